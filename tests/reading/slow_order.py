"""The order of selected and balanced epochs, slowly: lists, and no code of `reader.order` or `reader.select`."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Item = tuple[int, int]  # number of a run in an epoch, and a draw
MASK = (1 << 64) - 1


def runs_of(shards: Sequence[int], chosen: Sequence[int]) -> tuple[list[list[int]], int]:
    """Which of the chosen records are in each run of 64 that has any, and how many runs there are."""
    ends = zip(itertools.accumulate(shards), shards, strict=True)
    runs = [range(begin, min(begin + 64, end)) for end, count in ends for begin in range(end - count, end, 64)]
    of_run = [[at for at, number in enumerate(chosen) if number in run] for run in runs]
    return [*filter(None, of_run)], len(runs)


class Job(NamedTuple):
    """What is read: the selected records of each run that has any, their labels, and the shares of the classes if
    epochs are balanced; draws of an epoch; records and runs of the split, and runs of a window.
    """

    runs: Sequence[Sequence[int]]
    labels: Sequence[int]
    shares: Sequence[int]
    size: int
    split: tuple[int, int]
    window_runs: int
    seed: int


def mixed(job: Job, name: str, epoch: int, number: int) -> int:
    """Output `number` of the stream of this name."""
    text = f"{name}\0{job.seed}\0{epoch}".encode()
    z = (
        (number + 1) * 0x9E3779B97F4A7C15 + int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    ) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def classes_of(shares: Sequence[int], draws: int) -> list[int]:
    """Of the first draws, how many are of each class."""
    if len(shares) == 1:
        return [draws]
    first = (2 * draws * shares[0] + sum(shares)) // (2 * sum(shares))
    return [first, *classes_of(shares[1:], draws - first)]


def passes_of(job: Job, epoch: int) -> list[list[Item]]:
    """An epoch's passes in the order that hosts share."""
    times = Counter(range(len(job.labels)))
    if job.shares:
        times.clear()
        for at in range(len(job.shares)):
            mine = [number for number, label in enumerate(job.labels) if label == at]
            mine.sort(key=lambda number: mixed(job, "turn", 0, number))
            begin, end = (classes_of(job.shares, number * job.size)[at] for number in (epoch, epoch + 1))
            times.update(mine[draw % len(mine)] for draw in range(begin, end))
    copies, total = max(times.values()), len(job.labels)
    parts: list[list[Item]] = [[] for _ in range(copies)]
    for number, run in enumerate(job.runs):
        for record, copy in ((one, copy) for one in run for copy in range(times[one])):
            part = ((copy << 16) + (mixed(job, "copy", epoch, number) >> 48)) * copies // (times[record] << 16)
            parts[part].append((part * len(job.runs) + number, part * total + record))
    joined: list[list[Item]] = [[]]
    for number, items in enumerate(parts):
        joined[-1] += items
        if min(len(joined[-1]), sum(map(len, parts[number + 1 :]))) >= 1024:
            joined.append([])
    return [sorted(items, key=lambda item: (mixed(job, "runs", epoch, item[0]), item[1])) for items in joined]


def windows_of(items: list[Item], dealt: list[int], host: int, runs: int) -> list[list[Item]]:
    """A host's share of a pass, of which each host gets as many as come to it in turn, in windows of so many runs."""
    begin = sum(one < host for one in dealt)
    groups = [
        list(group) for _, group in itertools.groupby(items[begin : begin + dealt.count(host)], lambda item: item[0])
    ]
    bounds = [at * len(groups) // max(1, len(groups) // runs) for at in range(max(1, len(groups) // runs) + 1)]
    return [[*itertools.chain(*groups[first:last])] for first, last in itertools.pairwise(bounds) if last > first]


def read(
    job: Job, epoch: int, todo: list[list[Item]], turns: Iterator[int], counts: Sequence[int]
) -> tuple[list[list[Item]], int, list[list[Item]]]:
    """(epoch, draw) of each host's next draws; then the epoch that isn't read to its end, and what is left.

    Hosts have their turns in the order of `turns`, which is without end.
    """
    found: list[list[Item]] = [[] for _ in counts]
    while True:
        left: list[list[Item]] = [[] for _ in todo]
        full = passes_of(job, epoch)
        for number, items in enumerate(todo):
            dealt = [*itertools.islice(turns, len(items))]
            per_window = job.window_runs * job.split[0] * len({run for run, _ in full[number]})
            per_window = max(1, per_window // (job.split[1] * len(full[number])))
            for host, count in enumerate(counts):
                is_first = True
                for window in windows_of(items, dealt, host, per_window):
                    drawn = sorted(window, key=lambda item: mixed(job, "records", epoch, item[1]))
                    taken = drawn[: count - len(found[host])]
                    found[host] += [(epoch, draw) for _, draw in taken]
                    if len(taken) < len(drawn):
                        left[number] += sorted(drawn[len(taken) :]) if is_first else window
                        is_first = False
        if any(left):
            return found, epoch, left if any(at == epoch for one in found for at, _ in one) else todo
        epoch, todo = epoch + 1, passes_of(job, epoch + 1)
