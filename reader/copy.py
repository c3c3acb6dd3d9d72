"""`copy`: a whole dataset from anywhere into a local folder, every file checked, the manifest last.

What a copy left when it was stopped is kept: whole files are checked and not fetched again, a part of a file goes on
where it ends. `train_dataset(…, cache=DIR)` takes such a folder for its cache.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import google_crc32c

from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, StorageError, UsageError
from reader.info import DatasetInfo
from reader.picking import check_shards
from reader.storage import CHUNK_BYTES, LocalStorage, Storage, chunks, normalize

# Files under way at once: with requests of 8 MiB, eight hide 50 ms of latency at 1 GB/s.
_FILES_AT_ONCE = 8
_PART = ".copying"


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy did.

    Attributes:
        files, bytes: in the dataset.
        kept: how many files were there, whole, already.
        folder: where the dataset now lies.
    """

    files: int
    bytes: int
    kept: int
    folder: str


class _Sum(Protocol):
    """A checksum that is fed part by part."""

    def update(self, data: bytes) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The sum of all of them."""


class _Crc32c:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes) -> None:
        self._value = google_crc32c.extend(self._value, data)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class _File(NamedTuple):
    """One file to copy: from where, how long, and what its checksum has to be (None: nobody knows)."""

    source: str
    storage: Storage
    bytes: int
    new_sum: Callable[[], _Sum]
    expected: str | None


def copy_dataset(info: DatasetInfo, folder: str, threads: int = _FILES_AT_ONCE) -> Copied:
    """Copy every file of a dataset, or what is missing of it.

    Args:
        info: from `load_info`. An index of foreign files is copied with these files.
        folder: local; new, empty, or one that a copy of the same dataset was begun in.
        threads: files fetched at once.

    Raises:
        UsageError: the folder holds something else.
        ImageShardsError: a file isn't what the manifest says, also when fetched again.
        StorageError: a file can't be read, or the disk is full.
    """
    target = Path(_local(folder))
    manifest, names = _manifest_there(info)
    files = _files(info, names)
    _check_folder(target, manifest, files)
    with ThreadPoolExecutor(threads, "reader-copy") as executor:
        try:
            kept = sum(executor.map(lambda item: _copy_file(item[1], target / item[0]), files.items()))
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise
    path = target / schema.MANIFEST_FILE
    if path.exists():  # and is the same, or `_check_folder` had raised
        kept += 1
    else:
        _replace(path, manifest)
    total = sum(file.bytes for file in files.values()) + len(manifest)
    return Copied(len(files) + 1, total, kept, str(target))


def _local(folder: str) -> str:
    if "://" in folder and not folder.startswith("file://"):
        raise UsageError(f"{folder}: a copy goes to a local folder; give a path")
    return normalize(folder)


def _manifest_there(info: DatasetInfo) -> tuple[bytes, dict[str, str]]:
    """The copy's manifest, and shard as the dataset names it → file name in the copy (another one only if foreign)."""
    shards = [shard.file for split in info.splits.values() for shard in split.shards]
    names = {file: file for file in shards}
    foreign = [file for file in shards if info.path(file) == file]
    if not foreign:
        return schema.seal_manifest(info.manifest), names
    for number, file in enumerate(foreign):
        names[file] = f"shards/{number:05d}-{file.rpartition('/')[2]}"
    splits = {
        name: {**split, "shards": [{**shard, "file": names[shard["file"]]} for shard in split["shards"]]}
        for name, split in info.manifest["splits"].items()
    }
    return schema.seal_manifest({**info.manifest, "splits": splits}), names


def _check_folder(target: Path, manifest: bytes, files: Mapping[str, _File]) -> None:
    """Raise UsageError if something else lies there; what a copy or a cache of the dataset began is fine."""
    if not target.exists():
        return
    if not target.is_dir():
        raise UsageError(f"{target}: it is a file; choose a folder")
    path = target / schema.MANIFEST_FILE
    if path.exists() and path.read_bytes() != manifest:
        raise UsageError(f"{target}: another dataset lies there; choose an empty folder")
    ours = {file.split("/")[0] for file in (*files, schema.MANIFEST_FILE)}
    others = [
        entry.name
        for entry in target.iterdir()
        if not entry.name.startswith(".")
        and entry.name.removesuffix(entry.suffix) not in ours
        and entry.name not in ours
    ]
    if others:
        raise UsageError(f"{target}: {min(others)!r} lies there, which isn't the dataset's; choose an empty folder")


def _files(info: DatasetInfo, names: Mapping[str, str]) -> dict[str, _File]:
    """Path in the copy → file, of everything but the manifest."""
    for split in info.splits.values():
        if split.records:
            check_shards(info, split.name)
    published = info.manifest["files"]
    files = {
        names[shard.file]: _File(info.path(shard.file), info.shard_storage, shard.bytes, _Crc32c, f"{shard.crc32c:08x}")
        for split in info.splits.values()
        for shard in split.shards
    }
    sizes = dict(info.storage.files(info.url))
    for path in (*published, *sorted(schema.UNHASHED_FILES & set(sizes))):
        if path not in sizes:
            raise StorageError(f"{info.path(path)} is missing: run the job again with --repair")
        files[path] = _File(info.path(path), info.storage, sizes[path], hashlib.sha256, published.get(path))
    return files


def _copy_file(file: _File, target: Path) -> bool:
    """Bring one file over; whether it was there already."""
    there = _sum_of(target, file) if target.exists() and target.stat().st_size == file.bytes else None
    if there is not None and there == file.expected:
        return True
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + _PART)
    for _ in range(2):  # what an earlier copy left may be damaged: then once more from the beginning
        with _disk(part):
            digest = _fetch(file, part)
            if file.expected in (None, digest):
                os.replace(part, target)
                return digest == there
            part.unlink()
    raise ImageShardsError(
        f"{file.source} isn't the file that was published: its checksum is {digest}, the manifest has {file.expected}; "
        "run the job again with --repair"
    )


def _fetch(file: _File, part: Path) -> str:
    """Append what `part` lacks; returns the checksum of all of it."""
    digest = file.new_sum()
    with open(part, "ab") as output:
        start = min(output.tell(), file.bytes)
        output.truncate(start)
        for chunk in chunks(LocalStorage(), str(part), start):
            digest.update(chunk)
        for begin in range(start, file.bytes, CHUNK_BYTES):
            chunk = file.storage.read(file.source, begin, min(begin + CHUNK_BYTES, file.bytes))
            digest.update(chunk)
            output.write(chunk)
        output.flush()
        os.fsync(output.fileno())
    return digest.hexdigest()


def _sum_of(path: Path, file: _File) -> str:
    digest = file.new_sum()
    for chunk in chunks(LocalStorage(), str(path), file.bytes):
        digest.update(chunk)
    return digest.hexdigest()


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + _PART)
    with _disk(part):
        part.write_bytes(data)
        os.replace(part, path)


class _disk:
    """Turns what a full or broken disk raises into a StorageError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise StorageError(f"{self._path}: {error.strerror or error}") from error
