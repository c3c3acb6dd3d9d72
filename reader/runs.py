"""Where the records of a split are, and reading them: a run of 64 records is one range read, every CRC is checked."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema, storage
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, StorageError

Integers = npt.NDArray[np.int64]
Parsed = tuple[Any, int, tuple[Any, ...]]  # of a record: encoded image, class id, further features

_HEADER = struct.Struct("<QI")  # length, and its masked CRC-32C
_CRC = struct.Struct("<I")


# Selected records of a run with fewer bytes between them are read at once, and from remote storage also those that are
# a quarter of the bytes from the first to the last one: a request costs as much (docs/decisions/013). It doesn't cost
# as much as a gap of 1 MiB between large records.
_GAP_BYTES, _MAX_GAP_BYTES = 96 << 10, 1 << 20
_DENSE = 4


class InvalidRecordError(ValueError):
    """A record's CRC is valid, but its content isn't what the manifest says."""


class Piece(NamedTuple):
    """Records that one request reads: a run, or a part of it.

    Attributes:
        path: of the shard.
        text_index: path of the shard's, "" if it has none.
        start, stop: its bytes in the shard.
        record: number in the shard of its first record.
        records: how many it has.
    """

    path: str
    text_index: str
    start: int
    stop: int
    record: int
    records: int


@dataclass(frozen=True)
class RunTable:
    """The runs that hold a selection of records, in file order: arrays int64 [runs], an entry a run.

    Attributes:
        files: full paths of the shards.
        file: index of the shard in `files`.
        offset, bytes: the run's bytes in it.
        records: records in the run on disk.
        file_record: number in the shard of its first record.
        skip: records at its beginning that aren't selected.
        first: int64 [runs + 1], the number in the selection of the first selected record; the last entry is the total.
        indexes: full path of each shard's text index, "" if it has none.
    """

    files: tuple[str, ...]
    file: Integers
    offset: Integers
    bytes: Integers
    records: Integers
    file_record: Integers
    skip: Integers
    first: Integers
    indexes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Records in the selection."""
        return int(self.first[-1])

    @property
    def mean_run(self) -> tuple[int, int]:
        """Records and runs of the split string, which say how large a window is."""
        return self.total, len(self.file)

    @property
    def read_bytes(self) -> int:
        """Bytes that reading all of the records takes, about."""
        return int(self.bytes.sum())

    def runs_of(self, numbers: Integers) -> Integers:
        """The run of each record; int64 [n]."""
        return np.searchsorted(self.first, numbers, "right") - 1

    def pieces_of(
        self, numbers: Integers, is_kept: bool = False, is_remote: bool = False
    ) -> tuple[list[Piece], Integers, Integers]:
        """What to read for some records: pieces in file order, and of each record the piece and its index in that.

        Args:
            numbers: int64 [n] of the records, in any order, some perhaps more than once.
            is_kept: whether a cache keeps the pieces: they are then the same whatever else is read.
            is_remote: whether a request takes long.
        """
        run = self.runs_of(numbers)
        runs, piece_of = np.unique(run, return_inverse=True)
        start, head = self.offset[runs], self.file_record[runs]
        pieces = self._pieces(runs, start, start + self.bytes[runs], head, self.records[runs])
        return pieces, piece_of, numbers - self.first[run] + self.skip[run]

    def _pieces(
        self, run: Integers, start: Integers, stop: Integers, record: Integers, records: Integers
    ) -> list[Piece]:
        files, columns = self.file[run].tolist(), (one.tolist() for one in (start, stop, record, records))
        return [
            Piece(self.files[file], self.indexes[file], *values) for file, *values in zip(files, *columns, strict=True)
        ]

    def places_of(
        self, numbers: Integers, runs: Integers | slice, counts: Integers, lengths: Integers
    ) -> tuple[Integers, Integers, Integers]:
        """Of some records: the index in the run on disk, where the record begins there, and its bytes; each int64 [n].

        Args:
            numbers: int64 [n] of the records, ascending.
            runs: that they are in, ascending.
            counts: how many are in each of these.
            lengths: framed bytes of each record of these runs on disk, run after run.

        Raises:
            ImageShardsError: the runs aren't of these lengths.
        """
        ends = np.cumsum(self.records[runs])
        heads = ends - self.records[runs]  # in lengths
        begins = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=begins[1:])
        is_wrong = begins[ends] - begins[heads] != self.bytes[runs]
        if is_wrong.any():
            raise self.not_of_these(int(self.file[runs][is_wrong.argmax()]))
        index = numbers - np.repeat(self.first[runs] - self.skip[runs], counts)
        record = index + np.repeat(heads, counts)
        return index, begins[record] - np.repeat(begins[heads], counts), lengths[record]

    def rows_of_file(self, runs: slice) -> slice:
        """The numbers in their shard of the records on disk of some runs of one shard."""
        return slice(int(self.file_record[runs.start]), int(self.file_record[runs][-1] + self.records[runs][-1]))

    def not_of_these(self, file: int) -> ImageShardsError:
        """The error for a record table whose `bytes` aren't those of a shard's runs."""
        path = self.files[file]
        return ImageShardsError(f"{path}: its record table isn't of these records; run the job with --repair")

    def number_of(self, path: str, row: int) -> int | None:
        """Number in the selection of record `row` of a shard, the first if it is there twice; None if it isn't."""
        for file in (number for number, name in enumerate(self.files) if name == path):
            begin, end = np.searchsorted(self.file, [file, file + 1]).tolist()  # its runs
            index = row - self.file_record[begin:end] - self.skip[begin:end]
            for run in np.flatnonzero((index >= 0) & (index < np.diff(self.first[begin : end + 1]))).tolist():
                return int(self.first[begin + run] + index[run])
        return None

    @classmethod
    def select(
        cls, files: Sequence[str], rows: npt.NDArray[np.void], start: int, stop: int, indexes: Sequence[str] = ()
    ) -> RunTable:
        """Records [start, stop) of one split.

        Args:
            files: full paths of the split's shards, in order.
            rows: the split's run index, an array of `schema.RUN_DTYPE`.
            indexes: full paths of the shards' text indexes, if there are any.
        """
        records, file = rows["records"].astype(np.int64), rows["shard"].astype(np.int64)
        ends = np.cumsum(records)
        begins = ends - records
        is_new_file = np.concatenate(([True], file[1:] != file[:-1]))[: len(file)]
        file_begin = np.maximum.accumulate(np.where(is_new_file, begins, 0))
        selected = np.minimum(ends, stop) - np.maximum(begins, start)
        kept = selected > 0
        return cls(
            files=tuple(files),
            file=file[kept],
            offset=rows["offset"].astype(np.int64)[kept],
            bytes=rows["bytes"].astype(np.int64)[kept],
            records=records[kept],
            file_record=(begins - file_begin)[kept],
            skip=np.maximum(start - begins, 0)[kept],
            first=np.concatenate(([0], np.cumsum(selected[kept]))),
            indexes=tuple(indexes) or ("",) * len(files),
        )

    @classmethod
    def concatenate(cls, tables: Sequence[RunTable]) -> RunTable:
        """One table after the other: `train+validation`."""
        if len(tables) == 1:
            return tables[0]
        files_before = np.cumsum([0, *(len(table.files) for table in tables)])
        records_before = np.cumsum([0, *(table.total for table in tables)])

        def joined(name: str, before: Integers | None = None) -> Integers:
            arrays: list[Integers] = [getattr(table, name) for table in tables]
            return np.concatenate([array + (0 if before is None else before[i]) for i, array in enumerate(arrays)])

        return cls(
            files=tuple(file for table in tables for file in table.files),
            indexes=tuple(index for table in tables for index in table.indexes),
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


@dataclass(frozen=True)
class SelectedTable(RunTable):
    """Some records of a table: its runs are those with at least one of them, `skip` is 0, numbers count these records.

    Attributes:
        index: uint16 [records], index of the record in its run on disk.
        start, size: uint32 [records], where it begins in its run, and its bytes.
        split: records and runs of the table that they were selected from.
        label: int32 [records], class id in the selection; empty if nobody needs it.
    """

    index: npt.NDArray[np.uint16] = field(kw_only=True)
    start: npt.NDArray[np.uint32] = field(kw_only=True)
    size: npt.NDArray[np.uint32] = field(kw_only=True)
    split: tuple[int, int] = field(kw_only=True)
    label: npt.NDArray[np.int32] = field(kw_only=True)

    @property
    def mean_run(self) -> tuple[int, int]:
        return self.split

    @property
    def read_bytes(self) -> int:
        return int(self.size.sum(dtype=np.int64))

    def pieces_of(
        self, numbers: Integers, is_kept: bool = False, is_remote: bool = False
    ) -> tuple[list[Piece], Integers, Integers]:
        wanted = np.unique(numbers)
        if is_kept:  # all selected records of these runs
            runs = np.unique(self.runs_of(wanted))
            wanted = np.concatenate([np.arange(self.first[run], self.first[run + 1]) for run in runs.tolist()])
        run, start, size = self.runs_of(wanted), self.start[wanted].astype(np.int64), self.size[wanted].astype(np.int64)
        stop, index = start + size, self.index[wanted].astype(np.int64)
        is_new = np.concatenate(([True], run[1:] != run[:-1]))
        heads = np.flatnonzero(is_new)
        tails = np.concatenate((heads[1:], [len(run)])) - 1
        is_sparse = np.add.reduceat(size, heads) * _DENSE * is_remote < stop[tails] - start[heads]
        gap = np.concatenate(([0], start[1:] - stop[:-1]))
        is_cut = is_new | ((gap > _GAP_BYTES) & is_sparse[np.cumsum(is_new) - 1]) | (gap > _MAX_GAP_BYTES)
        heads = np.flatnonzero(is_cut)
        tails = np.concatenate((heads[1:], [len(run)])) - 1
        of, offset = run[heads], self.offset[run[heads]]
        record, records = self.file_record[of] + index[heads], index[tails] - index[heads] + 1
        pieces = self._pieces(of, offset + start[heads], offset + stop[tails], record, records)
        at = np.searchsorted(wanted, numbers)
        piece_of = (np.cumsum(is_cut) - 1)[at]
        return pieces, piece_of, index[at] - index[heads][piece_of]

    @classmethod
    def of(cls, table: RunTable, run: Integers, counts: Integers, **of_records: Any) -> SelectedTable:
        """Some records of a table: the runs that they are in, how many each has, and what is known of them."""
        names = ("file", "offset", "bytes", "records", "file_record")
        runs: dict[str, Any] = {name: getattr(table, name)[run] for name in names}
        runs |= {"skip": np.zeros(len(run), np.int64), "first": np.concatenate(([0], np.cumsum(counts)))}
        return cls(files=table.files, indexes=table.indexes, split=table.mean_run, **runs, **of_records)


class Rows(Protocol):
    """How records are parsed and decoded. Thread-safe."""

    #: (height, width, channels) of an image; None if images are objects of any kind.
    shape: tuple[int, int, int] | None

    def parse(self, record: bytes) -> Parsed:
        """A record's image, class and features. Raises InvalidRecordError."""

    def decode(self, encoded: Any, row: Any, seed: int) -> Any:
        """Decode an image into `row`; returns None, or an object that is the image. Raises InvalidRecordError."""


class RunCache(Protocol):
    """A local store of runs (`reader.cache`). Thread-safe."""

    def get(self, path: str, start: int, stop: int) -> bytes | None:
        """Bytes [start, stop) of a shard, or None; they may be corrupt. Never raises."""

    def put(self, path: str, start: int, data: bytes) -> None:
        """Keep one run, whose records are valid, from byte `start` of a shard on. Never raises."""


class Run:
    """The records of one run in memory.

    Args:
        data: the run's bytes, fewer if its file ends early; None if the file is missing.
        bounds: where in `data` each record's frame begins, then where the last ends; fewer if that isn't known.
        file: of the run.
        file_record, offset: number in the file, and byte offset, of the first record.
        is_framed: whether `bounds` are those of the frames' own lengths, with valid CRCs.
    """

    __slots__ = ("_bounds", "_data", "_file", "_file_record", "_is_checked", "_is_framed", "_offset")

    def __init__(
        self,
        data: memoryview | None,
        bounds: list[int],
        file: str,
        file_record: int,
        offset: int,
        is_framed: bool = True,
    ) -> None:
        self._data, self._bounds, self._file, self._is_framed = data, bounds, file, is_framed
        self._file_record, self._offset, self._is_checked = file_record, offset, False

    def record(self, index: int) -> bytes:
        """One serialized record. Raises CorruptRecordError, which names file, record and byte offset."""
        data, bounds = self._data, self._bounds
        if data is not None and index + 1 < len(bounds) and bounds[index + 1] <= len(data):
            begin, end = bounds[index], bounds[index + 1] - 4
            if self._is_framed or schema.framed_bytes(bytes(data[begin : begin + 12])) == end + 4 - begin:
                record = bytes(data[begin + 12 : end])
                if self._is_checked or _CRC.unpack_from(data, end)[0] == schema.masked_crc32c(record):
                    return record
        raise self._corrupt(index, self._fault(index))

    def check(self, records: int) -> bool:
        """Whether all its records are valid; if so, `record` doesn't compute their CRCs again."""
        try:
            for index in range(records):
                self.record(index)
        except CorruptRecordError:
            return False
        self._is_checked = True
        return True

    def located(self, index: int, error: CorruptRecordError | InvalidRecordError) -> CorruptRecordError:
        """The error of record `index`, with file, record and byte offset."""
        return error if isinstance(error, CorruptRecordError) else self._corrupt(index, str(error))

    def _corrupt(self, index: int, reason: str) -> CorruptRecordError:
        begin = self._bounds[min(index, len(self._bounds) - 1)] if self._bounds else 0
        return CorruptRecordError(self._file, self._file_record + index, self._offset + begin, reason)

    def _fault(self, index: int) -> str:
        if self._data is None:
            return "the file is missing"
        last = len(self._bounds) - 1
        end = self._bounds[index + 1] if index < last else len(self._data)
        return frame_fault(bytes(self._data[self._bounds[min(index, last)] : end]))


class RunReader:
    """Reads runs of a table, from the cache or the storage. Thread-safe; holds no file open.

    Args:
        table: where the runs are.
        cache: asked before the storage; gets the runs whose records are all valid.
    """

    def __init__(self, table: RunTable, cache: RunCache | None = None) -> None:
        self.table = table
        self._store = storage.open_storage(table.files[0])
        self._cache = cache
        self._text_indexes: dict[str, list[int]] = {}  # of corrupt shards
        self.is_remote = self._store.is_remote

    def pieces_of(self, numbers: Integers) -> tuple[list[Piece], Integers, Integers]:
        """What to read for some records of the table; as `RunTable.pieces_of`."""
        return self.table.pieces_of(numbers, self._cache is not None, self.is_remote)

    def read(self, piece: Piece, out: memoryview | None = None) -> Run:
        """Some records of one run.

        Args:
            piece: of the table.
            out: memory of at least its bytes, which the result may use.

        Raises:
            StorageError: the file can't be read. (If it is missing or short, each record says so.)
        """
        path, start, stop = piece.path, piece.start, piece.stop
        cached = None if self._cache is None else self._cache.get(path, start, stop)
        if cached is not None:
            loaded = self._parse(piece, memoryview(cached))
            if loaded.check(piece.records):
                return loaded
        try:
            data = self._store.read_range(path, start, stop, None if out is None else out[: stop - start])
        except FileNotFoundError:
            return self._parse(piece, None)
        loaded = self._parse(piece, memoryview(data))
        if self._cache is not None and loaded.check(piece.records):
            self._cache.put(path, start, bytes(data))
        return loaded

    def _parse(self, piece: Piece, data: memoryview | None) -> Run:
        count, is_framed = piece.records, True
        bounds = [] if data is None else frame_bounds(data, count)
        if data is not None and (len(bounds) <= count or bounds[-1] != piece.stop - piece.start):
            is_framed = False
            # The right number of frames, but of other lengths: another file's.
            bounds = self._indexed_bounds(piece) or (bounds if len(bounds) <= count else [0])
        return Run(data, bounds, piece.path, piece.record, piece.start, is_framed)

    def _indexed_bounds(self, piece: Piece) -> list[int] | None:
        """Bounds of its frames by the shard's text index, if one fits: a corrupt length hides them."""
        offsets, count, size = self._text_index(piece.text_index), piece.records, piece.stop - piece.start
        bounds = [offset - piece.start for offset in offsets[piece.record : piece.record + count]]
        fits = len(bounds) == count and bounds[0] == 0 and bounds == sorted(bounds) and bounds[-1] < size
        return [*bounds, size] if fits else None

    def _text_index(self, path: str) -> list[int]:
        if path not in self._text_indexes:
            try:
                lines = self._store.read(path).splitlines() if path else []
                rows = [(int(offset), int(size)) for offset, size in map(bytes.split, lines)]
            except (StorageError, ValueError):
                rows = []
            offsets = [0, *(offset + size for offset, size in rows)][: len(rows)]
            # Unless each record begins where the previous one ends, numbers may be shifted.
            self._text_indexes[path] = offsets if offsets == [offset for offset, _ in rows] else []
        return self._text_indexes[path]


def frame_bounds(data: memoryview, count: int) -> list[int]:
    """Where `count` TFRecord frames begin in `data`, and where the last ends; fewer if a length is corrupt."""
    bounds, at, end = [0], 0, len(data) - schema.FRAME_BYTES
    for _ in range(count):
        if at > end:
            break
        length, crc = _HEADER.unpack_from(data, at)
        if crc != schema.masked_crc32c(length.to_bytes(8, "little")) or at + length > end:
            break
        at += length + schema.FRAME_BYTES
        bounds.append(at)
    return bounds


def frame_fault(frame: bytes) -> str:
    """Why `frame` isn't exactly one valid record, in a few words."""
    try:
        count = len(list(schema.unframe(frame)))
    except CorruptRecordError as error:
        return error.reason
    return f"{count} records are where the index has one" if count else "the file ends before this record"
