"""Rates of several datasets, in turns, so that a slow minute of the machine hits all of them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Dataset = Any  # tf.data.Dataset: TensorFlow ships no types


@dataclass(frozen=True, slots=True)
class Rate:
    """What the repeats of one dataset took, each for `images` images.

    Attributes:
        wall_s, cpu_s: a number for each repeat; CPU of the whole process.
    """

    images: int
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]

    @property
    def images_per_s(self) -> float:
        """Median by wall clock."""
        return self.images / statistics.median(self.wall_s)

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest repeat, images/s by wall clock."""
        return self.images / max(self.wall_s), self.images / min(self.wall_s)

    @property
    def cpu_per_1000(self) -> float:
        """Median CPU seconds for 1,000 images."""
        return statistics.median(self.cpu_s) / self.images * 1000


def ratio(of: Rate, to: Rate) -> tuple[float, float]:
    """How fast `of` is as a share of `to`, by wall clock and by CPU: medians over the repeats side by side."""

    def median(ours: tuple[float, ...], theirs: tuple[float, ...]) -> float:
        pairs = zip(ours, theirs, strict=True)
        return statistics.median(other / to.images / (own / of.images) for own, other in pairs)

    return median(of.wall_s, to.wall_s), median(of.cpu_s, to.cpu_s)


class Runnable(NamedTuple):
    """A dataset to measure: its batches, their size, and whether its first iteration has to come to its end."""

    dataset: Dataset
    batch_size: int
    is_cached: bool = False


def measure(
    datasets: Mapping[str, Runnable], images: int, repeats: int, tell: Callable[[str], None]
) -> dict[str, Rate]:
    """Run every dataset once to warm it up, then all of them in turns.

    Args:
        datasets: by name.
        images: read in each run, rounded down to whole batches; fewer where a dataset ends before.
        repeats: runs of each that count.
        tell: is given a line of progress.
    """
    wall: dict[str, list[float]] = {name: [] for name in datasets}
    cpu: dict[str, list[float]] = {name: [] for name in datasets}
    batches = dict.fromkeys(datasets, 0)
    for repeat in range(repeats + 1):
        for name, one in datasets.items():
            tell(f"{f'repeat {repeat} of {repeats}' if repeat else 'warm-up'}: {name}")
            most = None if one.is_cached and not repeat else max(1, images // one.batch_size)
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            iterator = iter(one.dataset)
            batches[name] = sum(1 for _ in itertools.islice(iterator, most))
            wall[name].append(time.perf_counter() - wall_start)
            cpu[name].append(time.process_time() - cpu_start)
            del iterator  # with AUTOTUNE that may take as long as the run itself: see dataset.py
    return {
        name: Rate(batches[name] * one.batch_size, tuple(wall[name][1:]), tuple(cpu[name][1:]))
        for name, one in datasets.items()
    }
