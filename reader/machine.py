"""How many cores and how much memory this process may take, of the machine or of its container; and a folder alone."""

from __future__ import annotations

import fcntl
import os
from functools import cache
from pathlib import Path

from beam_pipeline.storage.causes import as_storage_error

_GROUP = Path("sys/fs/cgroup")
# Limit and usage of the control group that a container sees at the top, versions 2 and 1,
# https://docs.kernel.org/admin-guide/cgroup-v2.html#memory
_GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
# CPU quota and its period, both in µs.
_CPU_FILES = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def cpu_count(root: str = "/") -> int:
    """Cores that this process may keep busy: those it may run on, fewer if its control group has a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _quota_cores(root) or cores)


@cache  # asked for each window; a quota that changes while the process runs isn't seen
def _quota_cores(root: str) -> int | None:
    for files in _CPU_FILES:
        words = " ".join(_text(Path(root, _GROUP, file)) for file in files).split()
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():  # "max" or -1 if there is no quota
            return max(1, -(-int(words[0]) // int(words[1])))
    return None


def free_memory_bytes(root: str = "/") -> int | None:
    """Free memory of the machine or of its control group, the smaller; None if unknown (outside Linux)."""
    free = [int(_fields(Path(root, "proc/meminfo")).get("MemAvailable:", 0)) << 10]
    for limit_file, usage_file, statistics in _GROUP_FILES:
        limit, used = (_text(Path(root, _GROUP, file)).strip() for file in (limit_file, usage_file))
        if limit.isdecimal() and used.isdecimal():  # "max" if there is no limit
            fields = _fields(Path(root, _GROUP, statistics))
            pages = int(fields.get("inactive_file", fields.get("total_inactive_file", 0)))  # given back on demand
            free.append(max(1, int(limit) - int(used) + pages))
    return min(filter(None, free), default=None)


def _fields(path: Path) -> dict[str, str]:
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""


def lock_folder(url: str) -> int:
    """Make a local folder and lock it until the descriptor is closed; BlockingIOError if another process holds it."""
    try:
        os.makedirs(url, exist_ok=True)
        descriptor = os.open(url, os.O_RDONLY)
    except OSError as error:
        raise as_storage_error(url, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without locks
        pass
    return descriptor
