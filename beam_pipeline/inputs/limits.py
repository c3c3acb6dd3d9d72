"""How many images a local run can group: it keeps a reference of each in memory, and stops before that runs out."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from beam_pipeline.errors import ImageShardsError

# Memory of the process tree per reference, from 3,000 to 300,000 of them (benchmarks/RESULTS.md).
IN_PROCESS_BYTES = 800  # FnApiRunner
BETWEEN_PROCESSES_BYTES = 3500  # Prism, and FnApiRunner with worker processes


def check(images: int, most: int | None) -> None:
    """Stop a job whose references don't fit.

    Args:
        images: listed so far.
        most: of `max_references`, or None for no limit.

    Raises:
        ImageShardsError: there are more.
    """
    if most is not None and images > most:
        what = f"{images:,} images are listed, but this machine's free memory holds references of {most:,} only"
        fix = "give it more memory, or use --runner DataflowRunner, which keeps them on disks"
        raise ImageShardsError(f"{what}: {fix}")


def max_references(bytes_each: int) -> int | None:
    """How many references of so many bytes, see above, fit in free memory; None if the system doesn't tell."""
    free = free_memory_bytes(Path("/"))
    return None if free is None else free // bytes_each


def free_memory_bytes(root: Path) -> int | None:
    """The least of what the machine and the control groups of this process have left, as `proc` and `sys` in root say.

    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory
    """
    available = [line.split()[1] for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    left = [int(kibibytes) << 10 for kibibytes in available]
    for line in _lines(root / "proc/self/cgroup"):
        if line.startswith("0::"):
            # In a container the path is the host's, and the group itself is mounted at the top.
            for group in accumulate(line[3:].split("/"), Path.joinpath, initial=root / "sys/fs/cgroup"):
                limit, usage = (_lines(group / f"memory.{name}") for name in ("max", "current"))
                if limit and usage and limit != ["max"]:
                    statistics = dict(line.split() for line in _lines(group / "memory.stat"))
                    cached = int(statistics.get("inactive_file", 0))  # given back on demand
                    left.append(int(limit[0]) - int(usage[0]) + cached)
    return max(0, min(left)) if left else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
