"""`load_info`: what a published dataset holds, from its checked manifest, for trainers and tools."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, NotPublishedError, UsageError
from beam_pipeline.schema.manifest import FOREIGN_KEY, Content, FileSums, Manifest, parse_manifest
from beam_pipeline.schema.manifest import Shard as ShardInfo
from beam_pipeline.schema.table import Table, read_table
from beam_pipeline.storage import Storage, normalize, open_storage
from beam_pipeline.text import first_few
from reader.hosts import batch_size_of
from reader.runs import RunTable
from reader.splits import RecordRange, parse_split

_LOG = logging.getLogger("reader")
_MISTYPED_URL = re.compile(r"(?P<scheme>gs|gcs|s3|az|abfs|https?):?/+(?P<rest>[^/].*)")
# `photos:1.*.*`, as tfds.load reads it.
_WITH_VERSION = re.compile(r"(?P<folder>.+):(?P<version>(?:\d+|\*)(?:\.(?:\d+|\*)){2})", re.DOTALL)
_IMAGE_FILE = re.compile(r".*\.(jpe?g|jfif|png|webp|gif|bmp|tiff?|heic|heif|avif)", re.IGNORECASE)
_SEARCHED_FOLDERS = 3  # for images, at each level

# Undecoded records of one shuffle window: a larger one is cut to fewer runs. Windows of 16 runs reach it at 262 kB a
# record; several of them are in memory.
MAX_WINDOW_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """One split: its shards in order, and how many records each class has, in class order."""

    name: str
    records: int
    bytes: int
    class_counts: tuple[int, ...]
    shards: tuple[ShardInfo, ...]


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """How images are stored.

    Attributes:
        format: `jpeg` or `png`.
        channels: 3 (RGB) or 1 (grey).
        min_size, max_size: smallest and largest (height, width) stored, in pixels; None if there is no record.
        mean, std: of the train split's sampled pixels scaled to [0, 1], one number a channel.
    """

    format: str
    channels: int
    min_size: tuple[int, int] | None
    max_size: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True, repr=False)
class DatasetInfo:
    """A published dataset. Made by `load_info`; holds no open file and pickles.

    Attributes:
        url: the version's folder.
        name, version: as published.
        classes: class names; a class id is an index into it.
        splits: split name → `SplitInfo`.
        image: how images are stored.
        compression: `none` or `gzip` (of complete shards).
        manifest: all of manifest.json, as parsed: `manifest["images"]`; what `run` returns is one, too.
    """

    url: str
    name: str
    version: str
    classes: tuple[str, ...]
    splits: Mapping[str, SplitInfo]
    image: ImageInfo
    compression: str
    manifest: Manifest

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        counts = ", ".join(f"{name} {split.records}" for name, split in self.splits.items()) or "no"
        sizes = [f"{size[0]}x{size[1]}" for size in (self.image.min_size, self.image.max_size) if size]
        size = " to ".join(dict.fromkeys(sizes))
        classes = "1 class" if self.num_classes == 1 else f"{self.num_classes} classes"
        stored = " ".join(filter(None, (self.image.format, "grey" if self.image.channels == 1 else "", size)))
        return f"DatasetInfo({self.name} {self.version} at {self.url}: {counts} records; {classes}; {stored})"

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def storage(self) -> Storage:
        """The storage of the dataset's files."""
        return open_storage(self.url)

    @property
    def shard_storage(self) -> Storage:
        """The storage of the shards: another one if the dataset is an index of third-party files."""
        files = [shard.file for split in self.splits.values() for shard in split.shards]
        return open_storage(self.path(files[0])) if files else self.storage

    @property
    def is_index(self) -> bool:
        """Whether `imageshards index` made it: its shards are third-party files, which may be anywhere."""
        return FOREIGN_KEY in self.manifest

    @property
    def image_key(self) -> str:
        """The feature that holds the encoded image."""
        return str(self.manifest.get(FOREIGN_KEY, {}).get("image", schema.IMAGE_KEY))

    @property
    def class_key(self) -> str:
        """The feature that holds the class id."""
        return str(self.manifest.get(FOREIGN_KEY, {}).get("class", schema.CLASS_KEY))

    def path(self, file: str) -> str:
        """The full path or URL of a file of the dataset; a full one is returned unchanged."""
        return file if file.startswith("/") or "://" in file else f"{self.url}/{file}"

    def ranges(self, split: str) -> tuple[RecordRange, ...]:
        """The record ranges that a TFDS split string names, such as `train[:10%]` or `train+validation`.

        Raises:
            UsageError: no such split, or no record in it.
        """
        return parse_split(split, {name: info.records for name, info in self.splits.items()})

    def records(self, split: str) -> int:
        """How many records a split string names."""
        return sum(part.stop - part.start for part in self.ranges(split))

    def steps_per_epoch(self, split: str, global_batch_size: int) -> int:
        """Batches of one iteration of a train builder that reads the complete split; of any other, `len(batches)`."""
        return max(1, self.records(split) // batch_size_of(global_batch_size, 1))

    def capped_window_runs(self, split: str, window_runs: int) -> int:
        """`window_runs`, or fewer if such a window would hold more than `MAX_WINDOW_BYTES` undecoded.

        By the manifest alone, so that every host and every resume comes to the same number.
        """
        shards = [shard for name in self._names(split) for shard in self.splits[name].shards if shard.records]
        run_bytes = max((-(-shard.bytes * schema.RUN_RECORDS // shard.records) for shard in shards), default=0)
        there = min(window_runs, sum(-(-shard.records // schema.RUN_RECORDS) for shard in shards))
        return window_runs if run_bytes * there <= MAX_WINDOW_BYTES else max(1, MAX_WINDOW_BYTES // run_bytes)

    def source(self, split: str) -> str:
        """Names the records of a split string, their order and their runs; a copy's are the same.

        The content fingerprint alone says nothing of the order: the same images with another seed have it as well.
        """
        ranges = self.ranges(split)
        runs = [self.manifest["files"].get(schema.runs_file(part.split)) for part in ranges]
        shards = [[shard.crc32c for shard in self.splits[part.split].shards] for part in ranges]
        text = f"{self.manifest['content_fingerprint']}\0{ranges}\0{runs}\0{shards}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def tables(self) -> dict[str, FileSums]:
        """Path of each shard's record table in the dataset's folder → its size and sums."""
        shards = (shard for split in self.splits.values() for shard in split.shards)
        return {schema.table_file(shard.file): shard.table for shard in shards}

    def load_table(self, shard: ShardInfo) -> Table:
        """The record table of a shard: `table["class"]` has a value for each record, in file order.

        Raises:
            ImageShardsError: the file isn't the one that was published.
        """
        path = self.path(schema.table_file(shard.file))
        data = self.storage.read(path)
        if schema.sha256(data) != shard.table.sha256:
            raise ImageShardsError(f"{path} isn't the record table that was published; run the job with --repair")
        return read_table(data)

    def load_runs(self, split: str) -> npt.NDArray[np.void]:
        """One split's run index, an array of `schema.RUN_DTYPE` in file order (18 bytes a run of 64 records).

        Raises:
            ImageShardsError: the dataset has none (gzip), or the file isn't the one that was published.
        """
        if self.compression != "none":
            raise ImageShardsError(
                f"{self.url} is compressed with {self.compression}, so no record can be found by its offset: read it "
                "with imageshards.record_dataset, or write it with --compression none"
            )
        path = self.path(schema.runs_file(split))
        data = self.storage.read(path)
        if schema.sha256(data) == self.manifest["files"].get(schema.runs_file(split)):
            with contextlib.suppress(Exception):  # NumPy has many kinds of them for bytes that aren't an array
                rows: npt.NDArray[np.void] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
                if _fits(rows, self.splits[split]):
                    return rows
        raise ImageShardsError(
            f"{path} isn't the published run index of the manifest's shards; run the job with --repair"
        )

    def run_table(self, split: str) -> RunTable:
        """Which run of which shard holds the records of a split string: what the readers work from."""
        rows = {name: self.load_runs(name) for name in self._names(split)}
        tables = []
        for part in self.ranges(split):
            shards = self.splits[part.split].shards
            files = [self.path(shard.file) for shard in shards]
            names = [schema.ShardName.parse(shard.file) for shard in shards]
            indexes = [self.path(name.index_file) if name else "" for name in names]
            tables.append(RunTable.select(files, rows[part.split], part.start, part.stop, indexes))
        return RunTable.concatenate(tables)

    def wrong_sizes(self, split: str) -> list[str]:
        """A line for each shard of a split string that is missing or has another size than the manifest says.

        Costs one listing of the folder if it is remote, a page for each 1,000 files.
        """
        shards = [shard for name in self._names(split) for shard in self.splits[name].shards]
        sizes = self.shard_storage.sizes([self.path(shard.file) for shard in shards])
        wrong = []
        for shard, size in zip(shards, sizes, strict=True):
            if size != shard.bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                wrong.append(f"{self.path(shard.file)} {found}, the manifest says {shard.bytes}")
        return wrong

    def _names(self, split: str) -> list[str]:
        """The splits that a split string names, each once."""
        return list(dict.fromkeys(part.split for part in self.ranges(split)))


def load_info(dataset: DatasetInfo | str | os.PathLike[str]) -> DatasetInfo:
    """Read and check the manifest of a published dataset.

    Args:
        dataset: folder of one version, `gs://bucket/datasets/flowers/1.0.0`; or of all versions, for the newest that is
            published; or with a pattern, `gs://bucket/datasets/flowers:1.*.*`, for the newest that matches it. A
            `DatasetInfo` is returned unchanged.

    Raises:
        NotPublishedError: no manifest there, or an invalid one; says what was found and what to do.
        StorageError: the storage can't be reached.
    """
    if isinstance(dataset, DatasetInfo):
        return dataset
    if not isinstance(dataset, str | os.PathLike) or not isinstance(given := os.fspath(dataset), str) or "\0" in given:
        shown = reprlib.repr(dataset) + " (imageshards.mix reads several)" * isinstance(dataset, list | tuple | dict)
        raise UsageError(f"no dataset: {shown}: give its URL or path, or what imageshards.load_info returns")
    pattern = _WITH_VERSION.fullmatch(given)
    url = normalize(pattern["folder"] if pattern else given)
    storage = open_storage(url)
    if pattern is None and (info := _open(storage, url)):
        return info
    names = storage.names(url)
    versions = schema.newest_first(names)
    for version in versions:
        is_wanted = pattern is None or fnmatchcase(version, pattern["version"])
        if is_wanted and (info := _open(storage, f"{url}/{version}")):
            return info
    raise NotPublishedError(_diagnose(storage, url, given, names, versions))


def version_before(info: DatasetInfo) -> DatasetInfo:
    """The newest published version that is earlier, next to this one. Raises UsageError if there is none."""
    folder, _, version = info.url.rpartition("/")
    versions = schema.newest_first([*info.storage.names(folder), f"{version}/"])
    for earlier in versions[versions.index(version) + 1 :] if version in versions else ():
        if earlier != version and (before := _open(info.storage, f"{folder}/{earlier}")):
            return before
    raise UsageError(f"{info.url}: no earlier version is published next to it: name the other version, too")


def _open(storage: Storage, url: str) -> DatasetInfo | None:
    """The dataset of a version's folder; None if it has no manifest."""
    path = f"{url}/{schema.MANIFEST_FILE}"
    try:
        data = storage.read(path)
    except FileNotFoundError:
        return None
    return _typed(url, *parse_manifest(data, path))


def _published(storage: Storage, folder: str, versions: Sequence[str]) -> list[str]:
    """Those of a folder's versions that have a manifest."""
    return [name for name in versions if storage.stat(f"{folder}/{name}/{schema.MANIFEST_FILE}")]


def _diagnose(storage: Storage, url: str, given: str, names: Sequence[str], versions: Sequence[str]) -> str:
    """Why a folder without a manifest is no dataset, and what to do about it."""
    missing = f"{url} holds no {schema.MANIFEST_FILE}, so no dataset is published there"
    if not names:
        mistyped = None if "://" in given else _MISTYPED_URL.fullmatch(given)
        if mistyped:
            return f"there is no folder {given}: did you mean {mistyped['scheme']}://{mistyped['rest']}?"
        parent, _, name = url.rpartition("/")
        siblings = storage.names(parent)
        if name in siblings:
            return f"{url} is a file: name the folder {parent}"
        if schema.VERSION_PATTERN.fullmatch(name) and (
            others := _published(storage, parent, schema.newest_first(siblings))
        ):
            return f"{missing}: there are {first_few(others, 8)}"
        return f"{missing}: there is no such folder, or it is empty"
    if published := _published(storage, url, versions):
        wanted = given.rpartition(":")[2]
        return f"{url}: no published version matches {wanted}: there are {first_few(published, 8)}"
    if versions:
        what = f"no version is published there: {first_few(versions)} without a {schema.MANIFEST_FILE}"
        return f"{url}: {what}; run the same imageshards write command again"
    if any(schema.ShardName.parse(name) for name in names):
        files = f"only an unfinished job's files: {first_few(names)}"
        return f"{missing}, {files}; run the same imageshards write command again"
    if "metrics.jsonl" in names and schema.RUN_FILE in names:
        return f"{url} holds a run of imageshards train, not a dataset: evaluate and predict take RUN first"
    if _has_images(storage, url, names):
        write = f"imageshards write --input {given} --output DIR --name NAME"
        return f"{url} holds images, not a dataset: write one first: {write}"
    return f"{missing}; found {first_few(names)}"


def _has_images(storage: Storage, url: str, names: Sequence[str], depth: int = 2) -> bool:
    """Whether there are image files in a folder, or in the first few folders inside it."""
    if any(map(_IMAGE_FILE.fullmatch, names)):
        return True
    folders = [f"{url}/{name}".rstrip("/") for name in names if name.endswith("/")][:_SEARCHED_FOLDERS] if depth else []
    return any(_has_images(storage, folder, storage.names(folder), depth - 1) for folder in folders)


def _typed(url: str, raw: dict[str, Any], manifest: Content) -> DatasetInfo:
    image = manifest.image
    mean, std = (tuple(map(float, values)) for values in (image.mean, image.std))
    return DatasetInfo(
        url=url,
        name=manifest.name,
        version=manifest.version,
        classes=manifest.classes,
        splits={
            name: SplitInfo(name, split.records, split.bytes, split.class_counts, split.shards)
            for name, split in manifest.splits.items()
        },
        image=ImageInfo(image.format, image.channels, image.min_size, image.max_size, mean, std),
        compression=manifest.flags.compression,
        manifest=Manifest(url, raw),
    )


def _fits(rows: npt.NDArray[np.void], split: SplitInfo) -> bool:
    """Whether the rows of a run index are runs of the split's shards, in order, with all their records."""
    if rows.dtype != schema.RUN_DTYPE or rows.ndim != 1:
        return False
    shard = rows["shard"].astype(np.int64)
    if len(rows) and (shard.max() >= len(split.shards) or (np.diff(shard) < 0).any()):
        return False
    records = np.bincount(shard, rows["records"], len(split.shards))
    ends = rows["offset"].astype(np.float64) + rows["bytes"]
    sizes = np.array([one.bytes for one in split.shards], np.float64)[shard]
    return records.tolist() == [one.records for one in split.shards] and bool((ends <= sizes).all())
