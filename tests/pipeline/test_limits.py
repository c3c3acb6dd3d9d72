"""Memory for references: read from the machine and its control groups, held against what is listed."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam
import pytest

from beam_pipeline import Config
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.inputs import limits
from beam_pipeline.pipeline import graph
from beam_pipeline.schema.job import Run

LINE = (
    "40 images are listed, but this machine's free memory holds references of 39 only: "
    "give it more memory, or use --runner DataflowRunner, which keeps them on disks"
)


def machine(root: Path, groups: str, **files: str) -> Path:
    """A made-up `/proc` and `/sys` with 1,000 KiB free: groups of the process, files of those with `__` for `/`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 1000 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("memory_", "memory.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


NESTED = {
    "user__job__memory_max": "max\n",
    "user__job__memory_current": "1\n",
    "user__memory_max": "500000\n",
    "user__memory_current": "300000\n",
    "user__memory_stat": "anon 5\ninactive_file 100000\n",
}
AT_THE_TOP = {"memory_max": "70000\n", "memory_current": "20000\n", "memory_stat": "anon 1\n"}


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("0::/\n", {"memory_max": "max\n", "memory_current": "5\n"}, 1000 << 10),
        ("0::/user/job\n", NESTED, 300_000),  # its limit less what is used and can't be given back
        ("0::/docker/0123abc\n", AT_THE_TOP, 50_000),  # as a container sees it
        ("0::/\n", {"memory_max": "10\n", "memory_current": "20\n"}, 0),
    ],
)
def test_free_memory_is_the_least_that_the_machine_and_its_control_groups_leave(
    tmp_path: Path, groups: str, files: dict[str, str], free: int
) -> None:
    assert limits.free_memory_bytes(machine(tmp_path, groups, **files)) == free


def test_a_system_that_does_not_say_sets_no_limit_and_this_one_has_memory(tmp_path: Path) -> None:
    assert limits.free_memory_bytes(tmp_path) is None
    limits.check(10**12, None)
    limits.check(40, 40)
    most = limits.max_references(limits.IN_PROCESS_BYTES)
    assert most is None or most > 10_000


def test_a_job_whose_references_do_not_fit_stops_with_one_line_and_writes_nothing(photos: Path, tmp_path: Path) -> None:
    config = Config(input=str(photos), output=str(tmp_path), name="photos", image_size=24).in_run(max_references=39)
    job = beam.Pipeline(runner="FnApiRunner")
    graph.build(job, config, Run())
    with pytest.raises(ImageShardsError, match=LINE):
        job.run()
    assert not list(tmp_path.rglob("*.tfrecord*"))
