"""Reading bytes of local files and of any fsspec URL: ranges, listings, globs.

A range read is one request; `remote` says what URLs add. A local failure is final. Nothing here writes.
"""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

from beam_pipeline.errors import StorageError
from reader.retries import unless_missing

Range = tuple[str, int, int]  # file, first byte, byte behind the last

CHUNK_BYTES = 8 << 20  # of sequential reading: 50 ms of request latency are lost in its transfer time
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


class Storage(Protocol):
    """What the reader needs of a place that holds files; paths are whole local paths or URLs."""

    #: Whether a request is slow enough that several should be under way at once.
    is_remote: bool
    #: How many ranges `read_into` asks for before it awaits the first.
    ranges_at_once: int = 1

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, fewer where it ends before. Raises StorageError, also where it is missing."""

    def read_into(self, ranges: Sequence[Range], parts: Sequence[memoryview]) -> list[int | None]:
        """Fill each part with the bytes of its range, which has its length.

        Returns:
            How many bytes each got, fewer where its file ends before; None where the file is missing.

        Raises:
            StorageError: a file can't be read.
        """
        received: list[int | None] = []
        for one, part in zip(ranges, parts, strict=True):
            data = unless_missing(partial(self.read, *one))
            if data is not None:
                part[: len(data)] = data
            received.append(None if data is None else len(data))
        return received

    def size(self, path: str) -> int:
        """Bytes of a file. Raises StorageError, also where it is missing."""

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """Bytes of each of some files, None where there is none; remote, a listing of their folders."""

    def names(self, folder: str) -> list[str]:
        """What lies right inside a folder, sorted, folders with a slash at the end; [] where there is no folder."""

    def files(self, folder: str) -> list[tuple[str, int]]:
        """(relative path, bytes) of every file below a folder, sorted by path as UTF-8; [] where there is no folder."""

    def glob(self, pattern: str) -> list[str]:
        """Files that match `*`, `?` and `[…]`, sorted."""


def open_storage(url: str) -> Storage:
    """The storage that holds `url`, a local path or `scheme://…`.

    Raises:
        StorageError: no such protocol, or its fsspec package isn't installed.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme == "file":
        return LocalStorage()
    from reader.remote import open_remote  # which needs this module

    return open_remote(scheme.lower())


def normalize(url: str) -> str:
    """A folder as a user writes it, without `file://` and a slash at the end; local paths become absolute."""
    if "://" in url and not url.startswith("file://"):
        return url.rstrip("/")
    return os.path.abspath(os.path.expanduser(url.removeprefix("file://")))


def chunks(storage: Storage, path: str, size: int, offset: int = 0) -> Iterator[bytes]:
    """Bytes [offset, size) of a file in chunks of `CHUNK_BYTES`, less where it ends before."""
    for start in range(offset, size, CHUNK_BYTES):
        yield storage.read(path, start, min(start + CHUNK_BYTES, size))


class LocalStorage(Storage):
    """Files of this machine. Each read opens its file: 10 µs, a run takes 200, and no descriptors to run out of."""

    is_remote = False

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        with _naming(path), open(path, "rb", buffering=0) as file:
            length = (os.fstat(file.fileno()).st_size if stop is None else stop) - start
            parts = []
            while length > 0 and (part := os.pread(file.fileno(), length, start)):
                parts.append(part)
                start, length = start + len(part), length - len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def size(self, path: str) -> int:
        with _naming(path):
            return os.stat(path).st_size

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        return [_size(path) for path in paths]

    def names(self, folder: str) -> list[str]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entry.name + "/" * _is_folder(entry) for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self, folder: str) -> list[tuple[str, int]]:
        found = []
        for parent, _, names in os.walk(folder):
            for name in names:
                path = os.path.join(parent, name)
                if (size := _size(path)) is not None:
                    found.append((os.path.relpath(path, folder).replace(os.sep, "/"), size))
        return sorted(found, key=lambda file: os.fsencode(file[0]))

    def glob(self, pattern: str) -> list[str]:
        return sorted(path for path in glob.glob(normalize(pattern), recursive=True) if os.path.isfile(path))


class _naming:
    """Turns an OSError into a StorageError that names the file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise StorageError(f"{self._path} is missing") from error
        if isinstance(error, OSError):
            raise StorageError(f"{self._path}: {error.strerror or error}") from error


def _size(path: str) -> int | None:
    """Bytes of a local file; None where there is none, or only a link that leads nowhere."""
    try:
        with _naming(path):
            return os.stat(path).st_size
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _NOTHING_THERE:
            return None
        raise


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one, also where a link leads round in circles."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
