"""Files of this machine."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import random
import re
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import IO, TypeVar

from beam_pipeline.errors import MissingFileError, StorageError
from beam_pipeline.storage import Data, ListedFile, Storage
from beam_pipeline.storage.causes import as_storage_error, translating_os_errors

Result = TypeVar("Result")
_TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{8}\.tmp$")
# Folders are deleted when they are empty; each attempt to write takes microseconds.
_MAX_ATTEMPTS = 1000
_MAX_WAYS = 100
# Errors of file systems without hard links, such as exFAT.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
# Errors of a broken or circular link, and of a file that was deleted after its folder was read.
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class LocalStorage(Storage):
    """Files of this machine; nothing is retried. Each read opens its file: 20 µs, and no descriptors to run out of."""

    is_remote = False

    def names(self, url: str) -> list[str]:
        try:
            with translating_os_errors(url), os.scandir(url) as entries:
                return sorted(f"{entry.name}/" if os.path.isdir(entry.path) else entry.name for entry in entries)
        except FileNotFoundError:
            return []

    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        # Folders to be read, and whether they or a parent are links. No recursion, which would end at 1,000 levels.
        waiting, ways = [("", os.path.islink(url))], Counter[str]()
        while waiting:
            prefix, is_linked = waiting.pop()
            folder = os.path.join(url, prefix[:-1]) if prefix else url
            if is_linked:
                if _leads_back(url, folder):
                    continue
                ways[target := os.path.realpath(folder)] += 1
                if ways[target] > _MAX_WAYS:  # n folders, each with two links to the next, have 2^n paths
                    reason = f"{target}: more than {_MAX_WAYS:,} paths lead to it by links"
                    raise StorageError(reason, "remove some links")
            try:
                with translating_os_errors(folder), os.scandir(folder) as entries:
                    for entry in entries:
                        path, status = f"{prefix}{entry.name}", _stat(entry.path)
                        if status and S_ISDIR(status.st_mode):
                            waiting.append((f"{path}/", is_linked or entry.is_symlink()))
                        elif status and S_ISREG(status.st_mode):
                            yield _listed(path, status)
                        elif every_name:
                            yield ListedFile(path, 0, "")
            except FileNotFoundError:
                if not prefix:  # others may have been deleted meanwhile
                    raise

    def stat(self, url: str) -> ListedFile | None:
        status = _stat(url)
        return _listed(url, status) if status and S_ISREG(status.st_mode) else None

    def read_range(self, url: str, start: int, stop: int | None, out: memoryview | None = None) -> Data:
        size = -1 if stop is None else max(0, stop - start)
        with translating_os_errors(url), self.open(url) as file:
            file.seek(start)
            data: Data = (file.read(size) or b"") if out is None else out[: file.readinto(out[:size]) or 0]
        return data

    def read_if(self, url: str, start: int, stop: int, generation: str) -> Data | None:
        with translating_os_errors(url), self.open(url) as file:
            data = os.pread(file.fileno(), max(0, stop - start), start)
            return data if _generation(os.fstat(file.fileno())) == generation else None

    def open(self, url: str) -> BufferedReader:
        """A folder, a pipe or a broken link is missing, and never waited for."""
        if self.stat(url) is None:
            raise MissingFileError(f"{url} is a folder, not a file") if os.path.isdir(url) else MissingFileError.at(url)
        with translating_os_errors(url):
            # Some files of /proc block, and a pipe may have come in its place.
            return open(url, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))

    def glob(self, pattern: str) -> list[str]:
        with translating_os_errors(pattern):
            return sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))

    def write(self, url: str, data: bytes, generation: str | None = None) -> bool:
        # Not derived from the name, which may be as long as names can be.
        temporary = os.path.join(os.path.dirname(url), f".{os.getpid()}-{random.getrandbits(32):08x}.tmp")

        def write() -> bool:
            Path(temporary).write_bytes(data)
            return _publish(temporary, url, generation)

        with translating_os_errors(url):
            try:
                is_written = making_folder(url, write)  # again, too, if another job deletes the temporary file
            finally:
                Path(temporary).unlink(missing_ok=True)
        if is_written:
            return True
        with suppress(FileNotFoundError):
            return self.read(url) == data
        return False

    def publish(self, file: IO[bytes], url: str, generation: str | None = None) -> bool:
        with translating_os_errors(url):
            file.flush()
            return making_folder(url, lambda: _publish(file.name, url, generation))

    def delete(self, url: str, generation: str = "") -> None:
        with translating_os_errors(url):
            if generation:
                _if_unchanged(url, generation, lambda: os.unlink(url))
            else:
                Path(url).unlink(missing_ok=True)

    def delete_temporaries(self, url: str) -> None:
        with suppress(FileNotFoundError):
            for file in list(self.files(url)):
                if _TEMPORARY.search(file.path):
                    self.delete(os.path.join(url, file.path))

    def delete_empty_folders(self, url: str, below: str) -> None:
        with suppress(OSError):
            while url != below:
                with suppress(FileNotFoundError):
                    os.rmdir(url)
                url = os.path.dirname(url)


@contextmanager
def temporary_file(folder: str | None) -> Iterator[IO[bytes]]:
    """A file to be published: in this folder, if publishing is a rename; else it has no name."""
    if folder is None:
        system = tempfile.gettempdir()
        with translating_os_errors(system, of_others=False), tempfile.TemporaryFile(buffering=1 << 20) as file:
            yield file
        return
    path = os.path.join(folder, f"{uuid.uuid4().hex}.tmp")
    try:
        with (
            translating_os_errors(path, of_others=False),
            making_folder(path, lambda: open(path, "xb", buffering=1 << 20)) as file,
        ):
            yield file
    finally:
        Path(path).unlink(missing_ok=True)


def delete_tree(path: str) -> None:
    """Delete a file, a link, or a folder with everything in it; no error if it is missing."""
    with translating_os_errors(path), suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def _publish(temporary: str, path: str, generation: str | None) -> bool:
    """Give a file its final name, with a `generation` only in place of that file, "" for none; returns whether."""
    if generation is None:
        os.replace(temporary, path)
        return True
    if generation:
        return _if_unchanged(path, generation, lambda: os.replace(temporary, path))
    try:
        os.link(temporary, path)  # the temporary name is deleted by whoever made it
    except FileExistsError:
        if os.path.exists(path):
            return False
        raise StorageError(f"{path}: it is a link to a file that isn't there", "delete it") from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            os.replace(temporary, path)
            return True
        return False
    return True


def _if_unchanged(path: str, generation: str, change: Callable[[], None]) -> bool:
    """Replace or delete a file if it still is this one; returns whether it was.

    Whoever does so locks the file itself, so that no lock file is left behind.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # NFS locks what is opened for writing
    except PermissionError:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, IsADirectoryError):
        return False
    try:
        with suppress(OSError):  # the file system has no locks: it is compared, at least
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        there = _stat(path)
        is_unchanged = there is not None and _generation(os.fstat(descriptor)) == generation == _generation(there)
        if is_unchanged:
            change()
        return is_unchanged
    finally:
        os.close(descriptor)


def making_folder(url: str, write: Callable[[], Result]) -> Result:
    """Make a file's folder and write the file there: again, if another thread or process deletes the folder first."""
    for _ in range(_MAX_ATTEMPTS):
        with suppress(FileNotFoundError, FileExistsError):  # the latter from makedirs, which looks twice
            os.makedirs(os.path.dirname(url), exist_ok=True)
            return write()
    os.makedirs(os.path.dirname(url), exist_ok=True)
    return write()


def _leads_back(url: str, folder: str) -> bool:
    """Whether a folder below `url` is a symbolic link to one that is above it."""
    above = {
        *map(os.path.realpath, Path(os.path.abspath(folder)).parents),
        *map(str, Path(os.path.realpath(url)).parents),
    }
    return os.path.realpath(folder) in above


def _stat(path: str) -> os.stat_result | None:
    """The status of a file, or of a link's target; None if there is none."""
    try:
        return os.stat(path)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return None
        raise as_storage_error(path, error) from error


def _listed(path: str, status: os.stat_result) -> ListedFile:
    return ListedFile(path, status.st_size, f"mtime_ns:{status.st_mtime_ns}", generation=_generation(status))


def _generation(status: os.stat_result) -> str:
    return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
