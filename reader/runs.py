"""Reading runs: one range read is 64 consecutive records, framing and CRC of each record checked, in plain Python.

Costs 5 µs a record of 16 kB, the read from the page cache included (2.2 of it framing and CRCs): 1/50 of its decode.
TensorFlow, PyTorch, JAX, `verify` and damage reports all stand on this module; it knows none of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError
from reader.storage import CHUNK_BYTES, Storage, chunks

Integers = npt.NDArray[np.int64]

# Neighbouring runs of a window are read at once up to this size: evaluation in file order makes one request a window.
JOIN_BYTES = 16 << 20


@dataclass(frozen=True)
class RunTable:
    """The runs that hold a selection of records, in file order: arrays int64 [runs], an entry a run.

    Attributes:
        files: full paths of the shards.
        file: number of the shard in `files`.
        offset, bytes: where the run lies in it.
        records: records in the run on disk.
        file_record: number in the shard of its first record.
        skip: records at its beginning that aren't selected.
        first: int64 [runs + 1], the number in the selection of the first selected record; the last entry is the total.
    """

    files: tuple[str, ...]
    file: Integers
    offset: Integers
    bytes: Integers
    records: Integers
    file_record: Integers
    skip: Integers
    first: Integers

    @property
    def total(self) -> int:
        """Records in the selection."""
        return int(self.first[-1])

    @classmethod
    def select(cls, files: Sequence[str], rows: npt.NDArray[np.void], start: int, stop: int) -> RunTable:
        """Records [start, stop) of one split.

        Args:
            files: full paths of the split's shards, in order.
            rows: the split's run index, an array of `schema.RUN_DTYPE`.
        """
        records = rows["records"].astype(np.int64)
        file = rows["shard"].astype(np.int64)
        ends = np.cumsum(records)
        begins = ends - records
        is_new_file = np.concatenate(([True], file[1:] != file[:-1]))[: len(file)]
        file_begin = np.maximum.accumulate(np.where(is_new_file, begins, 0))
        skip = np.maximum(start - begins, 0)
        selected = np.minimum(ends, stop) - np.maximum(begins, start)
        kept = selected > 0
        return cls(
            tuple(files),
            file[kept],
            rows["offset"].astype(np.int64)[kept],
            rows["bytes"].astype(np.int64)[kept],
            records[kept],
            (begins - file_begin)[kept],
            skip[kept],
            np.concatenate(([0], np.cumsum(selected[kept]))),
        )

    @classmethod
    def concatenate(cls, tables: Sequence[RunTable]) -> RunTable:
        """One table behind the other: `train+validation`."""
        if len(tables) == 1:
            return tables[0]
        files_before = np.cumsum([0, *(len(table.files) for table in tables)])
        records_before = np.cumsum([0, *(table.total for table in tables)])

        def joined(name: str, before: Integers | None = None) -> Integers:
            arrays: list[Integers] = [getattr(table, name) for table in tables]
            return np.concatenate([array + (0 if before is None else before[i]) for i, array in enumerate(arrays)])

        return cls(
            files=tuple(file for table in tables for file in table.files),
            file=joined("file", files_before),
            offset=joined("offset"),
            bytes=joined("bytes"),
            records=joined("records"),
            file_record=joined("file_record"),
            skip=joined("skip"),
            first=np.concatenate(
                [*(table.first[:-1] + records_before[i] for i, table in enumerate(tables)), records_before[-1:]]
            ),
        )


class RunReader:
    """Reads the records of a `RunTable` by number.

    Args:
        storage: where the files lie.
        table: which records there are.
        executor: where given, the requests of one call run in it at once; each takes a request's latency.
    """

    def __init__(self, storage: Storage, table: RunTable, executor: Executor | None = None) -> None:
        self._storage = storage
        self._table = table
        self._executor = executor

    def read(self, numbers: Integers) -> list[bytes]:
        """The serialized records with these numbers in the selection, in this order; each run they touch is read once.

        Raises:
            CorruptRecordError: names file, record and offset of the first wrong record.
            StorageError: a file is missing or can't be read.
        """
        table = self._table
        run_of = np.searchsorted(table.first, numbers, "right") - 1
        runs = np.unique(run_of)
        by_run = dict(zip(runs.tolist(), self._read_runs(runs), strict=True))
        within = numbers - table.first[run_of] + table.skip[run_of]
        return [by_run[run][record] for run, record in zip(run_of.tolist(), within.tolist(), strict=True)]

    def _read_runs(self, runs: Integers) -> list[list[bytes]]:
        """The records of each of these runs (ascending numbers)."""
        groups = self._neighbours(runs)
        read = (
            map(self._read_joined, groups) if self._executor is None else self._executor.map(self._read_joined, groups)
        )
        return [records for group in read for records in group]

    def _neighbours(self, runs: Integers) -> list[Integers]:
        """`runs` cut into groups that lie one behind the other in a file, each up to `JOIN_BYTES`."""
        file, offset, size = (array[runs] for array in (self._table.file, self._table.offset, self._table.bytes))
        groups, begin = [], 0
        for i in range(1, len(runs)):
            follows = file[i] == file[i - 1] and offset[i] == offset[i - 1] + size[i - 1]
            if not follows or offset[i] + size[i] - offset[begin] > JOIN_BYTES:
                groups.append(runs[begin:i])
                begin = i
        groups.append(runs[begin:])
        return groups

    def _read_joined(self, runs: Integers) -> list[list[bytes]]:
        """The records of neighbouring runs, by one range read."""
        table = self._table
        path = table.files[table.file[runs[0]]]
        start = int(table.offset[runs[0]])
        stop = int(table.offset[runs[-1]] + table.bytes[runs[-1]])
        data = self._storage.read(path, start, stop)
        ends = np.cumsum(table.records[runs])
        first_record = int(table.file_record[runs[0]])
        records = list(schema.unframe(data, path, first_record, start))
        if len(records) != ends[-1]:
            # Framing and CRCs are right and records are gone: the file was cut between two of them.
            where = first_record + len(records), start + len(data)
            raise CorruptRecordError(path, *where, f"{ends[-1]} records are indexed here and {len(records)} found")
        return [
            records[end - count : end] for end, count in zip(ends.tolist(), table.records[runs].tolist(), strict=True)
        ]


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
