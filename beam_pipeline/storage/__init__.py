"""Local folders and fsspec URLs behind one small interface: list in pages, read, write whole files, delete.

A URL is a local path or `scheme://…`. Names are never globbed, unquoted or normalised: what a listing returns reads
back, whatever characters it holds. Remote requests retry with jittered backoff until a deadline; a local one fails at
once. Everything is written whole under its final name: a reader meets a complete file or none.

    base        what a storage can do, for those that use one
    urls        paths and URLs as text
    retries     which failures pass, how often they are met again, and the one line for those that don't
    local, remote, google       this machine; any fsspec filesystem; gs://
    json_api, chunks            requests and uploads of gs://
"""

from __future__ import annotations

import functools
import os
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
    "join",
    "normalize",
    "open_storage",
    "open_versioned",
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
        raise StorageError(f"can't open {protocol}:// URLs: {error}; install its fsspec package") from None


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
