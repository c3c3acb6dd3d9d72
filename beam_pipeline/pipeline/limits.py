"""How many images a local run can group: it keeps a reference of each in memory, and stops before that runs out."""

from __future__ import annotations

import os

from beam_pipeline.errors import ImageShardsError

# Memory of the whole process tree a reference, from 3,000 to 300,000 of them (benchmarks/RESULTS.md).
IN_PROCESS_BYTES = 800  # FnApiRunner
BETWEEN_PROCESSES_BYTES = 3500  # Prism, and FnApiRunner with worker processes


def most_references(bytes_each: int, root: str = "/") -> int | None:
    """How many references the memory that is free now can hold; None where the system doesn't tell.

    Args:
        bytes_each: one of the above.
        root: where `proc` and `sys` are.
    """
    free = free_memory_bytes(root)
    return None if free is None else free // bytes_each


def check(images: int, most: int | None) -> None:
    """Stop a job whose references don't fit.

    Args:
        images: listed so far.
        most: of `most_references`, or None for no limit.

    Raises:
        ImageShardsError: there are more.
    """
    if most is not None and images > most:
        raise ImageShardsError(
            f"{images:,} images are listed, but this machine's free memory holds references of {most:,} only: "
            "give it more memory, or use --runner DataflowRunner, which keeps them on disks"
        )


def free_memory_bytes(root: str = "/") -> int | None:
    """What this process may still allocate: the least of what the machine and its control groups have left.

    Control groups of both versions, https://docs.kernel.org/admin-guide/cgroup-v2.html#memory
    """
    found = [_of_machine(root), *_of_groups(root)]
    known = [left for left in found if left is not None]
    return max(0, min(known)) if known else None


def _of_machine(root: str) -> int | None:
    for line in _lines(os.path.join(root, "proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _of_groups(root: str) -> list[int | None]:
    """What is left in each control group above this process."""
    left = []
    for line in _lines(os.path.join(root, "proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        names = ("memory.max", "memory.current") if not controllers else _VERSION_1
        folder = os.path.join(root, "sys/fs/cgroup", controllers)
        # In a container the path is that of the host, and the group itself is mounted at the top.
        for part in ("", *path.strip("/").split("/")):
            folder = os.path.join(folder, part)
            left.append(_of_group(folder, *names))
    return left


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _of_group(folder: str, limit_file: str, usage_file: str) -> int | None:
    limit = "".join(_lines(os.path.join(folder, limit_file)))
    usage = "".join(_lines(os.path.join(folder, usage_file)))
    if not limit.isdecimal() or not usage.isdecimal():
        return None
    statistics = dict(line.split() for line in _lines(os.path.join(folder, "memory.stat")))
    pages = int(statistics.get("inactive_file", statistics.get("total_inactive_file", 0)))  # given back on demand
    return int(limit) - int(usage) + pages


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []
