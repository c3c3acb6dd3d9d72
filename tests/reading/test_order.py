"""Order, hosts and positions: who reads which record when."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reader import Position, order
from reader.position import Phase

Integers = order.Integers
thoroughly = settings(deadline=None, max_examples=60)

runs = st.lists(st.integers(1, 64), min_size=1, max_size=60)
hosts = st.integers(1, 9)


def first_of(sizes: list[int]) -> Integers:
    return np.concatenate(([0], np.cumsum(sizes)))


def start(first: Integers, *, hosts: int = 1, batch: int = 1, seed: int = 0, window_runs: int = 16) -> Position:
    return Position("s", int(first[-1]), seed, batch * hosts, 0, (Phase(hosts, window_runs),), step=0)


def numbers_of(first: Integers, position: Position, host: int, count: int) -> list[tuple[int, int]]:
    """The next `count` record numbers of a host, with the epoch of each."""
    pairs = (
        (window.epoch, number)
        for window in order.train_windows(order.each_once(first), position, host)
        for number in window.numbers.tolist()
    )
    return list(itertools.islice(pairs, count))


@settings(deadline=None, max_examples=100)
@given(
    runs,
    st.lists(st.tuples(hosts, st.integers(1, 20), st.integers(0, 8), st.integers(1, 20)), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_a_change_of_hosts_and_batch_serves_exactly_the_unread_rest(
    sizes: list[int], phases: list[Any], seed: int
) -> None:
    first = first_of(sizes)
    total = int(first[-1])
    read: list[tuple[int, int]] = []
    position = start(first, seed=seed)
    for count, batch, steps, window_runs in phases:
        position = position.on(global_batch_size=batch * count, hosts=count, window_runs=window_runs)
        assert position == Position.from_json(position.to_json()) == pickle.loads(pickle.dumps(position))
        assert position.after(steps).after(7) == position.after(steps + 7)
        for host in range(count):
            mine = numbers_of(first, position, host, batch * steps)
            epochs = [position.epoch, *(epoch for epoch, _ in mine)]
            assert epochs == sorted(epochs)  # an epoch is finished before the next one begins
            read += mine
        position = position.after(steps)
    # To the end of the epoch after the current one.
    count = position.hosts
    left = total * (position.epoch + 2) - len(read)
    for host in range(count):
        read += [
            pair for pair in numbers_of(first, position, host, -(-left // count) + 1) if pair[0] < position.epoch + 2
        ]
    assert Counter(read) == Counter(
        {(epoch, number): 1 for epoch in range(position.epoch + 2) for number in range(total)}
    )


def test_a_batch_of_64_mixes_at_least_12_runs() -> None:
    first = first_of([64] * 200)
    numbers = np.array([number for _, number in numbers_of(first, start(first, hosts=7), 3, 64 * 20)])
    assert min(len(np.unique(batch // 64)) for batch in numbers.reshape(-1, 64)) >= 12


def test_records_come_anywhere_in_an_epoch_and_those_of_a_run_anywhere_in_its_window() -> None:
    """Pearson's chi-square test of many times 10 draws of a quarter against one chance in 30,000.

    A case of 10 draws from 4 equal chances has the mean 3 and the variance 2 · 3 · (1 - 1/10).
    """
    first, epochs, windows = first_of([64] * 320), 10, 20
    total = int(first[-1])
    numbers = np.array([number for _, number in numbers_of(first, start(first), 0, total * epochs)])
    where = np.argsort(numbers.reshape(epochs, total), axis=1) / total  # in [0, 1): float [epochs, records]
    for draws in (
        *(where[:, within::64] for within in (0, 13, 63)),  # one record of each run: those of one run stay together
        *((where * windows % 1)[:, 64 * run : 64 * (run + 1)] for run in (0, 100, 319)),
    ):
        counts = np.stack([((draws * 4).astype(int) == quarter).sum(0) for quarter in range(4)])
        statistic = ((counts - 2.5) ** 2 / 2.5).sum(0)
        assert abs(statistic.sum() - 3 * len(statistic)) < 4 * np.sqrt(5.4 * len(statistic))
