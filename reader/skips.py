"""What `on_error="skip"` left out: counted, logged at the end of an iteration."""

from __future__ import annotations

import logging
import threading
from typing import Any

from beam_pipeline.errors import CorruptRecordError

_LOG = logging.getLogger("reader")

_SHOWN_RECORDS = 10  # of an iteration, in the log


class Skips:
    """The records that were skipped. Thread-safe; a record counts once, however often it is read."""

    def __init__(self) -> None:
        self._errors: dict[int, CorruptRecordError] = {}
        self._reported = 0
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many records were skipped so far."""
        return len(self._errors)

    def add(self, number: int, error: CorruptRecordError) -> None:
        """Count a record by its number in the split string's selection."""
        with self._lock:
            self._errors.setdefault(number, error)

    def report(self) -> None:
        """Log what was skipped since the last report."""
        with self._lock:
            new = list(self._errors.values())[self._reported :]
            self._reported += len(new)
        if new:
            shown = "; ".join(map(str, new[:_SHOWN_RECORDS]))
            more = f"; and {len(new) - _SHOWN_RECORDS} more" if len(new) > _SHOWN_RECORDS else ""
            _LOG.warning("skipped %d corrupt records, %d so far: %s%s", len(new), self.count, shown, more)

    def __reduce__(self) -> Any:
        return Skips, ()  # another process counts for itself
