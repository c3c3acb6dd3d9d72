"""Any fsspec filesystem, by its general calls; listings come folder by folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import islice
from typing import IO, Any, TypeVar

from beam_pipeline.storage.base import ListedFile, Version
from beam_pipeline.storage.retries import retry
from beam_pipeline.storage.urls import join

T = TypeVar("T")

_BUFFER_BYTES = 8 << 20
_DELETES_IN_FLIGHT = 32
_FILES_A_ROUND = 1000


class FsspecStorage:
    """Files of an fsspec filesystem.

    Its stores promise no conditional writes by general calls: `create` asks for one where the filesystem knows `mode`,
    `replace` looks, writes and looks again. docs/decisions/006-one-writer.md says what that leaves open.
    """

    def __init__(self, filesystem: Any, deadline_s: float) -> None:
        self._fs = filesystem
        self._deadline_s = deadline_s

    def names(self, url: str) -> Iterator[str]:
        return (_last(entry["name"]) + "/" * (entry["type"] == "directory") for entry in self._entries(url))

    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        pending = [""]
        while pending:
            prefix = pending.pop()
            for entry in self._entries(join(url, prefix)):
                name = _last(entry["name"])
                if entry["type"] == "directory":
                    pending.append(f"{prefix}{name}/")
                else:
                    yield ListedFile(prefix + name, entry["size"], _etag(entry))

    def _entries(self, url: str) -> list[dict[str, Any]]:
        return self._retry(lambda: or_nothing(lambda: self._fs.ls(url, detail=True)), url) or []

    def stat(self, url: str) -> ListedFile | None:
        entry = self._info(url)
        return None if entry is None else ListedFile(url, entry["size"], _etag(entry))

    def _info(self, url: str) -> dict[str, Any] | None:
        return self._retry(lambda: or_nothing(lambda: self._fs.info(url)), url)

    def read(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        data: bytes = self._retry(lambda: self._fs.cat_file(url, start=start, end=end), url)
        return data

    def open(self, url: str) -> IO[bytes]:
        file = self.stat(url)
        if file is None:
            raise FileNotFoundError(url)
        return io.BufferedReader(_Stream(self.read, url, file.bytes), _BUFFER_BYTES)

    def write(self, url: str, data: bytes) -> None:
        self._retry(lambda: self._fs.pipe_file(url, data), url)

    def create(self, url: str, data: bytes) -> bool:
        with contextlib.suppress(FileExistsError):
            if self.stat(url) is None:
                self._retry(lambda: self._fs.pipe_file(url, data, mode="create"), url)
        return self.read(url) == data

    def version(self, url: str) -> Version | None:
        entry = self._info(url)
        data = None if entry is None else or_nothing(lambda: self.read(url))
        if entry is None or data is None:
            return None
        return Version(data, hashlib.sha256(data).hexdigest(), _age_s(entry))

    def replace(self, url: str, data: bytes, generation: str) -> bool:
        found = self.version(url)
        if found is None or found.generation != generation:
            return found is not None and found.data == data
        self.write(url, data)
        return self.read(url) == data

    def delete_version(self, url: str, generation: str) -> None:
        found = self.version(url)
        if found is not None and found.generation == generation:
            self.delete(url)

    def publish(self, local_file: str, url: str) -> None:
        self._retry(lambda: self._fs.put_file(local_file, url), url)
        os.unlink(local_file)

    def delete(self, url: str) -> None:
        self._retry(lambda: or_nothing(lambda: self._fs.rm_file(url)), url)

    def delete_tree(self, url: str, keep: Collection[str] = ()) -> None:
        files = (file.path for file in self.files(url) if file.path not in keep)
        with ThreadPoolExecutor(_DELETES_IN_FLIGHT) as pool:
            while some := list(islice(files, _FILES_A_ROUND)):
                for _ in pool.map(lambda path: self.delete(join(url, path)), some):
                    pass

    def delete_temporaries(self, url: str) -> None:
        pass

    def delete_empty_folders(self, *urls: str) -> None:
        pass

    def _retry(self, request: Callable[[], T], url: str) -> T:
        return retry(request, url, self._deadline_s)


class _Stream(io.RawIOBase):
    """A remote file from its start to its end; each read is a request of its own, which is retried."""

    def __init__(self, read: Callable[[str, int, int], bytes], url: str, size: int) -> None:
        self._read = read
        self._url = url
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        data = self._read(self._url, self._position, end) if self._position < end else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def or_nothing(request: Callable[[], T]) -> T | None:
    """What `request` returns, or None where there is no such file."""
    try:
        return request()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _etag(entry: dict[str, Any]) -> str:
    for key in ("etag", "ETag", "content_hash", "mtime", "created"):
        if entry.get(key):
            return f"etag:{entry[key]}"
    return ""


def _age_s(entry: dict[str, Any]) -> float:
    """Seconds since a file was written, by this machine's clock: general calls don't tell the store's."""
    for key in ("LastModified", "last_modified", "mtime", "created"):
        written = entry.get(key)
        if isinstance(written, datetime):
            return time.time() - written.timestamp()
        if isinstance(written, int | float):
            return time.time() - written
    return 0.0
