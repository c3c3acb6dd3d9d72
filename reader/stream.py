"""Serialized records in training or evaluation order, in plain Python: what every framework's dataset wraps.

A window (about 16 runs) is read while the records of the one before are handed out, so storage latency hides behind the
trainer. Memory: two windows of undecoded records, about 2 × 16 MB at 224×224 pixels, however large the dataset.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reader import order
from reader.position import Position
from reader.runs import RunReader, RunTable
from reader.storage import Storage

# Range requests under way at once for a remote window: all of it, so that a window costs one latency.
REMOTE_REQUESTS = 16


class Block(NamedTuple):
    """Records that follow each other for one host.

    Attributes:
        records: serialized records, in order.
        seeds: int32 [n, 2], a stateless seed for each record's augmentation.
        weights: float32 [n], 1 for a record and 0 for padding.
    """

    records: list[bytes]
    seeds: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]


class RecordStream:
    """Hands out the records of some windows, any number at a time.

    Args:
        storage, table: where the records lie.
        windows: what to read, in order.
        seed: of augmentation.
    """

    def __init__(self, storage: Storage, table: RunTable, windows: Iterator[order.Window], seed: int = 0) -> None:
        self._loaded = _read_ahead(storage, table, windows)
        self._seed = seed
        self._records: list[bytes] = []
        self._seeds = np.zeros((0, 2), np.int32)

    def take(self, count: int) -> Block:
        """The next `count` records, fewer where the windows end.

        Raises:
            CorruptRecordError: names file, record and offset.
            StorageError: a file is missing or can't be read.
        """
        while len(self._records) < count and (loaded := next(self._loaded, None)) is not None:
            window, records = loaded
            self._records = self._records + records
            self._seeds = np.concatenate((self._seeds, order.augment_seeds(window.numbers, self._seed, window.epoch)))
        records, self._records = self._records[:count], self._records[count:]
        seeds, self._seeds = self._seeds[:count], self._seeds[count:]
        return Block(records, seeds, np.ones(len(records), np.float32))


def train_stream(storage: Storage, table: RunTable, position: Position, host: int) -> RecordStream:
    """The records of one host from `position` on, across epochs without a seam and without end."""
    return RecordStream(storage, table, order.train_windows(table.first, position, host), position.seed)


class EvalStream:
    """Every record of one host's share once, in file order, then padding without end: real records of weight 0."""

    def __init__(self, storage: Storage, table: RunTable, hosts: int, host: int, skip: int = 0) -> None:
        start, stop = order.eval_share(table.total, hosts, host)
        windows = order.eval_windows(table.first, min(start + skip, stop), stop)
        self._stream = RecordStream(storage, table, windows)
        self._reader = RunReader(storage, table)
        self._filler: list[bytes] = []

    def take(self, count: int) -> Block:
        """The next `count` records or paddings. Raises: as `RecordStream.take`."""
        block = self._stream.take(count)
        missing = count - len(block.records)
        if not missing:
            return block
        # A real image decodes like the others; zeros could make a normalisation divide by zero.
        self._filler = self._filler or block.records[-1:] or self._reader.read(np.zeros(1, np.int64))
        weights = np.concatenate((block.weights, np.zeros(missing, np.float32)))
        return Block(block.records + self._filler * missing, np.zeros((count, 2), np.int32), weights)


def _read_ahead(
    storage: Storage, table: RunTable, windows: Iterator[order.Window]
) -> Iterator[tuple[order.Window, list[bytes]]]:
    """Each window with its records, read one window ahead in a thread of its own."""
    requests = ThreadPoolExecutor(REMOTE_REQUESTS, "reader-request") if storage.is_remote else None
    reader = RunReader(storage, table, requests)

    def load() -> tuple[order.Window, list[bytes]] | None:
        window = next(windows, None)
        return None if window is None else (window, reader.read(window.numbers))

    ahead = ThreadPoolExecutor(1, "reader-window")
    is_finalizing = sys.is_finalizing  # `sys` itself may be gone by then
    try:
        pending: Future[tuple[order.Window, list[bytes]] | None] = ahead.submit(load)
        while (loaded := pending.result()) is not None:
            pending = ahead.submit(load)
            yield loaded
    finally:  # also when nobody reads on
        if not is_finalizing():  # the interpreter has ended the threads itself
            for executor in filter(None, (ahead, requests)):
                executor.shutdown(wait=False, cancel_futures=True)
