"""Files of this machine."""

from __future__ import annotations

import errno
import glob
import io
import os
import random
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import IO, Any

from beam_pipeline.errors import StorageError
from beam_pipeline.storage.base import Data, ListedFile, Storage
from beam_pipeline.storage.causes import MissingFileError, explained
from beam_pipeline.storage.urls import local_path, normalize

_TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{8}\.tmp$")
# Of a link that leads nowhere, or round in circles, of a socket, and of a file that has gone since its folder was read.
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
# Of a file system that knows no hard links, such as FAT.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Failures of the machine as one line; that something is or isn't there stays an OSError too."""
    try:
        yield
    except (StorageError, FileExistsError, IsADirectoryError):
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError(f"{url} is missing") from error
    except OSError as error:
        raise explained(url, error) from error


class LocalStorage(Storage):
    """Files of this machine; nothing is tried twice. Each read opens its file: 10 µs, no descriptors to run out of."""

    is_remote = False

    def names(self, url: str) -> list[str]:
        try:
            with _told(url), os.scandir(local_path(url)) as entries:
                return sorted(entry.name + "/" * S_ISDIR(mode) for entry, mode, _ in _there(entries))
        except FileNotFoundError:
            return []

    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        url = local_path(url)
        pending = [("", _folders_above(url))]
        while pending:
            prefix, above = pending.pop()
            folder = os.path.join(url, prefix) if prefix else url
            real = os.path.realpath(folder)
            if real in above:  # a symbolic link back to a folder above
                continue
            inside = above | {real}
            with _told(folder), suppress(*[FileNotFoundError] * bool(prefix)), os.scandir(folder) as entries:
                for entry, mode, stat in _there(entries):  # one that was found a moment ago may be gone
                    if S_ISDIR(mode):
                        pending.append((f"{prefix}{entry.name}/", inside))
                    elif stat and S_ISREG(mode):
                        yield _listed(prefix + entry.name, stat)
                    elif every_name:
                        yield ListedFile(prefix + entry.name, 0, "")

    def stat(self, url: str) -> ListedFile | None:
        try:
            stat = os.stat(local_path(url))
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return None
            raise explained(url, error) from error
        return _listed(url, stat) if S_ISREG(stat.st_mode) else None

    def sizes(self, urls: Sequence[str]) -> list[int | None]:
        found = map(self.stat, urls)
        return [None if file is None else file.bytes for file in found]

    def read_range(self, url: str, start: int, stop: int, out: memoryview | None = None) -> Data:
        if out is None:
            return self.read(url, start, stop)
        with _told(url), _opened(url) as file:
            received = 0
            while more := os.preadv(file.fileno(), [out[received : stop - start]], start + received):
                received += more  # one call gives 2 GB at most
                if received == stop - start:
                    break
        return out[:received]

    def read(self, url: str, start: int = 0, stop: int | None = None) -> bytes:
        with _told(url), _opened(url) as file:
            if start:
                file.seek(start)
            return file.read(-1 if stop is None else max(0, stop - start))

    def open(self, url: str) -> IO[bytes]:
        with _told(url):
            return io.BufferedReader(_opened(url))

    def glob(self, pattern: str) -> list[str]:
        return sorted(path for path in glob.glob(normalize(pattern), recursive=True) if os.path.isfile(path))

    def write(self, url: str, data: bytes) -> None:
        with _told(url), _written(url, data) as temporary:
            os.replace(temporary, url)

    def create(self, url: str, data: bytes) -> bool:
        with _told(url), _written(url, data) as temporary:
            try:
                os.link(temporary, url)
            except FileExistsError:
                return self.read(url) == data
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if os.path.exists(url):
                    return self.read(url) == data
                os.replace(temporary, url)
        return True

    def publish(self, local_file: str, url: str) -> None:
        with _told(url):
            os.makedirs(os.path.dirname(url), exist_ok=True)
            os.replace(local_file, url)

    def delete(self, url: str) -> None:
        with _told(url):
            _remove(url)

    def delete_tree(self, url: str, keep: Collection[str] = ()) -> None:
        with _told(url):
            with suppress(FileNotFoundError, NotADirectoryError):
                for name in os.listdir(url):
                    path = os.path.join(url, name)
                    if os.path.isdir(path) and not os.path.islink(path):
                        shutil.rmtree(path, onerror=_ignore_the_missing)
                    elif name not in keep:
                        _remove(path)
            if not keep:
                with suppress(FileNotFoundError, NotADirectoryError):  # a link to a folder stays
                    os.rmdir(url)

    def delete_temporaries(self, url: str) -> None:
        for file in list(self.files(url)) if os.path.isdir(url) else ():
            if _TEMPORARY.search(file.path):
                self.delete(os.path.join(url, file.path))

    def delete_empty_folders(self, *urls: str) -> None:
        for folder in urls:
            with suppress(OSError):
                os.rmdir(folder)


def _folders_above(url: str) -> frozenset[str]:
    """Where the folders lie that hold a folder, by its own path and by where that leads."""
    path = os.path.abspath(url)
    real = os.path.realpath(path)
    above = frozenset(map(str, Path(real).parents))
    return above if real == path else above.union(map(os.path.realpath, Path(path).parents))


def _there(entries: Iterable[os.DirEntry[str]]) -> Iterator[tuple[os.DirEntry[str], int, os.stat_result | None]]:
    """Entries with what each is or leads to, and its mode: None and 0 for a link that leads nowhere.

    One that has gone meanwhile is left out, one that may not be looked at must not be.
    """
    for entry in entries:
        try:
            stat = entry.stat()
        except OSError as error:
            if error.errno not in _NOTHING_THERE:
                raise explained(entry.path, error) from error
            if entry.is_symlink():
                yield entry, 0, None
        else:
            yield entry, stat.st_mode, stat


def _listed(path: str, stat: os.stat_result) -> ListedFile:
    return ListedFile(path, stat.st_size, f"mtime_ns:{stat.st_mtime_ns}")


def _opened(url: str) -> io.FileIO:
    """An open file; what is none, a folder, a pipe or a link that leads nowhere, isn't found, and never waited for."""
    try:
        file = io.FileIO(local_path(url), opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    except IsADirectoryError as error:
        raise MissingFileError(f"{url} is a folder, not a file") from error
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            raise FileNotFoundError(error.errno, error.strerror) from error
        raise
    if not S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(url)
    return file


@contextmanager
def _written(url: str, data: bytes) -> Iterator[str]:
    """A whole file beside `url`, for a moment."""
    os.makedirs(os.path.dirname(url), exist_ok=True)
    temporary = f"{url}.{os.getpid()}-{random.getrandbits(32):08x}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        yield temporary
    finally:
        _remove(temporary)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _ignore_the_missing(function: Any, path: str, failure: Any) -> None:
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]
