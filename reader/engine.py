"""The engine: records in a given order become finished batches, read and decoded by threads ahead of the consumer.

    windows    what to read, in order (`order.train_windows`), of each feed; read ahead within a bound in bytes
    pieces     up to 16 rows of a batch from one feed: the unit of decoding, so that every core works on the same few
               batches
    batches    handed out in order; a few are finished ahead

All threads share one lock. Read threads bring runs of 64 records into memory. Decode threads take the next piece of
the current window, check each record's CRC and decode its image into its row. A corrupt record fails its batch, or
another record takes its row.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from beam_pipeline.errors import UsageError
from reader.buffers import SMALLEST_BUFFER, BufferPool
from reader.feeds import Feed, Feeds, Window
from reader.runs import Run

_LOG = logging.getLogger("reader")

RowNumbers = range | list[int]  # of a batch

# Rows of a piece: a batch of 64 keeps 4 cores busy, and taking a piece costs 10 µs.
PIECE_ROWS = 16
# Finished batches that are ready for the trainer, besides those being decoded; 1 if batches are large.
_BATCHES_AHEAD = 2
_LARGE_BATCH_BYTES = 32 << 20
_LOCAL_READS, _REMOTE_READS = 8, 32
_STALL_WARNING_S = 30.0  # then the log says what a batch waits for: under tf.data Ctrl-C has no effect meanwhile
_JOIN_TIMEOUT_S = 0.5  # for all threads when the process exits; those blocked on storage are abandoned


class _FailedRun(NamedTuple):
    """Takes the place of a run that couldn't be read: every record of it raises the error."""

    error: BaseException

    def record(self, index: int) -> bytes:
        raise self.error


class Batch:
    """b records, which threads decode.

    Args:
        parts: which of its rows are from which feed.
        shape: of an image, see `Rows`.
        pool: where memory comes from.

    Attributes:
        images: uint8 [b, height, width, channels], 64-byte aligned; or a list of objects.
        labels: int64 [b], class ids.
        weights: float32 [b], 0 for padding and for substitutes of corrupt records.
        features: for each record the values of the features that were asked for.
    """

    def __init__(
        self, parts: Sequence[tuple[Feed, RowNumbers]], shape: tuple[int, int, int] | None, pool: BufferPool
    ) -> None:
        self.parts = [part for part in parts if part[1]]  # those with rows that are not taken yet
        size = sum(len(rows) for _, rows in self.parts)
        self.images: Any = [None] * size if shape is None else pool.array((size, *shape))
        self.labels = np.empty(size, np.int64)
        self.weights = np.empty(size, np.float32)
        self.features: list[tuple[Any, ...]] = [()] * size
        self.size, self.taken, self.unfinished = size, 0, size
        self.error: tuple[int, BaseException] | None = None  # of the first row that has one

    def take(self) -> _Piece | None:
        """Rows of the first feed whose window is there; None if there is none."""
        at = next((at for at, (feed, _) in enumerate(self.parts) if not feed.windows[0].unread), None)
        if at is None:
            return None
        feed, rows = self.parts[at]
        window = feed.windows[0]
        count = min(PIECE_ROWS, len(rows), len(window.numbers) - window.taken)
        piece = _Piece(self, rows[:count], window, window.taken)
        self.parts[at : at + 1] = [(feed, rows[count:])] if count < len(rows) else []
        self.taken += count
        window.taken += count
        feed.ahead -= count
        if window.taken == len(window.numbers):
            feed.windows.popleft()
        return piece


class _Piece(NamedTuple):
    """Some rows of a batch, which are records [first, first + number of rows) of a window."""

    batch: Batch
    rows: RowNumbers
    window: Window
    first: int


class Engine:
    """Reads batches of given sizes, once; a context manager that starts and ends the threads.

    Args:
        feeds: what is read.
        sizes: records of each batch.
        parts: for each batch the rows of each feed.
        threads: how many decode.
        pool: where memory comes from.
    """

    def __init__(
        self,
        feeds: Feeds,
        sizes: Sequence[int],
        parts: Iterator[Sequence[RowNumbers]],
        *,
        threads: int,
        pool: BufferPool,
    ) -> None:
        self._feeds, self._parts, self._pool, self._shape = feeds, parts, pool, feeds.all[0].rows.shape
        self._left, self._decoders = len(sizes), threads
        self.threads: list[threading.Thread] = []
        # Reentrant: memory taken under it may start a garbage collection, which may drop this engine's own iterator.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # for decode threads
        self._finished = threading.Condition(self._lock)  # for the consumer
        self._reads: queue.SimpleQueue[tuple[Window, int] | None] = queue.SimpleQueue()
        self._batches: deque[Batch] = deque()  # begun or finished, not handed out
        largest = max(sizes, default=1)
        is_large = largest * math.prod(self._shape or ()) > _LARGE_BATCH_BYTES
        self._max_batches = (1 if is_large else _BATCHES_AHEAD) + -(-threads * PIECE_ROWS // largest)
        self._is_closed, self._process = False, os.getpid()
        self._fatal: BaseException | None = None
        self._request()

    def __enter__(self) -> Engine:
        reads = _REMOTE_READS if self._feeds.is_remote else _LOCAL_READS
        bodies = [self._read_runs] * reads + [self._decode_pieces] * self._decoders
        # Daemons: a request that hangs must not keep the process from ending.
        self.threads = [threading.Thread(target=body, name=f"reader{body.__name__}", daemon=True) for body in bodies]
        _STARTED.add(self)
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:  # Ctrl-C, or no more threads are to be had
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End the threads: each finishes the image or the request that it is busy with."""
        # The interpreter's end closes twice, the second time without modules; after a fork the lock may be held.
        if self._is_closed or os.getpid() != self._process:
            return
        with self._lock:
            self._is_closed = True
            self._feeds.close()
            self._work.notify_all()
        for _ in self.threads:
            self._reads.put(None)

    def _request(self) -> None:
        """Let the read threads read as far ahead as they may."""
        while (window := self._feeds.next_window()) is not None:
            for number in range(len(window.pieces)):
                self._reads.put((window, number))

    def _read_runs(self) -> None:
        """Body of a read thread."""
        while (read := self._reads.get()) is not None and not self._is_closed:
            (window, number), buffer = read, None
            reader = window.feed.reader
            run: Run | _FailedRun
            try:
                piece = window.pieces[number]
                size = piece.stop - piece.start
                if size >= SMALLEST_BUFFER and not reader.is_remote:  # remote clients hand out their own memory
                    window.buffers.append(buffer := self._pool.run_buffer(size))
                run = reader.read(piece, buffer)
            except BaseException as error:
                run = _FailedRun(error)
            with self._lock:
                window.loaded[number] = run
                window.unread -= 1
                if not window.unread:
                    self._work.notify_all()

    def _decode_pieces(self) -> None:
        """Body of a decode thread."""
        piece: _Piece | None = None
        try:
            while (piece := self._next_piece(piece)) is not None:
                self._decode(piece)
        except BaseException as error:  # not a record's fault: out of memory, or a bug
            with self._lock:
                self._fatal = error
                self._finished.notify()

    def _decode(self, piece: _Piece) -> None:
        batch, window, rows = piece.batch, piece.window, piece.rows
        images, records, row = batch.images, range(piece.first, piece.first + len(rows)), rows[0]
        labels, weights = list[int](), list[int]()
        try:
            # All are parsed, then all decoded: between two decodes a thread then needs the GIL for 2 µs instead of 10.
            for row, at, record in zip(rows, records, window.parsed(records), strict=True):
                if self._is_closed:
                    return
                label, values, image, weight = window.decode(at, record, images[row])
                labels.append(label)
                weights.append(weight)
                if image is not None:
                    images[row] = image
                if values:
                    batch.features[row] = values
        except BaseException as error:  # the consumer gets it after all batches before this one
            with self._lock:
                if batch.error is None or row < batch.error[0]:
                    batch.error = row, error
                # Nothing after it is decoded; decoding of everything before it has begun already.
                self._feeds.stop()
                self._left, last = 0, self._batches[-1]
                last.unfinished -= last.size - last.taken
                last.size = last.taken
            return
        index = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        batch.labels[index], batch.weights[index] = labels, weights

    def _next_piece(self, done: _Piece | None) -> _Piece | None:
        """The next rows to decode, after those of `done`; None if there are no more."""
        with self._lock:
            if done is not None:
                self._finish(done)
            while not self._is_closed:
                batch = self._open_batch()
                if batch is None and not self._left:
                    break
                if batch is not None and (piece := batch.take()) is not None:
                    if piece.window.feed.is_due():
                        self._request()
                    return piece
                self._work.wait()
            self._work.notify_all()  # the others have nothing to wait for either
            return None

    def _open_batch(self) -> Batch | None:
        """The batch that has rows left to decode, or a new one; None if there is no room or no batch is left."""
        if self._batches and self._batches[-1].taken < self._batches[-1].size:
            return self._batches[-1]
        if not self._left or len(self._batches) >= self._max_batches:
            return None
        self._left -= 1
        parts = list(zip(self._feeds.all, next(self._parts), strict=True))
        self._batches.append(Batch(parts, self._shape, self._pool))
        return self._batches[-1]

    def _finish(self, piece: _Piece) -> None:
        batch, window = piece.batch, piece.window
        batch.unfinished -= len(piece.rows)
        if not batch.unfinished and batch is self._batches[0]:
            self._finished.notify()
        window.unfinished -= len(piece.rows)
        if not window.unfinished:
            self._feeds.decoded(window)
            self._pool.take_back(window.buffers)
            self._request()

    def next_batch(self) -> Batch:
        """The next batch; waits for it.

        Raises:
            CorruptRecordError, StorageError: of the first record in it that is corrupt or can't be read.
            UsageError: a user's function failed; or this process is a fork of the one that began to iterate.
        """
        if os.getpid() != self._process:
            raise UsageError("this iteration began in another process, before a fork: begin one in this process")
        with self._lock:
            while self._fatal is None and not (self._batches and not self._batches[0].unfinished):
                if not self._finished.wait(_STALL_WARNING_S):
                    _LOG.warning("no batch for %.0f s; %s", _STALL_WARNING_S, self._feeds.waits_for())
            if self._fatal is not None:
                raise self._fatal
            batch = self._batches.popleft()
            self._work.notify(-(-batch.size // PIECE_ROWS))
        if batch.error is not None:
            raise batch.error[1]
        return batch


# Engines whose threads run. They are ended before the interpreter exits: a thread that returns from C++ or Rust while
# it does aborts the process.
_STARTED: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    deadline = time.monotonic() + _JOIN_TIMEOUT_S
    engines = list(_STARTED)
    for engine in engines:
        engine.__exit__()
    for thread in (thread for engine in engines for thread in engine.threads if thread.is_alive()):
        thread.join(max(0.0, deadline - time.monotonic()))
