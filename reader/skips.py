"""What `on_error="skip"` lost: counted, logged, and asked for by `reader.skipped`."""

from __future__ import annotations

import logging
import threading
from typing import Any

from beam_pipeline.errors import CorruptRecordError, UsageError

_LOG = logging.getLogger("reader")

_SHOWN_RECORDS = 10  # of an epoch, in the log


class Skips:
    """The records of one dataset that were skipped, by number. Thread-safe; a record counts once, however often read.

    Attributes:
        undecodable: the numbers among them whose CRC is right, so that only decoding tells.
    """

    def __init__(self) -> None:
        self._errors: dict[int, CorruptRecordError] = {}
        self._reported = 0
        self._lock = threading.Lock()
        self.undecodable: dict[int, CorruptRecordError] = {}

    @property
    def count(self) -> int:
        """How many records were skipped so far."""
        return len(self._errors)

    @property
    def records(self) -> list[CorruptRecordError]:
        """File, number, offset and reason of each, in the order in which they were met."""
        with self._lock:
            return list(self._errors.values())

    def add(self, number: int, error: CorruptRecordError) -> None:
        """Count a record of the dataset."""
        with self._lock:
            self._errors.setdefault(number, error)

    def report(self) -> None:
        """Log, at the end of an epoch, what was skipped since the last one."""
        new = self.records[self._reported :]
        if not new:
            return
        self._reported += len(new)
        shown = "; ".join(map(str, new[:_SHOWN_RECORDS]))
        more = f"; and {len(new) - _SHOWN_RECORDS} more" if len(new) > _SHOWN_RECORDS else ""
        _LOG.warning("%d damaged records skipped in this epoch, %d so far: %s%s", len(new), self.count, shown, more)

    def __getstate__(self) -> dict[str, Any]:  # a lock doesn't pickle; another process counts for itself
        return {}

    def __setstate__(self, _: dict[str, Any]) -> None:
        Skips.__init__(self)


def skipped(dataset: Any) -> int:
    """How many damaged records `on_error="skip"` has left out of a dataset so far, each counted once.

    Args:
        dataset: of `train_dataset` or `eval_dataset`, or what `map`, `take` and the like made of it; or a
            `reader.torch.ShardDataset`.

    Raises:
        UsageError: it is another kind of dataset.
    """
    pending = [dataset]
    while pending:
        one = pending.pop()
        found = getattr(one, "_imageshards_skips", None) or getattr(one, "skips", None)
        if isinstance(found, Skips):
            return found.count
        if hasattr(one, "_inputs"):
            pending += one._inputs()
    raise UsageError(f"reader.skipped({type(dataset).__name__}): give a dataset that this reader made")
