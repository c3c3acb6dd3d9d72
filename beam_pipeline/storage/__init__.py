"""Files of this machine and of object stores behind one interface, for the writer and the reader.

A URL is a local path, `file://`, `gs://`, `s3://`, `az://` or one `http(s)://` file. Names are never unquoted or
normalised: what a listing returns reads back, whatever characters it holds. Remote requests are tried again until a
deadline; a local one fails at once. Every file is written under its final name in one step: a reader meets all or none.

    causes      why a request failed, in one line each, and the loop that tries again
    local       files of this machine
    objects     s3://, az://, http:// by obstore
    gs          gs:// by google-cloud-storage, read by obstore
"""

from __future__ import annotations

import functools
import glob
import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import IO, Any, NamedTuple

import google_crc32c

from beam_pipeline.errors import MissingFileError, StorageError, UsageError

Data = bytes | memoryview
DEFAULT_DEADLINE_S = 600.0
_PIECE_BYTES = 16 << 20
_BUFFER_BYTES = 8 << 20
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*)://")
_PASSWORD = re.compile(rf"{_SCHEME.pattern}[^/@\s]*:[^/@\s]*@")
_ALIASES = {"gcs": "gs", "abfs": "az", "abfss": "az", "https": "http"}
_REMOTE = ("gs", "s3", "az", "http")


def scheme_of(url: str) -> str | None:
    """`gs` of `gs://…` and `gcs://…`, "" of an unknown scheme; None for a path on this machine."""
    match = _SCHEME.match(url)
    if match is None or match[1].lower() == "file":
        return None
    scheme = _ALIASES.get(match[1].lower(), match[1].lower())
    return scheme if scheme in _REMOTE else ""


def is_local(url: str) -> bool:
    """Whether `url` is a path on this machine."""
    return scheme_of(url) is None


def join(base: str, relative: str) -> str:
    """`relative` below `base`, untouched: it may hold `//`, `..` and any other character."""
    return f"{base.rstrip('/')}/{relative}"


def normalize(url: str) -> str:
    """A user's folder as the job carries it: local paths made absolute, `file://` ones too, no slash at the end."""
    if is_local(url):
        return os.path.abspath(os.path.expanduser(url.removeprefix("file://")))
    scheme, _, path = url.partition("://")
    return f"{scheme}://{path.rstrip('/')}"


def bucket_and_name(url: str) -> tuple[str, str]:
    """`("bucket", "a/b")` of `gs://bucket/a/b`."""
    bucket, _, name = url.partition("://")[2].partition("/")
    return bucket, name


def why_unusable(url: str, is_file: bool = False) -> str | None:
    """Why no storage can hold the folder, or file, `url`: no such scheme, no bucket; None if one can."""
    scheme = scheme_of(url)
    if scheme is None:
        return None
    if not scheme:
        return "no such storage; use a local path, gs://, s3:// or az:// (http:// and https:// for single files)"
    if not url.partition("://")[2].strip("/"):
        return "name a bucket"
    return "http:// and https:// name single files, not folders" if scheme == "http" and not is_file else None


def has_password(url: str) -> bool:
    """Whether a URL holds a password: `ftp://user:password@host/…`."""
    return _PASSWORD.match(url) is not None


class ListedFile(NamedTuple):
    """One file of a listing."""

    path: str  # relative to the listed folder, `/` separators
    bytes: int
    #: Tells one content from another, with its kind: `md5:`, `crc32c:` (both hexadecimal), `mtime_ns:`, or `etag:`, to
    #: be compared within one store only.
    etag: str
    crc32c: int | None = None  # of the content, if the store knows it
    generation: str = ""  # what tells this version of an object from its others, if the store can act on one only


class Storage(ABC):
    """A store of files, for any number of threads; paths are full local paths or URLs.

    Every method raises StorageError when its request failed for good: refused, or no success until the deadline. If
    there is no such file or bucket, it is a FileNotFoundError, too.
    """

    #: Whether a request is slow enough that several should run at a time.
    is_remote = True

    @abstractmethod
    def names(self, url: str) -> list[str]:
        """What is directly inside `url`, sorted, folders with a slash at the end; [] if there is no folder."""

    @abstractmethod
    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        """Every file below a folder in no particular order, in pages: memory doesn't grow with their number.

        With `every_name` also names that hold no file, of 0 bytes and without an etag: links that lead nowhere, pipes,
        devices. Only a local folder has such names.
        """

    @abstractmethod
    def stat(self, url: str) -> ListedFile | None:
        """One file, or None; its `path` is the URL."""

    @abstractmethod
    def read_range(self, url: str, start: int, stop: int | None, out: memoryview | None = None) -> Data:
        """Bytes [start, stop) of a file, fewer if it ends before, in one request; to its end if `stop` is None.

        A storage may fill `out`, memory of at least stop - start bytes, and return the filled part of it.
        """

    def read(self, url: str, start: int = 0, stop: int | None = None) -> bytes:
        """The same in memory of its own."""
        return bytes(self.read_range(url, start, stop))

    def open(self, url: str) -> io.BufferedReader:
        """A file to be read from its start to its end."""
        return io.BufferedReader(_Stream(self, url), _BUFFER_BYTES)

    def size(self, url: str) -> int:
        """Bytes of a file."""
        if (found := self.stat(url)) is None:
            raise MissingFileError(f"{url} is missing")
        return found.bytes

    def sizes(self, urls: Sequence[str]) -> list[int | None]:
        """Bytes of each of some files, None if it isn't there; remote ones by a listing of their folders."""
        return [None if file is None else file.bytes for file in map(self.stat, urls)]

    def glob(self, pattern: str) -> list[str]:
        """URLs of the files that match `*`, `?` and `[…]` (not across `/`) and `**` (any folders), sorted."""
        parts = pattern.split("/")
        fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), None)
        if fixed is None:
            return [pattern] if self.stat(pattern) is not None else []
        folder, patterns = "/".join(parts[:fixed]), parts[fixed:]
        if len(patterns) == 1 and patterns != ["**"]:
            paths = [name for name in self.names(folder) if not name.endswith("/")]
        else:
            paths = [file.path for file in self.files(folder)]
        return sorted(join(folder, path) for path in paths if _matches(path.split("/"), patterns))

    @abstractmethod
    def write(self, url: str, data: bytes, generation: str | None = None) -> bool:
        """Write a small file; whoever reads meets all of it or none.

        With a `generation` an object store replaces that version only, and with "" a file that is there is never
        replaced: False, and nothing written, if there is another with other content.
        """

    def create(self, url: str, data: bytes) -> bool:
        """Write a small file that isn't there yet; False, and nothing written, if one with other content is."""
        return self.write(url, data, "")

    @abstractmethod
    def publish(self, file: IO[bytes], url: str, generation: str | None = None) -> bool:
        """Give a finished temporary file, still open, its final name: rename it, or upload it.

        With a `generation`, "" for none, gs:// replaces no other version: False if there is one with other content.
        """

    @abstractmethod
    def delete(self, url: str, generation: str = "") -> None:
        """Delete one file, if it still is that version; fine if there is none."""

    @abstractmethod
    def delete_tree(self, url: str, keep: Collection[str] = ()) -> None:
        """Delete all below a folder, but for the files `keep` directly inside it; fine if there is none."""

    def delete_temporaries(self, url: str) -> None:  # noqa: B027
        """Delete what writes that were killed left below a folder; object stores have no such files."""

    def delete_empty_folders(self, *urls: str) -> None:  # noqa: B027
        """Delete these folders, one after the other, if they hold nothing; object stores know no empty ones."""


class _Stream(io.RawIOBase):
    """A remote file from its start to its end; each read is a request of its own, which is retried."""

    def __init__(self, store: Storage, url: str) -> None:
        self._store, self._url, self._size, self._position = store, url, store.size(url), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._size)
        data = self._store.read_range(self._url, self._position, stop)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_matches(parts[start:], patterns[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def open_storage(url: str, deadline_s: float = DEFAULT_DEADLINE_S) -> Storage:
    """The storage that holds `url`; one per process, scheme and deadline.

    Args:
        url: any path or URL.
        deadline_s: how long a remote request is tried again.

    Raises:
        UsageError: no such scheme.
        StorageError: its client isn't installed.
    """
    scheme = scheme_of(url)
    if scheme == "":
        raise UsageError(f"{url}: {why_unusable(url)}")
    try:
        store = storage_of(scheme, deadline_s)
    except ImportError as error:
        raise StorageError(
            f"{url}: {error}", "in the clone of imageshards, pip install '.[reader]' or '.[pipeline]'"
        ) from None
    return store if _wrap is None else _wrap(store)


_wrap: Callable[[Storage], Storage] | None = None


@contextmanager
def wrapped(wrap: Callable[[Storage], Storage]) -> Iterator[None]:
    """Within it `open_storage` returns `wrap(store)`, in this process: for experiments that count or delay requests."""
    global _wrap
    before, _wrap = _wrap, wrap
    try:
        yield
    finally:
        _wrap = before


@functools.cache
def storage_of(scheme: str | None, deadline_s: float) -> Storage:
    """A new storage for a scheme, None for this machine; it reads the environment once."""
    if scheme is None:
        from beam_pipeline.storage.local import LocalStorage

        return LocalStorage()
    if scheme == "gs":
        from beam_pipeline.storage.gs import GoogleStorage

        return GoogleStorage(deadline_s)
    from beam_pipeline.storage.objects import ObjectStorage

    return ObjectStorage(scheme, deadline_s)


def pieces(store: Storage, url: str, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file, in pieces."""
    for start in range(0, size, _PIECE_BYTES):
        yield store.read(url, start, min(start + _PIECE_BYTES, size))


def is_intact(
    store: Storage, url: str, found: ListedFile | None, size: int, crc32c: int, read: bool | None = None
) -> bool:
    """Whether a file has this size and CRC-32C.

    Args:
        store, url: the file.
        found: what the store says of it.
        size, crc32c: what it should be.
        read: every byte of it, or none: then an unknown CRC is taken for valid; None reads if the CRC is unknown.
    """
    if found is None or found.bytes != size:
        return False
    if read or (read is None and found.crc32c is None):
        return functools.reduce(google_crc32c.extend, pieces(store, url, size), 0) == crc32c
    return found.crc32c in (None, crc32c)
