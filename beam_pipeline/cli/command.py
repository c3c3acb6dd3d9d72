"""The process of a job, of `imageshards write` or of a notebook: Ctrl-C ends it with one line."""

from __future__ import annotations

import glob
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from beam_pipeline import require_pipeline
from beam_pipeline.errors import EXIT_FAILED, INTERRUPTED, ImageShardsError, UnforeseenError, UsageError, print_error
from beam_pipeline.text import shown_on


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
        stderr = shown_on(sys.stderr).fileno()
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
    os._exit(EXIT_FAILED)


def _descendants(process: str) -> list[str]:
    """Ids of all descendants of a process: Beam starts its workers in shells."""
    ids: list[str] = []
    for children in glob.glob(f"/proc/{process}/task/*/children"):
        with suppress(OSError):  # the thread has ended
            for child in Path(children).read_text().split():
                ids += [child, *_descendants(child)]
    return ids


def run_here() -> None:
    """A notebook's new process: runs the job and writes its result to the file whose descriptor is the argument."""
    signal.signal(signal.SIGINT, lambda *_: end_process())
    from beam_pipeline.cli.quiet import only_our_lines
    from beam_pipeline.cli.run import run

    question = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the caller's process
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        with only_our_lines():
            result: Any = run(*question)
    except UnforeseenError as error:
        error.add_note("".join(traceback.format_exception(error)))
        result = error
    except (ImageShardsError, KeyboardInterrupt) as error:
        result = error
    with open(int(sys.argv[1]), "wb") as answer:
        pickle.dump(result, answer)


def _end_with_caller() -> None:
    """A notebook's kernel may be killed or restarted."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGINT)  # signals are handled in the main thread
