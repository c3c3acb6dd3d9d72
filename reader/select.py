"""Selecting the records of a split: those of some classes, or that a user's function of the record tables wants.

    selected = select(info, "train", classes={"tabby": "cat", "tiger": "cat", "dog": "dog"})
    selected.numbers(), selected.classes, selected.label(3), selected.digest

Everything follows from the columns of the record tables (`schema.table`): no record is read.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.text import meant
from reader.info import DatasetInfo
from reader.runs import Integers, SelectedTable
from reader.tables import Array, Columns, read_columns

Bools = npt.NDArray[np.bool_]
Classes: TypeAlias = Sequence[str] | Mapping[str, str] | None
Where: TypeAlias = "Callable[[Mapping[str, Array]], Any] | Selection | None"

_NOT_SELECTED = -1


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
        table, mask, new = info.run_table(split), self.mask(), np.array(self.labels, np.int32)
        counts = np.add.reduceat(mask, table.first[:-1], dtype=np.uint16)  # as int64 the mask would be copied
        counts = counts.astype(np.int64)
        index, (start, size) = np.empty(self.size, np.uint16), np.empty((2, self.size), np.uint32)
        label, begin, filled = np.empty(self.size * with_labels, np.int32), 0, 0
        for columns in read_columns(info, split, ["bytes", *["class"] * with_labels]):
            end = begin + columns.records
            chosen = np.flatnonzero(mask[begin:end])  # of the rows
            rows = slice(filled, filled + len(chosen))
            runs = slice(*np.searchsorted(table.first, [begin, end]).tolist())
            lengths = columns.complete("bytes")[table.rows_of_file(runs)]
            index[rows], start[rows], size[rows] = table.places_of(chosen + begin, runs, counts[runs], lengths)
            if with_labels:
                label[rows] = new[columns["class"][chosen]]
            begin, filled = end, rows.stop
        run = np.flatnonzero(counts)
        return SelectedTable.of(table, run, counts[run], index=index, start=start, size=size, label=label)


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


def _class_map(info: DatasetInfo, classes: Classes) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The new names, and the new id of each class id in the records."""
    if classes is None:
        return info.classes, tuple(range(info.num_classes))
    is_valid = isinstance(classes, Mapping | Sequence) and not isinstance(classes, str) and bool(classes)
    if not is_valid or not all(isinstance(name, str) for name in classes):
        raise UsageError(f"classes must be a list of class names, or a dict of names → new names, got {classes!r}")
    new = as_renames(classes)
    for name in new.values():
        if not isinstance(name, str) or not name:
            raise UsageError(f"classes: a dict is of old name → new name, and the new name is a text, got {name!r}")
    for name in new:
        if name not in info.classes:
            raise UsageError(f"there is no class {name!r}: {meant(name, info.classes)}")
    names = tuple(sorted(set(new.values())))
    return names, tuple(names.index(new[name]) if name in new else _NOT_SELECTED for name in info.classes)


def parse_classes(value: Any) -> Mapping[str, str]:
    """`--classes`: `cat,dog`, or with new names `tabby=cat,tiger=cat,dog`; or what `classes` takes in Python."""
    if isinstance(value, str):
        pairs = [name.partition("=") for name in value.split(",")]
        return {name: new if equals else name for name, equals, new in pairs}
    return as_renames(value)


def as_renames(classes: Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    """Name → new name, of what `classes` takes."""
    return dict(classes) if isinstance(classes, Mapping) else {name: name for name in classes}


class _Numbers(np.ndarray[Any, Any]):
    """A column for a user's function. Comparing it with a text is an error: to NumPy each number differs from it."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **more: Any) -> Any:
        _refuse_texts(inputs)
        if "out" in more:
            more["out"] = tuple(map(_plain, more["out"]))
        return getattr(ufunc, method)(*map(_plain, inputs), **more)

    def __array_function__(self, function: Any, types: Any, arguments: Any, more: Any) -> Any:  # such as np.isin
        # A single text may be an option, as that of np.argsort(column, kind="stable").
        _refuse_texts([one for one in (*arguments, *more.values()) if function is np.isin or not isinstance(one, str)])
        return super().__array_function__(function, types, arguments, more)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, _Numbers) else value


def _refuse_texts(values: Sequence[Any]) -> None:
    is_of_numbers = any(isinstance(value, _Numbers) and value.dtype.kind in "biuf" for value in values)
    for value in values if is_of_numbers else ():
        some = value.flat if isinstance(value, np.ndarray) and value.dtype.kind in "SUO" else value
        some = some if isinstance(some, np.flatiter | list | tuple | set | frozenset) else [some]
        if any(isinstance(one, str | bytes) for one in some):
            fix = "a column holds numbers, of classes the ids: info.classes.index('cat')"
            raise UsageError(f"where compares a column with {reprlib.repr(value)}: {fix}")


class _OfNumbers(Mapping[str, Array]):
    """Columns for a user's function."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def __getitem__(self, name: str) -> Array:
        return self._columns[name].view(_Numbers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def _called(where: Callable[[Mapping[str, Array]], Any], columns: Columns) -> Bools:
    from reader.pixels import call_user  # simplejpeg, which the command line does without

    try:
        mask = call_user(where, _OfNumbers(columns))
    except UsageError as error:
        raise (error.__cause__ if isinstance(error.__cause__, ImageShardsError) else error) from None
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (columns.records,):
        got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise UsageError(f"where returned {got}: it has to return bool [{columns.records}], a value a record")
    return mask
