"""How well an epoch's order is shuffled. Who reads which record when: test_balance and test_golden."""

from __future__ import annotations

import itertools

import numpy as np

from reader import Position, order
from reader.position import Phase


def numbers_of(runs: int, hosts: int, host: int, count: int) -> order.Integers:
    """The first record numbers that a host reads of so many runs of 64."""
    position = Position("s", 64 * runs, 0, hosts, 0, (Phase(hosts, 16),), step=0)
    windows = order.train_windows(order.each_once(np.arange(runs + 1) * 64), position, host)
    numbers = itertools.chain.from_iterable(window.numbers.tolist() for window in windows)
    return np.fromiter(itertools.islice(numbers, count), np.int64)


def test_a_batch_of_64_mixes_at_least_12_runs() -> None:
    numbers = numbers_of(200, 7, 3, 64 * 20)
    assert min(len(np.unique(batch // 64)) for batch in numbers.reshape(-1, 64)) >= 12


def test_records_come_anywhere_in_an_epoch_and_those_of_a_run_anywhere_in_its_window() -> None:
    """Pearson's chi-square test of many times 10 draws of a quarter against one chance in 30,000.

    A case of 10 draws from 4 equal chances has the mean 3 and the variance 2 · 3 · (1 - 1/10).
    """
    total, epochs, windows = 320 * 64, 10, 20
    numbers = numbers_of(320, 1, 0, total * epochs)
    where = np.argsort(numbers.reshape(epochs, total), axis=1) / total  # in [0, 1): float [epochs, records]
    for draws in (
        *(where[:, within::64] for within in (0, 13, 63)),  # one record of each run: those of one run stay together
        *((where * windows % 1)[:, 64 * run : 64 * (run + 1)] for run in (0, 100, 319)),
    ):
        counts = np.stack([((draws * 4).astype(int) == quarter).sum(0) for quarter in range(4)])
        statistic = ((counts - 2.5) ** 2 / 2.5).sum(0)
        assert abs(statistic.sum() - 3 * len(statistic)) < 4 * np.sqrt(5.4 * len(statistic))
