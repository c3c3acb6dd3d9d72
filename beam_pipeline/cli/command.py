"""The process of `imageshards write`: Ctrl-C ends it with one line, and no traceback of Beam reaches stderr."""

from __future__ import annotations

import glob
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from beam_pipeline import require_pipeline
from beam_pipeline.errors import ImageShardsError, UsageError, print_error
from beam_pipeline.text import print_line

INTERRUPTED = ImageShardsError("interrupted; the same command resumes")
_ERROR = "error: "  # begins our lines in workers, such as the last one of a worker whose decoder hangs


def command(arguments: Sequence[str] | None = None) -> int:
    """`main` with signal handlers: Ctrl-C and SIGTERM end the process at once, and its workers, which would go on."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    defaults: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    is_main = threading.current_thread() is threading.main_thread()
    handled = [number for number, default in defaults.items() if is_main and signal.getsignal(number) is default]
    for number in handled:
        signal.signal(number, _end)
    try:
        require_pipeline()
        from beam_pipeline.cli.main import main  # slow: Ctrl-C is handled meanwhile

        return main(arguments)
    except UsageError as error:
        return print_error(error)
    finally:
        for number in handled:
            signal.signal(number, defaults[number])


def _end(number: int, *_: object) -> NoReturn:
    with suppress(OSError, ValueError, AttributeError):  # closed
        stderr = sys.stderr.fileno()  # not always 2, see `only_our_lines`
        wipe = b"\r\033[K" if os.isatty(stderr) else b""  # the progress line
        os.write(stderr, wipe + f"error: {INTERRUPTED}\n".encode())
    end_process(number)


def end_process(number: int = signal.SIGINT) -> NoReturn:
    """End this process and its workers as this signal would; the same command resumes."""
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interrupt, lambda *_: None)  # a process that is started meanwhile would inherit SIG_IGN
    threading.excepthook = lambda _: None  # Beam's threads would print that their workers are gone
    if attempts := sys.modules.get("beam_pipeline.conversion.attempts"):  # else nothing was decoded
        attempts.remove_local_markers()
    # Stop all before any ends: a stopped worker starts no others, while Beam's threads may still be starting some.
    for pause_s, numbers in ((0.0, [signal.SIGSTOP]), (0.1, [signal.SIGSTOP]), (0.1, [signal.SIGTERM, signal.SIGCONT])):
        time.sleep(pause_s)
        for process in _descendants("self"):
            for worker_signal in numbers:
                with suppress(OSError):  # it has ended
                    os.kill(int(process), worker_signal)
    if number == signal.SIGTERM:  # the exit status tells its sender
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(INTERRUPTED.exit_code)


def _descendants(process: str) -> list[str]:
    """Ids of all descendants of a process: Beam starts its workers in shells."""
    ids: list[str] = []
    for children in glob.glob(f"/proc/{process}/task/*/children"):
        with suppress(OSError):  # the thread has ended
            for child in Path(children).read_text().split():
                ids += [child, *_descendants(child)]
    return ids


@contextmanager
def only_our_lines() -> Iterator[None]:
    """Keep stderr to our own lines while a local job runs: drops tracebacks, and what workers print but our errors."""
    stderr = sys.stderr
    try:
        is_shared = stderr.fileno() == 2  # else workers print elsewhere: a test, a caller that collects our lines
    except (OSError, ValueError):
        is_shared = False
    if not is_shared:
        sys.stderr = cast(TextIO, _WithoutTracebacks(stderr))
        try:
            yield
        finally:
            sys.stderr = stderr
        return
    terminal, (reading, writing) = os.dup(2), os.pipe()
    with open(terminal, "w", encoding=stderr.encoding, errors=stderr.errors, buffering=1) as stream:
        sys.stderr = cast(TextIO, _WithoutTracebacks(stream))
        os.dup2(writing, 2)
        os.close(writing)
        relay = threading.Thread(target=_relay, args=(reading, stream), daemon=True)
        relay.start()
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            sys.stderr = stderr
            relay.join(1)  # until the last worker has ended


def _relay(reading: int, stream: TextIO) -> None:
    with open(reading, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(_ERROR):
                print_line(line.rstrip("\n"), stream)


class _WithoutTracebacks:
    """A stream that drops tracebacks, which threads print as one text, and the line end that `print` writes next."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._thread = threading.local()  # workers' threads fail at the same time

    def write(self, text: str) -> int:
        is_traceback = text.startswith("Traceback (most recent call last)") and text.count("\n") > 1
        follows_one = text == "\n" and getattr(self._thread, "dropped", False)
        self._thread.dropped = is_traceback
        return len(text) if is_traceback or follows_one else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
