"""The process of `imageshards write`, which Ctrl-C ends with one line, also while the rest is imported."""

from __future__ import annotations

import glob
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from beam_pipeline import require_pipeline
from beam_pipeline.errors import ImageShardsError, UsageError, print_error

INTERRUPTED = ImageShardsError("interrupted; the same command resumes")


def command(arguments: Sequence[str] | None = None) -> int:
    """`main` in a process of its own, which Ctrl-C and SIGTERM end at once, its workers too: they would go on."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    defaults: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number, default in defaults.items() if is_main and signal.getsignal(number) is default]
    for number in ours:
        signal.signal(number, _end)
    try:
        require_pipeline()
        from beam_pipeline.cli.main import main

        return main(given)
    except UsageError as error:
        return print_error(error)
    finally:
        for number in ours:
            signal.signal(number, defaults[number])


def _end(number: int, *_: object) -> NoReturn:
    with suppress(OSError, ValueError, AttributeError):  # closed
        stderr = sys.stderr.fileno()  # not always 2, see `only_our_lines`
        wipe = b"\r\033[K" if os.isatty(stderr) else b""  # the progress line
        os.write(stderr, wipe + f"error: {INTERRUPTED}\n".encode())
    end_process(number)


def end_process(number: int = signal.SIGINT) -> NoReturn:
    """End this process and its workers, as after this signal: the same command resumes whatever has been done."""
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, lambda *_: None)  # a process that is started meanwhile would inherit SIG_IGN
    threading.excepthook = lambda _: None  # Beam's threads would print that their workers are gone
    if decoder := sys.modules.get("beam_pipeline.conversion.decoder"):  # not yet imported, it has decoded nothing
        decoder.remove_local_markers()
    # Stopped, they start no others while Beam's threads may be starting some: each is found before any has ended.
    for pause_s, numbers in ((0.0, [signal.SIGSTOP]), (0.1, [signal.SIGSTOP]), (0.1, [signal.SIGTERM, signal.SIGCONT])):
        time.sleep(pause_s)
        for process in _descendants("self"):
            for each in numbers:
                with suppress(OSError):  # it has ended
                    os.kill(int(process), each)
    if number == signal.SIGTERM:  # whoever sent it is told so by the exit status
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(INTERRUPTED.exit_code)


def _descendants(process: str) -> list[str]:
    """Ids of all descendants of a process: Beam starts its workers in shells."""
    found: list[str] = []
    for children in glob.glob(f"/proc/{process}/task/*/children"):
        with suppress(OSError):  # the thread has ended
            for child in Path(children).read_text().split():
                found += [child, *_descendants(child)]
    return found
