"""Every error a user can meet.

    ImageShardsError            exit code 1: the job failed, or a check did
    ├── UsageError              exit code 2: bad flag or configuration, found before any image is read
    ├── StorageError            a storage request failed after all its retries
    │   └── MissingFileError    there is no such file or bucket
    ├── UnforeseenError         a job ended in an error that isn't one of these
    ├── NotPublishedError       a folder holds no finished dataset
    │   └── OtherFormatError    it is one of another release
    ├── CorruptRecordError      a record's framing or CRC is invalid (names file, record and byte offset)
    └── WorkerError             one of these as a runner passes it on; `from_worker` restores it
    Reject                      one image gets no record; users never see it as an error

An error's text is one line with the bad value and the fix.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote, unquote

from beam_pipeline.text import one_line, print_line

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
RESUMES = "the same command resumes"
INTERRUPTED = f"interrupted; {RESUMES}"
UNPUBLISHED = "nothing is published; run the same command again"


class ImageShardsError(Exception):
    """The job failed, or a check of a dataset did."""

    exit_code = EXIT_FAILED


class UsageError(ImageShardsError, ValueError):
    """A flag or a configuration value can't be used; raised before any image is read."""

    exit_code = EXIT_USAGE


class StorageError(ImageShardsError):
    """A storage request failed after all its retries, or was refused.

    Args:
        reason: which file, and what is wrong.
        fix: what the user can do about it; "" if that isn't known.
        resuming: how to continue the job that it stopped; "" without a job.
    """

    def __init__(self, reason: str, fix: str = "", resuming: str = "") -> None:
        super().__init__(reason, fix, resuming)
        self.reason = reason
        self.fix = fix
        self.resuming = resuming

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.reason, self.fix, self.resuming)))


class MissingFileError(StorageError, FileNotFoundError):
    """There is no such file, or no such bucket."""

    @classmethod
    def at(cls, url: str) -> MissingFileError:
        """There is no file `url`."""
        return cls(f"{url} is missing")


class UnforeseenError(ImageShardsError):
    """A job ended in an error that isn't one of these, which is the cause."""


class NotPublishedError(ImageShardsError):
    """A folder has no `manifest.json`, or one that isn't valid."""


class OtherFormatError(NotPublishedError):
    """A manifest of another format version, by a newer release, whose files must not be changed."""


class Reject(Exception):
    """One input image that gets no record: it is counted, and written to `rejects.jsonl`.

    Args:
        reason: a `schema.RejectReason`.
        detail: from a fixed template with deterministic values only, never a library's exception text.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class CorruptRecordError(ImageShardsError):
    """A TFRecord's framing or CRC is invalid.

    Args:
        file: the shard, as the caller names it.
        record: number of the record in that file, from 0; -1 if unknown.
        offset: byte offset in the file at which the record's framing begins.
        reason: what is wrong, in a few words.
    """

    def __init__(self, file: str, record: int, offset: int, reason: str) -> None:
        super().__init__(file, record, offset, reason)
        self.file = file
        self.record = record
        self.offset = offset
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.file}: record {self.record} at byte {self.offset}: {self.reason}"


# The fix if workers have other versions than the launcher.
OTHER_IMAGE = "build the workers' image from a checkout, deploy/Dockerfile, with the launcher's version, Python, extras"
# Of Beam's own check, in a worker; it names the versions of the two sides by their images.
_SDK = r"environment: \S*?beam_python([\d.]+)_sdk:([\d.]+)\."
_OTHER_SDK = re.compile(rf"Submission {_SDK} Runtime {_SDK}")
# JSON, percent-encoded: runners escape quotes and line breaks of a worker's text, some of them twice.
_TOKEN = re.compile(r"imageshards-error:([\w.~%-]+)")


class WorkerError(ImageShardsError):
    """An error of ours as it passes through a runner: its text, for a worker's log, and the error itself as a token."""


@contextmanager
def errors_as_tokens() -> Iterator[None]:
    """Put around code that a runner calls, which passes on only an error's text; `from_worker` restores the error."""
    try:
        yield
    except ImageShardsError as error:
        token = quote(json.dumps({"kind": type(error).__name__, "args": error.__reduce__()[1]}), safe="")
        raise WorkerError(f"{one_line(error)} imageshards-error:{token}") from error


def from_worker(error: Exception) -> ImageShardsError | None:
    """Our own error in a runner's exception, the last if there are several; None without one."""
    text = str(error)
    if match := _OTHER_SDK.search(text):
        sides = match.group(1, 2), match.group(3, 4)
        launcher, worker = (f"Python {python} with Beam {beam}" for python, beam in sides)
        return ImageShardsError(f"the worker has {worker}, the launcher {launcher}: {OTHER_IMAGE}")
    for token in reversed(_TOKEN.findall(text)):
        with suppress(ValueError, KeyError, TypeError):  # a service may truncate a long text
            document = json.loads(unquote(token))
            kind: type[ImageShardsError] = _kinds(ImageShardsError)[document["kind"]]
            return kind(*document["args"])
    return error if isinstance(error, ImageShardsError) else None


def _kinds(kind: type[ImageShardsError]) -> dict[str, Any]:
    """Name → class, of an error and its subclasses."""
    kinds: dict[str, Any] = {kind.__name__: kind}
    for subclass in kind.__subclasses__():
        kinds |= _kinds(subclass)
    return kinds


def print_error(error: ImageShardsError) -> int:
    """Print the last line of a failed command; returns its exit code."""
    print_line(f"error: {one_line(error)}", sys.stderr)
    return error.exit_code
