"""`verify`: reads every byte of a dataset and compares it with what the manifest says. Needs no TensorFlow.

The calling thread reads shards from end to end and checks framing and CRCs; other threads check the records and decode
their images. A few blocks of records are under way at once, so memory stays flat however large the dataset.
"""

from __future__ import annotations

import io
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, one_line
from reader.hashing import hash_file
from reader.info import DatasetInfo, ShardInfo, SplitInfo
from reader.record_checks import check_record
from reader.runs import Frame, check_frame, scan_file
from reader.storage import CHUNK_BYTES, chunks, cpu_count

_BLOCK_RECORDS = 64
_MAX_FAULTS_A_SHARD = 100


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that isn't as published.

    Attributes:
        file: full path or URL.
        record: number of the record in the file, from 0; None where the fault is the whole file's.
        offset: byte offset of its framing in the file (of the uncompressed bytes where it is GZIP); None as above.
        what: what is wrong, in a few words.
    """

    file: str
    record: int | None
    offset: int | None
    what: str

    def __str__(self) -> str:
        where = "" if self.record is None else f" record {self.record} at byte {self.offset}:"
        return f"{self.file}:{where} {self.what}"


def verify(info: DatasetInfo, threads: int | None = None) -> list[Fault]:
    """Check a dataset to the last byte.

    Every file is there with the hash or the size and CRC-32C that the manifest has; both indexes fit the shards; every
    record has its right CRCs, is an Example with the keys of the format, a label that its class id names, and an image
    that decodes to its size; numbers of records add up.

    Args:
        info: from `load_info`.
        threads: that decode; None for one a core.

    Returns:
        Faults in a fixed order, at most 100 a shard; [] if all is well.

    Raises:
        StorageError: the storage can't be reached (a missing file is a fault).
    """
    threads = threads or cpu_count()
    sizes = dict(info.storage.files(info.url))
    faults = _check_files(info, sizes)
    with ThreadPoolExecutor(threads, "reader-verify") as executor:
        pool = _Pool(executor, 2 * threads)
        for split in info.splits.values():
            runs, run_faults = _read_runs(info, split, sizes)
            faults += run_faults
            classes: Counter[int] = Counter()
            for index, shard in enumerate(split.shards):
                if shard.file in sizes:
                    faults += _check_shard(info, index, shard, sizes, runs, pool, classes)[:_MAX_FAULTS_A_SHARD]
            found = tuple(classes[label] for label in range(info.num_classes))
            if found != split.class_counts:
                faults.append(
                    _manifest_fault(info, f"{split.name} has {found} records a class, not {split.class_counts}")
                )
    return faults


class _Pool(NamedTuple):
    """Threads that check records, and how many blocks may wait for them."""

    executor: ThreadPoolExecutor
    blocks: int


def _check_files(info: DatasetInfo, sizes: dict[str, int]) -> list[Fault]:
    """Files that are missing, differ, or don't belong there, and sums that don't add up in the manifest."""
    faults = []
    published = info.manifest["files"]
    shards = {shard.file: shard for split in info.splits.values() for shard in split.shards}
    for file in sorted({*published, *shards} - set(sizes)):
        faults.append(Fault(info.path(file), None, None, "the file is missing"))
    for file, sha256 in sorted(published.items()):
        if file in sizes and hash_file(info.storage, info.path(file), sizes[file]) != sha256:
            faults.append(Fault(info.path(file), None, None, "its SHA-256 isn't the one that was published"))
    for file in sorted(set(sizes) - {*published, *shards}):
        if schema.ShardName.parse(file) or file.startswith(f"{schema.INDEX_FOLDER}/"):
            faults.append(Fault(info.path(file), None, None, "the file doesn't belong to the dataset"))
    rejects = sum(info.manifest["rejects"]["by_reason"].values())
    records = sum(split.records for split in info.splits.values())
    if not records == info.manifest["records"] == info.manifest["images"] - rejects:
        faults.append(_manifest_fault(info, "records + rejects isn't the number of images listed"))
    for split in info.splits.values():
        if not split.records == sum(shard.records for shard in split.shards) == sum(split.class_counts):
            faults.append(_manifest_fault(info, f"the shards or classes of {split.name} don't add up to its records"))
    return faults


def _check_shard(
    info: DatasetInfo,
    index: int,
    shard: ShardInfo,
    sizes: dict[str, int],
    runs: npt.NDArray[np.void] | None,
    pool: _Pool,
    classes: Counter[int],
) -> list[Fault]:
    """All faults of one shard, in file order; adds its records' classes to `classes`."""
    path = info.path(shard.file)
    faults = []
    if sizes[shard.file] != shard.bytes:
        faults.append(Fault(path, None, None, f"it has {sizes[shard.file]} bytes, the manifest {shard.bytes}"))
    record_index, index_faults = _read_index(info, index, shard, sizes, runs)
    faults += index_faults
    reading = _ShardReading(info, shard, record_index)
    pending: deque[Future[tuple[list[Fault], Counter[int]]]] = deque()

    def collect() -> None:
        found, found_classes = pending.popleft().result()
        faults.extend(found)
        classes.update(found_classes)

    for block in reading.blocks():
        pending.append(pool.executor.submit(_check_block, info, path, block))
        if len(pending) > pool.blocks:
            collect()
    while pending:
        collect()
    if reading.records != shard.records:
        faults.append(
            Fault(path, None, None, f"{reading.records} records are found in it, the manifest has {shard.records}")
        )
    if reading.crc32c != shard.crc32c:
        faults.append(Fault(path, None, None, "its CRC-32C isn't the one that was published"))
    return faults


class _IndexEntry(NamedTuple):
    offset: int
    bytes: int


def _read_runs(
    info: DatasetInfo, split: SplitInfo, sizes: dict[str, int]
) -> tuple[npt.NDArray[np.void] | None, list[Fault]]:
    """A split's run index; None where there is none, which is a fault of the files."""
    if info.compression != "none" or schema.runs_file(split.name) not in sizes:
        return None, []
    path = info.path(schema.runs_file(split.name))
    try:
        return np.load(io.BytesIO(info.storage.read(path)), allow_pickle=False), []
    except (ValueError, EOFError) as error:
        return None, [Fault(path, None, None, f"it isn't a run index: {one_line(error)}")]


def _read_index(
    info: DatasetInfo, index: int, shard: ShardInfo, sizes: dict[str, int], runs: npt.NDArray[np.void] | None
) -> tuple[list[_IndexEntry] | None, list[Fault]]:
    """The shard's text index, compared with the run index and the shard's size; None where it is no help."""
    name = schema.ShardName.parse(shard.file)
    if info.compression != "none" or name is None or name.index_file not in sizes:
        return None, []
    path = info.path(name.index_file)
    try:
        lines = info.storage.read(path).decode("ascii").splitlines()
        entries = [_IndexEntry(*map(int, line.split(" "))) for line in lines]
    except (ValueError, TypeError):
        return None, [Fault(path, None, None, "it isn't an index")]
    ends = [0, *(entry.offset + entry.bytes for entry in entries)]
    if [entry.offset for entry in entries] != ends[:-1] or ends[-1] != shard.bytes:
        return None, [Fault(path, None, None, "its records don't lie one behind the other over the whole shard")]
    expected = np.array(schema.run_rows(index, [entry.bytes for entry in entries]), schema.RUN_DTYPE)
    if runs is not None and not np.array_equal(runs[runs["shard"] == index], expected):
        reason = f"its runs of shard {index} aren't those of the shard's own index"
        runs_path = info.path(schema.runs_file(name.split))
        return entries, [Fault(runs_path, None, None, reason)]
    return entries, []


class _ShardReading:
    """Reads one shard from end to end, by its index if there is one; its sums are complete after `blocks()`."""

    def __init__(self, info: DatasetInfo, shard: ShardInfo, index: list[_IndexEntry] | None) -> None:
        self._info = info
        self._shard = shard
        self._index = index
        self.records = 0
        self.crc32c = 0

    def blocks(self) -> Iterator[list[tuple[int, Frame]]]:
        """(record number, frame) of every record, some at a time."""
        block: list[tuple[int, Frame]] = []
        frames = self._scan() if self._index is None else self._by_index(self._index)
        for number, frame in enumerate(frames):
            self.records += not isinstance(frame.record, CorruptRecordError)
            block.append((number, frame))
            if len(block) == _BLOCK_RECORDS:
                yield block
                block = []
        if block:
            yield block

    def _scan(self) -> Iterator[Frame]:
        path = self._info.path(self._shard.file)
        for chunk in chunks(self._info.storage, path, self._info.storage.size(path)):
            self.crc32c = google_crc32c.extend(self.crc32c, chunk)
        yield from scan_file(self._info.storage, path)

    def _by_index(self, index: list[_IndexEntry]) -> Iterator[Frame]:
        """Each record at its place in the index: one with a wrong length costs no other."""
        path = self._info.path(self._shard.file)
        first = 0
        while first < len(index):
            last = first + 1
            while last < len(index) and index[last].offset + index[last].bytes - index[first].offset <= CHUNK_BYTES:
                last += 1
            start, stop = index[first].offset, index[last - 1].offset + index[last - 1].bytes
            data = self._info.storage.read(path, start, stop)
            self.crc32c = google_crc32c.extend(self.crc32c, data)
            for number in range(first, last):
                begin = index[number].offset - start
                frame = data[begin : begin + index[number].bytes]
                yield Frame(index[number].offset, check_frame(frame, path, number, index[number].offset))
            first = last


def _check_block(info: DatasetInfo, path: str, block: list[tuple[int, Frame]]) -> tuple[list[Fault], Counter[int]]:
    """The faults of some records, and how many there are of each class."""
    faults = []
    classes: Counter[int] = Counter()
    for number, frame in block:
        if isinstance(frame.record, CorruptRecordError):
            faults.append(Fault(path, number, frame.offset, frame.record.reason))
            continue
        label, reasons = check_record(info, frame.record)
        classes[label] += 1
        faults += [Fault(path, number, frame.offset, reason) for reason in reasons]
    return faults, classes


def _manifest_fault(info: DatasetInfo, reason: str) -> Fault:
    return Fault(info.path(schema.MANIFEST_FILE), None, None, reason)
