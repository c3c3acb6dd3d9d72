"""Memory for references: read from the machine and its control groups, held against what is listed."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam
import pytest

from beam_pipeline import Config
from beam_pipeline.dataset.state import JobState
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.pipeline import graph, limits

LINE = (
    r"40 images are listed, but this machine's free memory holds references of 39 only: "
    r"give it more memory, or use --runner DataflowRunner, which keeps them on disks"
)


def machine(root: Path, available_kib: int, groups: str, **files: str) -> str:
    """A made-up `/proc` and `/sys`: free memory, groups of the process, files of those by path with `__` for `/`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("memory_", "memory.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    root = machine(tmp_path, 1000, "0::/\n", memory_max="max\n", memory_current="5\n")
    assert limits.free_memory_bytes(root) == 1000 << 10


def test_a_control_group_leaves_its_limit_less_what_is_used_and_cannot_be_given_back(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        1000,
        "0::/user/job\n",
        user__job__memory_max="max\n",
        user__job__memory_current="1\n",
        user__memory_max="500000\n",
        user__memory_current="300000\n",
        user__memory_stat="anon 5\ninactive_file 100000\n",
    )
    assert limits.free_memory_bytes(root) == 300_000
    assert limits.most_references(800, root) == 375


def test_in_a_container_the_group_is_at_the_top(tmp_path: Path) -> None:
    root = machine(
        tmp_path, 1000, "0::/docker/0123abc\n", memory_max="70000\n", memory_current="20000\n", memory_stat="anon 1\n"
    )
    assert limits.free_memory_bytes(root) == 50_000


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        1000,
        "3:cpu:/x\n2:memory:/x\n",
        memory__x__memory_limit_in_bytes="90000\n",
        memory__x__memory_usage_in_bytes="50000\n",
        memory__x__memory_stat="total_inactive_file 1000\n",
    )
    assert limits.free_memory_bytes(root) == 41_000


def test_a_group_beyond_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, 1000, "0::/\n", memory_max="10\n", memory_current="20\n")
    assert limits.most_references(800, root) == 0


def test_a_system_that_tells_nothing_sets_no_limit(tmp_path: Path) -> None:
    assert limits.most_references(800, str(tmp_path)) is None
    limits.check(10**12, None)


def test_this_machine_has_memory() -> None:
    most = limits.most_references(limits.IN_PROCESS_BYTES)
    assert most is None or most > 10_000


@pytest.mark.parametrize("most", [39, 40])
def test_a_job_whose_references_do_not_fit_stops_with_one_line_and_writes_nothing(
    photos: Path, tmp_path: Path, most: int
) -> None:
    config = Config(input=str(photos), output=str(tmp_path), name="photos", image_size=24, most_references=most)
    JobState(config).claim.hold()
    job = beam.Pipeline(runner="FnApiRunner")
    graph.build(job, config, {"started_unix_s": 0})
    if most == 40:
        job.run()
        assert (tmp_path / "photos/1.0.0/manifest.json").exists()
    else:
        with pytest.raises(ImageShardsError, match=LINE):
            job.run()
        assert not list(tmp_path.rglob("*.tfrecord*"))
