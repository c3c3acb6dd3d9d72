"""What is told of a running job: one line of progress, and where a local job's counts come from.

Local runners show nothing while they work. The launcher names a UDP port of this machine in an environment variable
that worker processes inherit. Each process sends its own counts there now and then, and the launcher adds up the
latest. On a cluster nobody sets the variable.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

from beam_pipeline.text import plural, print_line

_VARIABLE = "IMAGESHARDS_PROGRESS"  # the port, and which job it is for, since ports are used again
_HOST = "127.0.0.1"
_DATAGRAM_BYTES = 4096
_SEND_EVERY_S = 0.25
_REDRAW_EVERY_S = 0.5
_LOG_LINE_EVERY_S = 15.0
_lock = threading.Lock()
_counts: dict[str, int] = {}  # what this process did for the job in _sender
_sender = ("", 0)
_sent = 0.0


def report(now: bool = False, **counts: int) -> None:
    """Add to this process's counts, if a launcher shows them; from any thread.

    Args:
        now: send them at once; otherwise at most every quarter of a second.
        counts: `images`, `shards` done; `images_planned`, `shards_planned`, `images_listed`, `images_to_sample`,
            `images_sampled`.
    """
    global _sender, _sent
    job = os.environ.get(_VARIABLE)
    if not job:
        return
    with _lock:
        if _sender != (job, os.getpid()):  # another job, or a forked process
            _sender, _sent = (job, os.getpid()), 0.0
            _counts.clear()
        for name, number in counts.items():
            _counts[name] = _counts.get(name, 0) + number
        if now or time.monotonic() - _sent > _SEND_EVERY_S:
            _sent = time.monotonic()
            with suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.sendto(json.dumps([*_sender, _counts]).encode(), (_HOST, int(job.partition("-")[0])))


class StatusLine:
    """A line at the bottom of a terminal that is redrawn; in a log, a line now and then.

    Args:
        stream: stderr if it is None.
        log_every_s: seconds between two lines of a log.
    """

    def __init__(self, stream: TextIO | None = None, log_every_s: float = _LOG_LINE_EVERY_S) -> None:
        self._stream = stream or sys.stderr
        self._terminal = not self._stream.closed and self._stream.isatty()
        self._log_every_s = log_every_s
        self._last_line = time.monotonic()
        self._shown = ""

    def show(self, text: str) -> None:
        """Redraw the line; in a log, if it is time for one."""
        self._shown = text
        if self._terminal:
            self._shown = text[: shutil.get_terminal_size().columns - 1]  # what wraps can't be wiped
            print_line(self._shown, self._stream, end="", wipe=True)
        elif time.monotonic() - self._last_line > self._log_every_s:
            self._last_line = time.monotonic()
            print_line(text, self._stream)

    def wipe(self) -> None:
        """Leave nothing of it on a terminal."""
        self._shown = ""
        if self._terminal:
            print_line("", self._stream, end="", wipe=True)

    def tell(self, text: str) -> None:
        """Print a line that stays, above this one."""
        print_line(text, self._stream, wipe=self._terminal)
        if self._terminal:
            print_line(self._shown, self._stream, end="")


class ProgressText:
    """Words a job's counts; the rate is of what was seen done since the first images."""

    def __init__(self) -> None:
        self._start = (0.0, 0)  # when the first images were seen done, and how many

    def __call__(self, total: Mapping[str, int]) -> str:
        """The line, or "" if there is nothing to tell.

        Args:
            total: of `images`, `shards`, `rejects` done; and of what else `report` takes.
        """
        planned = total.get("images_planned", 0)
        done = min(planned, total.get("images", 0))  # a runner may count what is tried again
        if not planned:
            listed, to_sample = total.get("images_listed", 0), total.get("images_to_sample", 0)
            sampled = min(to_sample, total.get("images_sampled", 0))
            if sampled < to_sample:
                return f"sampling: {sampled:,}/{to_sample:,} images"
            return f"{'planning' if to_sample else 'listing'}: {listed:,} images" if listed else ""
        now = time.monotonic()
        if not self._start[0]:
            self._start = (now, done)
        seconds, since = now - self._start[0], done - self._start[1]
        rate = since / seconds if seconds > 0 else 0.0
        text = f"shards {total.get('shards', 0):,}/{total.get('shards_planned', 0):,} · images {done:,}/{planned:,}"
        if rejects := total.get("rejects", 0):
            text += f" · {plural(rejects, 'reject')}"
        if since >= 10:
            text += f" · {rate:,.0f} images/s · {duration((planned - done) / rate)} left"
        return text


class ProgressLine:
    """Shows a local job's progress on a stream while the `with` block runs.

    Args:
        stream: a terminal gets one line that is redrawn; anything else a line every 15 seconds.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._line = StatusLine(stream, _LOG_LINE_EVERY_S)
        self._text = ProgressText()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._job = ""
        self._latest: dict[int, dict[str, int]] = {}  # process → its counts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ProgressLine:
        with suppress(OSError):  # without a port there is no progress
            self._socket.bind((_HOST, 0))
            self._socket.setblocking(False)
            self._job = f"{self._socket.getsockname()[1]}-{uuid.uuid4().hex}"
            os.environ[_VARIABLE] = self._job
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._job:
            os.environ.pop(_VARIABLE, None)
            self._stop.set()
            self._thread.join()
        self._socket.close()
        if self._job:
            self._line.wipe()

    def _watch(self) -> None:
        while not self._stop.wait(_REDRAW_EVERY_S):
            if text := self._text(self._sum()):
                self._line.show(text)

    def _sum(self) -> dict[str, int]:
        with suppress(BlockingIOError):  # all that came is read
            while True:
                datagram = self._socket.recv(_DATAGRAM_BYTES)
                with suppress(ValueError, TypeError, AttributeError, RecursionError):  # somebody else's
                    job, process, counts = json.loads(datagram)
                    if job == self._job:
                        self._latest[process] = {str(name): int(number) for name, number in counts.items()}
        total: dict[str, int] = {}
        for counts in list(self._latest.values()):
            for name, number in counts.items():
                total[name] = total.get(name, 0) + number
        return total


def duration(seconds: float) -> str:
    """`12 s`, `3 min 05 s`, `2 h 07 min`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
