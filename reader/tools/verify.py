"""`verify`: reads every byte of a dataset and compares it with what its manifest says; needs no framework."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, StorageError, UsageError
from beam_pipeline.schema.manifest import Shard
from reader.example import parse_example
from reader.info import DatasetInfo, SplitInfo, as_info
from reader.record_files import FileScan, Frame
from reader.tools.scan import Scanners, check_record, first_bytes, first_integer
from reader.words import count

DECODE = ("all", "sample", "none")
_MAX_FAULTS = 100  # of a shard, and of file names that repeat


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that isn't as it was published.

    Attributes:
        file: full path or URL.
        record: number of the record in the file, from 0; None if the fault is the complete file's.
        offset: byte offset of its framing in the file (of the unpacked bytes if it is GZIP); None as above.
        what: what is wrong, in a few words.
    """

    file: str
    record: int | None
    offset: int | None
    what: str

    def __str__(self) -> str:
        located = "" if self.record is None else f" record {self.record} at byte {self.offset}:"
        return f"{self.file}:{located} {self.what}"


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found; true if there is no fault.

    Attributes:
        dataset: its URL.
        records, shards: that the manifest counts.
        decode: which images were decoded: `all`, `sample` or `none`.
        faults: in a fixed order, at most 100 a shard.
    """

    dataset: str
    records: int
    shards: int
    decode: str
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        """Whether the dataset is as it was published."""
        return not self.faults

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.faults:
            return f"{count(len(self.faults), 'fault')} in {self.dataset}"
        decoded = {"all": "all images decode", "sample": "1 image in 64 decoded", "none": "no image decoded"}
        return f"OK: {count(self.records, 'record')} in {count(self.shards, 'shard')}, {decoded[self.decode]}"


def verify(url: DatasetInfo | str | os.PathLike[str], *, decode: str = "all") -> Report:
    """Check a dataset to the last byte, on all cores.

    Every file is there with the hash, or the size and CRC-32C, that the manifest has; both indexes fit the shards; TFDS
    metadata, labels and lists of rejects say what the manifest says; every record has valid CRCs and is an Example with
    the keys of the format, a label that its class id names, a file name that no other record has, and an image that
    decodes to its size; numbers of records add up.

    Args:
        url: folder of one version, such as `gs://bucket/datasets/flowers/1.0.0`.
        decode: which images are decoded: `all`, `sample` (the first of each 64 records) or `none`.

    Returns:
        A `Report`: `if not reader.verify(url): …`, `report.faults`. Memory: 8 bytes a record, some blocks of 8 MiB.

    Raises:
        NotPublishedError: no manifest there, or an invalid one.
        UsageError: no such `decode`.
        StorageError: the storage can't be reached (a missing file is a fault).
    """
    if decode not in DECODE:
        raise UsageError(f"--decode {decode!r}: choose one of {', '.join(DECODE)}")
    info = as_info(url)
    sizes = {file.path: file.bytes for file in info.storage.files(info.url)} | _sizes_elsewhere(info)
    faults = list(_check_files(info, sizes))
    tasks = {split.name: _tasks(info, split, sizes, faults) for split in info.splits.values()}
    names: list[tuple[str, npt.NDArray[np.uint64]]] = []
    with Scanners(sum(map(len, tasks.values()))) as scanners:
        check = _ShardChecker(info, decode, scanners)
        for split in info.splits.values():
            classes, is_complete = Counter[int](), len(tasks[split.name]) == len(split.shards)
            for task, found in zip(tasks[split.name], scanners.files(check, tasks[split.name]), strict=True):
                faults += _some(found.faults, info.path(task.shard.file))
                is_complete = is_complete and not found.faults
                classes.update(found.classes)
                names.append((task.shard.file, found.names))
            if is_complete:  # else a shard's fault explains it
                faults += _check_classes(info, split, classes)
    faults += _repeated_names(info, names)
    shards = sum(len(split.shards) for split in info.splits.values())
    return Report(info.url, info.manifest["records"], shards, decode, tuple(faults))


def _sizes_elsewhere(info: DatasetInfo) -> dict[str, int]:
    """Shard → bytes, of those that are outside the dataset's folder (an index of other people's files)."""
    shards = [shard.file for split in info.splits.values() for shard in split.shards]
    files = [file for file in shards if info.path(file) == file]
    sizes = info.shard_storage.sizes(files) if files else []
    return {file: size for file, size in zip(files, sizes, strict=True) if size is not None}


def _of_file(file: str, what: str) -> Fault:
    return Fault(file, None, None, what)


def _some(faults: list[Fault], path: str) -> list[Fault]:
    more = len(faults) - _MAX_FAULTS
    left_out = [_of_file(path, f"{count(more, 'more fault')} of this shard {'is' if more == 1 else 'are'} left out")]
    return faults[:_MAX_FAULTS] + (left_out if more > 0 else [])


# --- shards


class _Task(NamedTuple):
    """A shard to check: its number in the split, what the manifest says of it, what there is of it.

    Attributes:
        bytes: that it has.
        index_file: its text index, "" if there is none.
        rows: its rows of the split's run index, None if that is missing or corrupt.
    """

    number: int
    shard: Shard
    bytes: int
    index_file: str
    rows: npt.NDArray[np.void] | None


class _Found(NamedTuple):
    """What was found in a shard, or a block of one: faults, records of each class, of each record a hash of its file
    name (0 if it has none), and how many are corrupt."""

    faults: list[Fault]
    classes: Counter[int]
    names: npt.NDArray[np.uint64]
    corrupt: int


def _tasks(info: DatasetInfo, split: SplitInfo, sizes: Mapping[str, int], faults: list[Fault]) -> list[_Task]:
    """The shards of a split that there are; adds a fault of its run index that `_check_files` can't see."""
    runs_file, rows = schema.runs_file(split.name), None
    if info.compression == "none" and runs_file in sizes:
        try:
            rows = info.load_runs(split.name)
        except StorageError:
            raise
        except ImageShardsError:
            if all(fault.file != info.path(runs_file) for fault in faults):
                faults.append(_of_file(info.path(runs_file), "it isn't a run index of the manifest's shards"))
    tasks = []
    for number, shard in enumerate(split.shards):
        if shard.file in sizes:
            name = schema.ShardName.parse(shard.file)
            index_file = name.index_file if name and name.index_file in sizes else ""
            own_rows = None if rows is None else rows[rows["shard"] == number]
            tasks.append(_Task(number, shard, sizes[shard.file], index_file, own_rows))
    return tasks


class _ShardChecker:
    """Every fault of one shard and of its text index; called by several threads."""

    def __init__(self, info: DatasetInfo, decode: str, scanners: Scanners) -> None:
        self._info, self._decode, self._scanners = info, decode, scanners
        self._is_foreign = schema.FOREIGN_KEY in info.manifest

    def __call__(self, task: _Task) -> _Found:
        shard, path = task.shard, self._info.path(task.shard.file)
        faults: list[Fault] = []
        if task.bytes != shard.bytes:
            faults.append(_of_file(path, f"it has {count(task.bytes, 'byte')}, the manifest says {shard.bytes:,}"))
        bounds, index_faults = self._bounds(task)
        scan = FileScan(path, bounds)
        spans = task.rows if self._is_foreign else None
        found = list(self._scanners.blocks(lambda block: self._check_block(path, block, spans), scan.blocks()))
        faults += [fault for one in found for fault in one.faults]
        classes = sum((one.classes for one in found), Counter[int]())
        names = np.concatenate([np.empty(0, np.uint64), *(one.names for one in found)])
        corrupt = sum(one.corrupt for one in found)
        if len(names) < len(bounds) - 1:
            lost = len(bounds) - 2 - len(names)
            after = f" and the {count(lost, 'record')} after it" if lost else ""
            faults.append(Fault(path, len(names), bounds[len(names)], f"the file ends before this record{after}"))
        elif len(names) != shard.records:
            valid = count(len(names) - corrupt, "valid record")
            faults.append(_of_file(path, f"it has {valid}, the manifest says {shard.records:,}"))
        if scan.crc32c != shard.crc32c and not corrupt and task.bytes == shard.bytes:  # which would explain it
            faults.append(_of_file(path, "its CRC-32C isn't the one that was published"))
        return _Found(faults + index_faults, classes, names, corrupt)

    def _check_block(self, path: str, block: Iterable[Frame], spans: npt.NDArray[np.void] | None) -> _Found:
        faults: list[Fault] = []
        names: list[int] = []
        classes, corrupt = Counter[int](), 0
        for number, offset, record in block:
            if spans is not None and not _is_in(spans, offset):
                continue  # `index` left it out
            names.append(0)
            if isinstance(record, CorruptRecordError):
                faults.append(Fault(path, number, offset, record.reason))
                corrupt += 1
                continue
            decode = self._decode == "all" or (self._decode == "sample" and number % schema.RUN_RECORDS == 0)
            try:
                features = parse_example(record)
            except ValueError as error:
                faults.append(Fault(path, number, offset, str(error)))
                continue
            faults += [Fault(path, number, offset, what) for what in check_record(self._info, features, decode)]
            classes[first_integer(features, self._info.class_key)] += 1
            if not self._is_foreign:  # whose records need no names
                names[-1] = _name_hash(first_bytes(features, schema.FILENAME_KEY))
        return _Found(faults, classes, np.array(names, np.uint64), corrupt)

    def _bounds(self, task: _Task) -> tuple[list[int], list[Fault]]:
        """Where the shard's records are by its text index, and the index's faults; [] if it is no help."""
        if not task.index_file:
            return [], []
        path = self._info.path(task.index_file)
        data = self._info.storage.read(path)
        if schema.sha256(data) != self._info.manifest["files"].get(task.index_file):
            return [], [_of_file(path, "its SHA-256 isn't the one that was published")]
        try:
            pairs = [line.split(" ") for line in data.decode("ascii").splitlines()]
            offsets, lengths = [int(offset) for offset, _ in pairs], [int(length) for _, length in pairs]
            expected = np.array(schema.run_rows(task.number, lengths), schema.RUN_DTYPE)
        except (ValueError, OverflowError):
            return [], [_of_file(path, "it isn't an index")]
        bounds = list(itertools.accumulate(lengths, initial=0))
        if offsets != bounds[:-1] or bounds[-1] != task.shard.bytes or sorted(bounds) != bounds:
            return [], [_of_file(path, "its records don't cover the shard from its start to its end")]
        if task.rows is not None and not np.array_equal(task.rows, expected):
            name = schema.ShardName.parse(task.shard.file)
            runs = self._info.path(schema.runs_file(name.split if name else ""))
            return bounds, [_of_file(runs, f"its runs of shard {task.number} aren't those of the shard's text index")]
        return bounds, []


def _is_in(spans: npt.NDArray[np.void], offset: int) -> bool:
    """Whether a record is in a run of the index."""
    run = int(np.searchsorted(spans["offset"], offset, "right")) - 1
    return run >= 0 and offset < int(spans["offset"][run]) + int(spans["bytes"][run])


def _name_hash(filename: bytes) -> int:
    """64 bits that tell file names apart, not 0; equal ones are compared in full before anything is said."""
    return int.from_bytes(hashlib.blake2b(filename, digest_size=8).digest(), "big") or 1


# --- the dataset


def _check_files(info: DatasetInfo, sizes: Mapping[str, int]) -> Iterator[Fault]:
    """Files that are missing, don't belong or aren't the published ones; shards and their text indexes come later."""
    published: Mapping[str, str] = info.manifest["files"]
    shards = {shard.file for split in info.splits.values() for shard in split.shards}
    indexes = {name.index_file for name in map(schema.ShardName.parse, shards) if name is not None}
    for file in sorted({*published, *shards} - set(sizes)):
        yield _of_file(info.path(file), "the file is missing")
    for file in sorted(set(published).intersection(sizes) - indexes):
        data = info.storage.read(info.path(file))
        if schema.sha256(data) != published[file]:
            yield _of_file(info.path(file), "its SHA-256 isn't the one that was published")
            continue
        # With the published hash it can only differ from the manifest if the writer erred, or both were edited.
        try:
            found, expected = _contents(info, file, data)
            wrong = [key for key in {**found, **expected} if found.get(key) != expected.get(key)]
            has, says = ({key: of[key] for key in wrong if key in of} for of in (found, expected))
            what = f"it has {_short(has)}, the manifest {_short(says)}" if wrong else ""
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            what = f"it can't be read: {type(error).__name__}"
        if what:
            yield _of_file(info.path(file), what)
    for file in sorted(set(sizes) - {*published, *shards}):
        if schema.ShardName.parse(file) or file.startswith(f"{schema.INDEX_FOLDER}/"):
            what = "the file doesn't belong to the dataset; move it away if --repair leaves it"
            yield _of_file(info.path(file), what)
    if info.manifest["records"] + sum(info.manifest["rejects"]["by_reason"].values()) != info.manifest["images"]:
        yield _of_file(info.path(schema.MANIFEST_FILE), "records + rejects isn't the number of images listed")


def _short(value: object) -> str:
    return textwrap.shorten(str(value), 200, placeholder=" …")


def _contents(info: DatasetInfo, file: str, data: bytes) -> tuple[dict[Any, Any], Mapping[Any, Any]]:
    """What a small file says of the dataset, and what the manifest says of the same."""
    manifest = info.manifest
    if file == schema.LABELS_FILE:
        expected = b"".join(schema.relative_path_bytes(f"{label}\n") for label in info.classes)
        return dict(enumerate(data.splitlines(True))), dict(enumerate(expected.splitlines(True)))
    if file == schema.REJECTS_FILE:
        return Counter(json.loads(line)["reason"] for line in data.splitlines()), manifest["rejects"]["by_reason"]
    if file == schema.DUPLICATES_FILE:
        groups = [json.loads(line) for line in data.splitlines()]
        across = {f"across_{of}": sum(group[of] > 1 for group in groups) for of in ("classes", "splits")}
        images = sum(len(group["images"]) for group in groups)
        return {"groups": len(groups), "images": images, **across}, manifest.get("duplicates") or {}
    if file == schema.DATASET_INFO_FILE:
        document = json.loads(data)
        found: dict[Any, Any] = {one["name"]: (one["numBytes"], one["shardLengths"]) for one in document["splits"]}
        splits = {
            split.name: (str(split.bytes), [str(shard.records) for shard in split.shards])
            for split in info.splits.values()
        }
        named = {"dataset": (document["name"], document["version"])}
        return {**found, **named}, {**splits, "dataset": (info.name, info.version)}
    if file == schema.FEATURES_FILE:
        features = json.loads(data)["featuresDict"]["features"]
        image = features[schema.IMAGE_KEY]["image"]
        found = dict.fromkeys(features, "feature") | {
            schema.CLASS_KEY: features[schema.CLASS_KEY]["classLabel"]["numClasses"],
            schema.IMAGE_KEY: (image["encodingFormat"], image["shape"]["dimensions"][2]),
        }
        keys = [*schema.RECORD_KEYS, *(column["name"] for column in manifest["features"])]
        if not manifest["configuration"]["one_hot"]:
            keys.remove(schema.ONE_HOT_KEY)
        own = {schema.CLASS_KEY: str(info.num_classes), schema.IMAGE_KEY: (info.image.format, str(info.image.channels))}
        return found, dict.fromkeys(keys, "feature") | own
    return {}, {}


def _check_classes(info: DatasetInfo, split: SplitInfo, counts: Counter[int]) -> list[Fault]:
    """A fault if the records don't have the classes that the manifest counts."""
    wrong = [number for number, published in enumerate(split.class_counts) if counts[number] != published]
    if not wrong:
        return []
    first, more = wrong[0], len(wrong) - 1
    has = f"{split.name} has {count(counts[first], 'record')} of class {first} {info.classes[first]!r}"
    others = f"; and {count(more, 'more class differs', 'more classes differ')}" if more else ""
    what = f"{has}, the manifest says {split.class_counts[first]:,}{others}"
    return [_of_file(info.path(schema.MANIFEST_FILE), what)]


def _repeated_names(info: DatasetInfo, names: Sequence[tuple[str, npt.NDArray[np.uint64]]]) -> list[Fault]:
    """A fault for each record whose file name an earlier record has: found by hashes, read again to be sure."""
    every = np.sort(np.concatenate([np.empty(0, np.uint64), *(hashes for _, hashes in names)]))
    repeated = np.unique(every[1:][(every[1:] == every[:-1]) & (every[1:] != 0)])
    first: dict[bytes, str] = {}
    faults: list[Fault] = []
    for file, hashes in names:
        wanted = set(np.flatnonzero(np.isin(hashes, repeated)).tolist())
        for number, offset, record in FileScan(info.path(file)) if wanted else ():
            if number not in wanted or isinstance(record, CorruptRecordError):
                continue
            filename = first_bytes(parse_example(record), schema.FILENAME_KEY)
            located = f"{file} record {number} at byte {offset}"
            if first.setdefault(filename, located) != located and len(faults) < _MAX_FAULTS:
                what = f"filename {filename.decode('utf-8', 'backslashreplace')!r} is also in {first[filename]}"
                faults.append(Fault(info.path(file), number, offset, what))
    return faults
