"""What was read once, kept near: in memory or on the local disk. Runs stay undecoded, as they are in their shards.

- None costs nothing: for local disks, whose files the operating system keeps in memory as far as there is room.
- `memory` costs the split's bytes in RAM on every host, since each epoch deals other runs to it: for remote storage.
- DIR costs as much disk, and a write for each run when it is first read: for remote storage and splits larger than
  memory, or several jobs on one machine.

Decoded pixels are never kept: at 224×224 they are ten times as large as their JPEGs, and augmentation needs them anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import google_crc32c

from beam_pipeline import schema
from beam_pipeline.errors import StorageError, UsageError
from reader.storage import LocalStorage, chunks

if TYPE_CHECKING:
    from reader.info import DatasetInfo

_LOG = logging.getLogger("reader")
_MARKER = ".imageshards-cache"  # says whose cache a folder is


class RunCache(Protocol):
    """What keeps runs by their place."""

    def get(self, path: str, start: int, stop: int) -> bytes | None:
        """Bytes [start, stop) of a shard, None where they aren't here; whoever reads them checks the records' CRCs."""

    def put(self, path: str, start: int, data: bytes) -> None:
        """Keep bytes of a shard from offset `start` on: one whole run."""


class MemoryCache:
    """Keeps runs in this process' memory."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, int, int], bytes] = {}

    def get(self, path: str, start: int, stop: int) -> bytes | None:
        return self._runs.get((path, start, stop))

    def put(self, path: str, start: int, data: bytes) -> None:
        self._runs[path, start, start + len(data)] = data


class DiskCache:
    """Keeps shards in a local folder: each a sparse file that fills as its runs are read.

    `SHARD.part` holds the runs read so far, `SHARD.have` a line of their bounds for each; both outlive the process, and
    several processes may share the folder. When a shard is whole, its CRC-32C is compared with the manifest's and it
    gets its name; if it differs, it begins anew. Records' own CRCs are checked at every reading all the same. A folder
    that `python -m reader copy` made is a full cache.

    Args:
        folder: local; made where it is missing.
        identity: of the dataset, its manifest's `self_sha256`.
        shards: full path of each shard → (name in the folder, bytes, CRC-32C).

    Raises:
        UsageError: the folder holds another dataset, or isn't local.
    """

    def __init__(self, folder: str, identity: str, shards: dict[str, tuple[str, int, int]]) -> None:
        if "://" in folder:
            raise UsageError(f"cache={folder!r}: give a local folder, 'memory' or None")
        self._folder = Path(folder).expanduser().absolute()
        self._shards = shards
        self._have: dict[str, set[tuple[int, int]]] = {}
        self._whole: set[str] = set()
        self._lock = threading.Lock()
        self._is_full = False
        _claim(self._folder, identity)

    def get(self, path: str, start: int, stop: int) -> bytes | None:
        name, size, _ = self._shards[path]
        if self._is_whole(name, size):
            return self._read(name, start, stop)
        with self._lock:
            here = (start, stop) in self._ranges(name)
        return self._read(f"{name}.part", start, stop) if here else None

    def put(self, path: str, start: int, data: bytes) -> None:
        name, size, crc32c = self._shards[path]
        if self._is_whole(name, size):
            return
        stop = start + len(data)
        part, have = self._file(f"{name}.part"), self._file(f"{name}.have")
        with self._lock:
            if self._is_full:
                return
            try:
                part.parent.mkdir(parents=True, exist_ok=True)
                _write_at(part, start, data)
                with have.open("a", encoding="ascii") as file:  # after the data: a line is a promise
                    file.write(f"{start} {stop}\n")
            except OSError as error:
                self._is_full = True
                _LOG.warning("%s takes no more (%s): reading goes on without it", self._folder, error.strerror)
                return
            ranges = self._ranges(name)
            ranges.add((start, stop))
            if sum(last - first for first, last in ranges) >= size:
                self._finish(name, size, crc32c)

    def _finish(self, name: str, size: int, crc32c: int) -> None:
        """Give a shard that is complete its name, if it is right."""
        part = self._file(f"{name}.part")
        found = 0
        with contextlib.suppress(StorageError):  # another process has finished it
            for chunk in chunks(LocalStorage(), str(part), size):
                found = google_crc32c.extend(found, chunk)
            if found == crc32c:
                os.replace(part, self._file(name))
            else:
                _LOG.warning("%s isn't what the manifest says: it is read again", part)
                part.unlink(missing_ok=True)
            self._file(f"{name}.have").unlink(missing_ok=True)
        self._have.pop(name, None)

    def _is_whole(self, name: str, size: int) -> bool:
        if name not in self._whole:
            with contextlib.suppress(OSError):
                if self._file(name).stat().st_size == size:
                    self._whole.add(name)
        return name in self._whole

    def _ranges(self, name: str) -> set[tuple[int, int]]:
        """The runs of a shard that are here."""
        if name not in self._have:
            self._have[name] = set()
            with contextlib.suppress(OSError):
                for line in self._file(f"{name}.have").read_text("ascii").splitlines():
                    bounds = line.split()
                    if len(bounds) == 2 and all(map(str.isdigit, bounds)):  # the last line may be cut
                        self._have[name].add((int(bounds[0]), int(bounds[1])))
        return self._have[name]

    def _read(self, name: str, start: int, stop: int) -> bytes | None:
        """Bytes of a file of the folder, None where somebody took them away."""
        with contextlib.suppress(StorageError):
            data = LocalStorage().read(str(self._file(name)), start, stop)
            return data if len(data) == stop - start else None
        return None

    def _file(self, name: str) -> Path:
        return self._folder / name


def open_cache(info: DatasetInfo, cache: str | RunCache | None) -> RunCache | None:
    """The cache that a dataset's `cache` argument names: None, `memory`, or a local folder.

    Raises:
        UsageError: the folder holds another dataset, or isn't local.
    """
    if cache is None or not isinstance(cache, str):
        return cache
    if cache == "memory":
        return MemoryCache()
    shards = {
        info.path(shard.file): (shard.file if info.path(shard.file) != shard.file else _name(shard.file), shard)
        for split in info.splits.values()
        for shard in split.shards
    }
    return DiskCache(
        cache,
        info.manifest["self_sha256"],
        {path: (name, shard.bytes, shard.crc32c) for path, (name, shard) in shards.items()},
    )


def _name(url: str) -> str:
    """A file name for a shard that lies anywhere."""
    return f"{schema.sha256(url.encode())[:8]}-{url.rpartition('/')[2]}"


def _claim(folder: Path, identity: str) -> None:
    """Make `folder` this dataset's, unless it is another's."""
    marker = folder / _MARKER
    try:
        if marker.exists():
            found = marker.read_text("ascii", "replace").strip()
        elif (folder / schema.MANIFEST_FILE).exists():  # a copy
            found = schema.open_manifest((folder / schema.MANIFEST_FILE).read_bytes(), str(folder))["self_sha256"]
        else:
            folder.mkdir(parents=True, exist_ok=True)
            marker.write_text(f"{identity}\n", "ascii")
            return
    except OSError as error:
        raise UsageError(f"cache={str(folder)!r}: {error.strerror}; give a folder that can be written") from None
    if found != identity:
        raise UsageError(f"cache={str(folder)!r}: it holds another dataset; give each dataset its own folder")


def _write_at(path: Path, start: int, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, start)
            view, start = view[written:], start + written
    finally:
        os.close(descriptor)
