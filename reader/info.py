"""`load_info`: what a published dataset says about itself, checked, for trainers and tools."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, NotPublishedError, StorageError, UsageError
from reader.position import WINDOW_RUNS, Phase, Position, host_batch_size, whole
from reader.run_table import RunTable
from reader.splits import RecordRange, parse_split
from reader.storage import Storage, normalize, open_storage

_SHOWN_NAMES = 3
_MISTYPED_URL = re.compile(r"(?P<scheme>gs|gcs|s3|az|abfs|https?):?/+(?P<rest>[^/].*)")


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard: its file name in the dataset's folder, what it holds, and the CRC-32C of the whole file."""

    file: str
    records: int
    bytes: int
    crc32c: int


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
        min_size, max_size: smallest and largest (height, width) stored, in pixels; None where there is no record.
        mean, std: of the train split's sampled pixels scaled to [0, 1], one number a channel.
    """

    format: str
    channels: int
    min_size: tuple[int, int] | None
    max_size: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """A published dataset. Made by `load_info`; holds no open file and pickles.

    Attributes:
        url: the version's folder.
        name, version: as published.
        classes: class names; a class id is a place in it.
        splits: split name → `SplitInfo`.
        image: how images are stored.
        compression: `none` or `gzip` (of whole shards).
        manifest: everything else that manifest.json says, as parsed.
    """

    url: str
    name: str
    version: str
    classes: tuple[str, ...]
    splits: Mapping[str, SplitInfo]
    image: ImageInfo
    compression: str
    manifest: Mapping[str, Any] = field(repr=False)

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def storage(self) -> Storage:
        """Where the files lie."""
        return open_storage(self.url)

    @property
    def shard_storage(self) -> Storage:
        """Where the shards lie: elsewhere, where the dataset is an index of somebody's files."""
        files = [shard.file for split in self.splits.values() for shard in split.shards]
        return open_storage(self.path(files[0])) if files else self.storage

    @property
    def image_key(self) -> str:
        """The feature that holds the encoded image."""
        return str(self.manifest.get(schema.FOREIGN_KEY, {}).get("image", schema.IMAGE_KEY))

    @property
    def class_key(self) -> str:
        """The feature that holds the class id."""
        return str(self.manifest.get(schema.FOREIGN_KEY, {}).get("class", schema.CLASS_KEY))

    def path(self, file: str) -> str:
        """The full path or URL of a file of the dataset; a path or URL stays as it is."""
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
        """Batches of one iteration of `train_dataset`: the whole batches that the split's records fill, at least 1."""
        return max(1, self.records(split) // host_batch_size(global_batch_size, 1))

    def position(
        self, split: str, *, global_batch_size: int, hosts: int = 1, seed: int = 0, window_runs: int = WINDOW_RUNS
    ) -> Position:
        """Where training begins; arguments as `train_dataset` takes them."""
        hosts = whole("hosts", hosts)
        global_batch_size = host_batch_size(global_batch_size, hosts) * hosts
        phase = Phase(hosts, whole("window_runs", window_runs))
        return Position(self._source(split), self.records(split), whole("seed", seed), global_batch_size, 0, (phase,))

    def _source(self, split: str) -> str:
        """Names the records of a split string, their order and their runs; a copy's are the same.

        The content fingerprint alone says nothing of the order: the same images with another seed have it as well.
        """
        ranges = self.ranges(split)
        runs = [self.manifest["files"].get(schema.runs_file(part.split)) for part in ranges]
        shards = [[shard.crc32c for shard in self.splits[part.split].shards] for part in ranges]
        text = f"{self.manifest['content_fingerprint']}\0{ranges}\0{runs}\0{shards}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def load_runs(self, split: str) -> npt.NDArray[np.void]:
        """One split's run index, an array of `schema.RUN_DTYPE` in file order (18 bytes a run of 64 records).

        Raises:
            ImageShardsError: the dataset has none (gzip), or the file isn't the one that was published.
        """
        file = schema.runs_file(split)
        if self.compression != "none":
            raise ImageShardsError(
                f"{self.url} is compressed with {self.compression}, so no record can be found by its offset: read it "
                "with reader.record_dataset, or write it with --compression none"
            )
        data = self.storage.read(self.path(file))
        if schema.sha256(data) != self.manifest["files"].get(file):
            raise ImageShardsError(f"{self.path(file)} isn't the file that was published; run the job with --repair")
        rows: npt.NDArray[np.void] = np.load(io.BytesIO(data), allow_pickle=False)
        return rows

    def run_table(self, split: str) -> RunTable:
        """Where the records of a split string lie: what the readers work from."""
        tables = []
        rows = {part.split: self.load_runs(part.split) for part in self.ranges(split)}
        for part in self.ranges(split):
            shards = self.splits[part.split].shards
            files = [self.path(shard.file) for shard in shards]
            indexes = [self._index_path(shard.file) for shard in shards]
            tables.append(RunTable.select(files, rows[part.split], part.start, part.stop, indexes))
        return RunTable.concatenate(tables)

    def _index_path(self, file: str) -> str:
        name = schema.ShardName.parse(file)
        return "" if name is None else self.path(name.index_file)

    def wrong_sizes(self, split: str) -> list[str]:
        """A line for each shard of a split string that is missing or has another size than the manifest says.

        Costs one listing of the folder, a page for each 1,000 files, where it is remote.
        """
        shards = [shard for part in self.ranges(split) for shard in self.splits[part.split].shards]
        sizes = self.shard_storage.sizes([self.path(shard.file) for shard in shards])
        wrong = []
        for shard, size in zip(shards, sizes, strict=True):
            if size != shard.bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                wrong.append(f"{self.path(shard.file)} {found}, the manifest says {shard.bytes}")
        return wrong


def load_info(url: str | os.PathLike[str]) -> DatasetInfo:
    """Read and check the manifest of a published dataset.

    Args:
        url: folder of one version, such as `gs://bucket/datasets/flowers/1.0.0`.

    Raises:
        NotPublishedError: no manifest there, or one that can't be believed; says what was found and what to do.
        StorageError: the storage can't be reached.
    """
    given = os.fspath(url)
    url = normalize(given)
    storage = open_storage(url)
    path = f"{url}/{schema.MANIFEST_FILE}"
    try:
        data = storage.read(path)
    except StorageError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            raise NotPublishedError(_what_is_there(storage, url, given)) from None
        raise
    manifest = schema.open_manifest(data, path)
    try:
        return _from_manifest(url, manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise NotPublishedError(f"{path} lacks or misstates {error}; run the job with --repair") from None


def check_info(info: DatasetInfo) -> None:
    """Raises UsageError where a builder was given something else, such as a dataset's folder."""
    if not isinstance(info, DatasetInfo):
        raise UsageError(f"info={info!r}: give what reader.load_info({info!r}) returns")


def _from_manifest(url: str, manifest: dict[str, Any]) -> DatasetInfo:
    image = manifest["image"]
    return DatasetInfo(
        url=url,
        name=manifest["name"],
        version=manifest["version"],
        classes=tuple(manifest["classes"]),
        splits={name: _split_info(name, split) for name, split in manifest["splits"].items()},
        image=ImageInfo(
            image["format"],
            image["channels"],
            _size(image["min_size"]),
            _size(image["max_size"]),
            tuple(map(float, image["mean"])),
            tuple(map(float, image["std"])),
        ),
        compression=manifest["configuration"]["compression"],
        manifest=manifest,
    )


def _split_info(name: str, split: Mapping[str, Any]) -> SplitInfo:
    shards = tuple(
        ShardInfo(shard["file"], shard["records"], shard["bytes"], shard["crc32c"]) for shard in split["shards"]
    )
    return SplitInfo(name, split["records"], split["bytes"], tuple(split["class_counts"]), shards)


def _size(size: list[int] | None) -> tuple[int, int] | None:
    return None if size is None else (size[0], size[1])


def _what_is_there(storage: Storage, url: str, given: str) -> str:
    """Why a folder without a manifest is no dataset, and what to do about it."""
    names = storage.names(url)
    missing = f"{url} holds no {schema.MANIFEST_FILE}, so no dataset is published there"
    mistyped = None if "://" in given else _MISTYPED_URL.fullmatch(given)
    if not names and mistyped:
        return f"there is no folder {given}: did you mean {mistyped['scheme']}://{mistyped['rest']}?"
    parent, _, name = url.rpartition("/")
    if not names and name in storage.names(parent):
        return f"{url} is a file: name the folder {parent}"
    versions = [f"{url}/{name.rstrip('/')}" for name in names if schema.VERSION_PATTERN.fullmatch(name.rstrip("/"))]
    if not names:
        return f"{missing}: there is no such folder, or it is empty"
    if versions:
        return f"{missing}; name a version: {_some(versions)}"
    if any(schema.ShardName.parse(name) for name in names):
        return f"{missing}, only an unfinished job's files: {_some(names)}; run the same beam_pipeline command again"
    return f"{missing}; found {_some(names)}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more
