"""Ends a worker process whose decoder hangs: nothing else can stop a thread inside a C library.

What the process was at work on is noted in the state (`inflight`), so its next attempt decodes it in a child process.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time

from beam_pipeline.images import ImageOptions

# Pillow decodes and resizes a permitted pixel in about 0.02 µs; 50 times that, for a machine that is busy with more.
LEAST_S = 60.0
SECONDS_A_PIXEL = 1e-6
_LOOK_EVERY_S = 1.0

_watched: dict[int, tuple[float, float, str]] = {}  # thread → since when, seconds it may take, path


def limit_s(options: ImageOptions) -> float:
    """Seconds after which an image counts as one that hangs its decoder: 239 with the default `--max_pixels`."""
    return LEAST_S + options.max_pixels * SECONDS_A_PIXEL


def begin(path: str, seconds: float) -> None:
    """The calling thread decodes the image at `path` from now on; the process ends if that takes longer."""
    _start()
    _watched[threading.get_ident()] = (time.monotonic(), seconds, path)


def end() -> None:
    """The calling thread decodes no longer."""
    del _watched[threading.get_ident()]


@functools.cache
def _start() -> None:
    threading.Thread(target=_look, name="watchdog", daemon=True).start()


def _look() -> None:
    while True:
        time.sleep(_LOOK_EVERY_S)
        now = time.monotonic()
        for start, seconds, path in list(_watched.values()):
            if now - start > seconds:
                line = f"error: {path!r} has been decoded for {now - start:.0f} s and more: this process ends"
                sys.stderr.write(f"\n{line}; the same command resumes, and decodes it in one of its own\n")
                sys.stderr.flush()
                os._exit(1)
