"""Files of any fsspec URL.

Requests that fail in passing are tried again: one lost packet doesn't end a training run of days.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from beam_pipeline.errors import StorageError
from reader.object_ranges import ObjectRanges
from reader.retries import http_status, retry, unless_missing
from reader.storage import Range, Storage

_RANGE_NOT_SATISFIABLE = 416


@cache  # one client, one connection pool and one event loop a process
def open_remote(scheme: str) -> RemoteStorage:
    """The storage of a scheme. Raises StorageError: no such protocol, or its fsspec package isn't installed."""
    # gcsfs otherwise asks for the bucket's type over gRPC, which stalls for a minute without that permission.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    options: dict[str, Any] = {"use_listings_cache": False}
    is_gcs = scheme in ("gs", "gcs")
    if is_gcs:
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs a traceback for each request it gives up
        if os.environ.get("STORAGE_EMULATOR_HOST"):
            options["token"] = "anon"  # the emulator knows no credentials
    try:
        import fsspec

        filesystem = fsspec.filesystem(scheme, **options)
    except (ImportError, ValueError) as error:
        raise StorageError(f"can't open {scheme}:// URLs: {error}") from None
    return GcsStorage(scheme, filesystem) if is_gcs else RemoteStorage(scheme, filesystem)


if hasattr(os, "register_at_fork"):  # a forked child (a PyTorch worker) has no threads of its parent's client
    os.register_at_fork(after_in_child=open_remote.cache_clear)


class RemoteStorage(Storage):
    """Any fsspec filesystem."""

    is_remote = True

    def __init__(self, scheme: str, filesystem: Any) -> None:
        self._scheme = scheme
        self._fs = filesystem

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is not None and stop <= start:
            return b""
        # cat_file, since cat() takes `[`, `*` and `?` in a name for a pattern.
        try:
            data: bytes = retry(lambda: self._fs.cat_file(path, start=start if stop or start else None, end=stop), path)
        except StorageError as error:
            if http_status(error.__cause__) == _RANGE_NOT_SATISFIABLE:  # the file ends before `start`
                return b""
            raise
        return data

    def size(self, path: str) -> int:
        return int(retry(lambda: self._fs.info(path), path)["size"])

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        found: dict[str, int] = {}
        for folder in sorted({path.rpartition("/")[0] for path in paths}):
            for entry in self._entries(folder):
                found[f"{folder}/{entry['name'].removeprefix(self._inside(folder))}"] = entry["size"]
        return [found.get(path) for path in paths]

    def _entries(self, folder: str) -> list[dict[str, Any]]:
        return unless_missing(lambda: retry(lambda: self._fs.ls(folder, detail=True), folder)) or []

    def names(self, folder: str) -> list[str]:
        paths = [entry["name"].rstrip("/") + "/" * (entry["type"] == "directory") for entry in self._entries(folder)]
        return sorted(path.removeprefix(self._inside(folder)) for path in paths)

    def files(self, folder: str) -> list[tuple[str, int]]:
        found = unless_missing(lambda: retry(lambda: self._fs.find(folder, detail=True), folder)) or {}
        files = [(path.removeprefix(self._inside(folder)), int(entry["size"])) for path, entry in found.items()]
        return sorted((file for file in files if not file[0].endswith("/")), key=lambda file: file[0].encode())

    def _inside(self, folder: str) -> str:
        """How the paths of a listing of `folder` begin."""
        return str(self._fs._strip_protocol(folder)).rstrip("/") + "/"

    def glob(self, pattern: str) -> list[str]:
        return sorted(f"{self._scheme}://{path.lstrip('/')}" for path in retry(lambda: self._fs.glob(pattern), pattern))


class GcsStorage(RemoteStorage):
    """Google Cloud Storage: runs are received where they are wanted; all else, and what goes wrong, is for gcsfs."""

    ranges_at_once = 2  # the 16 of a window take one latency on two cores (docs/decisions/009)

    def __init__(self, scheme: str, filesystem: Any) -> None:
        super().__init__(scheme, filesystem)
        self._ranges = ObjectRanges()

    def read_into(self, ranges: Sequence[Range], parts: Sequence[memoryview]) -> list[int | None]:
        headers: dict[str, str] = {}
        retry(lambda: self._fs.credentials.apply(headers), ranges[0][0])
        asks = [(self._fs.url(path), start, part) for (path, start, _), part in zip(ranges, parts, strict=True)]
        received = self._ranges.receive(asks, headers)
        for place, size in enumerate(received):
            if size is None:
                (received[place],) = super().read_into([ranges[place]], [parts[place]])
        return received
