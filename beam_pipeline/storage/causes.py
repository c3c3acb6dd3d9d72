"""Why a request failed: a table of causes, the line that a user reads, and the loop that retries until a deadline."""

from __future__ import annotations

import errno
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from beam_pipeline.errors import RESUMES, ImageShardsError, MissingFileError, StorageError
from beam_pipeline.text import printable

T = TypeVar("T")

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
_SILENT_S = 3.0  # that a reader waits without a word
_LOG = logging.getLogger(__name__)


class Incomplete(Exception):
    """The received data isn't the object's: a body is cut short, or has another CRC."""


class Cause(NamedTuple):
    """A row of the table: the text, the pattern in an error's facts, the fix, whether a retry may succeed."""

    text: str
    pattern: str
    fix: str = ""
    is_transient: bool = False


_CREDENTIALS = {
    "gs": "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE and install boto3",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or az login and AZURE_USE_AZURE_CLI=true",
}
_NO_BUCKET = Cause("there is no such bucket", "NoSuchBucket|ContainerNotFound|bucket does not exist", "check its name")
_NO_UPLOAD = Cause("the upload is gone", "NoSuchUpload", is_transient=True)  # completed, though an error was answered
_MISSING = Cause("missing", "")
NO_CREDENTIALS = Cause(
    "credentials are missing",
    r"anonymous HTTP 40[13]|NoCredentials|DefaultCredentialsError|get_credentials|performing [A-Z]+ 169\.254\.",
    "credentials",
)
_EXPIRED = "ExpiredToken|TokenRefreshRequired|RefreshError|ReauthFail|UnauthorizedSSOToken|TokenRetrieval"
_REFUSED = "HTTP 401|InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|Unauthenticated"
_REGION = "AuthorizationHeaderMalformed|IllegalLocation|redirect without LOCATION"
# The last of a body that isn't a JSON object.
_INCOMPLETE = "Incomplete|JSONDecodeError|multipart response|Header missing|object has no attribute 'get'"
_NO_CONNECTION = "HTTP error|Connect|ChunkedEnc|ProtocolError|SSLError"
# The first row that matches is the cause.
_CAUSES: tuple[Cause, ...] = (
    _NO_BUCKET,
    Cause("credentials can't be fetched now", "TransportError", "check the network", is_transient=True),
    Cause("the bucket is in another region", _REGION, "set AWS_REGION to the bucket's own"),
    Cause("credentials have expired", _EXPIRED, "credentials"),
    NO_CREDENTIALS,
    Cause("credentials are refused", _REFUSED, "credentials"),
    Cause("permission denied", "HTTP 403|AccessDenied|errno (EACCES|EPERM)", "give this account the right to it"),
    Cause("", "errno (ENOSPC|EDQUOT)", "make room"),
    Cause("the store's client can't take this name", "InvalidPathError|Could not parse path|surrogates", "rename it"),
    Cause("the server is busy or failing", r"HTTP (408|429|5\d\d)|SlowDown|returned error response", is_transient=True),
    Cause("no answer in time", "TimedOut|timed out|Timeout", is_transient=True),
    Cause("the answer is incomplete", _INCOMPLETE, is_transient=True),
    Cause("the listing is corrupt", "invalid list response", "check the URL and the network", is_transient=True),
    Cause("no connection", _NO_CONNECTION, "check the URL and the network", is_transient=True),
    Cause("", ""),
)


def cause_of(error: BaseException, is_anonymous: bool = False) -> Cause:
    """The row of the table for an exception of a client or of the operating system."""
    status = status_of(error)
    number = errno.errorcode.get(getattr(error, "errno", None) or 0, "")
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    text = re.sub(r"\w+://([^/\s]*)\S*", r"\1", str(error))  # an object's name might match a pattern
    facts = f"{'anonymous ' * is_anonymous}HTTP {status} errno {number} {kinds} {text}"
    rows = _CAUSES
    if isinstance(error, FileNotFoundError | NotADirectoryError) or status in (404, 410):
        rows = (_NO_BUCKET, NO_CREDENTIALS, _NO_UPLOAD, _MISSING)
    elif status and status < 500 and status not in (408, 429):
        rows = tuple(row for row in _CAUSES if not row.is_transient)
    return next(row for row in rows if re.search(row.pattern, facts))


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status that an exception of obstore, google-cloud-storage or requests carries."""
    for status in (getattr(error, "code", None), getattr(getattr(error, "response", None), "status_code", None)):
        if isinstance(status, int):
            return int(status)
    match = re.search(r"status code: (\d{3})", str(error))
    return int(match[1]) if match else None


def as_storage_error(url: str, error: BaseException, is_anonymous: bool = False) -> StorageError:
    """An exception as one line: in the operating system's words, or the table's and the server's."""
    cause, status, scheme = cause_of(error, is_anonymous), status_of(error), url.partition("://")[0]
    if cause is _MISSING:
        return MissingFileError.at(url)
    fix = _CREDENTIALS.get(scheme, "pass credentials") if cause.fix == "credentials" else cause.fix
    if isinstance(error, OSError) and error.strerror and scheme == url:
        reason = error.strerror[:1].lower() + error.strerror[1:]
    else:
        detail = f"{status}: {_detail(error)}" if status else _detail(error)
        reason = f"{cause.text} ({detail})" if cause.text else detail
    kind = MissingFileError if cause is _NO_BUCKET else StorageError
    return kind(f"{url}: {reason}", fix, RESUMES if fix else "")


@contextmanager
def translating_os_errors(path: str, of_others: bool = True) -> Iterator[None]:
    """OSErrors become StorageErrors of one line; those about other files than `path` only if `of_others`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        if not of_others and (error.errno is None or error.filename not in (None, path)):
            raise
        raise as_storage_error(path, error) from error
    except RecursionError:  # Python's glob and rmtree recurse into each level
        raise StorageError(f"{path}: folders are nested too deeply", "move them away") from None


def _detail(error: BaseException) -> str:
    """The server's message, else the first line of the client's, with the host instead of the URL."""
    text = str(error).partition("\n\nDebug source")[0]
    for pattern in (r"<Message>(.*?)</Message>", r'"message": ?"(.*?)"', r"status code: \d{3} [^:]*: (.*)"):
        if match := re.search(pattern, text, re.DOTALL):
            text = match[1]
            break
    text = re.sub(r"^\d{3} |^Generic \w+ error: ", "", text)
    text = re.sub(r"(Error performing )?[A-Z]+ \w+://([^/\s]*)\S*( in \S+ - HTTP error:| in \S+ -|:)", r"\2:", text)
    text = re.sub(r"HTTPS?ConnectionPool\(host='(.*?)', port=(\d+)\).*", r"\1:\2", text)
    return " ".join(text.split())[:200] or type(error).__name__


def retry(
    request: Callable[[], T], url: str, deadline_s: float, is_anonymous: bool = False, first_s: float | None = None
) -> T:
    """Call `request` until it succeeds, with jittered exponential backoff.

    Args:
        request: one request.
        url: for the error.
        deadline_s: seconds of failures until it gives up.
        is_anonymous: whether it is sent without credentials.
        first_s: seconds without an answer until a reader gives up; None for a job, which the same command resumes.

    Raises:
        StorageError: a failure that isn't transient, such as a missing file, or `deadline_s` seconds of failures.
    """
    start, pause_s, is_told = time.monotonic(), _FIRST_PAUSE_S, first_s is None
    while True:
        try:
            return _call_interruptibly(request)
        except ImageShardsError:
            raise
        except Exception as error:
            cause, failure = cause_of(error, is_anonymous), as_storage_error(url, error, is_anonymous)
            limit_s, waited_s = deadline_s if first_s is None or status_of(error) else first_s, time.monotonic() - start
            if not cause.is_transient:
                raise (type(failure)(failure.reason, failure.fix) if first_s else failure) from error
            if waited_s + pause_s > limit_s:
                reason = f"{url}: no success for {limit_s:.0f} s{failure.reason.removeprefix(url)}"
                resuming = f"{RESUMES}, --io_deadline waits longer" * (first_s is None)
                raise StorageError(reason, cause.fix, resuming) from error
            if not is_told and (is_told := waited_s > _SILENT_S):
                _LOG.warning("%s; trying again for %.0f s", printable(failure.reason), limit_s - waited_s)
        time.sleep(pause_s * random.uniform(0.5, 1.5))
        pause_s = min(pause_s * 2, _MAX_PAUSE_S)


def _call_interruptibly(request: Callable[[], T]) -> T:
    """Send a request in a thread: Ctrl-C can't interrupt the main thread in a client that waits for a server."""
    if threading.current_thread() is not threading.main_thread():
        return request()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(request())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="storage-request", daemon=True).start()
    return future.result()
