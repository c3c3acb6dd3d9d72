"""Local folders and fsspec URLs behind one small interface: list in pages, read, write whole files, delete.

A URL is a local path or `scheme://…`. Names are never globbed, unquoted or normalised: what a listing returns reads
back, whatever characters it holds. Remote requests retry with jittered backoff until a deadline; a local one fails at
once.
Everything is written whole under its final name: a reader meets a complete file or none.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import logging
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from stat import S_ISDIR, S_ISREG
from typing import IO, Any, NamedTuple, Protocol, TypeVar

import google_crc32c

from beam_pipeline.errors import ImageShardsError, StorageError

T = TypeVar("T")

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*)://")
_PAGE_NAMES = 1000  # the most that GCS puts in one page
_PIECE_BYTES = 16 << 20
DEFAULT_DEADLINE_S = 600.0


class ListedFile(NamedTuple):
    """One file of a listing.

    Attributes:
        path: relative to the listed folder, `/` separators.
        bytes: size.
        etag: what tells one content from another, with its kind: `md5:`, `crc32c:` (both hexadecimal), `mtime_ns:`,
            `etag:`.
        crc32c: of the content, where the store knows it.
    """

    path: str
    bytes: int
    etag: str
    crc32c: int | None = None


class Storage(Protocol):
    """What the job needs of a place that holds files; all paths are full URLs."""

    def folders(self, url: str) -> list[str]:
        """Names of the folders right inside `url`, sorted; [] where there is nothing."""

    def files(self, url: str) -> Iterator[ListedFile]:
        """Every file below `url` in no particular order, in pages: memory doesn't grow with their number."""

    def stat(self, url: str) -> ListedFile | None:
        """One file, or None; its `path` is the URL."""

    def read(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes [start, end) of a file in one request. Raises FileNotFoundError."""

    def open(self, url: str) -> IO[bytes]:
        """A file to be read from its start to its end. Raises FileNotFoundError."""

    def write(self, url: str, data: bytes) -> None:
        """Write a small file whole."""

    def publish(self, local_file: str, url: str) -> None:
        """Move a finished local file to `url`; the local file is gone afterwards."""

    def delete(self, url: str) -> None:
        """Delete one file; fine if there is none."""

    def delete_tree(self, url: str) -> None:
        """Delete a folder and all below it; fine if there is none."""

    def delete_empty_folders(self, url: str) -> None:
        """Delete a folder that holds nothing, and two above it if they then do; object stores know no such."""


def is_local(url: str) -> bool:
    """Whether `url` is a path on this machine."""
    return _SCHEME.match(url) is None


def join(base: str, relative: str) -> str:
    """`relative` below `base`, untouched: it may hold `//`, `..` and any other character."""
    return f"{base.rstrip('/')}/{relative}" if base.rstrip("/") else f"/{relative}"


def normalize(url: str) -> str:
    """A user's folder as the job carries it: local paths made absolute, no slash at the end."""
    if is_local(url):
        return os.path.abspath(os.path.expanduser(url))
    scheme, _, path = url.partition("://")
    return f"{scheme}://{path.rstrip('/')}"


def why_unusable(url: str) -> str | None:
    """Why no storage can hold `url`: no such protocol, its package isn't installed, no bucket; None if one can."""
    match = _SCHEME.match(url)
    if match is None:
        return None
    if not url[match.end() :]:
        return "name a bucket"
    try:
        _fsspec().get_filesystem_class(match[1].lower())
    except (ImportError, ValueError) as error:
        return f"no such protocol here ({error}); install its fsspec package"
    return None


def open_storage(url: str, deadline_s: float = DEFAULT_DEADLINE_S) -> Storage:
    """The storage that holds `url`.

    Args:
        url: any path or URL.
        deadline_s: how long a remote request is retried.

    Raises:
        StorageError: no such protocol, or its fsspec package isn't installed.
    """
    match = _SCHEME.match(url)
    return LocalStorage() if match is None else _remote(match[1].lower(), deadline_s)


@functools.cache  # one client, one connection pool and one event loop a process
def _remote(protocol: str, deadline_s: float) -> Storage:
    fsspec = _fsspec()
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("gs", "gcs"):
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs a traceback for each request it gives up
        if os.environ.get("STORAGE_EMULATOR_HOST"):
            options["token"] = "anon"
    try:
        if protocol in ("gs", "gcs"):
            return GoogleStorage(_gcsfs_without_retries()(**options), deadline_s)
        return FsspecStorage(fsspec.filesystem(protocol, **options), deadline_s)
    except (ImportError, ValueError) as error:
        raise StorageError(f"can't open {protocol}:// URLs: {error}; install its fsspec package") from None


def _gcsfs_without_retries() -> Any:
    """gcsfs' client; it would repeat each request for half a minute by itself, whatever `--io_deadline` says."""
    from gcsfs import GCSFileSystem

    class OneTryFileSystem(GCSFileSystem):  # type: ignore[misc]
        _request = GCSFileSystem._request.__wrapped__

    return OneTryFileSystem


def _fsspec() -> Any:
    """fsspec, ready to import gcsfs."""
    # gcsfs otherwise asks for the bucket's type over gRPC, which stalls for a minute without that permission; it looks
    # at this when it is imported.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec

    return fsspec


class LocalStorage:
    """Files of this machine."""

    def folders(self, url: str) -> list[str]:
        try:
            with os.scandir(url) as entries:
                return sorted(entry.name for entry in entries if os.path.isdir(entry))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self, url: str) -> Iterator[ListedFile]:
        pending = [("", frozenset[str]())]
        while pending:
            prefix, above = pending.pop()
            folder = os.path.join(url, prefix) if prefix else url
            real = os.path.realpath(folder)
            if real in above:  # a symbolic link back to a folder above
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        stat = entry.stat()
                    except OSError:  # a symbolic link to nothing, or to itself
                        continue
                    if S_ISDIR(stat.st_mode):
                        pending.append((f"{prefix}{entry.name}/", above | {real}))
                    elif S_ISREG(stat.st_mode):
                        yield ListedFile(prefix + entry.name, stat.st_size, f"mtime_ns:{stat.st_mtime_ns}")

    def stat(self, url: str) -> ListedFile | None:
        try:
            stat = os.stat(url)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return ListedFile(url, stat.st_size, f"mtime_ns:{stat.st_mtime_ns}")

    def read(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        with open(url, "rb", buffering=0) as file:
            if start:
                file.seek(start)
            return file.read(-1 if end is None else end - (start or 0))

    def open(self, url: str) -> IO[bytes]:
        return open(url, "rb")

    def write(self, url: str, data: bytes) -> None:
        os.makedirs(os.path.dirname(url), exist_ok=True)
        temporary = f"{url}.{os.getpid()}-{random.getrandbits(32):08x}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
            os.replace(temporary, url)
        except BaseException:
            _remove(temporary)
            raise

    def publish(self, local_file: str, url: str) -> None:
        os.makedirs(os.path.dirname(url), exist_ok=True)
        os.replace(local_file, url)

    def delete(self, url: str) -> None:
        _remove(url)

    def delete_tree(self, url: str) -> None:
        shutil.rmtree(url, ignore_errors=True)

    def delete_empty_folders(self, url: str) -> None:
        with contextlib.suppress(OSError):
            for folder in (url, os.path.dirname(url), os.path.dirname(os.path.dirname(url))):
                os.rmdir(folder)


class FsspecStorage:
    """Any fsspec filesystem, by its general calls; listings come folder by folder."""

    def __init__(self, filesystem: Any, deadline_s: float) -> None:
        self._fs = filesystem
        self._deadline_s = deadline_s

    def folders(self, url: str) -> list[str]:
        return sorted(_last(entry["name"]) for entry in self._entries(url) if entry["type"] == "directory")

    def files(self, url: str) -> Iterator[ListedFile]:
        pending = [""]
        while pending:
            prefix = pending.pop()
            for entry in self._entries(join(url, prefix)):
                name = _last(entry["name"])
                if entry["type"] == "directory":
                    pending.append(f"{prefix}{name}/")
                else:
                    yield ListedFile(prefix + name, entry["size"], _general_etag(entry))

    def _entries(self, url: str) -> list[dict[str, Any]]:
        return self._retry(lambda: _or_nothing(lambda: self._fs.ls(url, detail=True)), url) or []

    def stat(self, url: str) -> ListedFile | None:
        entry = self._retry(lambda: _or_nothing(lambda: self._fs.info(url)), url)
        return None if entry is None else ListedFile(url, entry["size"], _general_etag(entry))

    def read(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        data: bytes = self._retry(lambda: self._fs.cat_file(url, start=start, end=end), url)
        return data

    def open(self, url: str) -> IO[bytes]:
        file: IO[bytes] = self._fs.open(url, "rb")
        return file

    def write(self, url: str, data: bytes) -> None:
        self._retry(lambda: self._fs.pipe_file(url, data), url)

    def publish(self, local_file: str, url: str) -> None:
        self._retry(lambda: self._fs.put_file(local_file, url), url)
        _remove(local_file)

    def delete(self, url: str) -> None:
        self._retry(lambda: _or_nothing(lambda: self._fs.rm_file(url)), url)

    def delete_tree(self, url: str) -> None:
        for file in list(self.files(url)):
            self.delete(join(url, file.path))

    def delete_empty_folders(self, url: str) -> None:
        pass

    def _retry(self, request: Callable[[], T], url: str) -> T:
        return retry(request, url, self._deadline_s)


class GoogleStorage(FsspecStorage):
    """`gs://` by gcsfs. Listings are its JSON requests page by page: `find` would hold them all (3.5 kB an object).

    https://cloud.google.com/storage/docs/json_api/v1/objects/list
    """

    _FIELDS = "nextPageToken,prefixes,items(name,size,md5Hash,crc32c)"

    def folders(self, url: str) -> list[str]:
        return sorted(
            name[len(prefix) : -1]
            for prefix, page in self._pages(url, delimiter="/", fields="nextPageToken,prefixes")
            for name in page.get("prefixes", ())
        )

    def files(self, url: str) -> Iterator[ListedFile]:
        for prefix, page in self._pages(url, fields=self._FIELDS):
            for item in page.get("items", ()):
                if not item["name"].endswith("/"):  # consoles make such placeholders for folders
                    yield _google_file(item["name"][len(prefix) :], item)

    def stat(self, url: str) -> ListedFile | None:
        bucket, name = _bucket_and_name(url)
        item = self._retry(
            lambda: _or_nothing(lambda: self._fs.call("GET", "b/{}/o/{}", bucket, name, json_out=True)), url
        )
        if item is None:
            return None
        return _google_file(url, item)

    def _pages(self, url: str, **parameters: str) -> Iterator[tuple[str, dict[str, Any]]]:
        bucket, name = _bucket_and_name(url)
        prefix = f"{name}/" if name else ""
        token: str | None = None
        while True:
            page = self._page(url, bucket, prefix=prefix, maxResults=_PAGE_NAMES, pageToken=token, **parameters)
            yield prefix, page
            token = page.get("nextPageToken")
            if not token:
                return

    def _page(self, url: str, bucket: str, **parameters: Any) -> dict[str, Any]:
        page: dict[str, Any] = self._retry(
            lambda: self._fs.call("GET", "b/{}/o", bucket, json_out=True, **parameters), url
        )
        return page


def crc32c_of(store: Storage, url: str) -> int:
    """CRC-32C of a whole file, read in pieces."""
    crc, position = 0, 0
    file = store.stat(url)
    size = file.bytes if file else 0
    while position < size:
        piece = store.read(url, position, min(position + _PIECE_BYTES, size))
        if not piece:
            break
        crc, position = google_crc32c.extend(crc, piece), position + len(piece)
    return crc


def retry(request: Callable[[], T], url: str, deadline_s: float) -> T:
    """Call `request` until it succeeds, with jittered exponential backoff.

    Raises:
        FileNotFoundError: at once, the file isn't there.
        StorageError: refused for good, or `deadline_s` seconds of failures.
    """
    start = time.monotonic()
    pause_s = 0.5
    while True:
        try:
            return request()
        except (FileNotFoundError, FileExistsError, ImageShardsError):
            raise
        except Exception as error:
            if not _passing(error):
                raise StorageError(f"{url}: {_reason(error)}") from error
            if time.monotonic() - start + pause_s > deadline_s:
                raise StorageError(f"{url}: no success for {deadline_s:.0f} s: {_reason(error)}") from error
        time.sleep(pause_s * random.uniform(0.5, 1.5))
        pause_s = min(pause_s * 2, 30.0)


_LASTING = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ENAMETOOLONG,
    }
)


def _passing(error: Exception) -> bool:
    """Whether a failed request may succeed later: 408, 429, 5xx, a reset connection, a time-out."""
    status = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(status, int):
        return status in (408, 429) or status >= 500
    if isinstance(error, OSError):
        return error.errno not in _LASTING and "Forbidden" not in str(error)
    return not isinstance(error, (ValueError, TypeError, NotImplementedError, MemoryError))


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _or_nothing(request: Callable[[], T]) -> T | None:
    try:
        return request()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _bucket_and_name(url: str) -> tuple[str, str]:
    bucket, _, name = url.partition("://")[2].partition("/")
    return bucket, name


def _google_file(path: str, item: dict[str, Any]) -> ListedFile:
    """One item of a listing; a composite object has no MD5."""
    crc32c = base64.b64decode(item["crc32c"]).hex() if "crc32c" in item else None
    etag = (
        f"md5:{base64.b64decode(item['md5Hash']).hex()}" if "md5Hash" in item else f"crc32c:{crc32c}" if crc32c else ""
    )
    return ListedFile(path, int(item["size"]), etag, int(crc32c, 16) if crc32c else None)


def _general_etag(entry: dict[str, Any]) -> str:
    for key in ("etag", "ETag", "content_hash", "mtime", "created"):
        if entry.get(key):
            return f"etag:{entry[key]}"
    return ""
