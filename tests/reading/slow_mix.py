"""Mixes, slowly: whose each row is, one by one; what each host reads of each source by `slow_order`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

from tests.reading import slow_order

Left = tuple[int, list[list[slow_order.Item]]]  # of a source: the epoch that isn't read to its end, and what is left
Row = tuple[int, int, int]  # source, epoch, draw


@cache
def halves(weights: tuple[int, ...], sources: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sources in two parts, whose weights are as near as possible."""
    cuts = range(1, len(sources))
    cut = min(
        cuts,
        key=lambda cut: abs(sum(weights[one] for one in sources[:cut]) - sum(weights[one] for one in sources[cut:])),
    )
    return sources[:cut], sources[cut:]


@cache
def counts(weights: tuple[int, ...], rows: int) -> list[int]:
    """Of the first rows, how many are of each source: halved, by the rounded share of the first half."""
    found = [0] * len(weights)
    pending = [(tuple(sorted(range(len(weights)), key=lambda one: -weights[one])), rows)]
    for sources, left in pending:
        if len(sources) == 1:
            found[sources[0]] = left
            continue
        parts = halves(weights, sources)
        of_first, total = (sum(weights[one] for one in some) for some in (parts[0], sources))
        first = (2 * left * of_first + total) // (2 * total)
        pending += [(parts[0], first), (parts[1], left - first)]
    return found


@cache
def source_of(weights: tuple[int, ...], row: int) -> int:
    """The source whose count rises with a row."""
    before, after = counts(weights, row), counts(weights, row + 1)
    (source,) = [one for one in range(len(weights)) if after[one] > before[one]]
    return source


def read(
    jobs: Sequence[slow_order.Job], weights: tuple[int, ...], left: list[Left], begins: list[int], row: int, count: int
) -> tuple[list[list[Row]], list[Left]]:
    """Rows [row, row + count) of each host, which counts them from its own begin on; then what is left."""
    whose = [[source_of(weights, begin + row + number) for number in range(count)] for begin in begins]

    def turns(source: int) -> Iterator[int]:
        for number in itertools.count(row):
            yield from (host for host, begin in enumerate(begins) if source_of(weights, begin + number) == source)

    drawn, after = [], list[Left]()
    for source, (job, (epoch, todo)) in enumerate(zip(jobs, left, strict=True)):
        found, *now = slow_order.read(job, epoch, todo, turns(source), [one.count(source) for one in whose])
        drawn.append([iter(one) for one in found])
        after.append((now[0], now[1]))
    return [[(one, *next(drawn[one][host])) for one in mine] for host, mine in enumerate(whose)], after
