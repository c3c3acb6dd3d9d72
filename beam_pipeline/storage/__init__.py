"""Files of this machine and of object stores behind one interface, for the writer and the reader.

A URL is a local path, `file://`, `gs://`, `s3://`, `az://` or one `http(s)://` file. Names are never unquoted or
normalised: what a listing returns reads back, whatever characters it holds. Remote requests are tried again until a
deadline; a local one fails at once. Every file is written under its final name in one step: a reader meets all or none.

    base        what a storage can do, for those that use one; paths and URLs as text
    causes      why a request failed, in one line each, and the loop that tries again
    local       files of this machine
    objects     s3://, az://, http:// by obstore
    gs          gs:// by google-cloud-storage, read by obstore
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import google_crc32c

from beam_pipeline.errors import StorageError, UsageError
from beam_pipeline.storage.base import (
    REMOTE_SCHEMES,
    ListedFile,
    Storage,
    is_local,
    join,
    normalize,
    scheme_of,
    why_unusable,
)
from beam_pipeline.storage.causes import DEFAULT_DEADLINE_S, MissingFileError, explained
from beam_pipeline.storage.local import LocalStorage

if TYPE_CHECKING:
    from beam_pipeline.storage.objects import ObjectStorage as VersionedStorage

__all__ = [
    "DEFAULT_DEADLINE_S",
    "ListedFile",
    "LocalStorage",
    "Storage",
    "VersionedStorage",
    "crc32c_of",
    "explained",
    "forget_clients",
    "is_local",
    "is_missing",
    "is_whole",
    "join",
    "normalize",
    "open_storage",
    "open_versioned",
    "pieces",
    "why_unusable",
]

_PIECE_BYTES = 16 << 20
_LOCAL = LocalStorage()


def open_storage(url: str, deadline_s: float = DEFAULT_DEADLINE_S) -> Storage:
    """The storage that holds `url`; one per process, scheme and deadline.

    Args:
        url: any path or URL.
        deadline_s: how long a remote request is tried again.

    Raises:
        UsageError: no such scheme.
        StorageError: its client isn't installed.
    """
    return _LOCAL if is_local(url) else open_versioned(url, deadline_s)


def open_versioned(url: str, deadline_s: float = DEFAULT_DEADLINE_S) -> VersionedStorage:
    """The remote storage that holds `url`, for files that several jobs may write."""
    scheme = scheme_of(url)
    if scheme not in REMOTE_SCHEMES:
        raise UsageError(f"{url}: {why_unusable(url)}")
    try:
        return _remote(scheme, deadline_s)
    except ImportError as error:
        raise StorageError(
            f"{url}: {error}", "in the clone of imageshards, pip install '.[reader]' or '.[pipeline]'"
        ) from None


@functools.cache
def _remote(scheme: str, deadline_s: float) -> VersionedStorage:
    if scheme == "gs":
        from beam_pipeline.storage.gs import GoogleStorage

        return GoogleStorage(deadline_s)
    from beam_pipeline.storage.objects import ObjectStorage

    return ObjectStorage(scheme, deadline_s)


def forget_clients() -> None:
    """Later storages read the environment again."""
    _remote.cache_clear()


def is_missing(error: StorageError) -> bool:
    """Whether it says that there is no such file."""
    return isinstance(error, MissingFileError)


def pieces(store: Storage, url: str, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file, in pieces."""
    for start in range(0, size, _PIECE_BYTES):
        yield store.read(url, start, min(start + _PIECE_BYTES, size))


def crc32c_of(store: Storage, url: str, size: int) -> int:
    """CRC-32C of the first `size` bytes of a file."""
    return functools.reduce(google_crc32c.extend, pieces(store, url, size), 0)


def is_whole(
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
        return crc32c_of(store, url, size) == crc32c
    return found.crc32c in (None, crc32c)
