"""Columns of the record tables (`schema.table`), each read by a range request when it is first asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.schema.manifest import Shard
from beam_pipeline.schema.table import Field, table_fields
from beam_pipeline.text import meant
from reader.info import DatasetInfo
from reader.runs import Integers, Piece, RunTable, SelectedTable

Array = npt.NDArray[Any]
T = TypeVar("T")
R = TypeVar("R")

_HEADER_BYTES = 4096  # of a table: fits the header of about 50 columns, so one request reads it
_TABLES_AT_ONCE, _TABLES_AHEAD = 32, 128  # of remote storage


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
                raise UsageError(f"there is no column {name!r}: {meant(name, self._fields)}")
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
    tables, asked = (Columns(info, *one) for one in _shards(info, split)), list(names)
    # The first one alone: it tells which columns `where` asks for.
    for first in itertools.islice(tables, 1):
        yield first.load(asked)
        asked = first.loaded()
    yield from _each(info, partial(Columns.load, names=asked), tables)


def _each(info: DatasetInfo, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """The results of a function that reads a table, in order; tables that are remote are read ahead by threads."""
    if not info.storage.is_remote:
        yield from map(function, items)
        return
    rest = iter(items)
    with ThreadPoolExecutor(_TABLES_AT_ONCE, "reader-tables") as pool:
        while some := list(itertools.islice(rest, _TABLES_AHEAD)):
            yield from pool.map(function, some)


def _shards(info: DatasetInfo, split: str) -> Iterator[tuple[Shard, int, int]]:
    for part in info.ranges(split):
        begin = 0
        for shard in info.splits[part.split].shards:
            start, stop = max(part.start - begin, 0), min(part.stop - begin, shard.records)
            if start < stop:
                yield shard, start, stop
            begin += shard.records


def locate(
    info: DatasetInfo, table: RunTable, numbers: Integers, lengths_of: Callable[[str], Array] | None = None
) -> SelectedTable:
    """The run table of some records: reads the column `bytes` of their shards.

    Args:
        table: of a split string.
        numbers: int64 [n] of its records, ascending, each once.
        lengths_of: shard → that column, if it is kept; any thread calls it.

    Raises:
        ImageShardsError: the record tables aren't those of these shards.
    """
    runs, counts = np.unique(table.runs_of(numbers), return_counts=True)
    files, run_of_file = np.unique(table.file[runs], return_index=True)
    heads, ends = table.file_record[runs].tolist(), (table.file_record[runs] + table.records[runs]).tolist()
    columns = _each(info, lengths_of or column_of(info, "bytes"), [table.files[file] for file in files.tolist()])
    lengths = [
        column[heads[run] : ends[run]]
        for column, first, end in zip(columns, run_of_file, [*run_of_file[1:], len(runs)], strict=True)
        for run in range(first, end)
    ]
    index, start, size = table.places_of(numbers, runs, counts, np.concatenate(lengths))
    of_records = {"index": index.astype(np.uint16), "start": start.astype(np.uint32), "size": size.astype(np.uint32)}
    return SelectedTable.of(table, runs, counts, **of_records, label=np.empty(0, np.int32))


def locate_one(table: RunTable, number: int, lengths_of: Callable[[str], Array]) -> Piece:
    """Where one record is, as `locate` finds it; NumPy's arrays of one value would cost 140 µs.

    Raises:
        ImageShardsError: the record table isn't that of this shard.
    """
    run = int(np.searchsorted(table.first, number, "right")) - 1
    path, head, records = table.files[table.file[run]], int(table.file_record[run]), int(table.records[run])
    index = number - int(table.first[run]) + int(table.skip[run])
    lengths = lengths_of(path)[head : head + records]
    if int(lengths.sum()) != table.bytes[run]:
        raise table.not_of_these(int(table.file[run]))
    start = int(table.offset[run]) + int(lengths[:index].sum())
    return Piece(path, table.indexes[table.file[run]], start, start + int(lengths[index]), head + index, 1)


def column_of(info: DatasetInfo, name: str) -> Callable[[str], Array]:
    """A function from a shard's path to a column of its record table."""
    columns_of = columns_by_path(info)
    return lambda path: columns_of(path)[name]


def columns_by_path(info: DatasetInfo) -> Callable[[str], Columns]:
    """A function from a shard's path to its record table."""
    shards = {info.path(one.file): one for split in info.splits.values() for one in split.shards}
    return lambda path: Columns(info, shards[path])
