"""Files of this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import IO, Any

from beam_pipeline.storage.base import ListedFile
from beam_pipeline.storage.retries import explained

_TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{8}\.tmp$")
# Of a link that leads nowhere, or round in circles, of a socket, and of a file that has gone since its folder was read.
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
# Of a file system that knows no hard links, such as FAT.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Failures of the machine as one line; what a caller may expect stays what it is."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError):
        raise
    except OSError as error:
        raise explained(url, error) from error


class LocalStorage:
    """Files of this machine; nothing is tried twice."""

    def names(self, url: str) -> Iterator[str]:
        try:
            with _told(url), os.scandir(url) as entries:
                for entry, mode, _ in _there(entries):
                    yield entry.name + "/" * S_ISDIR(mode)
        except (FileNotFoundError, NotADirectoryError):
            pass

    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        pending = [("", _folders_above(url))]
        while pending:
            prefix, above = pending.pop()
            folder = os.path.join(url, prefix) if prefix else url
            real = os.path.realpath(folder)
            if real in above:  # a symbolic link back to a folder above
                continue
            inside = above | {real}
            with _told(folder), _scanned(folder, missing_is_fine=bool(prefix)) as entries:
                for entry, mode, stat in _there(entries):
                    if S_ISDIR(mode):
                        pending.append((f"{prefix}{entry.name}/", inside))
                    elif stat and S_ISREG(mode):
                        yield _listed(prefix + entry.name, stat)
                    elif every_name:
                        yield ListedFile(prefix + entry.name, 0, "")

    def stat(self, url: str) -> ListedFile | None:
        try:
            stat = os.stat(url)
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return None
            raise explained(url, error) from error
        return _listed(url, stat) if S_ISREG(stat.st_mode) else None

    def read(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        with _told(url), open(url, "rb", buffering=0, opener=_open_file) as file:
            if start:
                file.seek(start)
            return file.read(-1 if end is None else end - (start or 0))

    def open(self, url: str) -> IO[bytes]:
        with _told(url):
            return open(url, "rb", opener=_open_file)

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
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for name in os.listdir(url):
                    path = os.path.join(url, name)
                    if os.path.isdir(path) and not os.path.islink(path):
                        shutil.rmtree(path, onerror=_ignore_the_missing)
                    elif name not in keep:
                        _remove(path)
            if not keep:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a link to a folder stays
                    os.rmdir(url)

    def delete_temporaries(self, url: str) -> None:
        for file in list(self.files(url)) if os.path.isdir(url) else ():
            if _TEMPORARY.search(file.path):
                self.delete(os.path.join(url, file.path))

    def delete_empty_folders(self, *urls: str) -> None:
        for folder in urls:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


@contextmanager
def _scanned(folder: str, missing_is_fine: bool) -> Iterator[Iterable[os.DirEntry[str]]]:
    """Entries of a folder; one that was found a moment ago may be gone."""
    try:
        scan = os.scandir(folder)
    except FileNotFoundError:
        if not missing_is_fine:
            raise
        yield ()
        return
    with scan:
        yield scan


def _folders_above(url: str) -> frozenset[str]:
    """Where the folders lie that hold a folder, by its own path and by where that leads."""
    path = os.path.abspath(url)
    real = os.path.realpath(path)
    above = frozenset(map(str, Path(real).parents))
    return above if real == path else above.union(map(os.path.realpath, Path(path).parents))


def _there(
    entries: Iterable[os.DirEntry[str]],
) -> Iterator[tuple[os.DirEntry[str], int, os.stat_result | None]]:
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


def _open_file(path: str, flags: int) -> int:
    """Open a file; what is none, a pipe or a link that leads nowhere, isn't found, and never waited for."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for its writer
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if S_ISREG(mode) or S_ISDIR(mode):  # open() itself refuses a folder
        return descriptor
    os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


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
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _ignore_the_missing(function: Any, path: str, failure: Any) -> None:
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]
