"""`balance`: how often the selected records are read, as exact counts of each class in every epoch."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from beam_pipeline import schema
from beam_pipeline.errors import UsageError
from beam_pipeline.text import first_few, meant, plural
from reader.hosts import integer
from reader.order import Draws, splitmix64, stream_key
from reader.position import WINDOW_RUNS
from reader.runs import Integers, SelectedTable
from reader.select import Selection

_LOG = logging.getLogger("reader")

_TOO_LONG = re.compile(r".{101}|e[+-]?[\d_]{4}", re.IGNORECASE | re.DOTALL)  # `Fraction("1e99999999")` doesn't end
_MIN_PASS = WINDOW_RUNS * schema.RUN_RECORDS  # draws
_MANY_TIMES = 16  # per record and epoch: more are logged


@dataclass(frozen=True, slots=True)
class Weights:
    """The shares of the classes in an epoch.

    Attributes:
        weights: an integer a class; None for the same of each that has records.
        records: in an epoch.
    """

    weights: tuple[int, ...] | None
    records: int

    @property
    def digest(self) -> str:
        """16 hexadecimal digits."""
        return hashlib.blake2b(json.dumps(self.weights).encode(), digest_size=8).hexdigest()


def parse_balance(selection: Selection | None, balance: Any, epoch_records: int | None) -> Weights | None:
    """The `balance` and `epoch_records` of `train_batches`, as numbers.

    Raises:
        UsageError: they are something else, or a class has no weight.
    """
    if isinstance(balance, Weights):
        return balance
    if balance is None or selection is None:
        if epoch_records is not None:
            raise UsageError("epoch_records goes with balance: without it an epoch is every record once")
        return None
    records = selection.size if epoch_records is None else integer("epoch_records", epoch_records, 1)
    if balance == "classes":
        return Weights(None, records)
    if not isinstance(balance, Mapping):
        raise UsageError(f"balance must be 'classes' or a dict of class → weight, got {reprlib.repr(balance)}")
    unknown = next((name for name in balance if name not in selection.classes), None)
    if unknown is not None:
        raise UsageError(f"balance: there is no class {unknown!r}: {meant(str(unknown), selection.classes)}")
    missing = [name for name in selection.classes if name not in balance]
    if missing:
        raise UsageError(f"balance has no weight for {first_few(missing)}: give one, or leave them out with classes")
    named = {repr(name): balance[name] for name in selection.classes}
    return Weights(exact_weights("balance: the weight of", named), records)


def exact_weights(what: str, named: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers, as their text says, in proportion as integers. Raises UsageError if one is too long, or not above 0."""
    exact = []
    for name, value in named.items():
        too_long = f"{what} {name} has over 100 digits, or over 3 in its exponent"
        try:
            text = str(value)
        except ValueError:  # an integer of more digits than Python prints
            raise UsageError(too_long) from None
        if _TOO_LONG.search(text):
            raise UsageError(f"{too_long}: {reprlib.repr(value)}")
        try:
            exact.append(Fraction(text))
        except (ValueError, ZeroDivisionError):
            exact.append(Fraction(0))
        if exact[-1] <= 0:
            raise UsageError(f"{what} {name} must be above 0, got {value!r}")
    scale = math.lcm(*(one.denominator for one in exact))
    return tuple(int(one * scale) for one in exact)


def counts(weights: Sequence[int], draws: int) -> list[int]:
    """Per-class counts among the first `draws` draws: class 0 against the rest, then class 1, and so on.

    Their sum is exact, and none ever falls when `draws` grows: the largest remainder does.
    """
    found, left, rest = [], draws, sum(weights)
    for weight in weights[:-1]:
        found.append((2 * left * weight + rest) // (2 * rest) if rest else 0)
        left -= found[-1]
        rest -= weight
    return [*found, left]


class Balance:
    """What balanced epochs read: of each class an exact count, its records by turns.

    The records of a class take turns in an order that the seed decides, epoch after epoch: draw d of class c is of the
    record whose turn is d modulo the class' records. A record that comes several times in an epoch comes in different
    passes, which it spans evenly. A pass that is smaller than a window is joined to the next one.

    Args:
        weights: the shares.
        table: of the records, with labels.
        classes: names.

    Raises:
        UsageError: a class with a weight has no record.
    """

    def __init__(self, weights: Weights, table: SelectedTable, classes: Sequence[str]) -> None:
        self._table, self._epoch_records = table, weights.records
        self._sizes = np.bincount(table.label, minlength=len(classes))
        self._weights = weights.weights or tuple((self._sizes > 0).astype(int).tolist())
        empty = [name for name, size in zip(classes, self._sizes.tolist(), strict=True) if not size]
        if empty and weights.weights:
            raise UsageError(
                f"balance has a weight for {first_few(empty)}, of which there is no record: leave it out with classes"
            )
        self._of_seed: tuple[int, Integers] | None = None
        times = -(-np.array(counts(self._weights, weights.records)) // np.maximum(self._sizes, 1))
        rarest = int(times.argmax())
        if times[rarest] > _MANY_TIMES:
            _LOG.warning(
                "balance reads each record of class %r %d times an epoch: it has %s; smaller epoch_records or a nearer "
                "weight repeat less",
                *(classes[rarest], times[rarest], plural(int(self._sizes[rarest]), "record")),
            )

    def draws(self, seed: int, epoch: int) -> Draws:
        """What an epoch reads."""
        table = self._table
        records, runs, first = table.total, len(table.file), table.first
        times = self._times(seed, epoch)
        passes = max(1, int(times.max()))
        run = np.repeat(np.arange(runs), np.diff(first))
        draw = np.flatnonzero(times)
        if passes > 1:
            # Copy j of m comes in pass ⌊(j + u) · passes / m⌋; u, of its run, has 16 bits.
            shift = (splitmix64(stream_key(seed, epoch, "copy"), np.arange(runs)) >> np.uint64(48)).astype(np.int64)
            record = np.repeat(draw, times[draw])
            copies = times[record]
            copy = np.arange(len(record)) - np.repeat(np.cumsum(times[draw]) - times[draw], times[draw])
            of_pass = ((copy << 16) + shift[run[record]]) * passes // (copies << 16)
            draw = np.sort(of_pass * records + record)
        run = draw // records * runs + run[draw % records]
        heads = np.flatnonzero(np.concatenate(([True], run[1:] != run[:-1])))
        ends = np.searchsorted(draw, np.arange(1, passes + 1) * records)
        bounds = [0]
        for end in ends.tolist():
            if end - bounds[-1] >= _MIN_PASS and len(draw) - end >= _MIN_PASS:
                bounds.append(end)
        first = np.concatenate((heads, [len(draw)]))
        return Draws(epoch, first, np.searchsorted(first, [*bounds, len(draw)]), table.mean_run, run[heads], draw)

    def _times(self, seed: int, epoch: int) -> Integers:
        """How often each record comes in an epoch."""
        if self._of_seed is None or self._of_seed[0] != seed:
            self._of_seed = seed, self._turns(seed)
        turn, label = self._of_seed[1], self._table.label
        begin, end = (
            np.array(counts(self._weights, at * self._epoch_records), np.int64)[label] for at in (epoch, epoch + 1)
        )
        size = self._sizes[label]
        return (end - 1 - turn) // size - (begin - 1 - turn) // size

    def _turns(self, seed: int) -> Integers:
        """The turn of each record in its class, for all epochs."""
        label = self._table.label
        order = np.lexsort((splitmix64(stream_key(seed, 0, "turn"), np.arange(len(label))), label))
        turns = np.empty(len(label), np.int64)
        turns[order] = np.arange(len(label)) - np.repeat(np.cumsum(self._sizes) - self._sizes, self._sizes)
        return turns
