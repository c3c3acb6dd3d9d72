"""Which failures of a storage request pass, how it is repeated until then, and the one line for those that last."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

from beam_pipeline.errors import ImageShardsError, StorageError

T = TypeVar("T")

DEFAULT_DEADLINE_S = 600.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Refused(Exception):
    """A server's answer to a request that it didn't fulfil.

    Args:
        status: of HTTP.
        message: what the server says of it.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.code = status
        self.message = message

    def __str__(self) -> str:
        return f"the server answers {self.code}: {self.message}"


class Incomplete(ConnectionError):
    """What arrived isn't what the other side holds: a body cut short, another CRC."""


def retry(request: Callable[[], T], url: str, deadline_s: float) -> T:
    """Call `request` until it succeeds, with jittered exponential backoff.

    Raises:
        FileNotFoundError: at once, the file isn't there.
        StorageError: refused for good, or `deadline_s` seconds of failures.
    """
    start = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return request()
        except (FileNotFoundError, FileExistsError, ImageShardsError):
            raise
        except Exception as error:
            if not passes(error):
                raise StorageError(f"{url}: {_reason(error)}", *_advice(_fix(error))) from error
            if time.monotonic() - start + pause_s > deadline_s:
                reason = f"{url}: no success for {deadline_s:.0f} s: {_reason(error)}"
                raise StorageError(reason, resuming=f"{_RESUMES}, --io_deadline waits longer") from error
        time.sleep(pause_s * random.uniform(0.5, 1.5))
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


# No wait mends these.
_LASTING = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ENAMETOOLONG,
    }
)
_RESUMES = "the same command resumes"
_ROOM = "make room"
_RIGHT = "give this account the right to it"
_FIXES_BY_ERRNO = {errno.ENOSPC: _ROOM, errno.EDQUOT: _ROOM, errno.EACCES: _RIGHT, errno.EPERM: _RIGHT}
_FIXES_BY_STATUS = {
    401: "credentials are missing or have expired: gcloud auth application-default login",
    403: _RIGHT,
}


def passes(error: Exception) -> bool:
    """Whether a failed request may succeed later: 408, 429, 5xx, a reset connection, a time-out, a body cut short."""
    status = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(status, int):
        return status in (408, 429) or status >= 500
    if isinstance(error, PermissionError):  # s3fs tells a refusal so, without a number
        return False
    if isinstance(error, OSError):
        return error.errno not in _LASTING and "Forbidden" not in str(error)
    if _fix_of_credentials(error):
        return type(error).__name__ == "TransportError" or bool(getattr(error, "retryable", False))
    return not isinstance(error, (ValueError, TypeError, NotImplementedError, MemoryError))


def _fix_of_credentials(error: Exception) -> str:
    """What mends an error of the credentials' own library; "" for any other error."""
    module, name = type(error).__module__, type(error).__name__
    if module == "google.auth.exceptions":
        return _FIXES_BY_STATUS[401]
    if module == "botocore.exceptions" and ("Credential" in name or "Token" in name):
        return "credentials are missing or have expired: aws configure"
    return ""


def _reason(error: Exception) -> str:
    text = " ".join(f"{'' if isinstance(error, Refused) else type(error).__name__ + ': '}{error}".split())
    return text[:300]


def _fix(error: Exception) -> str:
    """What mends a failure that lasts; "" where that isn't known."""
    if isinstance(error, Refused):
        return _FIXES_BY_STATUS.get(error.code, "")
    return _RIGHT if isinstance(error, PermissionError) else _fix_of_credentials(error)


def _advice(fix: str) -> tuple[str, str]:
    """`fix` and `resuming` of a StorageError: only what can be mended is tried again."""
    return fix, _RESUMES if fix else ""


def explained(url: str, error: OSError) -> StorageError:
    """The one line for a local file's failure."""
    text = os.strerror(error.errno) if error.errno else str(error)
    return StorageError(f"{url}: {text[:1].lower()}{text[1:]}", *_advice(_FIXES_BY_ERRNO.get(error.errno or 0, "")))
