"""What `on_error="skip"` does: corrupt records are counted and logged, other records take their rows."""

from __future__ import annotations

import logging
import threading
from functools import lru_cache
from typing import Any

import numpy as np

from beam_pipeline.errors import CorruptRecordError, ImageShardsError
from beam_pipeline.text import first_few, plural
from reader import order
from reader.runs import InvalidRecordError, Rows, RunReader

_LOG = logging.getLogger("reader")

_SHOWN_RECORDS = 10  # in the log, of an iteration
# Draws of a substitute for a corrupt record. If half of a split is corrupt, all fail for one record in 65,000.
_DRAWS = 16
_KEPT_RUNS = 16  # as many as the records of a window draw from


class Skips:
    """The records that were skipped. Thread-safe; a record counts once, however often it is read."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._unreported: list[str] = []  # text: an error's traceback would keep batches and windows in memory
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many records were skipped so far."""
        return len(self._numbers)

    def add(self, number: int, error: CorruptRecordError) -> None:
        """Count a record by its number in the split string's selection."""
        with self._lock:
            if number not in self._numbers:
                self._numbers.add(number)
                self._unreported.append(str(error))

    def report(self) -> None:
        """Log what was skipped since the last report."""
        with self._lock:
            new, self._unreported = self._unreported, []
        if new:
            shown = first_few(new, _SHOWN_RECORDS)
            _LOG.warning("skipped %s, %d so far: %s", plural(len(new), "corrupt record"), self.count, shown)


class Substitutes:
    """Fills rows of corrupt records with other records of the split. Thread-safe.

    Args:
        reader: of the records.
        rows: how each is parsed and decoded.
        seed: of the order.
    """

    def __init__(self, reader: RunReader, rows: Rows, seed: int) -> None:
        self._reader, self._rows, self._seed = reader, rows, seed
        self._read = lru_cache(_KEPT_RUNS)(reader.read)

    def fill(self, number: int, epoch: int, row: Any, augment_seed: int) -> tuple[int, tuple[Any, ...], Any]:
        """Fill the row of record `number`: by (seed, epoch, number), so every other record keeps its row.

        Returns:
            (class id, features, image) as `Rows` gives them.

        Raises:
            ImageShardsError: all records that were drawn are corrupt, too.
        """
        table = self._reader.table
        for draw in range(_DRAWS):
            other = order.substitute(table.first, self._seed, epoch, number, draw)
            (piece,), _, (index,) = self._reader.pieces_of(np.array([other]))
            try:
                encoded, label, values = self._rows.parse(self._read(piece).record(int(index)))
                return label, values, self._rows.decode(encoded, row, augment_seed)
            except (CorruptRecordError, InvalidRecordError):
                continue
        raise ImageShardsError(
            f"{table.files[0]}: {_DRAWS} records drawn as substitutes for a corrupt one are corrupt too; run the job "
            "again with --repair"
        )
