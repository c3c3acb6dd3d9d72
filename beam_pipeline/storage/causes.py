"""Why a request failed: one table of causes, one line for each, and the one loop that tries again until a deadline."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from beam_pipeline.errors import ImageShardsError, StorageError

T = TypeVar("T")

DEFAULT_DEADLINE_S = 600.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class MissingFileError(StorageError, FileNotFoundError):
    """There is no such file."""


class NoBucketError(StorageError, FileNotFoundError):
    """There is no such bucket."""


class Incomplete(Exception):
    """What arrived isn't what the other side holds: a body cut short, another CRC."""


class Cause(NamedTuple):
    """A row of the table.

    Attributes:
        says: the cause in the line that a user reads.
        pattern: of `_facts` of an error.
        fix: what the user can do.
        passes: whether the same request may succeed later.
    """

    says: str
    pattern: str
    fix: str = ""
    passes: bool = False


_CREDENTIALS = {
    "gs": "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (needs boto3; aws sso login renews one)",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or az login and AZURE_USE_AZURE_CLI=true",
}
_RIGHTS = "give this account the right to it"
_ROOM = "make room"

_NO_BUCKET = Cause(
    "there is no such bucket", r"NoSuchBucket|ContainerNotFound|specified bucket does not exist", "check its name"
)
# The first row that matches counts.
CAUSES = (
    _NO_BUCKET,
    Cause(
        "the bucket is in another region",
        r"HTTP 30[17]|PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocation|redirect without LOCATION",
        "set AWS_REGION to the bucket's own",
    ),
    Cause(
        "credentials have expired",
        r"ExpiredToken|TokenRefreshRequired|RefreshError|ReauthFail|invalid_grant|UnauthorizedSSOToken|TokenRetrieval",
        "{credentials}",
    ),
    Cause(
        "credentials are missing",
        r"anonymous HTTP 40[13]|NoCredentials|DefaultCredentialsError|169\.254\.169|metadata\.google|get_credentials",
        "{credentials}",
    ),
    Cause(
        "credentials are refused",
        r"HTTP 401|InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|Unauthenticated",
        "{credentials}",
    ),
    Cause("permission denied", r"HTTP 403|PermissionDenied|AccessDenied|errno EACCES|errno EPERM", _RIGHTS),
    Cause("no space left on device", r"errno ENOSPC", _ROOM),
    Cause("disk quota exceeded", r"errno EDQUOT", _ROOM),
    Cause("a name here that its client can't take", r"InvalidPathError|Could not parse path|surrogates", "rename it"),
    Cause("the server is busy or failing", r"HTTP (408|429|5\d\d)|SlowDown", passes=True),
    Cause("no answer in time", r"TimedOut|timed out|Timeout", passes=True),
    Cause(
        "no connection",
        r"dns error|ConnectError|Connection|error sending request|body error|ProtocolError|TransportError|EOF"
        r"|ChunkedEncoding|RemoteDisconnected|SSLError|IncompleteMessage|HTTP error|errno E(NET|HOST)",
        "check the network",
        passes=True,
    ),
    Cause("the answer is incomplete", r"Incomplete|DataCorruption|JSONDecodeError|Header missing", passes=True),
)
_OTHER = Cause("", "")


def cause_of(error: BaseException, is_anonymous: bool = False) -> Cause:
    """The row of the table for an exception of any of the clients, or of the operating system."""
    facts = f"{'anonymous ' if is_anonymous else ''}{_facts(error)}"
    return next((cause for cause in CAUSES if re.search(cause.pattern, facts)), _OTHER)


def _facts(error: BaseException) -> str:
    """Status, kinds and text of an exception, without the URLs in it, whose names may be anything."""
    import errno

    number = errno.errorcode.get(getattr(error, "errno", None) or 0, "")
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__[:-3])
    text = re.sub(r"\w+://\S+(?<!169\.254\.169\.254)", lambda url: url[0] if "169.254." in url[0] else "", str(error))
    return f"HTTP {status_of(error) or '-'} errno {number or '-'} {kinds} {text}"


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status that an exception of obstore, google-cloud-storage or requests carries."""
    for held in (getattr(error, "code", None), getattr(getattr(error, "response", None), "status_code", None)):
        if isinstance(held, int):
            return int(held)
    found = re.search(r"status code: (\d{3})", str(error))
    return int(found[1]) if found else None


def _words(error: BaseException) -> str:
    """What the server says itself, else the exception's first line without its client's log."""
    text = str(error).partition("\n\nDebug source")[0]
    for pattern in (r"<Message>(.*?)</Message>", r'"message": ?"(.*?)"', r"status code: \d{3} [^:]*: (.*)"):
        if found := re.search(pattern, text, re.DOTALL):
            text = found[1]
            break
    text = re.sub(r"Error performing \w+ \S+ in \S+ - |^\d{3} |\w+ https?://\S+: ", "", text)
    return " ".join(text.split())[:200]


def explained(url: str, error: BaseException, scheme: str = "", is_anonymous: bool = False) -> StorageError:
    """The one line for a failure that no waiting changes."""
    cause = cause_of(error, is_anonymous)
    reason, status = cause.says, status_of(error)
    if isinstance(error, OSError) and error.strerror and not scheme:
        reason = error.strerror[:1].lower() + error.strerror[1:]
    elif not cause.says or scheme:
        words = _words(error) or type(error).__name__
        reason = f"{cause.says} ({f'{status}: ' if status else ''}{words})" if cause.says else f"{status or ''} {words}"
    kind = NoBucketError if cause is _NO_BUCKET else StorageError
    fix = cause.fix.format(credentials=_CREDENTIALS.get(scheme, "pass credentials"))
    return kind(f"{url}: {reason.strip()}", fix, "the same command resumes" if fix else "")


def missing(url: str, error: BaseException | None = None) -> MissingFileError:
    """That there is no such file."""
    found = MissingFileError(f"{url} is missing")
    found.__cause__ = error if isinstance(error, FileNotFoundError) else FileNotFoundError(url)
    return found


def retry(request: Callable[[], T], url: str, deadline_s: float, is_anonymous: bool = False) -> T:
    """Call `request` until it succeeds, with jittered exponential backoff.

    Raises:
        MissingFileError: at once, the file isn't there.
        StorageError: refused for good, or `deadline_s` seconds of failures.
    """
    start, pause_s, scheme = time.monotonic(), _FIRST_PAUSE_S, url.partition("://")[0]
    while True:
        try:
            return _interruptible(request)
        except (FileExistsError, ImageShardsError):
            raise
        except Exception as error:
            cause = cause_of(error, is_anonymous)
            if not cause.says and (isinstance(error, FileNotFoundError) or status_of(error) == 404):
                raise missing(url, error) from error
            line = explained(url, error, scheme, is_anonymous)
            if not cause.passes:
                raise line from error
            if time.monotonic() - start + pause_s > deadline_s:
                reason = f"{url}: no success for {deadline_s:.0f} s:{line.reason.removeprefix(url).lstrip(':')}"
                resuming = "the same command resumes, --io_deadline waits longer"
                raise StorageError(reason, cause.fix, resuming) from error
        time.sleep(pause_s * random.uniform(0.5, 1.5))
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def _interruptible(request: Callable[[], T]) -> T:
    """Ctrl-C reaches the main thread only in Python, not in a client that waits for a server: that takes a thread."""
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
