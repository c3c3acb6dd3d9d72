"""Whose record each row of a mix is, as arithmetic: `Rule` for a stream of rows, `Dealing` for hosts that share it.

The weights' list, largest first, is split in two whose sums are as near as possible; the first part gets its rounded
proportion of any first m rows, the second the others; and so on within each. No share of up to twelve was found more
than 1.5 rows behind or ahead of its proportion; a chain of the sources one by one would drift by several.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

MAX_PERIOD = 1 << 30  # of weights, so that products with it fit 64 bits
_NEAR = 1 << 10  # rows that are tried; of 256 none may be exact enough for shares within 2 rows
_BEHIND = 3  # records that a host is never behind its share


class _Fork(NamedTuple):
    """A part of the weights' list that is split in two."""

    first: _Tree
    second: _Tree
    share: int  # of the first, in `total`
    total: int

    def first_of(self, rows: Integers) -> Integers:
        """How many of its first `rows` rows go to the first part."""
        return (2 * rows * self.share + self.total) // (2 * self.total)


_Tree: TypeAlias = _Fork | int  # or the number of a source


class Rule:
    """Which source each row of one stream is from: a period of sum(weights) rows has exactly weights[i] of source i.

    Args:
        weights: integers from 1 on, their sum at most `MAX_PERIOD`.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights, self.period = weights, sum(weights)
        self._forks: list[list[tuple[_Fork, bool]]] = [[] for _ in weights]  # from each source up, and the side
        self._tree = self._split(sorted(range(len(weights)), key=lambda source: -weights[source]))

    def _split(self, sources: Sequence[int]) -> _Tree:
        if len(sources) == 1:
            return sources[0]
        sums = list(itertools.accumulate(self.weights[source] for source in sources))
        cut = min(range(1, len(sources)), key=lambda cut: abs(2 * sums[cut - 1] - sums[-1]))
        fork = _Fork(self._split(sources[:cut]), self._split(sources[cut:]), sums[cut - 1], sums[-1])
        for at, source in enumerate(sources):
            self._forks[source].append((fork, at < cut))
        return fork

    def sources(self, rows: Integers) -> Integers:
        """The source of each row: int64 [n], of row numbers from 0 on."""
        return self._sources(self._tree, rows % self.period)

    def _sources(self, tree: _Tree, rows: Integers) -> Integers:
        if isinstance(tree, int):
            return np.full(len(rows), tree)
        before = tree.first_of(rows)
        is_first = tree.first_of(rows + 1) > before
        found = np.empty(len(rows), np.int64)
        found[is_first] = self._sources(tree.first, before[is_first])
        found[~is_first] = self._sources(tree.second, (rows - before)[~is_first])
        return found

    def count(self, source: int, rows: Integers) -> Integers:
        """How many of the first `rows` rows are of a source: int64 [n] for int64 [n]."""
        periods, left = np.divmod(rows, self.period)
        for fork, is_first in reversed(self._forks[source]):
            first = fork.first_of(left)
            left = first if is_first else left - first
        return periods * self.weights[source] + left


rule_of = lru_cache(Rule)


@lru_cache
def begins(rule: Rule, hosts: int) -> Integers:
    """The row that each host begins at, int64 [hosts], so that a rare source doesn't come to all of them in one step.

    They are spread over a period, each near a row before which all shares are as exact as can be.
    """
    spread = np.arange(hosts) * rule.period // hosts
    rows = spread[:, None] + np.arange(min(max(rule.period // hosts, 1), _NEAR))
    errors = np.stack(
        [rule.count(source, rows) * rule.period - rows * weight for source, weight in enumerate(rule.weights)]
    )
    lowest, highest = errors.min(axis=(1, 2), keepdims=True), errors.max(axis=(1, 2), keepdims=True)
    off = np.maximum(highest - errors, errors - lowest).max(axis=0)  # of any share later, begun here
    chosen: Integers = rows[np.arange(hosts), off.argmin(axis=1)]
    return chosen


@dataclass(frozen=True)
class Dealing:
    """What a fixed set of hosts reads of one source of a mix; what `position.Phase` is for a dataset alone.

    Rows of all hosts have numbers: row m of host h is number m · hosts + h.

    Attributes:
        rule: of the mix.
        source: its number there.
        hosts: how many hosts share the records that were unread when the phase began.
        window_runs: runs in a shuffle window.
        begin, end: the first row number of this phase and epoch, and the one after those that are read.
    """

    rule: Rule
    source: int
    hosts: int
    window_runs: int
    begin: int
    end: int

    def read_by(self, host: int) -> int:
        """Records of this epoch that `host` has read in this phase."""
        return int(self._counts(self.end)[host])

    @property
    def read(self) -> int:
        """Records of this epoch that all hosts together have read in this phase."""
        return int(self._counts(self.end).sum())

    def cuts(self, dealt: int, records: int) -> Integers:
        """As `Phase.cuts`."""
        shares = self._counts(self.row_after(dealt + records)) - self._counts(self.row_after(dealt))
        return np.concatenate(([0], np.cumsum(shares)))

    def row_after(self, records: int) -> int:
        """The first row number before which so many records were dealt since the phase began."""
        weight, period = self.rule.weights[self.source], self.rule.period
        low, high = self.begin, self.begin + max(0, records - _BEHIND * self.hosts) * period // weight
        while self._counts(high).sum() < records:
            low, high = high, high + self.hosts * -(-period // weight)
        while low < high:
            middle = (low + high) // 2
            if self._counts(middle).sum() < records:
                low = middle + 1
            else:
                high = middle
        return low

    def _counts(self, row: int) -> Integers:
        """How many records each host reads before a row number, since the phase began."""
        return self._of_source(row) - self._before

    @cached_property
    def _before(self) -> Integers:
        return self._of_source(self.begin)

    def _of_source(self, row: int) -> Integers:
        rows = -((np.arange(self.hosts) - row) // self.hosts)  # of each host
        return self.rule.count(self.source, begins(self.rule, self.hosts) + rows)
