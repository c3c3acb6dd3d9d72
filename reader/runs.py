"""Reading runs: one range read is 64 consecutive records, framing and CRC of each record checked, in plain Python.

Costs 5 µs a record of 16 kB, the read from the page cache included (2.2 of it framing and CRCs): 1/50 of its decode.
TensorFlow, PyTorch, JAX, `verify` and damage reports all stand on this module; it knows none of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, StorageError
from reader.cache import RunCache
from reader.ranges import read_ranges
from reader.run_table import Integers, RunTable
from reader.scanning import check_frame, frame_bytes
from reader.storage import Storage

# Neighbouring runs of a remote window are read at once up to this size: evaluation in file order makes one request a
# window. Local reads aren't joined: a buffer of many MB is mapped, faulted in and unmapped, 8 µs a record.
JOIN_BYTES = 16 << 20

Found = bytes | CorruptRecordError


class RunReader:
    """Reads the records of a `RunTable` by number; remote, many requests are under way at once.

    Args:
        storage: where the files lie.
        table: which records there are.
        cache: asked before the storage; it gets the runs whose records are all right.
    """

    def __init__(self, storage: Storage, table: RunTable, cache: RunCache | None = None) -> None:
        self._storage = storage
        self.table = table
        self._cache = cache

    def read(self, numbers: Integers) -> list[bytes]:
        """The serialized records with these numbers in the selection, in this order; each run they touch is read once.

        Raises:
            CorruptRecordError: names file, record and offset of the first wrong record.
            StorageError: a file can't be read.
        """
        records = []
        for record in self.find(numbers):
            if isinstance(record, CorruptRecordError):
                raise record
            records.append(record)
        return records

    def find(self, numbers: Integers) -> list[Found]:
        """As `read`, with what is wrong in the place of a wrong record; a missing file is that of all its records.

        Raises:
            StorageError: a file can't be read.
        """
        table = self.table
        run_of = np.searchsorted(table.first, numbers, "right") - 1
        by_run = self._find_runs(np.unique(run_of))
        within = numbers - table.first[run_of] + table.skip[run_of]
        return [by_run[run][record] for run, record in zip(run_of.tolist(), within.tolist(), strict=True)]

    def offset(self, number: int) -> int:
        """Byte offset in its file of the framing of one record, which is right as are those before it in its run."""
        table = self.table
        run = int(np.searchsorted(table.first, number, "right")) - 1
        before = number - int(table.first[run]) + int(table.skip[run])
        records = self._find_runs(np.array([run]))[run][:before]
        return int(table.offset[run]) + sum(
            len(record) + schema.FRAME_BYTES for record in records if isinstance(record, bytes)
        )

    def _find_runs(self, runs: Integers) -> dict[int, list[Found]]:
        """The records of each of these runs (ascending numbers), from the cache or by range reads."""
        found: dict[int, list[Found]] = {}
        for run in runs.tolist() if self._cache is not None else ():
            records = self._cached(run)
            if records is not None:
                found[run] = list(records)
        missing = np.array([run for run in runs.tolist() if run not in found], np.int64)
        groups = self._neighbours(missing)
        ranges = [(*self._range(int(group[0]))[:2], self._range(int(group[-1]))[2]) for group in groups]
        # Cut into records here: in the threads of the requests, each with a heap of its own, they would leave holes.
        for group, data in zip(groups, read_ranges(self._storage, ranges), strict=True):
            found.update(self._cut(group, data))
        return found

    def _cached(self, run: int) -> list[bytes] | None:
        """The records of a run that the cache has, all of them right, or None."""
        data = None if self._cache is None else self._cache.get(*self._range(run))
        return None if data is None else self._right(run, data)

    def _cut(self, runs: Integers, data: bytes | memoryview | None) -> dict[int, list[Found]]:
        """The records of neighbouring runs in the bytes that were fetched; the cache gets the runs that are right."""
        if data is None:
            return {run: self._missing(run) for run in runs.tolist()}
        path, start, _ = self._range(int(runs[0]))
        found: dict[int, list[Found]] = {}
        for run in runs.tolist():
            _, first, last = self._range(run)
            part = bytes(data[first - start : last - start])  # no copy of what is bytes, and whole
            records = self._right(run, part)
            if records is not None and self._cache is not None:
                self._cache.put(path, first, part)
            found[run] = self._salvage(run, part) if records is None else list(records)
        return found

    def _range(self, run: int) -> tuple[str, int, int]:
        """File, first byte and byte behind the last of one run."""
        start = int(self.table.offset[run])
        return self.table.files[int(self.table.file[run])], start, start + int(self.table.bytes[run])

    def _neighbours(self, runs: Integers) -> list[Integers]:
        """`runs` cut into groups that are read at once: they lie one behind the other, up to `JOIN_BYTES`."""
        if not self._storage.is_remote or not len(runs):
            return list(runs[:, None])
        file, offset, size = (array[runs] for array in (self.table.file, self.table.offset, self.table.bytes))
        groups, begin = [], 0
        for i in range(1, len(runs)):
            follows = file[i] == file[i - 1] and offset[i] == offset[i - 1] + size[i - 1]
            if not follows or offset[i] + size[i] - offset[begin] > JOIN_BYTES:
                groups.append(runs[begin:i])
                begin = i
        groups.append(runs[begin:])
        return groups

    def _right(self, run: int, data: bytes) -> list[bytes] | None:
        """The records of a run, None unless all of them are there and right."""
        try:
            records = list(schema.unframe(data))
        except CorruptRecordError:
            return None
        return records if len(records) == self.table.records[run] else None

    def _missing(self, run: int) -> list[Found]:
        """The records of a run whose file is missing."""
        first, (path, start, _) = int(self.table.file_record[run]), self._range(run)
        return [
            CorruptRecordError(path, first + i, start, "the file is missing") for i in range(self.table.records[run])
        ]

    def _salvage(self, run: int, data: bytes) -> list[Found]:
        """What of a damaged run is right, each record at the place that the shard's text index says.

        Without an index a wrong length costs the run's rest, since only lengths tell where the next record begins.
        """
        count, first = int(self.table.records[run]), int(self.table.file_record[run])
        path, start, _ = self._range(run)
        offsets = self._offsets(run)
        if offsets is None:
            return list(_scan_run(data, path, first, start, count))
        ends = [*offsets[1:], start + int(self.table.bytes[run])]
        return [
            check_frame(data[offset - start : end - start], path, first + i, offset)
            for i, (offset, end) in enumerate(zip(offsets, ends, strict=True))
        ]

    def _offsets(self, run: int) -> list[int] | None:
        """Byte offset of each record of a run by the shard's text index; None where there is none that fits."""
        path = self.table.indexes[int(self.table.file[run])]
        first, count = int(self.table.file_record[run]), int(self.table.records[run])
        try:
            lines = self._storage.read(path).splitlines()[first : first + count] if path else []
            offsets = [int(line.split()[0]) for line in lines]
        except (StorageError, ValueError, IndexError):
            return None
        fits = len(offsets) == count and offsets[0] == self.table.offset[run] and offsets == sorted(offsets)
        return offsets if fits else None


def _scan_run(data: bytes, path: str, first: int, start: int, count: int) -> Iterator[Found]:
    """`count` records from the beginning of `data` on, as far as their lengths can be believed."""
    position = 0
    for number in range(first, first + count):
        size = frame_bytes(data, position) or len(data) - position
        yield check_frame(data[position : position + size], path, number, start + position)
        position += size
