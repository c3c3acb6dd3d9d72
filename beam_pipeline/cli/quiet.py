"""Keeps stderr to our own lines while a local job runs: Beam's workers print the tracebacks of errors there as well."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from beam_pipeline.text import print_line

_OURS = "error: "  # such as the last words of a worker whose decoder hangs


@contextmanager
def only_our_lines() -> Iterator[None]:
    """Drops tracebacks that threads print as one text, and what worker processes print, but for our errors."""
    stderr = sys.stderr
    try:
        is_own = stderr.fileno() == 2  # else workers print elsewhere: a test, a caller that collects our lines
    except (OSError, ValueError):
        is_own = False
    if not is_own:
        sys.stderr = cast(TextIO, _WithoutTracebacks(stderr))
        try:
            yield
        finally:
            sys.stderr = stderr
        return
    kept, (reading, writing) = os.dup(2), os.pipe()
    with open(kept, "w", encoding=stderr.encoding, errors=stderr.errors, buffering=1) as stream:
        sys.stderr = cast(TextIO, _WithoutTracebacks(stream))
        os.dup2(writing, 2)
        os.close(writing)
        relay = threading.Thread(target=_relay, args=(reading, stream), daemon=True)
        relay.start()
        try:
            yield
        finally:
            os.dup2(kept, 2)
            sys.stderr = stderr
            relay.join(1)  # until the last worker is gone


def _relay(reading: int, stream: TextIO) -> None:
    with open(reading, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(_OURS):
                print_line(line.rstrip("\n"), stream)


class _WithoutTracebacks:
    """A stream that drops whole tracebacks, and the line end that `print` writes behind one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._dropped_by = 0

    def write(self, text: str) -> int:
        is_traceback = text.startswith("Traceback (most recent call last)") and text.count("\n") > 1
        if is_traceback or (text == "\n" and self._dropped_by == threading.get_ident()):
            self._dropped_by = threading.get_ident() if is_traceback else 0
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
