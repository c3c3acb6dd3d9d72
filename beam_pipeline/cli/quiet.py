"""One place that silences: while a job runs, stderr shows the lines that `print_line` prints, and nothing else."""

from __future__ import annotations

import io
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TextIO
from warnings import filterwarnings

from beam_pipeline.errors import UnforeseenError
from beam_pipeline.images.formats import hide_warnings


class Log(io.TextIOWrapper):
    """A temporary file in the place of stderr: `print_line` still prints to `terminal`."""

    def __init__(self, terminal: TextIO) -> None:
        file: IO[bytes]
        try:
            file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - workers write to it, too
        except OSError:  # no room: then it isn't kept
            file = open(os.devnull, "r+b", buffering=0)  # noqa: SIM115
        super().__init__(file, encoding="utf-8", errors="backslashreplace", write_through=True)
        self.terminal = terminal

    def isatty(self) -> bool:
        return not self.terminal.closed and self.terminal.isatty()


@contextmanager
def only_our_lines(logs: bool = False) -> Iterator[None]:
    """Keep tracebacks, warnings and what worker processes print out of stderr; an `UnforeseenError` gets it as a note.

    Args:
        logs: whether to leave loggers as they are: a cluster's job is told by its log lines.
    """
    level, stderr = logging.root.level, sys.stderr
    if not logs:
        logging.root.setLevel(logging.CRITICAL + 1)
    hide_warnings()
    # Users' own credentials are what docs/howto/dataflow.md recommends.
    filterwarnings("ignore", "Your application has authenticated using end user credentials")
    filterwarnings("ignore", "Unrecognized JobState")  # newer than the library
    is_shared = False  # else workers print elsewhere: a test, a caller that collects our lines
    with suppress(OSError, ValueError, AttributeError):
        is_shared = stderr.fileno() == 2
    terminal = stderr
    if is_shared:
        terminal = os.fdopen(os.dup(2), "w", encoding=stderr.encoding, errors=stderr.errors, buffering=1)
    sys.stderr = log = Log(terminal)
    if is_shared:
        os.dup2(log.fileno(), 2)
    try:
        yield
    except UnforeseenError as error:
        log.seek(0)
        error.add_note(log.read())
        raise
    finally:
        logging.root.setLevel(level)
        sys.stderr = stderr
        if is_shared:
            with suppress(OSError, ValueError):  # its reader has gone
                os.dup2(terminal.fileno(), 2)
                terminal.close()
