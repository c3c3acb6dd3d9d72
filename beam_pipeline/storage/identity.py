"""Which job, which process: told from every other on any machine and at any time."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Process(NamedTuple):
    """One process, told from every other on any machine and at any time.

    Attributes:
        boot, namespace: which machine since which start, in which container.
        pid, started: which process there; `started` in clock ticks since the machine's start.
    """

    boot: str
    namespace: str
    pid: int
    started: int

    @classmethod
    def here(cls) -> Process | None:
        """This process; None if the system doesn't tell enough (only Linux does)."""
        with contextlib.suppress(OSError):
            boot = _text("/proc/sys/kernel/random/boot_id")
            started = _started(os.getpid())
            if started is not None:
                return cls(boot, os.readlink("/proc/self/ns/pid"), os.getpid(), started)
        return None

    def is_dead(self) -> bool:
        """Whether it ran on this machine, in this container, and runs no longer."""
        here = Process.here()
        return here is not None and self[:2] == here[:2] and _started(self.pid) != self.started


def _text(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


def _started(pid: int) -> int | None:
    """When a process began; None for one that is gone, or dead and not yet buried.

    Fields 3 and 22 of https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    """
    try:
        fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


_running: set[str] = set()  # tokens of the jobs of this process


class Identity(NamedTuple):
    """A job, told from every other.

    Attributes:
        token: drawn once a job; a retried step of it has the same.
        process: whose end is the job's end; None for a job on a cluster, which outlives its launcher.
    """

    token: str
    process: Process | None = None

    @contextmanager
    def runs(self) -> Iterator[None]:
        """While the job runs in this process."""
        _running.add(self.token)
        try:
            yield
        finally:
            _running.discard(self.token)

    def is_over(self) -> bool:
        """Whether this job is known to have ended: with its process, or in this one."""
        if self.process is None:
            return False
        return self.process.is_dead() or (self.process == Process.here() and self.token not in _running)

    @classmethod
    def new(cls, ends_with_this_process: bool = False) -> Identity:
        """The identity of a job that begins now."""
        return cls(uuid.uuid4().hex, Process.here() if ends_with_this_process else None)
