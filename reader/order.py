"""The order of training as arithmetic: which records each host reads, when, and where a stopped job resumes.

The records of a dataset are globally shuffled already. An epoch therefore permutes runs, gives each host an equal
contiguous share of the records in that order, and shuffles inside windows of about 16 runs of the share. Nothing is
stateful: any part of any epoch follows from (seed, epoch, number), so hosts are exact and resuming is instant.

Pure integers and NumPy: no storage, no framework. A *record number* counts the records that are read, from 0 in file
order; a *run* is a range of them that is read at once; a *span* is a part of a run. An epoch that reads records several
times (`reader.balance.Balance`) has *passes*, each ordered as an epoch is; a *draw* is record number + pass · records.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from reader.position import WINDOW_RUNS, Part, Phase, Position, share_before
from reader.shares import Dealing

Integers = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

# SplitMix64, Steele, Lea, Flood 2014; reference code: https://prng.di.unimi.it/splitmix64.c
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(key: int, numbers: npt.ArrayLike) -> Keys:
    """Outputs number `numbers` (from 0) of the SplitMix64 generator whose state starts at `key`, in any order.

    NumPy's own `Generator.permutation` may change between versions (NEP 19); this can't: it is integer arithmetic.

    Args:
        key: 64-bit state.
        numbers: integers in [0, 2^63), any shape.

    Returns:
        uint64, the shape of `numbers`.
    """
    with np.errstate(over="ignore"):  # NumPy warns of a single number that wraps, not of many
        state = np.asarray(numbers, np.uint64) + np.uint64(1)
        state = state * _GOLDEN + np.uint64(key)
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def stream_key(seed: int, epoch: int, purpose: str) -> int:
    """The 64-bit key of one stream of random numbers: BLAKE2b of its name, so that neighbouring seeds share nothing."""
    name = f"{purpose}\0{seed}\0{epoch}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


class Draws(NamedTuple):
    """What an epoch reads: draws, known by their index in file order, pass after pass.

    Attributes:
        epoch: its number.
        first: int64 [runs + 1], the index of each run's first draw, then the total; no run is empty.
        passes: int64 [passes + 1], pass i has the runs [passes[i], passes[i + 1]).
        mean_run: records and runs of the split string, see `window_runs`.
        run: int64 [runs], the number of each run, which its turn follows from; None for 0, 1, …
        draw: int64 [total], by index; None for 0, 1, …: each record once.
    """

    epoch: int
    first: Integers
    passes: Integers
    mean_run: tuple[int, int]
    run: Integers | None = None
    draw: Integers | None = None

    def draws(self, indices: Integers) -> Integers:
        """The draws with these indices."""
        return indices if self.draw is None else self.draw[indices]

    def window_runs(self, number: int, window_runs: int) -> int:
        """Runs in a window of a pass that has as many records as `window_runs` runs of the split string."""
        begin, end = map(int, self.passes[number : number + 2])
        records, runs = self.mean_run
        return max(1, window_runs * records * (end - begin) // (runs * int(self.first[end] - self.first[begin])))


Epochs: TypeAlias = Callable[[int], Draws]  # number of an epoch → what it reads


def each_once(first: Integers, mean_run: tuple[int, int] | None = None) -> Epochs:
    """Epochs of all records; `first` as of `file_order`, of a complete split string if there is no `mean_run`."""
    runs = len(first) - 1
    return lambda epoch: Draws(epoch, first, np.array([0, runs]), mean_run or (int(first[-1]), runs))


class Spans(NamedTuple):
    """Records in reading order: int64 arrays of one length; span i is records [start[i], stop[i]) of run[i]."""

    run: Integers
    start: Integers
    stop: Integers

    @property
    def records(self) -> int:
        """How many records these are."""
        return int((self.stop - self.start).sum())

    def slice(self, first: int, last: int) -> Spans:
        """Spans number [first, last)."""
        return Spans(self.run[first:last], self.start[first:last], self.stop[first:last])

    def cut(self, first: int, last: int) -> Spans:
        """The records at positions [first, last) of this order."""
        ends = np.cumsum(self.stop - self.start)
        begins = ends - (self.stop - self.start)
        start = self.start + np.maximum(first - begins, 0)
        stop = self.stop - np.maximum(ends - last, 0)
        kept = start < stop
        return Spans(self.run[kept], start[kept], stop[kept])

    def numbers(self) -> Integers:
        """The record numbers, in this order."""
        ranges = [np.arange(start, stop) for start, stop in zip(self.start, self.stop, strict=True)]
        return np.concatenate([np.zeros(0, np.int64), *ranges])


class Window(NamedTuple):
    """Records that are read and shuffled together.

    Attributes:
        epoch: that it belongs to.
        numbers: int64 [n], draws in training order: number modulo the count of records is the record's.
        weight: 1, or 0 for records that only fill up the last batches of an evaluation.
    """

    epoch: int
    numbers: Integers
    weight: int = 1


def file_order(first: Integers) -> Spans:
    """Every record in file order. `first`: int64 [runs + 1], the number of each run's first record, then the total."""
    return Spans(np.arange(len(first) - 1), first[:-1], first[1:])


def epoch_order(draws: Draws, seed: int) -> list[Spans]:
    """The runs of each pass in the order of its epoch, before windows are shuffled."""
    key, order = stream_key(seed, draws.epoch, "runs"), []
    for begin, end in itertools.pairwise(draws.passes.tolist()):
        run = np.arange(begin, end)
        keys = splitmix64(key, run if draws.run is None else draws.run[begin:end])
        run = run[np.argsort(keys, kind="stable")]
        order.append(Spans(run, draws.first[run], draws.first[run + 1]))
    return order


def window_bounds(order: Spans, window_runs: int) -> Integers:
    """How `order` is cut into windows: spans [bounds[i], bounds[i + 1]) are window i.

    They differ by one run at most and have `window_runs` or more if `order` does: a short last one would mix badly.
    """
    if not len(order.run):
        return np.zeros(1, np.int64)
    heads = np.flatnonzero(np.concatenate(([True], order.run[1:] != order.run[:-1])))
    count = max(1, len(heads) // window_runs)
    return np.concatenate((heads[np.arange(count) * len(heads) // count], [len(order.run)]))


def shuffled(draws: Draws, indices: Integers, seed: int) -> Integers:
    """The indices of one window's draws in training order."""
    keys = splitmix64(stream_key(seed, draws.epoch, "records"), draws.draws(indices))
    return indices[np.argsort(keys, kind="stable")]


def augment_seeds(draws: Integers, seed: int, epoch: int) -> Keys:
    """Seeds of augmentation, uint64 [n], one a draw: they depend on (seed, epoch, draw) and nothing else."""
    return splitmix64(stream_key(seed, epoch, "augment"), draws)


def substitute(first: Integers, seed: int, epoch: int, number: int, draw: int) -> int:
    """The record that replaces corrupt record `number` in an epoch; draws count from 0.

    One run is drawn for each run, so a missing shard costs as many reads as it had runs; and an offset between their
    records, so even a single run has substitutes.
    """
    run = int(np.searchsorted(first, number, "right")) - 1
    drawn, turn = map(int, splitmix64(stream_key(seed, epoch, f"substitute {run}"), [2 * draw, 2 * draw + 1]))
    other = drawn % (len(first) - 1)
    begin, end = int(first[other]), int(first[other + 1])
    return begin + (number - int(first[run]) + turn) % (end - begin)


def unread(draws: Draws, position: Position | Part) -> list[Spans]:
    """Of each pass of the current epoch what was unread when the last phase began, in the order that hosts share."""
    passes = epoch_order(draws, position.seed)
    for phase in position.phases[:-1]:
        passes = _rest(draws, passes, phase, position.seed)
    return passes


def _rest(draws: Draws, passes: list[Spans], phase: Phase | Dealing, seed: int) -> list[Spans]:
    """What a phase left unread of each pass, host after host."""
    dealt, read, rest = 0, [phase.read_by(host) for host in range(phase.hosts)], []
    for number, order in enumerate(passes):
        parts = [order.slice(0, 0)]
        cuts = phase.cuts(dealt, order.records)
        for host in range(phase.hosts):
            spans = order.cut(cuts[host], cuts[host + 1])
            bounds = window_bounds(spans, draws.window_runs(number, phase.window_runs))
            window, within = _find_window(spans, bounds, read[host])
            if window < len(bounds) - 1:
                indices = shuffled(draws, spans.slice(bounds[window], bounds[window + 1]).numbers(), seed)
                parts += [_spans(indices[within:], draws.first), spans.slice(bounds[window + 1], len(spans.run))]
            read[host] = max(0, read[host] - spans.records)
        dealt += order.records
        rest.append(Spans(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))))
    return rest


def _find_window(order: Spans, bounds: Integers, read: int) -> tuple[int, int]:
    """The window that holds the record after the first `read` ones, and how many of its records were read."""
    before = np.concatenate(([0], np.cumsum(order.stop - order.start)))[bounds]
    window = int(np.searchsorted(before, read, "right")) - 1
    return window, read - int(before[window])


def _spans(numbers: Integers, first: Integers) -> Spans:
    """As few spans as possible for `numbers` (at least one, in any order)."""
    numbers = np.sort(numbers)
    run = np.searchsorted(first, numbers, "right") - 1
    breaks = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(run) != 0)) + 1
    heads = np.concatenate(([0], breaks))
    tails = np.concatenate((breaks, [len(numbers)])) - 1
    return Spans(run[heads], numbers[heads], numbers[tails] + 1)


def train_windows(epochs: Epochs, position: Position | Part, host: int) -> Iterator[Window]:
    """Windows that one host reads from `position` on, in training order, epoch after epoch, without end.

    Args:
        epochs: of `position.records` draws each.
        position: where to begin; its last phase says how many hosts there are.
        host: number of this host.

    Yields:
        Windows with at least one record each.
    """
    phase, draws = position.phases[-1], epochs(position.epoch)
    passes, dealt, read = unread(draws, position), 0, phase.read_by(host)
    while True:
        for number, order in enumerate(passes):
            cuts = phase.cuts(dealt, order.records)
            spans = order.cut(cuts[host], cuts[host + 1])
            bounds = window_bounds(spans, draws.window_runs(number, phase.window_runs))
            window, within = _find_window(spans, bounds, read)
            for begin, end in zip(bounds[window:-1], bounds[window + 1 :], strict=True):
                indices = shuffled(draws, spans.slice(begin, end).numbers(), position.seed)
                if within < len(indices):
                    yield Window(draws.epoch, draws.draws(indices[within:]))
                within = 0
            read = max(0, read - spans.records)
            dealt += order.records
        draws = epochs(draws.epoch + 1)
        passes, read = epoch_order(draws, position.seed), 0


def turn(windows: Iterator[Window], sizes: Sequence[int], index: int, count: int) -> Iterator[Window]:
    """Of batches of these sizes, read from `windows` one after the other, every `count`-th from batch `index` on."""
    ends, read = np.cumsum(sizes), 0
    while read < ends[-1]:
        window = next(windows)
        batch = np.searchsorted(ends, np.arange(read, read + len(window.numbers)), "right")
        read += len(window.numbers)
        numbers = window.numbers[(batch % count == index) & (batch < len(ends))]
        if len(numbers):
            yield window._replace(numbers=numbers)


def eval_share(records: int, hosts: int, host: int) -> tuple[int, int]:
    """The record numbers [start, stop) that one host evaluates: contiguous, the first hosts' one record larger."""
    return share_before(records, hosts, host), share_before(records, hosts, host + 1)


def eval_windows(
    first: Integers, start: int, stop: int, padding: int = 0, window_runs: int = WINDOW_RUNS
) -> Iterator[Window]:
    """Records [start, stop) in file order, so many runs at a time, then one of them `padding` times."""
    order = file_order(first).cut(start, stop)
    bounds = window_bounds(order, window_runs)
    for begin, end in itertools.pairwise(bounds):
        yield Window(0, order.slice(begin, end).numbers())
    if padding:
        # A real image decodes like the others; zeros could make a normalisation divide by zero.
        yield Window(0, np.full(padding, max(start, stop - 1) % first[-1]), weight=0)
