"""A base: the published version whose unchanged images are reused instead of being converted again.

Records are in the order of their keys, so a base's cuts say which of its shards may hold a new shard's images; their
record tables say where, and what each was made of. The bytes are those of a job without a base, so a worker that can't
read it goes on without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.fetch import Stored
from beam_pipeline.dataset.state import published_manifest
from beam_pipeline.errors import CorruptRecordError, StorageError, UsageError
from beam_pipeline.images import FLAG_NAMES, EncodedImage, ImageOptions, SourceInfo, codec_versions
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.schema import example, table
from beam_pipeline.schema.job import Counts, ReusedImages
from beam_pipeline.schema.manifest import Content
from beam_pipeline.schema.table import Table
from beam_pipeline.storage import Storage, join
from beam_pipeline.text import one_line, print_line

_PIECE_BYTES = 8 << 20  # of a base shard that one request reads
_TABLES = 32  # that a process keeps: those of other splits are looked into for many shards


def choose_base(config: Config) -> tuple[Config, str]:
    """For the launcher: the configuration with the base that `--base` means, and a line that says which.

    By default it is the newest published version of the dataset with the same image flags, seed and codec.

    Raises:
        UsageError: the version that `--base` names can't be the base.
    """
    if config.base == config.version:
        raise UsageError(f"--base {config.base!r}: it is the version to be written; choose an earlier one, or none")
    folder, why_not = join(config.output, config.name), ""
    versions = [config.base] if config.base not in ("", "none") else []
    if not config.base:
        with contextlib.suppress(FileNotFoundError):
            versions = schema.newest_first(storage.open_storage(folder, config.first_contact_s).names(folder))
    for version in versions:
        url = join(folder, version)
        try:
            manifest = published_manifest(url, config.first_contact_s) if version != config.version else None
        except StorageError as error:
            if config.base:
                raise
            why_not = why_not or f"warning: continuing without base {version}: {error.reason}"
            continue
        fault = "isn't published, or only by a newer release" if manifest is None else _difference(config, manifest)
        if manifest is not None and not fault:
            chosen = dataclasses.replace(config, base=version).in_run(base_sha256=manifest.self_sha256)
            return chosen, f"base: reusing unchanged images from {version}"
        if config.base:
            raise UsageError(f"--base {version!r}: {url} {fault}; choose another version, or none")
        why_not = why_not or f"base: none, since {version} {fault}" * (manifest is not None)
    return dataclasses.replace(config, base="none").in_run(base_sha256=""), why_not


def moved_ids(config: Config, classes: Sequence[str]) -> str:
    """The first class whose id differs from the newest earlier version with the same MAJOR; "" without one."""
    folder, major = join(config.output, config.name), config.version.partition(".")[0]
    with contextlib.suppress(StorageError):  # the new version is published whatever the earlier one holds
        names = storage.open_storage(folder, config.first_contact_s).names(folder)
        versions = schema.newest_first({*names, f"{config.version}/"})
        earlier = versions[versions.index(config.version) + 1 :]
        for version in (one for one in earlier if one.startswith(f"{major}.")):
            if manifest := published_manifest(join(folder, version), config.first_contact_s):
                ids = {name: number for number, name in enumerate(classes)}
                for number, name in enumerate(manifest.classes):
                    if number != (now := ids.get(name)):
                        is_now = "is gone" if now is None else f"is {now}"
                        return f"class ids changed against {version}: {name!r} was {number}, {is_now}: raise MAJOR"
                break
    return ""


def _difference(config: Config, manifest: Content) -> str:
    """Why a version's images aren't those that this job would make; "" if they are."""
    ours, theirs = config.fingerprint(), manifest.configuration
    flags = [*(FLAG_NAMES.get(name, name) for name in ImageOptions._fields), "seed"]
    if different := [flag for flag in flags if ours[flag] != theirs.get(flag, ours)]:
        return f"was written with another --{different[0]}"
    if theirs.get("compression") != "none":
        return "is compressed"
    return "" if manifest.codec == codec_versions() else "was written by other versions of the image libraries"


def stored_images(config: Config, refs: Sequence[ImageRef]) -> Iterator[Stored | None]:
    """What the base has of each image of a shard; ends early after an error.

    Args:
        config: of the job.
        refs: in order of their keys.
    """
    base = _base_of(config)
    if base is None or base.is_lost:
        return
    try:
        yield from base.stored(refs, _are_listed(config))
    except Exception as error:
        if not base.is_lost:
            base.is_lost = True
            _say_lost(config.base, error)


def unchanged(config: Config, refs: Sequence[ImageRef]) -> tuple[int, int]:
    """How many of some images a job would take from the base, and how many of these without reading their source."""
    base = _base_of(config)
    if base is None:
        return 0, 0
    is_listed = _are_listed(config)
    try:
        matches = base.find(refs, is_listed)
    except Exception:
        return 0, 0  # the job would go on without it
    same = [ref for ref, match in zip(refs, matches, strict=True) if match is not None and match.may_be_same]
    return len(same), sum(is_listed and ref.md5 is not None for ref in same)


def _are_listed(config: Config) -> bool:
    """True if MD5s come from the store; a manifest's are unverified."""
    return not (config.layout == "manifest" and "md5" in config.header)


def reused_from_base(config: Config, counts: Counts) -> ReusedImages | UnsetType:
    """What run.json says of the base, if there is one, by the counts over all images of the new version."""
    if not config.context.base_sha256:
        return UNSET
    base = _base_of(config)
    removed = UNSET if base is None or base.is_lost else base.records - counts.matched
    return ReusedImages(config.base, config.context.base_sha256, counts.records - counts.reused, counts.reused, removed)


def _say_lost(version: str, error: Exception) -> None:
    """Whatever the error is: it may be sealed and yet hold what no job writes."""
    why = error.reason if isinstance(error, StorageError) else f"it holds what no job writes ({one_line(error)})"
    print_line(f"warning: continuing without base {version}: {why}", sys.stderr)


def _base_of(config: Config) -> _Base | None:
    """The base that the launcher chose; None if there is none, or it is gone."""
    sha256, url = config.context.base_sha256, join(join(config.output, config.name), config.base)
    return _open_base(url, sha256, config.io_deadline) if sha256 else None


@functools.lru_cache(maxsize=1)
def _open_base(url: str, sha256: str, deadline_s: float) -> _Base | None:
    """The base that the launcher chose; None if it is gone."""
    try:
        manifest = published_manifest(url, deadline_s)
        if not manifest or manifest.self_sha256 != sha256:
            return None
        return _Base(url, storage.open_storage(url, deadline_s), manifest)
    except Exception as error:
        _say_lost(url.rpartition("/")[2], error)
        return None


class _Base:
    """A base as a worker process has it.

    Attributes:
        records: how many it has.
        is_lost: after a storage error.
    """

    def __init__(self, url: str, store: Storage, manifest: Content) -> None:
        self._url, self._store, self._shards = url, store, manifest.shards
        self._cuts = {name: np.array(split.keys, np.uint64) for name, split in manifest.plan.splits.items()}
        self.records, self.is_lost = manifest.records, False
        self._table = functools.lru_cache(maxsize=_TABLES)(self._read_table)

    def stored(self, refs: Sequence[ImageRef], is_listed: bool) -> Iterator[Stored | None]:
        """What this version has of each image; `is_listed`: their MD5s come from a listing."""
        matches = self.find(refs, is_listed)
        for match in matches:
            if match is not None and match.may_be_same:
                match.shard.last_row = max(match.shard.last_row, match.row)
        for ref, match in zip(refs, matches, strict=True):
            if match is None:
                yield None
                continue
            image = match.shard.image(match.row, ref.path) if match.may_be_same else None
            yield Stored(match.md5, image, image is not None and match.is_known)

    def find(self, refs: Sequence[ImageRef], is_listed: bool) -> list[_Match | None]:
        """Look up each reference by its path, in any split; arguments as of `stored`."""
        keys = np.array([ref.order_key for ref in refs], np.uint64)
        names = np.array([table.name_hash(ref.path) for ref in refs], np.uint64)
        matches: list[_Match | None] = [None] * len(refs)
        for split, cuts in self._cuts.items():
            numbers = np.searchsorted(cuts, keys, side="right")
            for number in np.unique(numbers).tolist():
                columns = self._table(split, number)
                if columns is None:
                    continue
                shard = _Shard(self._store, join(self._url, self._shards[split, number].file), columns)
                indices = np.flatnonzero(numbers == number)
                _, at, rows = np.intersect1d(names[indices], columns["name"], return_indices=True)
                sizes, md5s = columns["source_bytes"][rows].tolist(), columns["source_md5"][rows]
                for index, row, size, md5 in zip(indices[at].tolist(), rows.tolist(), sizes, md5s, strict=True):
                    ref, then = refs[index], md5.tobytes()
                    now = ref.md5 if is_listed else None
                    may_be_same = size == ref.source_bytes and now in (None, then)
                    matches[index] = _Match(shard, row, then, may_be_same, now is not None)
        return matches

    def _read_table(self, split: str, number: int) -> Table | None:
        """The record table of a shard; None if it isn't what was published."""
        shard = self._shards[split, number]
        try:
            data = self._store.read(join(self._url, schema.table_file(shard.file)))
        except FileNotFoundError:
            return None
        if schema.sha256(data) != shard.table.sha256:
            return None
        columns = table.read_table(data)
        if (len(columns["bytes"]), columns["bytes"].sum()) != (shard.records, shard.bytes):
            raise ValueError(f"a record table that isn't that of {shard.file}")
        return columns


class _Shard:
    """The records of a base shard, of which some are read in rising order, a piece at a time.

    Attributes:
        last_row: no record behind it is needed.
    """

    def __init__(self, store: Storage, url: str, columns: Table) -> None:
        self._store, self._url, self._columns = store, url, columns
        self._ends = np.cumsum(columns["bytes"], dtype=np.int64)
        self.last_row = 0
        self._start, self._piece = 0, b""

    def image(self, row: int, path: str) -> EncodedImage | None:
        """The image in a row; None if its record is corrupt."""
        columns, stop = self._columns, int(self._ends[row])
        start = stop - int(columns["bytes"][row])
        if stop > self._start + len(self._piece):
            end = min(start + _PIECE_BYTES, int(self._ends[self.last_row]))
            self._start, self._piece = start, self._store.read(self._url, start, max(stop, end))
        try:
            (record,) = schema.unframe(self._piece[start - self._start : stop - self._start])
            features = example.features_of(record)
            if features[schema.FILENAME_KEY] != example.bytes_feature(schema.relative_path_bytes(path)):
                return None
            height, width = map(int, example.numbers_of(features[schema.SIZE_KEY]))
            data = example.bytes_of(features[schema.IMAGE_KEY])
        except (CorruptRecordError, LookupError, ValueError):
            return None
        names = ("source_format", "source_height", "source_width", "passthrough", "source_bytes")
        image_format, source_height, source_width, way, source_bytes = (int(columns[name][row]) for name in names)
        passthrough = table.PASSTHROUGH[way - 1] if way else None
        if not all(0 < side < 1 << 31 for side in (height, width, source_height, source_width)):
            raise ValueError(f"an image of {source_height} x {source_width} pixels, stored as {height} x {width}")
        has_its_size, has_its_bytes = (height, width) == (source_height, source_width), len(data) == source_bytes
        if passthrough and not (has_its_size and has_its_bytes == (passthrough == "whole")):
            return None
        source = SourceInfo(table.SOURCE_FORMATS[image_format], source_height, source_width)
        return EncodedImage(data, height, width, source, passthrough)


class _Match(NamedTuple):
    """An image of the base.

    Attributes:
        shard, row: which.
        md5: of the source that was converted then.
        may_be_same: by size and listed MD5 the source is that of today.
        is_known: today's MD5 is listed, so the source needn't be read.
    """

    shard: _Shard
    row: int
    md5: bytes
    may_be_same: bool
    is_known: bool
