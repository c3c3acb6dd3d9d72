"""The progress line of a running job: its text, on a terminal or in a log, and a local job's counts."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from beam_pipeline.text import plural, print_line

LOG_LINE_EVERY_S = 15.0


class StatusLine:
    """A line on stderr: at the bottom of a terminal, redrawn; in a log, one now and then.

    Args:
        log_every_s: seconds between two lines of a log.
    """

    def __init__(self, log_every_s: float = LOG_LINE_EVERY_S) -> None:
        self._stream = sys.stderr
        self._terminal = not self._stream.closed and self._stream.isatty()
        self._log_every_s = log_every_s
        self._last_line = time.monotonic()
        self._shown = ""

    def show(self, text: str) -> None:
        """Redraw the line; in a log, print one if it is time."""
        self._shown = text
        if self._terminal:
            self._shown = text[: shutil.get_terminal_size().columns - 1]  # a wrapped line can't be wiped
            print_line(self._shown, self._stream, end="", wipe=True)
        elif time.monotonic() - self._last_line > self._log_every_s:
            self._last_line = time.monotonic()
            print_line(text, self._stream)

    def wipe(self) -> None:
        """Remove it from a terminal."""
        self._shown = ""
        if self._terminal:
            print_line("", self._stream, end="", wipe=True)

    def print_above(self, text: str) -> None:
        """Print a permanent line above this one."""
        print_line(text, self._stream, wipe=self._terminal)
        if self._terminal:
            print_line(self._shown, self._stream, end="")


class ProgressText:
    """Formats a job's counts; the rate is since the first images that were seen done."""

    def __init__(self) -> None:
        self._start = (0.0, 0)  # when images were first seen done, and how many

    def __call__(self, total: Mapping[str, int]) -> str:
        """The line, or "" before anything is done.

        Args:
            total: of `images`, `shards`, `rejects` done, and of the other counts of `report`.
        """
        shards = f"shards {total.get('shards', 0):,}/{total.get('shards_planned', 0):,}"
        planned = total.get("images_planned", 0)
        done = min(planned, total.get("images", 0))  # a runner may count retried images twice
        if not planned:
            if total.get("shards_planned"):
                return shards  # all that is known of workers that are other processes
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
        text = f"{shards} · images {done:,}/{planned:,}"
        if rejects := total.get("rejects", 0):
            text += f" · {plural(rejects, 'reject')}"
        if since >= 10:
            text += f" · {rate:,.0f} images/s · {duration((planned - done) / rate)} left"
        return text


class ProgressLine:
    """Shows a local job's progress on stderr while the `with` block runs.

    Args:
        count: gives the counts of `ProgressText`.
        every_s: seconds between two looks.
        before: what is shown until the counts have changed; "" for nothing.
        line: where it is shown.
    """

    def __init__(
        self, count: Callable[[], Counter[str]], every_s: float, before: str = "", line: StatusLine | None = None
    ) -> None:
        self._count, self._first, self._every_s, self._before = count, count(), every_s, before
        self._line = line or StatusLine(LOG_LINE_EVERY_S)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._line.wipe()

    def _watch(self) -> None:
        text, line = ProgressText(), self._before
        while not self._stop.wait(self._every_s):
            if (counts := self._count()) != self._first:
                line = text(counts) or line
            if line:
                self._line.show(line)


def duration(seconds: float) -> str:
    """`12 s`, `3 min 05 s`, `2 h 07 min`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
