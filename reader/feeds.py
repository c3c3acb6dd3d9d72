"""What an engine reads: records of one source, or of several, window by window, ahead within a bound in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from beam_pipeline.errors import CorruptRecordError
from beam_pipeline.text import plural
from reader import order
from reader.runs import InvalidRecordError, Parsed, Rows, RunReader
from reader.skips import Skips, Substitutes

# Undecoded bytes read ahead of decoding: remote, two or three windows, of which 32 runs are in flight: more than 20,000
# images/s of 16 kB at 50 ms of latency; local files need two windows only, the current one and the next.
_REMOTE_BYTES_AHEAD = 32 << 20


class Source(NamedTuple):
    """The records of a split string and how they are read.

    Attributes:
        reader: of their runs.
        skips: counts the records that are skipped; None to raise.
        epochs: a seed → what each epoch of training reads.
    """

    reader: RunReader
    skips: Skips | None
    epochs: Callable[[int], order.Epochs]


class Cursor(NamedTuple):
    """How far the records have been read.

    Attributes:
        windows: those to come.
        window: the one before them, if it is partly read.
    """

    windows: Iterator[order.Window]
    window: Window | None = None


class Feed:
    """Records of one source that an engine reads; a mix has several.

    Args:
        source: of the records.
        rows: how each is parsed and decoded.
        cursor: which records, in order: at least as many as the batches hold of it.
        records: how many the batches hold of it.
        share: of all records of the batches.
        seed: of the order.
    """

    def __init__(self, source: Source, rows: Rows, cursor: Cursor, records: int, share: float, seed: int) -> None:
        (self.reader, self.skips, _), (self.upcoming, window), self.rows = source, cursor, rows
        self.seed, self._share = seed, share
        self.substitutes = Substitutes(self.reader, self.rows, seed)
        self.windows: deque[Window] = deque()  # in flight
        if window is not None:
            window.feed = self  # it was another engine's
            self.windows.append(window)
        self.ahead = sum(len(window.numbers) - window.taken for window in self.windows)  # records
        self.to_request = records - self.ahead

    def next_window(self) -> Window:
        """Its next window, to be read."""
        window = Window(next(self.upcoming), self)
        self.windows.append(window)
        self.ahead += len(window.numbers)
        self.to_request -= len(window.numbers)
        return window

    def is_due(self) -> bool:
        """Whether its next window must be read: of the current one no more is left than its share of a window."""
        return len(self.windows) < 2 and self.ahead <= self._share * sum(len(one.numbers) for one in self.windows)

    def turn(self) -> tuple[bool, float]:
        """The feed with the least is read next: those that are due, then by the rows of batches until it has none."""
        return not self.is_due(), self.ahead / self._share


class Window:
    """A window in flight. Of each record, lists have its number, its seed, its piece and its index in that piece."""

    def __init__(self, window: order.Window, feed: Feed) -> None:
        numbers = window.numbers % feed.reader.table.total
        self.pieces, run_of, index = feed.reader.pieces_of(numbers)
        self.feed, self.epoch, self.weight = feed, window.epoch, window.weight
        self.numbers: list[int] = numbers.tolist()
        self.seeds: list[int] = order.augment_seeds(window.numbers, feed.seed, window.epoch).tolist()
        self.run_of: list[int] = run_of.tolist()
        self.index_in_run: list[int] = index.tolist()
        self.bytes = sum(piece.stop - piece.start for piece in self.pieces)
        self.loaded: list[Any] = [None] * len(self.pieces)  # Run, or the error in its place
        self.buffers: list[Any] = []
        self.unread = len(self.pieces)
        self.taken = 0  # rows handed to decode threads
        self.unfinished = len(self.numbers)

    def parsed(self, records: range) -> list[Parsed | CorruptRecordError]:
        """Some of its records, parsed; for each corrupt one its error, with file, record and byte offset."""
        parse, runs, run_of, index_in_run = self.feed.rows.parse, self.loaded, self.run_of, self.index_in_run
        parsed: list[Parsed | CorruptRecordError] = []
        for at in records:
            try:
                parsed.append(parse(runs[run_of[at]].record(index_in_run[at])))
            except (CorruptRecordError, InvalidRecordError) as error:
                parsed.append(self._located(at, error))
        return parsed

    def decode(self, at: int, record: Parsed | CorruptRecordError, row: Any) -> tuple[int, tuple[Any, ...], Any, int]:
        """Decode a parsed record into a row of a batch, or another one if it is corrupt and those are skipped.

        Returns:
            (class id, features, image) as `Rows` gives them, and its weight.
        """
        feed, seed = self.feed, self.seeds[at]
        if isinstance(record, tuple):
            encoded, label, values = record
            try:
                return label, values, feed.rows.decode(encoded, row, seed), self.weight
            except InvalidRecordError as error:
                record = self._located(at, error)
        if feed.skips is None:
            raise record
        feed.skips.add(self.numbers[at], record)
        return *feed.substitutes.fill(self.numbers[at], self.epoch, row, seed), 0

    def _located(self, at: int, error: CorruptRecordError | InvalidRecordError) -> CorruptRecordError:
        located: CorruptRecordError = self.loaded[self.run_of[at]].located(self.index_in_run[at], error)
        return located


class Feeds:
    """All feeds of an engine, whose lock is held by who calls."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self.all, self.is_remote = feeds, any(feed.reader.is_remote for feed in feeds)
        self._bytes_ahead = sum(window.bytes for feed in feeds for window in feed.windows)

    def next_window(self) -> Window | None:
        """The window to read now; None while enough is read: of each feed the current one and the next, at least."""
        wanted = [feed for feed in self.all if feed.to_request > 0]
        feed = min(wanted, key=Feed.turn, default=None)
        if feed is None or not (feed.is_due() or (self.is_remote and self._bytes_ahead < _REMOTE_BYTES_AHEAD)):
            return None
        window = feed.next_window()
        self._bytes_ahead += window.bytes
        return window

    def decoded(self, window: Window) -> None:
        """Nothing of a window is needed any more."""
        self._bytes_ahead -= window.bytes
        window.loaded.clear()

    def stop(self) -> None:
        """Ask for no more windows."""
        for feed in self.all:
            feed.to_request = 0

    def close(self) -> None:
        """Stop and drop the windows, which refer to their feed: no cycle keeps their memory."""
        self.stop()
        for feed in self.all:
            feed.windows.clear()

    def cursors(self) -> list[Cursor]:
        """Where another engine continues each feed, once the last batch was handed out."""
        return [Cursor(feed.upcoming, feed.windows[0] if feed.windows else None) for feed in self.all]

    def waits_for(self) -> str:
        """What the next rows wait for, in words."""
        windows = (feed.windows[0] for feed in self.all if feed.windows)
        window = next((window for window in windows if window.unread), None)
        if window is None:
            return "decoding"
        first = next(piece for piece, run in zip(window.pieces, window.loaded, strict=True) if run is None)
        return f"waiting for {plural(window.unread, 'read')}, such as {first.path}"
