"""Files of this machine and of object stores behind one interface, for the writer and the reader.

A URL is a local path, `file://`, `gs://`, `s3://`, `az://` or one `http(s)://` file. Names are never unquoted or
normalised: every name that a listing returns can be read. Remote requests are retried until a deadline; a local one
fails at once. Every file appears under its final name in one step: a reader sees a complete file or none.

    causes      why a request failed, in one line each, and the retry loop
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import IO, Any, Literal, NamedTuple, TypeAlias

import google_crc32c

from beam_pipeline.errors import MissingFileError, StorageError, UsageError

Data = bytes | memoryview
Reads = Literal["always", "if unknown", "never"]
DEFAULT_DEADLINE_S = 600.0
FIRST_CONTACT_S = 15.0  # until the first answer: a wrong URL or a missing network should not take ten minutes
_PIECE_BYTES = 16 << 20
_BUFFER_BYTES = 8 << 20
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*)://")
_PASSWORD = re.compile(rf"{_SCHEME.pattern}[^/@\s]*:[^/@\s]*@")
_ALIASES = {"gcs": "gs", "abfs": "az", "abfss": "az", "https": "http"}
_REMOTE = ("gs", "s3", "az", "http")


def scheme_of(url: str) -> str | None:
    """`gs` for `gs://…` and `gcs://…`, "" for an unknown scheme; None for a path on this machine."""
    match = _SCHEME.match(url)
    if match is None or match[1].lower() == "file":
        return None
    scheme = _ALIASES.get(match[1].lower(), match[1].lower())
    return scheme if scheme in _REMOTE else ""


def is_local(url: str) -> bool:
    """Whether `url` is a path on this machine."""
    return scheme_of(url) is None


def join(base: str, relative: str) -> str:
    """`relative` below `base`, unchanged: it may hold `//`, `..` and any other character."""
    return f"{base.rstrip('/')}/{relative}"


def normalize(url: str) -> str:
    """A folder as the job carries it: local paths and `file://` ones absolute, without a slash at the end."""
    if is_local(url):
        try:
            return os.path.abspath(os.path.expanduser(url.removeprefix("file://")))
        except FileNotFoundError:
            raise UsageError("the working folder is gone: give a full path, or cd to another folder") from None
    scheme, _, path = url.partition("://")
    return f"{scheme}://{path.rstrip('/')}"


def bucket_and_name(url: str) -> tuple[str, str]:
    """`("bucket", "a/b")` for `gs://bucket/a/b`."""
    bucket, _, name = url.partition("://")[2].partition("/")
    return bucket, name


def why_unusable(url: str, is_file: bool = False) -> str | None:
    """Why `url` names no folder, or file, of any storage: no such scheme, no bucket; None if it does."""
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


#: Identifies the content of a file: its MD5; its CRC-32C; or a text that is comparable within one store only,
#: `mtime_ns:…` or `etag:…`, "" if the store tells nothing.
Etag: TypeAlias = bytes | int | str


def etag_text(etag: Etag) -> str:
    """An etag as documents and fingerprints hold it."""
    if isinstance(etag, bytes):
        return f"md5:{etag.hex()}"
    return f"crc32c:{etag:08x}" if isinstance(etag, int) else etag


class Part(NamedTuple):
    """A range of an archive that holds a file.

    Attributes:
        url, generation: of the archive, as it was listed.
        start, stop: the range.
        packed: how many of its bytes are the file's.
        method: zip's method of compression, or `archives.members.PLAIN`.
        crc32: of the file, for a zip's.
    """

    url: str
    generation: str
    start: int
    stop: int
    packed: int
    method: int
    crc32: int


class ListedFile(NamedTuple):
    """One file of a listing."""

    path: str  # relative to the listed folder, `/` separators
    bytes: int
    etag: Etag
    crc32c: int | None = None  # of the content, if the store knows it
    generation: str = ""  # identifies this version of a file, for writing and deleting as found
    part: Part | None = None  # where it is, if that is in an archive


class Storage(ABC):
    """A thread-safe store of files; paths are full local paths or URLs.

    Every method raises StorageError if its request is refused or doesn't succeed until the deadline. If there is no
    such file or bucket, it is a FileNotFoundError, too.
    """

    #: Whether requests are slow enough to send several at a time.
    is_remote = True

    @abstractmethod
    def names(self, url: str) -> list[str]:
        """Names of the files and folders directly in `url`, sorted, folders with a slash; [] if it doesn't exist."""

    @abstractmethod
    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        """Every file below a folder, in no particular order, in pages: memory doesn't grow with their number.

        With `every_name` also broken links, pipes and devices of a local folder, with 0 bytes and without an etag.
        """

    @abstractmethod
    def stat(self, url: str) -> ListedFile | None:
        """One file, or None; its `path` is the URL."""

    @abstractmethod
    def read_range(self, url: str, start: int, stop: int | None, out: memoryview | None = None) -> Data:
        """Bytes [start, stop) of a file in one request, fewer if it ends before; to its end if `stop` is None.

        A storage may fill `out`, of at least stop - start bytes, and return the filled part of it.
        """

    def read_if(self, url: str, start: int, stop: int, generation: str) -> Data | None:
        """The same bytes of the file if it has this `generation`, of a listing; None if it has another one by now."""
        raise NotImplementedError

    def read(self, url: str, start: int = 0, stop: int | None = None) -> bytes:
        """The same as bytes."""
        return bytes(self.read_range(url, start, stop))

    def open(self, url: str) -> io.BufferedReader:
        """A file that is read from start to end."""
        return io.BufferedReader(_Stream(self, url), _BUFFER_BYTES)

    def size(self, url: str) -> int:
        """Bytes of a file."""
        if (file := self.stat(url)) is None:
            raise MissingFileError.at(url)
        return file.bytes

    def sizes(self, urls: Sequence[str]) -> list[int | None]:
        """Bytes of each file, None if it is missing; for remote ones their folders are listed."""
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
        """Write a small file in one step; returns whether the file now has this content.

        With a `generation` only that version is replaced, with "" no existing file.
        """

    def create(self, url: str, data: bytes) -> bool:
        """Write a small file unless it exists; returns False if it exists with other content."""
        return self.write(url, data, "")

    @abstractmethod
    def publish(self, file: IO[bytes], url: str, generation: str | None = None) -> bool:
        """Publish a complete temporary file, still open, under its final name: rename it, or upload it.

        With a `generation`, "" for a new file, no other version is replaced: False if there is one with other content.
        s3:// and az:// replace any.
        """

    @abstractmethod
    def delete(self, url: str, generation: str = "") -> None:
        """Delete a file, with a `generation` only that version; no error if it is missing."""

    def delete_temporaries(self, url: str) -> None:  # noqa: B027
        """Delete temporary files that killed processes left below a folder; object stores have none."""

    def delete_empty_folders(self, url: str, below: str) -> None:  # noqa: B027
        """Delete a folder and those above it, up to one that isn't empty or is `below`; object stores have none."""


class _Stream(io.RawIOBase):
    """A remote file from start to end; each read is a request, which is retried."""

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


def open_storage(url: str, deadline_s: float | None = None) -> Storage:
    """The storage of `url`; one per process, scheme and deadline.

    Args:
        url: any path or URL.
        deadline_s: how long a remote request of a job is retried, which an error says how to resume; None for readers.

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
        fix = "pip install 'imageshards[reader]' or 'imageshards[pipeline]'"
        raise StorageError(f"{url}: {error}", fix) from None
    return store if _wrap is None else _wrap(store)


_wrap: Callable[[Storage], Storage] | None = None


@contextmanager
def wrapped(wrap: Callable[[Storage], Storage]) -> Iterator[None]:
    """Within this block `open_storage` returns `wrap(store)`: for experiments that count or delay requests."""
    global _wrap
    before, _wrap = _wrap, wrap
    try:
        yield
    finally:
        _wrap = before


@functools.cache
def storage_of(scheme: str | None, deadline_s: float | None) -> Storage:
    """The storage of a scheme, None for this machine; it reads the environment once."""
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


def is_intact(store: Storage, url: str, file: ListedFile | None, size: int, crc32c: int, reads: Reads) -> bool:
    """Whether a file has this size and CRC-32C.

    Args:
        store, url: of the file.
        file: what the store lists; None if it is missing.
        size, crc32c: expected.
        reads: whether to read every byte; "if unknown" reads if the store has no CRC, "never" then takes it for valid.
    """
    if file is None or file.bytes != size:
        return False
    if reads == "always" or (reads == "if unknown" and file.crc32c is None):
        return functools.reduce(google_crc32c.extend, pieces(store, url, size), 0) == crc32c
    return file.crc32c in (None, crc32c)
