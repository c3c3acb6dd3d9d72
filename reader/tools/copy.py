"""`copy`: a complete dataset from anywhere into a local folder, every file checked, the manifest last.

What a copy left when it was stopped is kept: complete files are checked and not fetched again. A builder's `cache=DIR`
takes such a folder for its cache.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c

from beam_pipeline import schema, storage
from beam_pipeline.errors import ImageShardsError, StorageError, UsageError
from beam_pipeline.schema.manifest import seal_manifest
from beam_pipeline.text import plural
from reader.info import DatasetInfo, as_info

_FILES_AT_ONCE = 8  # with requests of 16 MiB, eight hide 50 ms of latency at 1 GB/s
_PART = ".copying"


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What a copy did.

    Attributes:
        files, bytes: in the dataset.
        kept: how many of the files were there already, and valid.
        folder: where the dataset is now.
    """

    files: int
    bytes: int
    kept: int
    folder: str


class _File(NamedTuple):
    """One file to copy; `expected` is its checksum, None if nobody knows it."""

    source: str
    size: int
    new_sum: Callable[[], Any]
    expected: bytes | None


def copy(url: DatasetInfo | str | os.PathLike[str], dir: str | os.PathLike[str]) -> CopyResult:
    """Copy every file of a dataset, or what is missing of it.

    Args:
        url: folder or URL of one version. An index of third-party files is copied with these files.
        dir: local; new, empty, or one that a copy of the same dataset was begun in.

    Raises:
        UsageError: the folder holds something else.
        ImageShardsError: a file isn't what the manifest says.
        StorageError: a file can't be read, or the disk is full.
    """
    info, folder = as_info(url), os.fspath(dir)
    if not storage.is_local(folder):
        raise UsageError(f"{folder}: a copy goes to a local folder; give a path")
    target = Path(storage.normalize(folder))
    manifest, names = _copied_manifest(info)
    files = _files(info, names)
    _check_folder(target, manifest, files)
    executor = ThreadPoolExecutor(_FILES_AT_ONCE, "reader-copy")
    try:
        kept = sum(executor.map(_copy_file, files.values(), map(target.joinpath, files)))
    finally:
        executor.shutdown(cancel_futures=True)
    path = target / schema.MANIFEST_FILE
    if path.exists():  # and is the same, or `_check_folder` had raised
        kept += 1
    else:
        storage.open_storage(str(path)).write(str(path), manifest)
    total = sum(file.size for file in files.values()) + len(manifest)
    return CopyResult(len(files) + 1, total, kept, str(target))


def _copied_manifest(info: DatasetInfo) -> tuple[bytes, dict[str, str]]:
    """The copy's manifest, and shard as the dataset names it → its path in the copy (another one only if foreign)."""
    shards = [shard.file for split in info.splits.values() for shard in split.shards]
    foreign = [file for file in shards if info.path(file) == file]
    moved = {file: f"shards/{number:05d}-{file.rpartition('/')[2]}" for number, file in enumerate(foreign)}
    names = {file: moved.get(file, file) for file in shards}
    splits = {
        name: {**split, "shards": [{**shard, "file": names[shard["file"]]} for shard in split["shards"]]}
        for name, split in info.manifest["splits"].items()
    }
    return seal_manifest({**info.manifest, "splits": splits}), names


def checked_sizes(info: DatasetInfo) -> dict[str, int]:
    """Path → bytes of a dataset's files. Raises ImageShardsError if one is missing or has another size."""
    sizes = {file.path: file.bytes for file in info.storage.files(info.url)}
    published = info.manifest.get("file_sizes", {}) | {file: {"bytes": one.bytes} for file, one in info.tables.items()}
    wrong = [line for split in info.splits.values() if split.records for line in info.wrong_sizes(split.name)]
    files = info.manifest["files"].keys() | info.tables.keys()
    wrong += [f"{info.path(file)} is missing" for file in sorted(files) if file not in sizes]
    for file in sorted(published.keys() & sizes.keys()):
        if sizes[file] != published[file]["bytes"]:
            says = f"has {sizes[file]} bytes, the manifest says {published[file]['bytes']}"
            wrong.append(f"{info.path(file)} {says}")
    if wrong:
        more = f" (and {plural(len(wrong) - 1, 'more file')})" if len(wrong) > 1 else ""
        raise ImageShardsError(f"{wrong[0]}{more}: run the job again with --repair")
    return sizes


def _files(info: DatasetInfo, names: Mapping[str, str]) -> dict[str, _File]:
    """Path in the copy → file, of everything but the manifest."""
    sizes, published = checked_sizes(info), info.manifest["files"]
    files = {}
    for shard in (shard for split in info.splits.values() for shard in split.shards):
        crc32c = shard.crc32c.to_bytes(4, "big")
        files[names[shard.file]] = _File(info.path(shard.file), shard.bytes, google_crc32c.Checksum, crc32c)
        path, expected = info.path(schema.table_file(shard.file)), bytes.fromhex(shard.table.sha256)
        files[schema.table_file(names[shard.file])] = _File(path, shard.table.bytes, hashlib.sha256, expected)
    for path in (*published, *sorted(schema.UNHASHED_FILES & set(sizes))):
        sha256 = bytes.fromhex(published[path]) if path in published else None
        files[path] = _File(info.path(path), sizes[path], hashlib.sha256, sha256)
    return files


def _check_folder(target: Path, manifest: bytes, files: Mapping[str, _File]) -> None:
    """Raise UsageError if it holds something else; what a copy or a cache of the dataset began is fine."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: it is a file; choose a folder")
    path = target / schema.MANIFEST_FILE
    if path.exists() and path.read_bytes() != manifest:
        raise UsageError(f"{target}: it holds another dataset; choose an empty folder")
    ours = {file.split("/")[0] for file in (*files, schema.MANIFEST_FILE)}
    there = {path.name for path in target.glob("[!.]*")}
    if others := [name for name in there if not {name, name.removesuffix(_PART)} & ours]:
        raise UsageError(f"{target}: {min(others)!r} isn't the dataset's; choose an empty folder")
    folders = {target / folder for file in files for folder in Path(file).parents if folder.name}
    if links := [folder for folder in folders if folder.is_symlink()]:
        raise UsageError(f"{min(links)}: it is a link to another folder; delete it")


def _copy_file(file: _File, target: Path) -> bool:
    """Copy one file; returns whether it was there already."""
    part = target.with_name(target.name + _PART)
    try:
        has_size = target.exists() and target.stat().st_size == file.size
        if has_size and file.expected in (None, _digest(file, storage.open_storage(str(target)), str(target))):
            return True
        target.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # if somebody has put a link there, the file it leads to isn't ours
        with part.open("xb") as output:
            digest = _digest(file, storage.open_storage(file.source), file.source, output.write)
            output.flush()
            os.fsync(output.fileno())
        if file.expected in (None, digest):
            os.replace(part, target)
            return False
        part.unlink()
    except StorageError:
        raise
    except OSError as error:  # a full or broken disk
        raise StorageError(f"{target}: {error.strerror or error}") from error
    raise ImageShardsError(
        f"{file.source} isn't the file that was published: its checksum is {digest.hex()}, the manifest has "
        f"{(file.expected or b'').hex()}; run the job again with --repair"
    )


def _digest(
    file: _File, store: storage.Storage, url: str, write: Callable[[bytes], object] = lambda piece: None
) -> bytes:
    """The checksum of a file that is read piece by piece; each piece is written as well."""
    digest = file.new_sum()
    for piece in storage.pieces(store, url, file.size):
        digest.update(piece)
        write(piece)
    return bytes(digest.digest())


def dataset_hash(url: DatasetInfo | str | os.PathLike[str]) -> str:
    """SHA-256 of a version as 64 hexadecimal digits; reads every byte, a piece at a time.

    Over the manifest and each file in its folder that the manifest names, in order of the relative path as UTF-8: path,
    NUL, size in decimal, NUL, content. Raises StorageError.
    """
    info, digest = as_info(url), hashlib.sha256()
    shards = {shard.file for split in info.splits.values() for shard in split.shards}
    named = {schema.MANIFEST_FILE, *info.manifest["files"], *info.tables, *shards}
    files = {schema.relative_path_bytes(file.path): file for file in info.storage.files(info.url) if file.path in named}
    for path, file in sorted(files.items()):
        digest.update(path + b"\0" + str(file.bytes).encode() + b"\0")
        for piece in storage.pieces(info.storage, info.path(file.path), file.bytes):
            digest.update(piece)
    return digest.hexdigest()
