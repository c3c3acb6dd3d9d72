"""Shared by the tools: reading some records of a dataset, many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

import numpy as np

from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.schema import example
from reader.info import MAX_WINDOW_BYTES, DatasetInfo
from reader.machine import cpu_count
from reader.runs import Integers, InvalidRecordError, Piece, RunReader, RunTable
from reader.tables import locate

T = TypeVar("T")

_READS_AT_ONCE = 32
_BLOCK = 1 << 14  # records whose reads are submitted together


def read_records(table: RunTable, parse: Callable[[int, bytes], T]) -> Iterator[T]:
    """What `parse` makes of each record of a table and its number there, in order; up to 256 MB are read at once.

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

    most = MAX_WINDOW_BYTES // int(table.bytes.max(initial=1))
    threads = max(1, min(_READS_AT_ONCE if reader.is_remote else cpu_count(), most))
    with ThreadPoolExecutor(threads, "reader-records") as pool:
        for start in range(0, table.total, _BLOCK):
            numbers = np.arange(start, min(start + _BLOCK, table.total))
            pieces, of, index = reader.pieces_of(numbers)
            heads = np.flatnonzero(np.diff(of)) + 1
            yield from chain.from_iterable(pool.map(read, pieces, np.split(numbers, heads), np.split(index, heads)))


def checked_table(info: DatasetInfo, split: str, numbers: Integers) -> RunTable:
    """Where some records of a split string are, ascending. Raises ImageShardsError if a shard has another size."""
    if faults := info.wrong_sizes(split):
        raise ImageShardsError(f"{faults[0]}: run the job again with --repair")
    return locate(info, info.run_table(split), numbers)


def read_filenames(info: DatasetInfo, splits: Sequence[str], numbers: Integers) -> list[bytes]:
    """The file names in some records, by their numbers among those of these splits, ascending, each once."""
    if not len(numbers):
        return []
    table = locate(info, info.run_table("+".join(splits)), numbers)
    return list(read_records(table, lambda _, record: filename_of(record)))


def filename_of(record: bytes) -> bytes:
    """The file name in a record that imageshards wrote. Raises KeyError, IndexError or ValueError."""
    return example.bytes_of(example.features_of(record)[schema.FILENAME_KEY])
