"""Remote requests that fail in passing are tried again; which failures pass, and which don't."""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from beam_pipeline.errors import StorageError

T = TypeVar("T")

DEADLINE_S = 600.0


def retry(request: Callable[[], T], path: str) -> T:
    """Call `request` until it succeeds, for at most `DEADLINE_S`, with jittered exponential backoff."""
    start, pause_s = time.monotonic(), 0.5
    while True:
        try:
            return request()
        except FileNotFoundError as error:
            raise StorageError(f"{path} is missing") from error
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if not _is_passing(error):
                raise StorageError(f"{path}: {reason}") from error
            if time.monotonic() - start + pause_s > DEADLINE_S:
                raise StorageError(f"{path}: gave up after {DEADLINE_S:.0f} s: {reason}") from error
        time.sleep(pause_s * random.uniform(0.5, 1.5))
        pause_s = min(pause_s * 2, 30.0)


# Failures of a connection that mend themselves; what isn't named here would only hide for `DEADLINE_S`.
_PASSING_ERRNOS = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,  # s3fs: the server asks to slow down
        errno.EIO,  # s3fs: an error inside the server
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
    }
)
# By name, so that none has to be imported: of aiohttp, gcsfs, google-auth, requests, urllib3, botocore, azure-core.
_PASSING_NAMES = frozenset(
    {
        "ClientConnectionError",
        "ClientPayloadError",
        "ServerDisconnectedError",
        "HTTPClientError",
        "ResponseStreamingError",
        "TransportError",
        "ChunkedEncodingError",
        "ConnectionError",
        "ProtocolError",
        "Timeout",
        "IncompleteRead",
        "IncompleteReadError",
        "ServiceRequestError",
        "ServiceResponseError",
        "TimeoutError",
        "ChecksumError",
    }
)


def _is_passing(error: Exception) -> bool:
    """Whether the same request may succeed later: 408, 429, 5xx, a connection reset, a time-out, a body cut short."""
    status = http_status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNOS:
        return True
    if getattr(error, "retryable", False) is True:  # of google-auth
        return True
    return any(kind.__name__ in _PASSING_NAMES for kind in type(error).__mro__)


def is_missing(error: StorageError) -> bool:
    """Whether there is no such file."""
    return isinstance(error.__cause__, FileNotFoundError)


def unless_missing(request: Callable[[], T]) -> T | None:
    """What `request` returns; None where it finds no such file."""
    try:
        return request()
    except StorageError as error:
        if is_missing(error):
            return None
        raise


def http_status(error: BaseException | None) -> int | None:
    """The HTTP status that an exception of gcsfs, aiohttp or s3fs carries, if any."""
    status = getattr(error, "code", None) or getattr(error, "status", None)
    return status if isinstance(status, int) else None
