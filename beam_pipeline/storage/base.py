"""What a storage can do."""

from __future__ import annotations

import functools
import glob
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import IO, Any, NamedTuple

from beam_pipeline.storage.urls import join

Data = bytes | memoryview
_BUFFER_BYTES = 8 << 20


class ListedFile(NamedTuple):
    """One file of a listing.

    Attributes:
        path: relative to the listed folder, `/` separators.
        bytes: size.
        etag: what tells one content from another, with its kind: `md5:`, `crc32c:` (both hexadecimal), `mtime_ns:`,
            `etag:` (comparable within one store only).
        crc32c: of the content, if the store knows it.
    """

    path: str
    bytes: int
    etag: str
    crc32c: int | None = None


class Version(NamedTuple):
    """One version of a file.

    Attributes:
        data: its content.
        generation: what tells it from any other version of the file.
        age_s: seconds since it was written, by the store's own clock if it tells that.
    """

    data: bytes
    generation: str
    age_s: float


class Storage(ABC):
    """A store of files, for any number of threads; paths are full local paths or URLs.

    Every method raises StorageError when its request failed for good: refused, or no success until the deadline. A
    file that isn't there is a StorageError that is a FileNotFoundError, too.
    """

    #: Whether a request is slow enough that several should be under way at once.
    is_remote: bool

    @abstractmethod
    def names(self, url: str) -> list[str]:
        """What is directly inside `url`, sorted, folders with a slash at the end; [] if there is no folder."""

    @abstractmethod
    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        """Every file below `url` in no particular order, in pages: memory doesn't grow with their number.

        Args:
            url: of a folder.
            every_name: also names that hold no file, of 0 bytes and without an etag: links that lead nowhere, pipes,
                devices. Only a local folder has such names.
        """

    @abstractmethod
    def stat(self, url: str) -> ListedFile | None:
        """One file, or None; its `path` is the URL."""

    @abstractmethod
    def read_range(self, url: str, start: int, stop: int, out: memoryview | None = None) -> Data:
        """Bytes [start, stop) of a file, fewer if it ends before, in one request.

        Args:
            url: of the file.
            start, stop: in bytes.
            out: memory of at least stop - start bytes, which a storage may fill and return the filled part of.
        """

    @abstractmethod
    def read(self, url: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, to its end without `stop`, in one request."""

    def open(self, url: str) -> IO[bytes]:
        """A file to be read from its start to its end."""
        return io.BufferedReader(_Stream(self.read, url, self.size(url)), _BUFFER_BYTES)

    def size(self, url: str) -> int:
        """Bytes of a file."""
        found = self.stat(url)
        if found is None:
            self.read(url)  # says what is wrong
            raise AssertionError(url)
        return found.bytes

    @abstractmethod
    def sizes(self, urls: Sequence[str]) -> list[int | None]:
        """Bytes of each of some files, None if it isn't there; remote ones by a listing of their folders."""

    def glob(self, pattern: str) -> list[str]:
        """URLs of the files that match `*`, `?` and `[…]` (not across `/`) and `**` (any folders), sorted."""
        if not glob.has_magic(pattern):
            return [pattern] if self.stat(pattern) is not None else []
        parts = pattern.split("/")
        first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
        folder, wanted = "/".join(parts[:first]), tuple(parts[first:])
        if len(wanted) == 1 and wanted != ("**",):
            paths = [name for name in self.names(folder) if not name.endswith("/")]
        else:
            paths = [file.path for file in self.files(folder)]
        return sorted(join(folder, path) for path in paths if _matches(tuple(path.split("/")), wanted))

    @abstractmethod
    def write(self, url: str, data: bytes) -> None:
        """Write a small file; whoever reads meets all of it or none."""

    @abstractmethod
    def create(self, url: str, data: bytes) -> bool:
        """Write a small file that isn't there yet; False, and nothing written, if one with other content is."""

    @abstractmethod
    def publish(self, local_file: str, url: str) -> None:
        """Move a finished local file to `url`; the local file is gone afterwards."""

    @abstractmethod
    def delete(self, url: str) -> None:
        """Delete one file; fine if there is none."""

    @abstractmethod
    def delete_tree(self, url: str, keep: Collection[str] = ()) -> None:
        """Delete all below a folder, but for the files `keep` directly inside it; fine if there is none."""

    def delete_temporaries(self, url: str) -> None:  # noqa: B027
        """Delete what writes that were killed left below a folder; object stores have no such files."""

    def delete_empty_folders(self, *urls: str) -> None:  # noqa: B027
        """Delete these folders, one after the other, if they hold nothing; object stores know no empty ones."""


class VersionedStorage(Storage):
    """A storage that several machines write to: a file is changed only while it is as it was found."""

    @abstractmethod
    def version(self, url: str) -> Version | None:
        """A file as it is now, or None."""

    @abstractmethod
    def replace(self, url: str, data: bytes, generation: str) -> bool:
        """Write a small file anew if it still is that version; False, and nothing written, if it isn't."""

    @abstractmethod
    def delete_version(self, url: str, generation: str) -> None:
        """Delete a file if it still is that version."""


class _Stream(io.RawIOBase):
    """A remote file from its start to its end; each read is a request of its own, which is retried."""

    def __init__(self, read: Callable[[str, int, int], bytes], url: str, size: int) -> None:
        self._read = functools.partial(read, url)
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._size)
        data = self._read(self._position, stop) if self._position < stop else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _matches(parts: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_matches(parts[start:], patterns[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])
