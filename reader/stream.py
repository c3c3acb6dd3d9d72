"""Serialized records in training or evaluation order, in plain Python: what every framework's dataset wraps.

A window (about 16 runs) is read while the records of the one before are handed out, so storage latency hides behind the
trainer. Memory: two windows of undecoded records, about 2 × 16 MB at 224×224 pixels, however large the dataset.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from beam_pipeline.errors import CorruptRecordError, ImageShardsError, UsageError
from reader import order
from reader.cache import RecentRuns, RunCache, open_cache
from reader.damage import Block, Mender
from reader.info import DatasetInfo
from reader.position import WINDOW_RUNS, Position
from reader.run_table import RunTable
from reader.runs import Found, RunReader
from reader.skips import Skips
from reader.storage import Storage

_LOG = logging.getLogger("reader")

# Runs that damaged records' places are filled from: those of a window, since its blocks draw from the same ones.
_SUBSTITUTE_RUNS = WINDOW_RUNS
# Windows of remote storage that somebody asked for before one is read on the chance that the next epoch is wanted: at
# most a twentieth of the bytes is then fetched for nothing.
_ASKED_BEFORE = 20

Loaded = tuple[order.Window, list[Found]]


class Source(NamedTuple):
    """The records of a split string, and how they are to be read; what all streams of one dataset share.

    Attributes:
        storage, table: where the records lie.
        cache: what keeps runs near, or None.
        skips: counts what `on_error="skip"` leaves out; None to raise.
    """

    storage: Storage
    table: RunTable
    cache: RunCache | None
    skips: Skips | None


def open_source(
    info: DatasetInfo, split: str, *, on_error: str = "raise", cache: str | os.PathLike[str] | None = None
) -> Source:
    """Find the records of a split string and check that their files are there, as long as the manifest says.

    Args:
        on_error: `raise` or `skip` damaged records.
        cache: None, `memory` or a local folder (see `reader.cache`).

    Raises:
        UsageError: no such split, or an argument has no such value.
        ImageShardsError: a shard is missing or has another size, unless damage is skipped; or there is no index (gzip).
    """
    if on_error not in ("raise", "skip"):
        raise UsageError(f"on_error={on_error!r}: raise or skip")
    table = info.run_table(split)
    wrong = info.wrong_sizes(split)
    if wrong and on_error == "raise":
        more = f" (and {len(wrong) - 1} more shards)" if len(wrong) > 1 else ""
        raise ImageShardsError(f"{wrong[0]}{more}: run the job again with --repair, or read with on_error='skip'")
    for line in wrong:
        _LOG.warning("%s: what is lost of it is skipped", line)
    return Source(info.shard_storage, table, open_cache(info, table, cache), Skips() if on_error == "skip" else None)


class RecordStream:
    """Hands out the records of some windows, any number at a time.

    Args:
        source: where the records lie.
        windows: what to read, in order.
        seed: of the order and of augmentation.
        for_training: what is done about a skipped record (see `Mender`).

    Attributes:
        mender: raises or replaces what is damaged.
    """

    def __init__(
        self, source: Source, windows: Iterator[order.Window], seed: int = 0, for_training: bool = True
    ) -> None:
        self.mender = mender(source, seed, for_training)
        self._loaded = _read_ahead(source, windows)
        self._skips = source.skips
        self._seed = seed
        self._pending: list[Loaded] = []
        self._failure: Exception | None = None
        self._epoch = -1

    @classmethod
    def train(cls, source: Source, position: Position, host: int) -> RecordStream:
        """The endless stream of one host, from a position on."""
        return cls(source, order.train_windows(source.table.first, position, host), position.seed)

    def take(self, count: int) -> Block:
        """The next `count` records, fewer where the windows end.

        Raises:
            CorruptRecordError: names file, record and offset, unless damage is skipped.
            StorageError: a file can't be read.
        """
        return self.mender.mend(self.find(count))

    def find(self, count: int) -> Block:
        """As `take`, with errors as they are found in the block. Raises StorageError, again and again."""
        parts, missing = [], count
        while missing and (loaded := self._pending.pop() if self._pending else self._next()) is not None:
            window, records = loaded
            if len(records) > missing:
                rest = order.Window(window.epoch, window.numbers[missing:])
                self._pending.append((rest, records[missing:]))
                window, records = order.Window(window.epoch, window.numbers[:missing]), records[:missing]
            missing -= len(records)
            parts.append((window, records))
        return self._block(parts)

    def _next(self) -> Loaded | None:
        if self._failure is not None:
            raise self._failure
        try:
            loaded = next(self._loaded, None)
        except Exception as error:
            self._failure = error  # of any kind: asked again, what failed would seem to have ended
            raise
        epoch = -1 if loaded is None else loaded[0].epoch
        if self._skips is not None and self._epoch not in (-1, epoch):
            self._skips.report()
        self._epoch = epoch
        return loaded

    def _block(self, parts: list[Loaded]) -> Block:
        found = [record for _, records in parts for record in records]
        windows = [order.Window(0, np.zeros(0, np.int64)), *(window for window, _ in parts)]
        numbers = np.concatenate([window.numbers for window in windows])
        errors: dict[int, ImageShardsError] = {
            place: record for place, record in enumerate(found) if isinstance(record, CorruptRecordError)
        }
        known = {} if self._skips is None else self._skips.undecodable
        for place, number in enumerate(numbers.tolist() if known else ()):
            if number in known:
                found[place] = errors[place] = known[number]
        return Block(
            records=[record if isinstance(record, bytes) else b"" for record in found],
            numbers=numbers,
            epochs=np.repeat([window.epoch for window in windows], [len(window.numbers) for window in windows]),
            seeds=np.concatenate([order.augment_seeds(w.numbers, self._seed, w.epoch) for w in windows]),
            weights=np.ones(len(found), np.float32),
            errors=errors,
        )


class EvalStream:
    """Every record of one host's share once, in file order, then padding without end: real records of weight 0."""

    def __init__(self, source: Source, hosts: int, host: int, skip: int = 0) -> None:
        table = source.table
        start, stop = order.eval_share(table.total, hosts, host)
        windows = order.eval_windows(table.first, min(start + skip, stop), stop)
        self._stream = RecordStream(source, windows, for_training=False)
        self.mender = self._stream.mender
        self._reader = RunReader(source.storage, table, source.cache)
        self._filler: list[bytes] = []

    def take(self, count: int) -> Block:
        """The next `count` records or paddings. Raises: as `RecordStream.take`."""
        return self.mender.mend(self.find(count))

    def find(self, count: int) -> Block:
        """As `RecordStream.find`."""
        block = self._stream.find(count)
        missing = count - len(block.records)
        if not missing:
            return block
        # A real image decodes like the others; zeros could make a normalisation divide by zero.
        self._filler = self._filler or [record for record in block.records if record][-1:] or self._first_right()
        return Block(
            records=block.records + self._filler * missing,
            numbers=np.concatenate((block.numbers, np.full(missing, -1))),
            epochs=np.concatenate((block.epochs, np.zeros(missing, np.int64))),
            seeds=np.concatenate((block.seeds, np.zeros((missing, 2), np.int32))),
            weights=np.concatenate((block.weights, np.zeros(missing, np.float32))),
            errors=block.errors,
        )

    def _first_right(self) -> list[bytes]:
        """A record that can be read, for a host whose own share has none."""
        for number in range(self._reader.table.total):
            (record,) = self._reader.find(np.array([number]))
            if isinstance(record, bytes):
                return [record]
        raise ImageShardsError(f"{self._reader.table.files[0]} and the other shards hold no record that can be read")


def mender(source: Source, seed: int, for_training: bool) -> Mender:
    """What a dataset does about damage."""
    reader = RunReader(source.storage, source.table, RecentRuns(source.cache, _SUBSTITUTE_RUNS))
    return Mender(reader, seed, source.skips, for_training)


def _read_ahead(source: Source, windows: Iterator[order.Window]) -> Iterator[Loaded]:
    """Each window with its records, read one window ahead in a thread of its own; nothing here holds on to them.

    Remote storage isn't read ahead over an epoch's end until much was read: who reads one small epoch fetches no
    other's bytes, and who reads many waits at the first ends only.
    """
    reader = RunReader(source.storage, source.table, source.cache)

    def load(window: order.Window) -> Loaded:
        return window, reader.find(window.numbers)

    ahead = ThreadPoolExecutor(1, "reader-window")
    is_finalizing = sys.is_finalizing  # `sys` itself may be gone by then
    loading: deque[Future[Loaded]] = deque()  # the window that is asked for, the one behind it
    epoch = 0
    try:
        for asked, window in enumerate(windows):
            if loading:
                loading[0].result()  # an error ends it here, before another window is asked for
                if window.epoch != epoch and source.storage.is_remote and asked < _ASKED_BEFORE:
                    yield loading.popleft().result()
            loading.append(ahead.submit(load, window))
            epoch = window.epoch
            if len(loading) > 1:
                yield loading.popleft().result()
        while loading:
            yield loading.popleft().result()
    finally:  # also when nobody reads on
        if not is_finalizing():  # the interpreter has ended the threads itself
            ahead.shutdown(wait=False, cancel_futures=True)
