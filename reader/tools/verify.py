"""`verify`: reads every byte of a dataset and compares it with what its manifest says; needs no framework."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, StorageError, UsageError
from beam_pipeline.schema.manifest import Shard
from reader.example import Value, parse_example
from reader.info import DatasetInfo, SplitInfo, as_info
from reader.record_files import FileScan, Frame
from reader.records import InvalidRecordError
from reader.tools.scan import Scanners, decode_image, only_bytes, only_integer, type_name
from reader.words import count

DECODE = ("all", "sample", "none")
_MAX_FAULTS = 100  # of a shard


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that isn't as published.

    Attributes:
        file: full path or URL.
        record: number of the record in the file, from 0; None if it is a fault of the file.
        offset: byte offset of its framing in the file (of the uncompressed bytes if it is GZIP); None as above.
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
        """Whether the dataset is as published."""
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

    Every file is there with the hash, or the size and CRC-32C, that the manifest has; both indexes fit the shards;
    every record has valid CRCs and is an Example with the keys of the format, a label that its class id names, and an
    image that decodes to its size; numbers of records add up.

    Args:
        url: folder of one version, such as `gs://bucket/datasets/flowers/1.0.0`.
        decode: which images are decoded: `all`, `sample` (the first of each 64 records) or `none`.

    Returns:
        A `Report`: `if not reader.verify(url): …`, `report.faults`. Memory: some blocks of 8 MiB.

    Raises:
        NotPublishedError: no manifest there, or an invalid one.
        UsageError: no such `decode`.
        StorageError: the storage can't be reached (a missing file is a fault).
    """
    if decode not in DECODE:
        raise UsageError(f"--decode {decode!r}: choose one of {', '.join(DECODE)}")
    info = as_info(url)
    shards = [shard.file for split in info.splits.values() for shard in split.shards]
    sizes = {file.path: file.bytes for file in info.storage.files(info.url)}
    found = info.shard_storage.sizes(list(map(info.path, shards)))  # those of an index are anywhere
    sizes |= {file: size for file, size in zip(shards, found, strict=True) if size is not None}
    faults = list(_check_files(info, shards, sizes))
    with Scanners(len(shards)) as scanners:
        for split in info.splits.values():
            faults += _check_split(info, split, sizes, decode, scanners)
    return Report(info.url, info.manifest["records"], len(shards), decode, tuple(faults))


def _of_file(file: str, what: str) -> Fault:
    return Fault(file, None, None, what)


def _check_files(info: DatasetInfo, shards: Iterable[str], sizes: Mapping[str, int]) -> Iterator[Fault]:
    """Files that are missing, don't belong or aren't the published ones; shards and their indexes come later."""
    published: Mapping[str, str] = info.manifest["files"]
    ours, indexes = {*published, *shards}, {*map(_index_file, shards), *map(schema.runs_file, info.splits)}
    for file in sorted(ours - set(sizes)):
        yield _of_file(info.path(file), "the file is missing")
    for file in sorted(set(published).intersection(sizes) - indexes):
        if schema.sha256(info.storage.read(info.path(file))) != published[file]:
            yield _of_file(info.path(file), "its SHA-256 isn't the one that was published")
    for file in sorted(set(sizes) - ours):
        if schema.ShardName.parse(file) or file.startswith(f"{schema.INDEX_FOLDER}/"):
            what = "the file doesn't belong to the dataset; move it away if --repair leaves it"
            yield _of_file(info.path(file), what)
    if info.manifest["records"] + sum(info.manifest["rejects"]["by_reason"].values()) != info.manifest["images"]:
        yield _of_file(info.path(schema.MANIFEST_FILE), "records + rejects isn't the number of images listed")


def _index_file(shard: str) -> str:
    """A shard's text index, "" if it is somebody else's file, which has none."""
    name = schema.ShardName.parse(shard)
    return name.index_file if name else ""


def _check_split(
    info: DatasetInfo, split: SplitInfo, sizes: Mapping[str, int], decode: str, scanners: Scanners
) -> Iterator[Fault]:
    """Faults of a split's run index, of its shards and their indexes, and of its class counts."""
    runs_file, runs = schema.runs_file(split.name), None
    if info.compression == "none" and runs_file in sizes:
        try:
            runs = info.load_runs(split.name)
        except StorageError:
            raise
        except ImageShardsError:
            yield _of_file(info.path(runs_file), "it isn't the published run index of the manifest's shards")
    check = _ShardChecker(info, decode, scanners, sizes, runs)
    present = [(number, shard) for number, shard in enumerate(split.shards) if shard.file in sizes]
    classes, is_complete = Counter[int](), len(present) == len(split.shards)
    for (_, shard), found in zip(present, scanners.files(check, present), strict=True):
        yield from found.faults[:_MAX_FAULTS]
        if (more := len(found.faults) - _MAX_FAULTS) > 0:
            left_out = f"{count(more, 'more fault')} of this shard {'is' if more == 1 else 'are'} left out"
            yield _of_file(info.path(shard.file), left_out)
        is_complete = is_complete and not found.faults
        classes.update(found.classes)
    wrong = [number for number, published in enumerate(split.class_counts) if classes[number] != published]
    if wrong and is_complete:  # else a shard's fault explains it
        first, more = wrong[0], len(wrong) - 1
        has = f"{split.name} has {count(classes[first], 'record')} of class {first} {info.classes[first]!r}"
        others = f"; and {count(more, 'more class differs', 'more classes differ')}" if more else ""
        what = f"{has}, the manifest says {split.class_counts[first]:,}{others}"
        yield _of_file(info.path(schema.MANIFEST_FILE), what)


# --- shards


class _Found(NamedTuple):
    """What is in a shard, or a block of one: faults, records by class, records in all, and how many are corrupt."""

    faults: list[Fault]
    classes: Counter[int]
    records: int
    corrupt: int


class _ShardChecker:
    """Every fault of one shard and of its indexes; called by several threads.

    Args:
        sizes: bytes of the files there are.
        runs: the split's run index, None if that is missing or corrupt.
    """

    def __init__(
        self,
        info: DatasetInfo,
        decode: str,
        scanners: Scanners,
        sizes: Mapping[str, int],
        runs: npt.NDArray[np.void] | None,
    ) -> None:
        self._info, self._decode, self._scanners, self._sizes, self._runs = info, decode, scanners, sizes, runs
        self._is_foreign = schema.FOREIGN_KEY in info.manifest

    def __call__(self, numbered: tuple[int, Shard]) -> _Found:
        number, shard = numbered
        path, size = self._info.path(shard.file), self._sizes[shard.file]
        runs = None if self._runs is None else self._runs[self._runs["shard"] == number]
        faults = [] if size == shard.bytes else [_of_file(path, f"it has {_says(size, 'byte', shard.bytes)}")]
        bounds, index_faults = self._read_index(number, shard, runs)
        scan = FileScan(path, bounds)
        spans = runs if self._is_foreign else None
        blocks = list(self._scanners.blocks(lambda block: self._check_block(path, block, spans), scan.blocks()))
        faults += [fault for block in blocks for fault in block.faults]
        records, corrupt = sum(block.records for block in blocks), sum(block.corrupt for block in blocks)
        if records < len(bounds) - 1:
            lost = len(bounds) - 2 - records
            after = f" and the {count(lost, 'record')} after it" if lost else ""
            faults.append(Fault(path, records, bounds[records], f"the file ends before this record{after}"))
        elif records != shard.records:
            faults.append(_of_file(path, f"it has {_says(records - corrupt, 'valid record', shard.records)}"))
        if scan.crc32c != shard.crc32c and not corrupt and size == shard.bytes:  # which would explain it
            faults.append(_of_file(path, "its CRC-32C isn't the one that was published"))
        classes = sum((block.classes for block in blocks), Counter[int]())
        return _Found(faults + index_faults, classes, records, corrupt)

    def _read_index(
        self, number: int, shard: Shard, runs: npt.NDArray[np.void] | None
    ) -> tuple[list[int], list[Fault]]:
        """Where the shard's records begin by its text index, then where the last ends; and faults of its indexes.

        Nothing of a text index that is missing or corrupt.
        """
        file = _index_file(shard.file)
        if file not in self._sizes:
            return [], []
        path, data = self._info.path(file), self._info.storage.read(self._info.path(file))
        if schema.sha256(data) != self._info.manifest["files"].get(file):
            return [], [_of_file(path, "its SHA-256 isn't the one that was published")]
        try:
            pairs = [(int(offset), int(length)) for offset, length in map(bytes.split, data.splitlines())]
            expected = np.array(schema.run_rows(number, (length for _, length in pairs)), schema.RUN_DTYPE)
        except (ValueError, OverflowError):
            pairs, expected = [(0, -1)], np.empty(0, schema.RUN_DTYPE)
        bounds = list(accumulate((length for _, length in pairs), initial=0))
        if bounds != sorted([*(offset for offset, _ in pairs), shard.bytes]):
            return [], [_of_file(path, "it doesn't index the shard from start to end")]
        if runs is not None and not np.array_equal(runs, expected):
            name = schema.ShardName.parse(shard.file)
            path = self._info.path(schema.runs_file(name.split if name else ""))
            return bounds, [_of_file(path, f"its runs of shard {number} aren't those of the shard's text index")]
        return bounds, []

    def _check_block(self, path: str, block: Iterable[Frame], spans: npt.NDArray[np.void] | None) -> _Found:
        faults: list[Fault] = []
        classes, records, corrupt = Counter[int](), 0, 0
        for number, offset, record in block:
            if spans is not None and not _is_in(spans, offset):
                continue  # `index` left it out
            records += 1
            if isinstance(record, CorruptRecordError):
                faults.append(Fault(path, number, offset, record.reason))
                corrupt += 1
                continue
            try:
                features = parse_example(record)
            except ValueError as error:
                faults.append(Fault(path, number, offset, str(error)))
                continue
            decode = self._decode == "all" or (self._decode == "sample" and number % schema.RUN_RECORDS == 0)
            faults += [Fault(path, number, offset, what) for what in _check_record(self._info, features, decode)]
            classes[_class_id(features, self._info)] += 1
        return _Found(faults, classes, records, corrupt)


def _says(number: int, noun: str, published: int) -> str:
    return f"{count(number, noun)}, the manifest says {published:,}"


def _is_in(spans: npt.NDArray[np.void], offset: int) -> bool:
    """Whether a record is in a run of the index."""
    run = int(np.searchsorted(spans["offset"], offset, "right")) - 1
    return run >= 0 and offset < int(spans["offset"][run]) + int(spans["bytes"][run])


# --- records


def _check_record(info: DatasetInfo, features: Mapping[str, Value], decode: bool) -> Iterator[str]:
    """What is wrong with a record's features; of third-party records only image and class are known."""
    is_ours, one_hot = schema.FOREIGN_KEY not in info.manifest, bool(info.manifest["configuration"]["one_hot"])
    keys = schema.RECORD_KEYS[: None if one_hot else -1] if is_ours else (info.image_key, info.class_key)
    if missing := [key for key in keys if not len(features.get(key, ()))]:
        yield f"it lacks {', '.join(missing)}"
        return
    label = _class_id(features, info)
    if not 0 <= label < info.num_classes:
        yield f"class {label} is out of range: there are {info.num_classes}"
    elif is_ours and features[schema.LABEL_KEY] != [schema.relative_path_bytes(info.classes[label])]:
        yield f"label {features[schema.LABEL_KEY]!r} isn't the name of class {label}, {info.classes[label]!r}"
    if one_hot and not np.array_equal(np.asarray(features[schema.ONE_HOT_KEY]), np.arange(info.num_classes) == label):
        yield f"{schema.ONE_HOT_KEY} isn't class {label}"
    for column in info.manifest["features"] if is_ours else ():
        value = features.get(column["name"])
        if value is None:
            yield f"it lacks {column['name']}"
        elif len(value) and (type_name(value) != column["dtype"] or (len(value) > 1 and not column["list"])):
            yield f"{column['name']} has {len(value)} values of {type_name(value)}, not {column['dtype']}"
    size = np.asarray(features[schema.SIZE_KEY]).tolist() if is_ours else None
    if decode:
        try:
            image = decode_image(only_bytes(features, info.image_key) or b"", info.image.channels)
        except InvalidRecordError as error:
            yield str(error)
            return
        found = list(image.pixels.shape[:2])
        if size not in (None, found):
            yield f"the image is {found} (height, width), its size feature says {size}"
        size = found
        if info.image.format not in (image.format, "mixed"):
            yield f"the image is {image.format}, the manifest says {info.image.format}"
        if is_ours and image.is_grey != (info.image.channels == 1):
            yield f"the image has {'1 channel' if image.is_grey else '3 channels'}, not {info.image.channels}"
    least, most = (list(one or (0, 0)) for one in (info.image.min_size, info.image.max_size))
    if size is not None and not (len(size) == 2 and least[0] <= size[0] <= most[0] and least[1] <= size[1] <= most[1]):
        yield f"size {size} isn't within the manifest's {least} to {most}"


def _class_id(features: Mapping[str, Value], info: DatasetInfo) -> int:
    """A record's class, -1 if it isn't one integer."""
    label = only_integer(features, info.class_key)
    return -1 if label is None else label
