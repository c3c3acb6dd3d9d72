"""Which records of a split are read, those of some classes or that a user's function wants, and how often (`Balance`).

    selected = select(info, "train", classes={"tabby": "cat", "tiger": "cat", "dog": "dog"})
    selected.numbers(), selected.classes, selected.label(3), selected.digest

Everything follows from the columns of the record tables (`schema.table`): no record is read.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import logging
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.schema.manifest import Shard
from beam_pipeline.schema.table import Field, table_fields
from beam_pipeline.text import first_few, plural
from reader.info import DatasetInfo
from reader.order import Draws, splitmix64, stream_key
from reader.position import WINDOW_RUNS, integer
from reader.runs import Integers, SelectedTable

Bools = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]
Classes: TypeAlias = Sequence[str] | Mapping[str, str] | None
Where: TypeAlias = "Callable[[Mapping[str, Array]], Any] | Selection | None"

_HEADER_BYTES = 4096  # of a table: fits the header of about 50 columns, so one request reads it
_TABLES_AT_ONCE, _TABLES_AHEAD = 32, 128  # of remote storage
_NOT_SELECTED = -1
_LEAST_PASS = WINDOW_RUNS * schema.RUN_RECORDS  # draws
_MANY_TIMES = 16  # a record in an epoch: more are told

_LOG = logging.getLogger("reader")


@dataclass(frozen=True, slots=True)
class Selection:
    """The records of a split string that are read. Pickles; the user's function isn't in it, only its mask.

    Attributes:
        total: records of the split string.
        size: how many of them are selected.
        bits: the mask, a bit a record in file order, as `np.packbits` packs it.
        classes: names of the classes; a class id of the selection is an index into it.
        labels: class id in the records → that of the selection, -1 if the class isn't selected.
    """

    total: int
    size: int
    bits: bytes
    classes: tuple[str, ...]
    labels: tuple[int, ...]

    def mask(self) -> Bools:
        """bool [total]: whether each record of the split string, in file order, is selected."""
        return np.unpackbits(np.frombuffer(self.bits, np.uint8), count=self.total).view(np.bool_)

    def numbers(self) -> Integers:
        """int64 [size]: the selected records, ascending, numbered as `info.run_table(split)` numbers them."""
        return np.flatnonzero(self.mask())

    def label(self, class_id: int) -> int:
        """The id in `classes` of a class id in the records; -1 if the class isn't selected."""
        return self.labels[class_id]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of BLAKE2b over the mask and the class map: equal for equal selections."""
        text = self.bits + json.dumps([self.total, self.classes, self.labels]).encode()
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    def table(self, info: DatasetInfo, split: str, with_labels: bool = False) -> SelectedTable:
        """The run table of the selected records, numbered from 0: reads the column `bytes` of each shard.

        Args:
            with_labels: read the column `class`, too.

        Raises:
            ImageShardsError: the record tables aren't those of these shards.
        """
        runs, mask, new = info.run_table(split), self.mask(), np.array(self.labels, np.int32)
        index, (start, size) = np.empty(self.size, np.uint16), np.empty((2, self.size), np.uint32)
        label, counts, begin, filled = np.empty(self.size * with_labels, np.int32), [], 0, 0
        for columns in read_columns(info, split, ["bytes", *["class"] * with_labels]):
            end = begin + columns.records
            chosen = np.flatnonzero(mask[begin:end]) + columns.start  # in the shard
            begins = np.concatenate(([0], np.cumsum(columns.complete("bytes"), dtype=np.int64)))
            of_shard = slice(*np.searchsorted(runs.first[:-1], [begin, end]))
            heads, records = runs.file_record[of_shard], runs.records[of_shard]
            if not np.array_equal(begins[heads + records] - begins[heads], runs.bytes[of_shard]):
                raise columns.error()
            run, rows = np.searchsorted(heads, chosen, "right") - 1, slice(filled, filled + len(chosen))
            counts.append(np.bincount(run, minlength=len(heads)))
            index[rows] = chosen - heads[run]
            start[rows] = begins[chosen] - begins[heads[run]]
            size[rows] = columns.complete("bytes")[chosen]
            if with_labels:
                label[rows] = new[columns.complete("class")[chosen]]
            begin, filled = end, filled + len(chosen)
        return SelectedTable.of(runs, np.concatenate(counts), index=index, start=start, size=size, label=label)


def select(
    info: DatasetInfo, split: str, classes: Classes = None, where: Where = None, or_all: bool = False
) -> Selection | None:
    """The records of a split string that have one of these classes and that `where` wants.

    Args:
        info: the dataset.
        split: TFDS split string; it applies first.
        classes: names of classes, or a dict of names → new names, which merges those with the same one. Ids follow from
            the sorted new names. None for all, as they are.
        where: `f(columns)` → bool [n], called once a shard, one after the other; `columns` has an array of n values by
            the name of each column of the record table ("class", "source_width", "column:NAME" …), read when it is
            asked for. A `Selection` that was made before is returned.
        or_all: return a selection of all records, too.

    Returns:
        None if all records are read with their own class ids, unless that is asked for.

    Raises:
        UsageError: an unknown class or column, `where` failed or returned something else, or nothing is selected.
        ImageShardsError: the dataset is compressed.
    """
    if classes is None and where is None and not or_all:
        return None
    if isinstance(where, Selection):
        return where
    names, labels = _class_map(info, classes)
    if where is not None and not callable(where):
        raise UsageError(f"where must be a function of the record table's columns, got {reprlib.repr(where)}")
    wanted, parts = np.array(labels) != _NOT_SELECTED, []
    for columns in read_columns(info, split, ["class"] * (classes is not None)):
        mask = np.ones(columns.records, np.bool_)
        if classes is not None:
            if columns["class"].max(initial=0) >= len(wanted):
                raise columns.error()
            mask = wanted[columns["class"]]
        if where is not None:
            mask &= _called(where, columns)
        parts.append(mask)
    mask = np.concatenate(parts)
    size = int(np.count_nonzero(mask))
    if not size:
        which = [f"classes={reprlib.repr(classes)}"] * (classes is not None) + ["where"] * (where is not None)
        raise UsageError(f"none of the {len(mask)} records of split {split!r} is selected by {' and '.join(which)}")
    if size == len(mask) and labels == tuple(range(info.num_classes)) and not or_all:
        return None
    return Selection(len(mask), size, np.packbits(mask).tobytes(), names, labels)


# --- balance


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


def weigh(selection: Selection | None, balance: Any, epoch_records: int | None) -> Weights | None:
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
        raise UsageError(f"balance: there is no class {unknown!r}: {_nearest(unknown, selection.classes)}")
    missing = [name for name in selection.classes if name not in balance]
    if missing:
        raise UsageError(f"balance has no weight for {first_few(missing)}: give one, or leave them out with classes")
    exact = []
    for name in selection.classes:
        try:
            exact.append(Fraction(str(balance[name])))
        except ValueError:
            exact.append(Fraction(0))
        if exact[-1] <= 0:
            raise UsageError(f"balance: the weight of {name!r} must be above 0, got {balance[name]!r}")
    scale = math.lcm(*(one.denominator for one in exact))
    return Weights(tuple(int(one * scale) for one in exact), records)


def counts(weights: Sequence[int], draws: int) -> list[int]:
    """How many of the first so many draws are of each class: class 0 against the rest, then class 1, and so on.

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
            if end - bounds[-1] >= _LEAST_PASS and len(draw) - end >= _LEAST_PASS:
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


def _class_map(info: DatasetInfo, classes: Classes) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The new names, and the new id of each class id in the records."""
    if classes is None:
        return info.classes, tuple(range(info.num_classes))
    is_valid = isinstance(classes, Mapping | Sequence) and not isinstance(classes, str) and bool(classes)
    if not is_valid or not all(isinstance(name, str) for name in classes):
        raise UsageError(f"classes must be a list of class names, or a dict of names → new names, got {classes!r}")
    new = new_names(classes)
    for name in new.values():
        if not isinstance(name, str) or not name:
            raise UsageError(f"classes: a dict is of old name → new name, and the new name is a text, got {name!r}")
    for name in new:
        if name not in info.classes:
            raise UsageError(f"there is no class {name!r}: {_nearest(name, info.classes)}")
    names = tuple(sorted(set(new.values())))
    return names, tuple(names.index(new[name]) if name in new else _NOT_SELECTED for name in info.classes)


def parse_classes(value: Any) -> Mapping[str, str]:
    """`--classes`: `cat,dog`, or with new names `tabby=cat,tiger=cat,dog`; or what `classes` takes in Python."""
    if isinstance(value, str):
        pairs = [name.partition("=") for name in value.split(",")]
        return {name: new if equals else name for name, equals, new in pairs}
    return new_names(value)


def new_names(classes: Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    """Name → new name, of what `classes` takes."""
    return dict(classes) if isinstance(classes, Mapping) else {name: name for name in classes}


def _called(where: Callable[[Mapping[str, Array]], Any], columns: Columns) -> Bools:
    from reader.pixels import call_user  # simplejpeg, which the command line does without

    try:
        mask = call_user(where, columns)
    except UsageError as error:
        raise (error.__cause__ if isinstance(error.__cause__, ImageShardsError) else error) from None
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (columns.records,):
        got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise UsageError(f"where returned {got}: it has to return bool [{columns.records}], a value a record")
    return mask


# --- columns of record tables


class Columns(Mapping[str, Array]):
    """Rows [start, stop) of a shard's record table by column, each read by a range request when it is first asked for.

    Raises:
        ImageShardsError: the dataset is compressed, or the table isn't this shard's.
    """

    def __init__(self, info: DatasetInfo, shard: Shard, start: int = 0, stop: int | None = None) -> None:
        self._info, self.shard, self.start = info, shard, start
        self._stop = shard.records if stop is None else stop
        self.records = self._stop - start
        self._path = info.path(schema.table_file(shard.file))
        self._header: Mapping[str, Field] | None = None
        self._loaded: dict[str, Array] = {}

    @property
    def _fields(self) -> Mapping[str, Field]:
        if self._header is None:  # not a cached_property: in Python 3.11 one lock makes all instances wait
            self._header = self._read_header()
        return self._header

    def _read_header(self) -> Mapping[str, Field]:
        if self._info.compression != "none":
            raise ImageShardsError(
                f"{self._info.url} is compressed with {self._info.compression}, so it has no record tables to select "
                "by: write it with --compression none"
            )
        try:
            fields, size = table_fields(lambda stop: self._info.storage.read(self._path, 0, stop), _HEADER_BYTES)
        except ValueError:
            raise self.error() from None
        if self.shard.table.bytes != size or any(one.shape[0] != self.shard.records for one in fields.values()):
            raise self.error()
        return fields

    def complete(self, name: str) -> Array:
        """A column of the shard, all rows of it."""
        if name not in self._loaded:
            if name not in self._fields:
                raise UsageError(f"there is no column {name!r}: {_nearest(name, self._fields)}")
            one = self._fields[name]
            data = self._info.storage.read(self._path, one.offset, one.offset + one.bytes)
            if len(data) != one.bytes:
                raise self.error()
            self._loaded[name] = np.frombuffer(data, one.dtype).reshape(one.shape)
        return self._loaded[name]

    def __getitem__(self, name: str) -> Array:
        return self.complete(name)[self.start : self._stop]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def load(self, names: Sequence[str]) -> Columns:
        """Read some now."""
        for name in names:
            self.complete(name)
        return self

    def loaded(self) -> list[str]:
        """Names of those that were read."""
        return list(self._loaded)

    def error(self) -> ImageShardsError:
        """That the table isn't the shard's."""
        return ImageShardsError(f"{self._path} isn't the record table of this shard; run the job with --repair")


def read_columns(info: DatasetInfo, split: str, names: Sequence[str] = ()) -> Iterator[Columns]:
    """The record tables of a split string, shard by shard, each with the rows that it names.

    These columns are read ahead by threads, and for later shards whatever was read of the first one.
    """
    shards, asked = list(_shards(info, split)), list(names)
    with ThreadPoolExecutor(_TABLES_AT_ONCE, "reader-tables") as pool:
        # The first one alone: it tells which columns `where` asks for.
        for begin, end in itertools.pairwise([0, *range(1, len(shards), _TABLES_AHEAD), len(shards)]):
            tables = [Columns(info, *one) for one in shards[begin:end]]
            for columns in (pool.map if info.storage.is_remote else map)(partial(Columns.load, names=asked), tables):
                yield columns
            asked = columns.loaded()


def _shards(info: DatasetInfo, split: str) -> Iterator[tuple[Shard, int, int]]:
    for part in info.ranges(split):
        begin = 0
        for shard in info.splits[part.split].shards:
            start, stop = max(part.start - begin, 0), min(part.stop - begin, shard.records)
            if start < stop:
                yield shard, start, stop
            begin += shard.records


def _nearest(name: object, there: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), there, 1) or [one for one in there if one.endswith(f":{name}")]
    return f"did you mean {close[0]!r}?" if close else f"there are {first_few(list(there), 20)}"
