"""The process of `imageshards write`, which Ctrl-C ends with one line, also while the rest is imported."""

from __future__ import annotations

import glob
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from beam_pipeline import require_pipeline
from beam_pipeline.errors import ImageShardsError, UsageError, tell

INTERRUPTED = ImageShardsError("interrupted; the same command resumes")


def command(arguments: Sequence[str] | None = None) -> int:
    """`main` in a process of its own, which Ctrl-C ends at once: Beam's threads and workers would go on for minutes."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    before = signal.getsignal(signal.SIGINT)
    is_ours = threading.current_thread() is threading.main_thread() and before is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, _end)
    try:
        require_pipeline()
        from beam_pipeline.cli.main import main

        return main(given)
    except UsageError as error:
        return tell(error)
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)


def _end(*_: object) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError, ValueError, AttributeError):  # closed
        stderr = sys.stderr.fileno()  # not always 2, see `only_our_lines`
        wipe = b"\r\033[K" if os.isatty(stderr) else b""  # the progress line
        os.write(stderr, wipe + f"error: {INTERRUPTED}\n".encode())
    end_process()


def end_process() -> NoReturn:
    """Nothing needs to be undone: whatever a job has done when it is killed, the same command resumes it."""
    threading.excepthook = lambda _: None  # Beam's threads would print that their workers are gone
    for process in _descendants("self"):
        with suppress(OSError):  # it has ended
            os.kill(int(process), signal.SIGTERM)
    os._exit(INTERRUPTED.exit_code)


def _descendants(process: str) -> list[str]:
    """Ids of all descendants of a process: Beam starts its workers in shells."""
    found: list[str] = []
    for children in glob.glob(f"/proc/{process}/task/*/children"):
        with suppress(OSError):  # the thread has ended
            for child in Path(children).read_text().split():
                found += [child, *_descendants(child)]
    return found
