"""Processes that never outlive this one: each leads a group of its own, which is killed as a whole."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent.parent
_GONE_S = 5.0
_running: list[subprocess.Popen[bytes]] = []


def start(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program from the repository's root, without input.

    Args:
        command: the program and its arguments.
        log: receives its output; truncated first.
        environment: variables beside those of this process.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _running.append(process)
    return process


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that `start` starts, killed at the end."""
    process = start(command, log, environment)
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program that `start` started, and every process that it started: as `kill -9` of the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        end = time.monotonic() + _GONE_S
        while time.monotonic() < end:  # the rest of the group dies in its own time, and is reaped by init
            os.killpg(process.pid, 0)
            time.sleep(0.01)
    process.wait()
    if process in _running:
        _running.remove(process)


@atexit.register
def kill_all() -> None:
    """Kill all that still runs."""
    for process in list(_running):
        kill(process)


def exit_on_signals() -> None:
    """Make SIGTERM and SIGHUP an ordinary end of this process, which kills the others."""

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def wait_until_up(process: subprocess.Popen[bytes], port: int, log: Path, deadline_s: float = 60) -> None:
    """Wait until a program listens on a port of this machine.

    Raises:
        RuntimeError: it ended, or doesn't listen in time; names its log.
    """
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
            return
        if process.poll() is not None:
            raise RuntimeError(f"a server ended with {process.returncode}: see {log}")
        time.sleep(0.05)
    raise RuntimeError(f"nothing listens on port {port} after {deadline_s:.0f} s: see {log}")
