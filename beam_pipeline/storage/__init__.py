"""Local folders and fsspec URLs behind one small interface: list in pages, read, write whole files, delete.

A URL is a local path or `scheme://…`. Names are never globbed, unquoted or normalised: what a listing returns reads
back, whatever characters it holds. Remote requests retry with jittered backoff until a deadline; a local one fails at
once. Everything is written whole under its final name: on this machine and in object stores a reader meets a complete
file or none. Other filesystems of fsspec (`sftp://`, `smb://`, …) may show one half written, and keep it so when its
writer is killed.

    base        what a storage can do, for those that use one
    urls        paths and URLs as text
    retries     which failures pass, how often they are met again, and the one line for those that don't
    local, remote, google       this machine; any fsspec filesystem; gs://
    json_api, chunks            requests and uploads of gs://
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import google_crc32c

from beam_pipeline.errors import StorageError
from beam_pipeline.storage.base import ListedFile, Storage, Version, VersionedStorage
from beam_pipeline.storage.local import LocalStorage
from beam_pipeline.storage.retries import DEFAULT_DEADLINE_S, explained
from beam_pipeline.storage.urls import is_local, join, load_fsspec, normalize, scheme_of, why_unusable

__all__ = [
    "DEFAULT_DEADLINE_S",
    "ListedFile",
    "LocalStorage",
    "Storage",
    "Version",
    "VersionedStorage",
    "crc32c_of",
    "explained",
    "is_local",
    "is_whole",
    "join",
    "normalize",
    "open_storage",
    "open_versioned",
    "pieces",
    "why_unusable",
]

_PIECE_BYTES = 16 << 20


def open_storage(url: str, deadline_s: float = DEFAULT_DEADLINE_S) -> Storage:
    """The storage that holds `url`.

    Args:
        url: any path or URL.
        deadline_s: how long a remote request is retried.

    Raises:
        StorageError: no such protocol, or its fsspec package isn't installed.
    """
    scheme = scheme_of(url)
    return LocalStorage() if scheme is None else _remote(scheme, deadline_s)


def open_versioned(url: str, deadline_s: float = DEFAULT_DEADLINE_S) -> VersionedStorage:
    """The remote storage that holds `url`, for files that several jobs may write."""
    scheme = scheme_of(url)
    assert scheme is not None
    return _remote(scheme, deadline_s)


@functools.cache  # one client, one connection pool and one event loop a process
def _remote(protocol: str, deadline_s: float) -> VersionedStorage:
    options: dict[str, Any] = {"use_listings_cache": False}
    try:
        fsspec = load_fsspec()
        if protocol not in ("gs", "gcs"):
            from beam_pipeline.storage.remote import FsspecStorage

            return FsspecStorage(fsspec.filesystem(protocol, **options), deadline_s)
        from beam_pipeline.storage.google import GoogleStorage

        if os.environ.get("STORAGE_EMULATOR_HOST"):
            options["token"] = "anon"
        return GoogleStorage(fsspec.filesystem(protocol, **options), deadline_s)
    except (ImportError, ValueError) as error:
        raise StorageError(f"can't open {protocol}:// URLs: {error}", "install its fsspec package") from None


def pieces(store: Storage, url: str, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file, in pieces."""
    for start in range(0, size, _PIECE_BYTES):
        yield store.read(url, start, min(start + _PIECE_BYTES, size))


def crc32c_of(store: Storage, url: str, size: int) -> int:
    """CRC-32C of the first `size` bytes of a file."""
    return functools.reduce(google_crc32c.extend, pieces(store, url, size), 0)


def is_whole(store: Storage, url: str, found: ListedFile | None, size: int, crc32c: int) -> bool:
    """Whether a file has this size and CRC-32C; where the store doesn't know the CRC, the file is read.

    Args:
        store, url: where it is.
        found: what the store says of it.
        size, crc32c: what it should be.
    """
    if found is None or found.bytes != size:
        return False
    return crc32c == (crc32c_of(store, url, size) if found.crc32c is None else found.crc32c)
