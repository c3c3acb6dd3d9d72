"""Keeps what runners and their worker processes print off the terminal: their tracebacks would bury our one line."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from typing import IO, TextIO

_terminal: TextIO | None = None  # while stderr goes elsewhere


def terminal() -> TextIO:
    """Where stderr leads for the user of this process, also while a job runs in it."""
    return _terminal or sys.stderr


def say(text: str, stream: TextIO | None = None) -> None:
    """Print what nothing hangs on: whoever reads it may have gone, or may read no Unicode.

    Args:
        text: one or more lines.
        stream: stdout if it is None.
    """
    stream = stream or sys.stdout
    if stream is None:  # closed when the process began
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except (OSError, ValueError):
        _forget(stream)


def _forget(stream: TextIO) -> None:
    """What waits in a stream that leads nowhere, which Python would try to write once more at the end."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class RunnerLog:
    """What went to stderr while a job ran.

    Attributes:
        stderr: where stderr led before: for the progress line and for errors.
    """

    def __init__(self, stderr: TextIO, file: IO[str] | None = None) -> None:
        self.stderr = stderr
        self._file = file

    def save(self) -> str | None:
        """Copy it to a file that stays; returns its path, or None where there is nothing."""
        if self._file is None:
            return None
        self._file.flush()
        self._file.seek(0)
        with tempfile.NamedTemporaryFile("w", prefix="imageshards-", suffix=".log", delete=False) as copy:
            shutil.copyfileobj(self._file, copy)
        if os.path.getsize(copy.name):
            return copy.name
        os.unlink(copy.name)
        return None


@contextmanager
def runner_log(quiet: bool) -> Iterator[RunnerLog]:
    """Sends stderr of this process, and of those that it starts, to a file without a name.

    Args:
        quiet: False changes nothing.
    """
    global _terminal
    if not quiet:
        yield RunnerLog(sys.stderr)
        return
    sys.stderr.flush()
    before = os.dup(2)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="backslashreplace") as file,
        open(before, "w", buffering=1, closefd=True) as shown,
    ):
        _terminal = stderr = shown if sys.stderr is sys.__stderr__ else sys.stderr
        os.dup2(file.fileno(), 2)
        try:
            with redirect_stderr(file):
                yield RunnerLog(stderr, file)
        finally:
            os.dup2(before, 2)
            _terminal = None
