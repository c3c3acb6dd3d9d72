"""Reading runs: one range read is 64 consecutive records, framing and CRC of each record checked, in plain Python.

Costs 5 µs a record of 16 kB, the read from the page cache included (2.2 of it framing and CRCs): 1/50 of its decode.
TensorFlow, PyTorch, JAX, `verify` and damage reports all stand on this module; it knows none of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, StorageError
from reader.cache import RunCache
from reader.run_table import Integers, RunTable
from reader.storage import CHUNK_BYTES, Storage, chunks

# Neighbouring runs of a remote window are read at once up to this size: evaluation in file order makes one request a
# window. Local reads aren't joined: a buffer of many MB is mapped, faulted in and unmapped, 8 µs a record.
JOIN_BYTES = 16 << 20

Found = bytes | CorruptRecordError


class RunReader:
    """Reads the records of a `RunTable` by number.

    Args:
        storage: where the files lie.
        table: which records there are.
        executor: where given, the requests of one call run in it at once; each takes a request's latency.
        cache: asked before the storage, and told what came from it.
    """

    def __init__(
        self, storage: Storage, table: RunTable, executor: Executor | None = None, cache: RunCache | None = None
    ) -> None:
        self._storage = storage
        self.table = table
        self._executor = executor
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
        runs = np.unique(run_of)
        by_run = dict(zip(runs.tolist(), self._find_runs(runs), strict=True))
        within = numbers - table.first[run_of] + table.skip[run_of]
        return [by_run[run][record] for run, record in zip(run_of.tolist(), within.tolist(), strict=True)]

    def offset(self, number: int) -> int:
        """Byte offset in its file of the framing of one record, which is right as are those before it in its run."""
        table = self.table
        run = int(np.searchsorted(table.first, number, "right")) - 1
        before = number - int(table.first[run]) + int(table.skip[run])
        records = self._find_runs(np.array([run]))[0][:before]
        return int(table.offset[run]) + sum(
            len(record) + schema.FRAME_BYTES for record in records if isinstance(record, bytes)
        )

    def _find_runs(self, runs: Integers) -> list[list[Found]]:
        """The records of each of these runs (ascending numbers)."""
        found = self._find_cached(runs)
        missing = np.array([run for run in runs.tolist() if run not in found], np.int64)
        fetch = map if self._executor is None else self._executor.map
        for part in fetch(self._fetch, self._neighbours(missing)):
            found.update((run, self._records(run, data)) for run, data in part.items())
        return [found[run] for run in runs.tolist()]

    def _find_cached(self, runs: Integers) -> dict[int, list[Found]]:
        """The records of those runs that the cache has, unless a disk has spoiled them there."""
        found = {}
        for run in runs.tolist() if self._cache is not None else ():
            data = self._cache.get(*self._range(run)) if self._cache is not None else None
            records = [] if data is None else self._records(run, data)
            if data is not None and all(isinstance(record, bytes) for record in records):
                found[run] = records
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

    def _fetch(self, runs: Integers) -> dict[int, bytes | CorruptRecordError]:
        """The bytes of neighbouring runs, by one range read."""
        path, start, _ = self._range(int(runs[0]))
        stop = self._range(int(runs[-1]))[2]
        try:
            data = self._storage.read(path, start, stop)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            first = int(self.table.file_record[runs[0]])
            return dict.fromkeys(runs.tolist(), CorruptRecordError(path, first, start, "the file is missing"))
        parts: dict[int, bytes | CorruptRecordError] = {}
        for run in runs.tolist():
            _, first, last = self._range(run)
            part = data if len(runs) == 1 else data[first - start : last - start]
            if self._cache is not None and len(part) == last - first:
                self._cache.put(path, first, part)
            parts[run] = part
        return parts

    def _records(self, run: int, data: bytes | CorruptRecordError) -> list[Found]:
        """The records of one run."""
        count, first = int(self.table.records[run]), int(self.table.file_record[run])
        path, start, _ = self._range(run)
        if isinstance(data, CorruptRecordError):
            return [CorruptRecordError(path, first + i, start, data.reason) for i in range(count)]
        try:
            records = list(schema.unframe(data, path, first, start))
        except CorruptRecordError:
            return self._salvage(run, data)
        return list(records) if len(records) == count else self._salvage(run, data)

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
        size = _frame_bytes(data, position) or len(data) - position
        yield check_frame(data[position : position + size], path, number, start + position)
        position += size


class Frame(NamedTuple):
    """One record of a file: its byte offset, and its bytes or what is wrong with them."""

    offset: int
    record: bytes | CorruptRecordError


def read_file(storage: Storage, path: str) -> Iterator[list[bytes]]:
    """Every record of one TFRecord file from its beginning, without an index; plain or GZIP.

    Yields:
        Some records, never none, each with both CRCs checked.

    Raises:
        CorruptRecordError: names file, record and offset (of the uncompressed bytes where the file is GZIP).
    """
    records: list[bytes] = []
    for frame in scan_file(storage, path):
        if isinstance(frame.record, CorruptRecordError):
            raise frame.record
        records.append(frame.record)
        if len(records) == schema.RUN_RECORDS:
            yield records
            records = []
    if records:
        yield records


def scan_file(storage: Storage, path: str) -> Iterator[Frame]:
    """Every record of one TFRecord file, plain or GZIP, the wrong ones too; memory is about two chunks of 8 MiB.

    A wrong CRC of a record's data costs that record. A wrong length costs the rest of the file, since only lengths tell
    where the next record begins.
    """
    number = offset = 0
    data = b""
    try:
        for chunk in _plain_chunks(storage, path):
            data = data + chunk if data else chunk
            position = 0
            while size := _frame_bytes(data, position):
                yield Frame(
                    offset + position, check_frame(data[position : position + size], path, number, offset + position)
                )
                position, number = position + size, number + 1
            offset, data = offset + position, data[position:]
            if size == _WRONG_LENGTH:
                break
    except CorruptRecordError as error:  # of the GZIP stream
        yield Frame(offset, CorruptRecordError(path, number, offset, error.reason))
        return
    if data:  # the file ends, or nobody knows where the next record begins
        yield Frame(offset, check_frame(data, path, number, offset))


def check_frame(frame: bytes, path: str, number: int, offset: int) -> bytes | CorruptRecordError:
    """The one record that `frame` holds, or what is wrong with it; the rest says where it lies, for the error."""
    try:
        records = list(schema.unframe(frame, path, number, offset))
    except CorruptRecordError as error:
        return error
    if len(records) == 1:
        return records[0]
    reason = f"{len(records)} records lie where the index has one" if records else "the file ends before this record"
    return CorruptRecordError(path, number, offset, reason)


_WRONG_LENGTH = 0


def _frame_bytes(data: bytes, position: int) -> int | None:
    """Length of the frame at `position`; None where `data` ends before it does; 0 where its length is wrong."""
    header = data[position : position + schema.FRAME_HEADER_BYTES]
    if len(header) < schema.FRAME_HEADER_BYTES:
        return None
    if int.from_bytes(header[8:], "little") != schema.masked_crc32c(header[:8]):
        return _WRONG_LENGTH
    size = int.from_bytes(header[:8], "little") + schema.FRAME_BYTES
    return size if position + size <= len(data) else None


def _plain_chunks(storage: Storage, path: str) -> Iterator[bytes]:
    """The bytes of a file in chunks, unpacked where it is GZIP (RFC 1952; several members may follow each other)."""
    raw = chunks(storage, path, storage.size(path))
    first = next(raw, b"")
    if first[:2] != b"\x1f\x8b":
        yield first
        yield from raw
        return
    yield from _unpack(first, raw, path)


def _unpack(packed: bytes, more: Iterator[bytes], path: str) -> Iterator[bytes]:
    """The plain bytes of a GZIP stream, at most `CHUNK_BYTES` at once however well it is packed."""
    offset = 0
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        while packed:
            plain = unpacker.decompress(packed, CHUNK_BYTES)
            offset += len(plain)
            yield plain
            packed = unpacker.unconsumed_tail
            if unpacker.eof:
                packed = unpacker.unused_data or next(more, b"")
                if not packed:
                    return
                unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
            packed = packed or next(more, b"")
        yield unpacker.flush()
    except zlib.error as error:
        raise CorruptRecordError(path, -1, offset, f"the gzip stream is damaged ({error})") from None
    if not unpacker.eof:
        raise CorruptRecordError(path, -1, offset, "the gzip stream ends too early")
