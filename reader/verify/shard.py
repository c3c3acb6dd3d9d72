"""One shard under `verify`: read from end to end once, every record checked, some or all images decoded."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, TypeVar, cast

import google_crc32c
import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError
from reader.info import DatasetInfo, ShardInfo
from reader.scanning import Frame, check_frame, scan_file
from reader.storage import CHUNK_BYTES, Storage, chunks
from reader.verify.faults import Fault, of_file
from reader.verify.images import load_pillow
from reader.verify.records import check_record
from reader.words import count

T = TypeVar("T")

DECODE = ("all", "sample", "none")
_BLOCK_RECORDS = schema.RUN_RECORDS


class ShardTask(NamedTuple):
    """A shard to be checked.

    Attributes:
        number: in the split, from 0.
        shard: what the manifest says of it.
        bytes: that it has.
        index_file: its text index, or None where there is none.
        rows: its rows of the split's run index, or None where that is missing or no help.
    """

    number: int
    shard: ShardInfo
    bytes: int
    index_file: str | None
    rows: npt.NDArray[np.void] | None


class Findings(NamedTuple):
    """What became of one shard.

    Attributes:
        faults: in file order.
        class_counts: records of each class.
        names: uint64, a hash of the file name of each record with right CRCs, in their order.
    """

    faults: list[Fault]
    class_counts: tuple[int, ...]
    names: npt.NDArray[np.uint64]


class _Index(NamedTuple):
    """Where records begin and how long they are with their framing."""

    offsets: list[int]
    lengths: list[int]


Block = list[tuple[int, Frame]]  # (record number, frame)


class _Checked(NamedTuple):
    faults: list[Fault]
    classes: list[int]
    names: list[int]


class ShardChecker:
    """Checks shards of one dataset, one after the other.

    Args:
        info: of the dataset.
        decode: one of `DECODE`.
        threads: that decode.
    """

    def __init__(self, info: DatasetInfo, decode: str, threads: int) -> None:
        if decode != "none":
            load_pillow()  # before the threads that decode
        self._info = info
        self._decode = decode
        self._threads = threads
        self._decoders = ThreadPoolExecutor(threads, "verify-decode")
        self._reader = ThreadPoolExecutor(1, "verify-read")

    def __enter__(self) -> ShardChecker:
        return self

    def __exit__(self, *_: object) -> None:
        self._decoders.shutdown(cancel_futures=True)
        self._reader.shutdown(cancel_futures=True)

    def check(self, task: ShardTask) -> Findings:
        """Every fault of one shard and of its text index.

        Raises:
            StorageError: it can't be read.
        """
        shard, path = task.shard, self._info.path(task.shard.file)
        faults = []
        if task.bytes != shard.bytes:
            faults.append(of_file(path, f"it has {count(task.bytes, 'byte')}, the manifest says {shard.bytes:,}"))
        index, index_faults = self._read_index(task)
        reading = _Reading(self._info.shard_storage, path, task.bytes, self._reader)
        classes: Counter[int] = Counter()
        names: list[int] = []
        for checked in self._check_blocks(path, reading.blocks(index)):
            faults += checked.faults
            classes.update(checked.classes)
            names += checked.names
        if reading.right + reading.damaged != shard.records:
            found = count(reading.right, "right record")
            faults.append(of_file(path, f"it holds {found}, the manifest says {shard.records:,}"))
        if reading.crc32c != shard.crc32c and not reading.damaged:  # which would explain it
            faults.append(of_file(path, "its CRC-32C isn't the one that was published"))
        counts = tuple(classes[label] for label in range(self._info.num_classes))
        return Findings(_joined(faults, task.bytes) + index_faults, counts, np.array(names, np.uint64))

    def _check_blocks(self, path: str, blocks: Iterator[Block]) -> Iterator[_Checked]:
        """In order; decoders are a few blocks behind the reading."""
        if self._decode != "all":
            yield from (self._check_block(path, block) for block in blocks)  # the GIL is held nearly all the time
            return
        pending: deque[Future[_Checked]] = deque()
        for block in blocks:
            pending.append(self._decoders.submit(self._check_block, path, block))
            if len(pending) > 2 * self._threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _check_block(self, path: str, block: Block) -> _Checked:
        checked = _Checked([], [], [])
        for number, frame in block:
            if isinstance(frame.record, CorruptRecordError):
                checked.faults.append(Fault(path, number, frame.offset, frame.record.reason))
                continue
            decode = self._decode == "all" or (self._decode == "sample" and number % schema.RUN_RECORDS == 0)
            found = check_record(self._info, frame.record, decode)
            checked.faults.extend(Fault(path, number, frame.offset, reason) for reason in found.reasons)
            checked.classes.append(found.label)
            if schema.FOREIGN_KEY not in self._info.manifest:  # whose records needn't have names
                checked.names.append(name_hash(found.filename))
        return checked

    def _read_index(self, task: ShardTask) -> tuple[_Index | None, list[Fault]]:
        """The shard's text index, compared with what was published, the run index and the shard's size.

        It is None where it is no help: then the shard is read by the lengths in its own framing.
        """
        if task.index_file is None:
            return None, []
        path = self._info.path(task.index_file)
        data = self._info.storage.read(path)
        if schema.sha256(data) != self._info.manifest["files"].get(task.index_file):
            return None, [of_file(path, "its SHA-256 isn't the one that was published")]
        index = _parse_index(data)
        if index is None:
            return None, [of_file(path, "it isn't an index")]
        ends = np.cumsum([0, *index.lengths]).tolist()
        if index.offsets != ends[:-1] or ends[-1] != task.shard.bytes:
            return None, [of_file(path, "its records don't lie one behind the other over the whole shard")]
        expected = np.array(schema.run_rows(task.number, index.lengths), schema.RUN_DTYPE)
        if task.rows is not None and not np.array_equal(task.rows, expected):
            name = schema.ShardName.parse(task.shard.file)
            runs_path = self._info.path(schema.runs_file(name.split if name else ""))
            what = f"its runs of shard {task.number} aren't those of the shard's own index"
            return index, [of_file(runs_path, what)]
        return index, []


def _joined(faults: list[Fault], size: int) -> list[Fault]:
    """One fault for all records that begin behind the end of a file that was cut."""
    there = [fault for fault in faults if fault.offset is None or fault.offset < size]
    gone = [fault for fault in faults if fault.offset is not None and fault.offset >= size]
    if len(gone) > 1:
        gone = [replace(gone[0], what=f"{gone[0].what} and the {count(len(gone) - 1, 'record')} behind it")]
    return there + gone


def _parse_index(data: bytes) -> _Index | None:
    try:
        pairs = [line.split(" ") for line in data.decode("ascii").splitlines()]
        return _Index([int(offset) for offset, _ in pairs], [int(length) for _, length in pairs])
    except ValueError:
        return None


def name_hash(filename: bytes) -> int:
    """64 bits that tell file names apart; equal ones are compared in full before anything is said."""
    return int.from_bytes(hashlib.blake2b(filename, digest_size=8).digest(), "big")


class _Reading:
    """Reads one shard from end to end, by its index if there is one; its sums are complete after `blocks()`."""

    def __init__(self, storage: Storage, path: str, size: int, reader: ThreadPoolExecutor) -> None:
        self._storage = storage
        self._path = path
        self._bytes = size
        self._reader = reader
        self.right = 0
        self.damaged = 0
        self.crc32c = 0

    def blocks(self, index: _Index | None) -> Iterator[Block]:
        """Every record, 64 at a time."""
        block: Block = []
        for number, frame in enumerate(self._scan() if index is None else self._by_index(index)):
            is_damaged = isinstance(frame.record, CorruptRecordError)
            self.damaged += is_damaged
            self.right += not is_damaged
            block.append((number, frame))
            if len(block) == _BLOCK_RECORDS:
                yield block
                block = []
        if block:
            yield block

    def _scan(self) -> Iterator[Frame]:
        """By the lengths in the framing; also what lies behind a wrong length is read, for the sum."""
        chunks_ahead = map(self._summed, _ahead(chunks(self._storage, self._path, self._bytes), self._reader))
        yield from scan_file(cast(Storage, _InOrder(chunks_ahead, self._bytes)), self._path)
        deque(chunks_ahead, maxlen=0)

    def _summed(self, data: bytes) -> bytes:
        self.crc32c = google_crc32c.extend(self.crc32c, data)
        return data

    def _by_index(self, index: _Index) -> Iterator[Frame]:
        """Each record at its place in the index: one with a wrong length costs no other."""
        ranges = list(_ranges(index))
        parts = (self._storage.read(self._path, start, stop) for _, _, start, stop in ranges)
        for (first, last, start, _), data in zip(ranges, map(self._summed, _ahead(parts, self._reader)), strict=True):
            for number in range(first, last):
                offset = index.offsets[number]
                frame = data[offset - start : offset - start + index.lengths[number]]
                yield Frame(offset, check_frame(frame, self._path, number, offset))


class _InOrder:
    """Chunks that are read already, as the storage that `scan_file` reads a file from."""

    def __init__(self, chunks_in_order: Iterator[bytes], size: int) -> None:
        self._chunks = chunks_in_order
        self._bytes = size

    def size(self, path: str) -> int:
        return self._bytes

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return next(self._chunks)


def _ranges(index: _Index) -> Iterator[tuple[int, int, int, int]]:
    """(first record, one behind the last, first byte, one behind the last) of reads of about `CHUNK_BYTES`."""
    first, count = 0, len(index.offsets)
    while first < count:
        start, last = index.offsets[first], first + 1
        while last < count and index.offsets[last] + index.lengths[last] - start <= CHUNK_BYTES:
            last += 1
        yield first, last, start, index.offsets[last - 1] + index.lengths[last - 1]
        first = last


def _ahead(items: Iterable[T], reader: ThreadPoolExecutor) -> Iterator[T]:
    """`items`, the next one under way in `reader` while one is worked on."""
    rest, end = iter(items), object()
    coming = reader.submit(next, rest, end)
    while (item := coming.result()) is not end:
        coming = reader.submit(next, rest, end)
        yield item  # type: ignore[misc]
