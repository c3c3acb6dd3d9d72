"""Shared by the tools: reading some records of a dataset, and all record tables, many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

import numpy as np

from beam_pipeline import schema, storage
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.machine import cpu_count
from beam_pipeline.schema import example
from beam_pipeline.schema.manifest import Shard
from beam_pipeline.schema.table import Table, name_hash
from reader.example import ImageFinder
from reader.info import MAX_WINDOW_BYTES, DatasetInfo
from reader.runs import Integers, InvalidRecordError, Piece, RunReader, RunTable, SelectedTable
from reader.tables import Array, columns_by_path, locate

T = TypeVar("T")

_READS_AT_ONCE, _TABLES_AT_ONCE = 32, 8
_HEAD_BYTES = 4096  # a page: class and path take some 100 bytes, columns whose names precede `filename` more
_BLOCK = 1 << 14  # records whose reads are submitted together


def read_records(table: RunTable, parse: Callable[[int, bytes], T], numbers: Integers | None = None) -> Iterator[T]:
    """What `parse` makes of each record of a table and its number there, in order; up to 256 MB are read at once.

    Args:
        numbers: int64 [n] of the records, ascending; None for all.

    Raises:
        CorruptRecordError: a record is corrupt, or not what `parse` takes; names file, record and byte offset.
    """
    reader = RunReader(table)

    def read(piece: Piece, numbers: Integers, indices: Integers) -> list[T]:
        run, parsed = reader.read(piece), []
        for number, index in zip(numbers.tolist(), indices.tolist(), strict=True):
            try:
                parsed.append(parse(number, run.record(index)))
            except UsageError:  # of a user's function
                raise
            except InvalidRecordError as error:
                raise run.located(index, error) from None
            except (KeyError, IndexError, ValueError) as error:
                raise run.located(index, InvalidRecordError(f"it isn't an Example of this dataset ({error})")) from None
        return parsed

    return _read_pieces(reader, np.arange(table.total) if numbers is None else numbers, read)


def read_images(info: DatasetInfo, table: RunTable, parse: Callable[[int, memoryview], T]) -> Iterator[T]:
    """The same of the encoded image of each record."""
    find = ImageFinder(info.image_key, info.class_key)
    return read_records(table, lambda number, record: parse(number, find(record)[0]))


def _read_pieces(
    reader: RunReader, numbers: Integers, read: Callable[[Piece, Integers, Integers], list[T]]
) -> Iterator[T]:
    """What `read` makes of the records that one request reads: of their numbers, and their indices in the piece."""
    runs = MAX_WINDOW_BYTES // int(reader.table.bytes.max(initial=1))
    threads = max(1, min(_READS_AT_ONCE if reader.is_remote else cpu_count(), runs))
    with ThreadPoolExecutor(threads, "reader-records") as pool:
        for start in range(0, len(numbers), _BLOCK):
            some = numbers[start : start + _BLOCK]
            pieces, of, index = reader.pieces_of(some)
            heads = np.flatnonzero(np.diff(of)) + 1
            yield from chain.from_iterable(pool.map(read, pieces, np.split(some, heads), np.split(index, heads)))


def checked_table(info: DatasetInfo, split: str, numbers: Integers) -> RunTable:
    """Where some records of a split string are, ascending. Raises ImageShardsError if a shard has another size."""
    if faults := info.wrong_sizes(split):
        raise ImageShardsError(f"{faults[0]}: run the job again with --repair")
    return locate(info, info.run_table(split), numbers)


def with_records(info: DatasetInfo) -> list[str]:
    """Names of the splits that have records."""
    return [name for name, split in info.splits.items() if split.records]


def read_tables(info: DatasetInfo, take: Callable[[str, slice, Table], None]) -> None:
    """Give `take` every record table, in threads, with its split, and which of all records it is of.

    Raises:
        ImageShardsError: a table isn't the file that was published.
    """
    shards = [(name, shard) for name, split in info.splits.items() for shard in split.shards]
    stops = np.cumsum([shard.records for _, shard in shards], dtype=np.int64).tolist()

    def read(of: tuple[str, Shard], stop: int) -> None:
        take(of[0], slice(stop - of[1].records, stop), info.load_table(of[1]))

    with ThreadPoolExecutor(_TABLES_AT_ONCE) as pool:
        list(pool.map(read, shards, stops))


def read_paths(info: DatasetInfo, splits: Sequence[str], numbers: Integers) -> list[bytes]:
    """The paths of some records, by their numbers among those of these splits, in any order.

    A path is near the beginning of a record, so the image isn't read unless it is between two records read at once.
    The path's hash in the record table, not the record's CRC, says that it is valid. Third-party files have none:
    record 17 is `train[17:18]`.

    Raises:
        CorruptRecordError: the path in a record is corrupt; names file, record and byte offset.
        ImageShardsError: the record tables aren't those of these shards.
    """
    numbers, at = np.unique(numbers, return_inverse=True)
    if info.is_index:
        stops = np.cumsum([0, *(info.splits[name].records for name in splits)])
        places = np.searchsorted(stops, numbers, "right") - 1
        pairs = zip(places.tolist(), (numbers - stops[places]).tolist(), strict=True)
        paths = [f"{splits[place]}[{number}:{number + 1}]".encode() for place, number in pairs]
    else:
        paths = _read_paths(info, splits, numbers) if len(numbers) else []
    return [paths[number] for number in at]  # a list of all numbers would take more than the paths


def _read_paths(info: DatasetInfo, splits: Sequence[str], numbers: Integers) -> list[bytes]:
    """Of ascending numbers, each once, of records that imageshards wrote."""
    columns_of, hash_column = columns_by_path(info), dict[str, Array]()

    def lengths_of(path: str) -> Array:
        columns = columns_of(path).load(["bytes", "name"])
        hash_column[path] = columns["name"]
        return columns["bytes"]

    table = locate(info, info.run_table("+".join(splits)), numbers, lengths_of)
    run = table.runs_of(np.arange(table.total))
    file, row = table.file[run], table.file_record[run] + table.index
    heads = np.flatnonzero(np.diff(file, prepend=-1))  # of each file's records
    paths = (table.files[one] for one in file[heads].tolist())
    hashes = [hash_column[path][rows] for path, rows in zip(paths, np.split(row, heads[1:]), strict=True)]
    return _checked_names(table, np.concatenate(hashes).tolist())


def _checked_names(table: SelectedTable, hashes: Sequence[int]) -> list[bytes]:
    """The file names in the records of a table, of which the hashes are known."""

    def name_in(number: int, record: bytes) -> bytes:
        name = filename_of(record)
        if name_hash(name.decode("utf-8", "surrogateescape")) != hashes[number]:
            raise table.not_of_these(int(table.file[np.searchsorted(table.first, number, "right") - 1]))
        return name

    names = [
        head if head is not None and name_hash(head.decode("utf-8", "surrogateescape")) == known else None
        for head, known in zip(names_in_heads(table), hashes, strict=True)
    ]
    missing = np.flatnonzero([name is None for name in names])
    complete = read_records(table, name_in, missing)
    return [name if name is not None else next(complete) for name in names]


def names_in_heads(table: SelectedTable) -> Iterator[bytes | None]:
    """The file name in each record of a table, unchecked; None if it isn't in the record's first bytes."""
    store, run = storage.open_storage(table.files[0]), table.runs_of(np.arange(table.total))
    begins = table.offset[run] + table.start

    def read(piece: Piece, numbers: Integers, _: Integers) -> list[bytes | None]:
        of_piece = begins[numbers]
        stop = min(piece.stop, int(of_piece[-1]) + _HEAD_BYTES)
        try:
            data = store.read_range(piece.path, piece.start, stop)
        except FileNotFoundError:  # which reading the records tells
            return [None] * len(numbers)
        heads = (of_piece - piece.start + schema.FRAME_HEADER_BYTES).tolist()
        return [example.bytes_in_head(bytes(data[head : head + _HEAD_BYTES]), schema.FILENAME_KEY) for head in heads]

    return _read_pieces(RunReader(table), np.arange(table.total), read)


def filename_of(record: bytes) -> bytes:
    """The file name in a record that imageshards wrote. Raises KeyError, IndexError or ValueError."""
    return example.bytes_of(example.features_of(record)[schema.FILENAME_KEY])
