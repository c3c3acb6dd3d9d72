"""Ends a worker process whose decoder hangs: nothing else can stop a thread inside a C library.

What the process was at work on is noted in the state (`inflight`), so its next attempt decodes it in a subprocess.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from beam_pipeline.images import ImageOptions

# Pillow decodes and resizes a permitted pixel in about 0.02 µs; 50 times that, for a machine that is busy with more.
LEAST_S = 60.0
SECONDS_A_PIXEL = 1e-6
_LOOK_EVERY_S = 1.0


def limit_s(options: ImageOptions) -> float:
    """Seconds after which an image counts as one that hangs its decoder: 239 with the default `--max_pixels`."""
    return LEAST_S + options.max_pixels * SECONDS_A_PIXEL


class Watchdog:
    """Watches all threads of a process that decode; costs a thread that looks once a second, and 1 µs an image."""

    def __init__(self) -> None:
        self._working: dict[int, tuple[float, float, str]] = {}  # thread → start, limit, path
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @contextmanager
    def watching(self, path: str, seconds: float) -> Iterator[None]:
        """The block decodes the image at `path`; the process ends when that takes longer than `seconds`."""
        if self._thread is None:
            self._start()
        thread = threading.get_ident()
        self._working[thread] = (time.monotonic(), seconds, path)
        try:
            yield
        finally:
            del self._working[thread]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The block waits, inside `watching`; the image has its whole time after it."""
        thread = threading.get_ident()
        _, seconds, path = self._working.pop(thread)
        try:
            yield
        finally:
            self._working[thread] = (time.monotonic(), seconds, path)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            now = time.monotonic()
            for start, seconds, path in list(self._working.values()):
                if now - start > seconds:
                    line = f"error: {path!r} has been decoded for {now - start:.0f} s and more: this process ends"
                    sys.stderr.write(f"\n{line}; the same command resumes, and decodes it in one of its own\n")
                    sys.stderr.flush()
                    os._exit(1)


WATCHDOG = Watchdog()  # of this process
