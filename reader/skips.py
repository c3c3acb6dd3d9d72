"""What `on_error="skip"` lost: counted, logged, and asked for by `reader.skipped`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable
from typing import Any

from beam_pipeline.errors import CorruptRecordError, UsageError

_LOG = logging.getLogger("reader")

_SHOWN_RECORDS = 10  # of an epoch, in the log


class Skips:
    """The records of one dataset that were skipped. Thread-safe; a record counts once, however often it is read.

    Attributes:
        undecodable: those of them by number whose CRC is right, so that only decoding tells.
    """

    def __init__(self) -> None:
        self._errors: dict[Hashable, CorruptRecordError] = {}
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

    def add(self, record: Hashable, error: CorruptRecordError) -> None:
        """Count a record; `record` tells it from the dataset's others."""
        with self._lock:
            self._errors.setdefault(record, error)

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
    """How many damaged records `on_error="skip"` has left out of a dataset so far, each counted once; else 0.

    Args:
        dataset: of this reader, or what `map`, `take` and the like made of some; or a `reader.torch.ShardDataset`.

    Raises:
        UsageError: it is another kind of dataset.
    """
    counts: dict[int, int] = {}
    pending = [dataset]
    while pending:
        one = pending.pop()
        if hasattr(one, "_imageshards_skips"):
            skips = one._imageshards_skips
            counts[id(skips)] = 0 if skips is None else skips.count
        elif isinstance(getattr(one, "skips", None), Skips):
            counts[id(one.skips)] = one.skips.count
        elif hasattr(one, "_inputs"):
            pending += one._inputs()
    if counts:
        return sum(counts.values())
    raise UsageError(f"reader.skipped({type(dataset).__name__}): give a dataset that this reader made")
