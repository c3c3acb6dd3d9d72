"""Runs that were read once, kept undecoded in memory or on the local disk.

`memory` costs the split's bytes on every host until the process ends, once for all readers of the same version. DIR
costs as much disk, and several jobs may share it; a local copy of the dataset is full already.

The reader checks the CRC of every cached record, and reads a run with a corrupt one from the source again. A cache
therefore needs no metadata, and recovers by itself from what a crash or another process corrupted.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from beam_pipeline import schema, storage
from beam_pipeline.errors import UsageError
from beam_pipeline.machine import free_memory_bytes
from beam_pipeline.schema.manifest import parse_manifest
from beam_pipeline.text import first_few, size_text
from reader.runs import RunCache, RunTable

if TYPE_CHECKING:
    from reader.info import DatasetInfo

Cache = str | os.PathLike[str] | None

_LOG = logging.getLogger("reader")

# Left free on the disk and in memory: for the job itself, its checkpoints and other programs.
RESERVE_BYTES = 1 << 30
_FOLDER = re.compile(rf"{schema.NAME_PATTERN.pattern}-{schema.VERSION_PATTERN.pattern}-[0-9a-f]{{16}}")


class MemoryCache:
    """Keeps runs in this process' memory."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, int, int], bytes] = {}

    def get(self, path: str, start: int, stop: int) -> bytes | None:
        return self._runs.get((path, start, stop))

    def put(self, path: str, start: int, data: bytes) -> None:
        self._runs[path, start, start + len(data)] = data

    def held_bytes(self, paths: set[str]) -> int:
        """Cached bytes of these shards."""
        return sum(len(data) for (path, _, _), data in list(self._runs.items()) if path in paths)


class DiskCache:
    """Keeps shards in a local folder: each a sparse file that fills as its runs are read; processes may share it.

    A run that isn't cached yet reads as zeros, which no record begins with: the CRC of a length of 0 isn't 0.

    Args:
        folder: of the files; it exists.
        names: full path of each shard → its file's name in the folder.
    """

    def __init__(self, folder: Path, names: Mapping[str, str]) -> None:
        self._folder, self._names, self._is_full = folder, names, False
        self._lock = threading.Lock()

    def get(self, path: str, start: int, stop: int) -> bytes | None:
        try:
            with open(self._file(path), "rb", 0, opener=lambda at, how: os.open(at, how | os.O_NONBLOCK)) as file:
                data = os.pread(file.fileno(), stop - start, start)
        except OSError:
            return None
        return data if any(data[: schema.FRAME_HEADER_BYTES]) else None

    def put(self, path: str, start: int, data: bytes) -> None:
        if self._is_full:
            return
        try:
            if shutil.disk_usage(self._folder).free < RESERVE_BYTES + len(data):
                raise OSError(errno.ENOSPC, f"less than {size_text(RESERVE_BYTES)} of the disk would be left")
            self._file(path).parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self._file(path), os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644), "wb") as file:
                file.seek(start)
                file.write(data)
        except OSError as error:
            with self._lock:
                was_full, self._is_full = self._is_full, True
            if not was_full:
                _LOG.warning("%s takes no more (%s): the rest is read again each epoch", self._folder, error.strerror)

    def _file(self, path: str) -> Path:
        return self._folder / self._names[path]


def cache_name(cache: str | os.PathLike[str]) -> str:
    """`memory` or a local folder, as a `cache` argument names it. Raises UsageError if it is neither."""
    if not isinstance(cache, str | os.PathLike) or not os.fspath(cache) or "://" in os.fspath(cache):
        raise UsageError(f"cache={cache!r}: give a local folder, 'memory' or None")
    return os.fspath(cache)


def open_cache(info: DatasetInfo, table: RunTable, cache: str | os.PathLike[str] | None) -> RunCache | None:
    """The cache that a builder's `cache` argument names.

    Args:
        info: the dataset.
        table: the records to read.
        cache: None, `memory`, or a local folder: new, used for caches before, or a copy of the dataset.

    Raises:
        UsageError: the folder isn't local, holds something else or can't be written; memory is too small.
    """
    if cache is None:
        return None
    cache = cache_name(cache)
    if cache == "memory":
        memory, free = _memory_cache(info.manifest["self_sha256"]), free_memory_bytes()
        missing = table.read_bytes - memory.held_bytes(set(table.files))
        if free is not None and missing > max(0, free - RESERVE_BYTES):
            raise UsageError(
                f"cache={cache!r}: {size_text(missing)} of records are to be kept and {size_text(free)} of memory are "
                "free; give a local folder instead"
            )
        return memory
    try:
        folder = _folder(info, cache)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cache={cache!r}: {error.strerror or error}; give a folder that can be written") from None
    return DiskCache(folder, _names(info))


@functools.cache
def _memory_cache(identity: str) -> MemoryCache:
    """One for each version of a dataset."""
    return MemoryCache()


def _folder(info: DatasetInfo, cache: str) -> Path:
    """The folder of the cached shards: one for each version, except in a copy of the dataset."""
    folder = Path(cache).expanduser().absolute()
    names = sorted(os.listdir(folder)) if folder.exists() else []
    identity = info.manifest["self_sha256"]
    if schema.MANIFEST_FILE in names:
        manifest = str(folder / schema.MANIFEST_FILE)
        if parse_manifest(storage.open_storage(manifest).read(manifest), manifest)[1].self_sha256 != identity:
            raise UsageError(f"cache={cache!r}: it holds another dataset; give a folder for caches")
        return folder
    others = [name for name in names if not _FOLDER.fullmatch(name)]
    if others:
        new = f"{cache.rstrip('/')}/cache"
        raise UsageError(
            f"cache={cache!r}: it holds other files ({first_few(others)}); give a folder for caches, such as {new}"
        )
    return folder / f"{info.name}-{info.version}-{identity[:16]}"


def _names(info: DatasetInfo) -> dict[str, str]:
    """Full path of each shard → its file's name in a cache: its own, or a new one if it is outside the dataset."""
    files = [shard.file for split in info.splits.values() for shard in split.shards]
    made = {file: f"{schema.sha256(file.encode())[:8]}-{file.rpartition('/')[2]}" for file in files}
    return {info.path(file): made[file] if info.path(file) == file else file for file in files}
