"""How many images a local run can group: it keeps a reference of each in memory, and stops before that runs out."""

from __future__ import annotations

from beam_pipeline.errors import ImageShardsError
from beam_pipeline.machine import free_memory_bytes

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
    free = free_memory_bytes()
    return None if free is None else free // bytes_each
