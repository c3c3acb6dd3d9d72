"""A live progress line for local runs, whose runners show nothing while they work.

The launcher names a folder in an environment variable that worker processes inherit; each process keeps its own counts
in one small file there, and the launcher adds them up. On a cluster nobody sets the variable and nothing is written.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import TextIO

_FOLDER_VARIABLE = "IMAGESHARDS_PROGRESS"
_WRITE_EVERY_S = 0.25
_REDRAW_EVERY_S = 0.5
_LOG_LINE_EVERY_S = 15.0
_lock = threading.Lock()
_counts: dict[str, int] = {}  # this process's, for the job whose folder is _folder
_folder = ""
_written = 0.0


def report(now: bool = False, **counts: int) -> None:
    """Add to this process's counts, if anybody watches; from any thread.

    Args:
        now: write them at once; otherwise at most every quarter of a second.
        counts: `images`, `shards` done; `images_planned`, `shards_planned`.
    """
    global _folder, _written
    folder = os.environ.get(_FOLDER_VARIABLE)
    if not folder:
        return
    with _lock:
        if folder != _folder:
            _folder, _written = folder, 0.0
            _counts.clear()
        for name, number in counts.items():
            _counts[name] = _counts.get(name, 0) + number
        if now or time.monotonic() - _written > _WRITE_EVERY_S:
            _written = time.monotonic()
            path = os.path.join(folder, f"{os.getpid()}.json")
            with suppress(OSError):  # the launcher is gone, or its disk is full: progress is not worth a failure
                with open(path + ".tmp", "w") as file:
                    json.dump(_counts, file)
                os.replace(path + ".tmp", path)


class ProgressLine:
    """Shows a local job's progress on a stream while the `with` block runs.

    Args:
        stream: a terminal gets one line that is redrawn; anything else a line every 15 seconds.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._folder = tempfile.mkdtemp(prefix="imageshards-")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._start = (0.0, 0)  # when the first images were seen done, and how many

    def __enter__(self) -> ProgressLine:
        os.environ[_FOLDER_VARIABLE] = self._folder
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        os.environ.pop(_FOLDER_VARIABLE, None)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._terminal:
            print("\r\033[K", end="", file=self._stream, flush=True)

    def _watch(self) -> None:
        last_line = time.monotonic()
        while not self._stop.wait(_REDRAW_EVERY_S):
            text = self._text(self._sum())
            if text and self._terminal:
                print(f"\r\033[K{text}", end="", file=self._stream, flush=True)
            elif text and time.monotonic() - last_line > _LOG_LINE_EVERY_S:
                last_line = time.monotonic()
                print(text, file=self._stream, flush=True)

    def _sum(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for entry in os.scandir(self._folder):
            with suppress(OSError, ValueError), open(entry.path) as file:
                for name, number in json.load(file).items():
                    total[name] = total.get(name, 0) + number
        return total

    def _text(self, total: dict[str, int]) -> str:
        planned, done = total.get("images_planned", 0), total.get("images", 0)
        if not planned:
            listed = total.get("images_listed", 0)
            return f"listing: {listed:,} images" if listed else ""
        now = time.monotonic()
        if not self._start[0]:
            self._start = (now, done)
        seconds, since = now - self._start[0], done - self._start[1]
        rate = since / seconds if seconds > 0 else 0.0
        text = f"shards {total.get('shards', 0):,}/{total.get('shards_planned', 0):,} · images {done:,}/{planned:,}"
        if rate:
            text += f" · {rate:,.0f} images/s · {_duration((planned - done) / rate)} left"
        return text


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
