"""Counts of a job's progress in this process, which a local job's launcher shows (cli/progress.py)."""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def report(**counts: int) -> None:
    """Add to the counts, from any thread.

    Args:
        counts: `images`, `shards` done; `images_planned`, `shards_planned`, `images_listed`, `images_to_sample`,
            `images_sampled`.
    """
    with _lock:
        _counts.update(counts)


def reported() -> Counter[str]:
    """The counts so far, of all jobs of this process."""
    with _lock:
        return _counts.copy()
