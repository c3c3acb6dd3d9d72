"""What bounds memory by the number of images: references as they are grouped; and the benchmark that measures jobs."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import pytest

from beam_pipeline.inputs.references import ImageRef, order_key
from beam_pipeline.pipeline.elements import Page, PageCoder
from benchmarks import memory
from tools.engines import processes


def reference(number: int) -> ImageRef:
    """As a listing of ImageNet on object storage gives it: nothing in it repeats but the class."""
    path = f"n01440764/n01440764_{number * 37}.JPEG"
    md5 = hashlib.md5(path.encode()).hexdigest()
    return ImageRef(path, 80_000 + number * 7919 % 90_000, f"md5:{md5}", "n01440764", "train", order_key(path, 0))


@pytest.mark.parametrize(("count", "most_bytes"), [(1000, 48), (33, 64), (1, 160)])
def test_a_reference_that_is_grouped_takes_few_bytes(count: int, most_bytes: int) -> None:
    page = Page(reference(number) for number in range(count))
    assert len(PageCoder().encode(page)) / count <= most_bytes


_TWO_TIMES_64_MIB = (
    "import subprocess, sys, time; held = b'x' * (64 << 20); child = 'held = b\"x\" * (64 << 20); import time; "
    "print(1, flush=True); time.sleep(60)'; subprocess.Popen([sys.executable, '-c', child]); time.sleep(60)"
)


def test_the_benchmark_counts_the_memory_of_every_process(tmp_path: Path) -> None:
    job = processes.start([sys.executable, "-c", _TWO_TIMES_64_MIB], tmp_path / "log")
    while not (tmp_path / "log").read_text():
        time.sleep(0.01)
    tree = memory._tree(job.pid)
    assert len(tree) == 2
    for of in (memory._rss, memory._pss):
        sizes = [of(process) for process in tree]
        assert all(64 << 20 < size < 128 << 20 for size in sizes), sizes
    processes.kill(job)
    assert memory._tree(job.pid) == []
