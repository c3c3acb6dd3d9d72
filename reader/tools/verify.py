"""`verify`: reads every byte of a dataset and compares it with what its manifest says; needs no framework."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, StorageError, UsageError
from beam_pipeline.schema.manifest import Shard
from beam_pipeline.text import name_line, plural
from reader.example import Value, class_id, parse_example
from reader.info import DatasetInfo, SplitInfo, load_info
from reader.runs import InvalidRecordError
from reader.tfrecord_files import FileScan, Frame
from reader.tools.checks import Scanners, check_image, single_bytes, type_name

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
        return name_line(f"{self.file}:{located} {self.what}")


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` returns; true if there is no fault.

    Attributes:
        dataset: its URL.
        records, shards: that the manifest counts.
        decode: which images were decoded: `all`, `sample` or `none`.
        faults: in a fixed order, at most 100 a shard.
        fix: what to do if there are any.
    """

    dataset: str
    records: int
    shards: int
    decode: str
    faults: tuple[Fault, ...]
    fix: str

    @property
    def ok(self) -> bool:
        """Whether the dataset is as published."""
        return not self.faults

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        if self.faults:
            return f"{plural(len(self.faults), 'fault')} in {self.dataset}; {self.fix}"
        decoded = {"all": "all images decode", "sample": "1 image in 64 decoded", "none": "no image decoded"}
        return f"OK: {plural(self.records, 'record')} in {plural(self.shards, 'shard')}, {decoded[self.decode]}"


def verify(dataset: DatasetInfo | str | os.PathLike[str], *, decode: str = "all") -> Report:
    """Check a dataset to the last byte, on all cores.

    Every file exists with the hash, or the size and CRC-32C, that the manifest has; the run index fits the shards;
    every record has valid CRCs and is an Example with the keys of the format, a label that its class id names, and an
    image that decodes to its size; numbers of records add up.

    Args:
        dataset: what `load_info` returned, or the URL.
        decode: which images are decoded: `all`, `sample` (the first of each 64 records) or `none`.

    Returns:
        A `Report`: `if not imageshards.tools.verify(url): …`, `report.faults`. Memory: some blocks of 8 MiB.

    Raises:
        NotPublishedError: no manifest there, or an invalid one.
        UsageError: no such `decode`.
        StorageError: the storage can't be reached (a missing file is a fault).
    """
    if decode not in DECODE:
        raise UsageError(f"--decode {decode!r}: choose one of {', '.join(DECODE)}")
    info = load_info(dataset)
    shards = [shard.file for split in info.splits.values() for shard in split.shards]
    sizes = {file.path: file.bytes for file in info.storage.files(info.url)}
    shard_sizes = info.shard_storage.sizes(list(map(info.path, shards)))  # those of an index may be in any folder
    sizes |= {file: size for file, size in zip(shards, shard_sizes, strict=True) if size is not None}
    with Scanners(len(shards)) as scanners:
        faults = _check_files(info, shards, sizes, scanners)
        corrupt = {fault.file for fault in faults}
        for split in info.splits.values():
            faults += _check_split(info, split, sizes, corrupt, decode, scanners)
    fix = "make it again with imageshards index" if info.is_index else "run the job again with --repair"
    return Report(info.url, info.manifest["records"], len(shards), decode, tuple(faults), fix)


def _of_file(file: str, what: str) -> Fault:
    return Fault(file, None, None, what)


def _check_files(info: DatasetInfo, shards: Iterable[str], sizes: Mapping[str, int], scanners: Scanners) -> list[Fault]:
    """Files that are missing, changed or don't belong to the dataset; the shards' content is checked later."""
    published: Mapping[str, str] = info.manifest["files"] | {file: one.sha256 for file, one in info.tables.items()}
    expected = {*published, *shards}
    faults = [_of_file(info.path(file), "the file is missing") for file in sorted(expected - set(sizes))]
    files = sorted(set(published).intersection(sizes))
    hashes = scanners.files(lambda file: schema.sha256(info.storage.read(info.path(file))), files)
    for file, sha256 in zip(files, hashes, strict=True):
        if sha256 != published[file]:
            faults.append(_of_file(info.path(file), "its SHA-256 isn't the one that was published"))
    for file in sorted(set(sizes) - expected):
        if schema.ShardName.parse(file) or file.startswith(f"{schema.INDEX_FOLDER}/"):
            what = "the file doesn't belong to the dataset; move it away if --repair leaves it"
            faults.append(_of_file(info.path(file), what))
    if info.manifest["records"] + sum(info.manifest["rejects"]["by_reason"].values()) != info.manifest["images"]:
        what = "records + rejects isn't the number of images listed"
        faults.append(_of_file(info.path(schema.MANIFEST_FILE), what))
    return faults


def _check_split(
    info: DatasetInfo, split: SplitInfo, sizes: Mapping[str, int], corrupt: Set[str], decode: str, scanners: Scanners
) -> Iterator[Fault]:
    """Faults of a split's run index, shards and class counts; `corrupt` are the files with a fault."""
    path, runs = info.path(schema.runs_file(split.name)), None
    if info.compression == "none" and path not in corrupt:
        try:
            runs = info.load_runs(split.name)
        except StorageError:
            raise
        except ImageShardsError:
            yield _of_file(path, "it isn't a run index of the manifest's shards")
    check = _ShardChecker(info, path, runs, sizes, decode, scanners)
    present = [(number, shard) for number, shard in enumerate(split.shards) if shard.file in sizes]
    classes, is_complete = Counter[int](), len(present) == len(split.shards)
    for (_, shard), (faults, of_shard) in zip(present, scanners.files(check, present), strict=True):
        yield from faults[:_MAX_FAULTS]
        if (more := len(faults) - _MAX_FAULTS) > 0:
            left_out = f"{plural(more, 'more fault')} of this shard {'is' if more == 1 else 'are'} left out"
            yield _of_file(info.path(shard.file), left_out)
        is_complete = is_complete and not faults
        classes.update(of_shard)
    differing = [number for number, published in enumerate(split.class_counts) if classes[number] != published]
    if differing and is_complete:  # else a shard's fault explains it
        first, more = differing[0], len(differing) - 1
        has = f"{split.name} has {plural(classes[first], 'record')} of class {first} {info.classes[first]!r}"
        others = f"; and {plural(more, 'more class')} {'differs' if more == 1 else 'differ'}" if more else ""
        what = f"{has}, the manifest says {split.class_counts[first]:,}{others}"
        yield _of_file(info.path(schema.MANIFEST_FILE), what)


# --- shards


@dataclass
class _Checked:
    """Result for a block or a shard: faults, records of each class, offsets of records, number of corrupt ones."""

    faults: list[Fault] = field(default_factory=list)
    classes: Counter[int] = field(default_factory=Counter)
    offsets: list[int] = field(default_factory=list)
    corrupt: int = 0


@dataclass(frozen=True)
class _ShardChecker:
    """Finds every fault of a shard. Thread-safe.

    Attributes:
        runs_path, runs: the split's run index, None if that is missing or corrupt.
        sizes: bytes of the files there are.
    """

    info: DatasetInfo
    runs_path: str
    runs: npt.NDArray[np.void] | None
    sizes: Mapping[str, int]
    decode: str
    scanners: Scanners

    def __call__(self, numbered: tuple[int, Shard]) -> tuple[list[Fault], Counter[int]]:
        """The faults of a shard of the split, and how many records of each class it has."""
        (number, shard), is_foreign, found = numbered, self.info.is_index, _Checked()
        path, size = self.info.path(shard.file), self.sizes[shard.file]
        runs = None if self.runs is None else self.runs[self.runs["shard"] == number]
        scan = FileScan(path)
        for block in self.scanners.blocks(
            partial(self._check_block, path, runs if is_foreign else None), scan.blocks()
        ):
            found.faults += block.faults
            found.classes += block.classes
            found.offsets += block.offsets
            found.corrupt += block.corrupt
        faults = found.faults
        if size != shard.bytes:
            faults.insert(0, _of_file(path, f"it has {plural(size, 'byte')}, the manifest says {shard.bytes:,}"))
        elif not found.corrupt:  # else corrupt records explain these
            if len(found.offsets) != shard.records:
                has = plural(len(found.offsets), "record")
                faults.append(_of_file(path, f"it has {has}, the manifest says {shard.records:,}"))
            if scan.crc32c != shard.crc32c:
                faults.append(_of_file(path, "its CRC-32C isn't the one that was published"))
            if not is_foreign:
                lengths = np.diff([*found.offsets, shard.bytes]).tolist()
                if runs is not None and runs.tolist() != schema.run_rows(number, lengths):
                    faults.append(_of_file(self.runs_path, f"its runs of shard {number} aren't those of the shard"))
                faults += self._check_table(shard, lengths, found.classes)
        return faults, found.classes

    def _check_table(self, shard: Shard, lengths: list[int], classes: Counter[int]) -> Iterator[Fault]:
        path = schema.table_file(shard.file)
        if path not in self.sizes:
            return  # it is reported already
        try:
            table = self.info.load_table(shard)
        except StorageError:
            raise
        except ImageShardsError:
            return  # reported already
        if self.info.compression != "none":
            lengths = [*lengths[:-1], *table["bytes"][-1:].tolist()]  # where the last one ends isn't known
        is_sorted = bool((table["order_key"][1:] >= table["order_key"][:-1]).all())
        if not is_sorted or table["bytes"].tolist() != lengths or Counter(table["class"].tolist()) != classes:
            yield _of_file(self.info.path(path), "it isn't the record table of its shard")

    def _check_block(self, path: str, spans: npt.NDArray[np.void] | None, block: Iterable[Frame]) -> _Checked:
        checked = _Checked()
        for number, offset, record in block:
            if spans is not None and not _is_in(spans, offset):
                continue  # `index` left it out
            checked.offsets.append(offset)
            if isinstance(record, CorruptRecordError):
                checked.faults.append(Fault(path, number, offset, record.reason))
                checked.corrupt += 1
                continue
            try:
                features = parse_example(record)
            except ValueError as error:
                checked.faults.append(Fault(path, number, offset, str(error)))
                continue
            decode = self.decode == "all" or (self.decode == "sample" and number % schema.RUN_RECORDS == 0)
            for what in _check_record(self.info, features, decode):
                checked.faults.append(Fault(path, number, offset, what))
            checked.classes[_class_id(features, self.info)] += 1
        return checked


def _is_in(spans: npt.NDArray[np.void], offset: int) -> bool:
    """Whether a record is in a run of the index."""
    run = int(np.searchsorted(spans["offset"], offset, "right")) - 1
    return run >= 0 and offset < int(spans["offset"][run]) + int(spans["bytes"][run])


# --- records


def _check_record(info: DatasetInfo, features: Mapping[str, Value], decode: bool) -> Iterator[str]:
    """Faults of a record's features; of third-party records only image and class are known."""
    is_native, one_hot = not info.is_index, bool(info.manifest["configuration"]["one_hot"])
    keys = schema.RECORD_KEYS[: None if one_hot else -1] if is_native else (info.image_key, info.class_key)
    if missing := [key for key in keys if not len(features.get(key, ()))]:
        yield f"it lacks {', '.join(missing)}"
        return
    label = _class_id(features, info)
    if not 0 <= label < info.num_classes:
        yield f"class {label} is out of range: there are {info.num_classes}"
    elif is_native and features[schema.LABEL_KEY] != [schema.relative_path_bytes(info.classes[label])]:
        yield f"label {features[schema.LABEL_KEY]!r} isn't the name of class {label}, {info.classes[label]!r}"
    if one_hot and not np.array_equal(np.asarray(features[schema.ONE_HOT_KEY]), np.arange(info.num_classes) == label):
        yield f"{schema.ONE_HOT_KEY} isn't class {label}"
    for column in info.manifest["features"] if is_native else ():
        value = features.get(column["name"])
        if value is None:
            yield f"it lacks {column['name']}"
        elif len(value) and (type_name(value) != column["dtype"] or (len(value) > 1 and not column["list"])):
            yield f"{column['name']} has {len(value)} values of {type_name(value)}, not {column['dtype']}"
    size = np.asarray(features[schema.SIZE_KEY]).tolist() if is_native else None
    if decode:
        try:
            image = check_image(single_bytes(features, info.image_key) or b"", info.image.channels)
        except InvalidRecordError as error:
            yield str(error)
            return
        decoded = [image.height, image.width]
        if size not in (None, decoded):
            yield f"the image is {decoded} (height, width), its size feature says {size}"
        size = decoded
        if info.image.format not in (image.format, "mixed"):
            yield f"the image is {image.format}, the manifest says {info.image.format}"
        if is_native and image.is_grey != (info.image.channels == 1):
            yield f"the image has {'1 channel' if image.is_grey else '3 channels'}, not {info.image.channels}"
    low, high = (list(bound or (0, 0)) for bound in (info.image.min_size, info.image.max_size))
    if size is not None and not (len(size) == 2 and low[0] <= size[0] <= high[0] and low[1] <= size[1] <= high[1]):
        yield f"size {size} isn't within the manifest's {low} to {high}"


def _class_id(features: Mapping[str, Value], info: DatasetInfo) -> int:
    """A record's class, -1 if it isn't one integer."""
    label = class_id(features.get(info.class_key, []))
    return -1 if label is None else label
