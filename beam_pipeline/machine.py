"""How many cores and how much memory this process may take: the least that the machine and its control groups leave.

https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path


def cpu_count(root: str = "/") -> int:
    """Cores that this process may keep busy: those it may run on, fewer if a control group of it has a quota.

    Args:
        root: where `proc` and `sys` are.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *_quotas(root)])


@cache  # asked for each window; a quota that changes while the process runs isn't seen
def _quotas(root: str) -> list[int]:
    """Cores of each quota, rounded up."""
    quotas = []
    for group in _groups(root, "cpu"):
        words = _text(group / "cpu.max").split() or [
            _text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        if len(words) == 2 and all(map(str.isdecimal, words)):  # "max" or -1 if there is no quota
            quota_us, period_us = map(int, words)
            quotas.append(max(1, -(-quota_us // period_us)))
    return quotas


def free_memory_bytes(root: str = "/") -> int | None:
    """Memory that this process may still take; None if the system doesn't tell (outside Linux)."""
    available = _fields(Path(root, "proc/meminfo")).get("MemAvailable:")
    left = [] if available is None else [int(available) << 10]
    for group in _groups(root, "memory"):
        for limit_file, usage_file in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
            limit, used = (_text(group / f"memory.{file}").strip() for file in (limit_file, usage_file))
            if limit.isdecimal() and used.isdecimal():  # "max" if there is no limit
                fields = _fields(group / "memory.stat")
                cached = int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))  # given back on demand
                left.append(int(limit) - int(used) + cached)
    return max(0, min(left)) if left else None


def _groups(root: str, controller: str) -> Iterator[Path]:
    """Folders of the control groups that limit this process, of version 2 and 1: those it is in, and all above."""
    for line in _text(Path(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            # In a container the path may be the host's, and the group itself is mounted at the top.
            top = Path(root, "sys/fs/cgroup", controllers and controller)
            yield from accumulate(Path(path).parts[1:], Path.joinpath, initial=top)


def _fields(path: Path) -> dict[str, str]:
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
