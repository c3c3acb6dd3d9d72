"""What the machine and the control groups of a process leave to it, as made-up `/proc` and `/sys` say."""

from __future__ import annotations

from pathlib import Path

import pytest

from beam_pipeline.machine import cpu_count, free_memory_bytes

V1 = "3:cpuset:/\n2:cpu,cpuacct:/docker/0123abc\n1:memory:/docker/0123abc\n"


def machine(root: Path, groups: str, files: dict[str, str]) -> str:
    """One with 1,000 KiB free.

    Args:
        groups: that the process is in.
        files: of these, by their path.
    """
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    texts |= {"proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 1000 kB\n", "proc/self/cgroup": groups}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "99900000 100000\n"}, None),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
        ("0::/user/job\n", {"user/cpu.max": "50000 100000\n", "user/job/cpu.max": "max 100000\n"}, 1),
        ("0::/docker/0123abc\n", {"cpu.max": "100000 100000\n"}, 1),  # as a container sees it
        (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        (V1, {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_cores_are_those_of_the_machine_or_of_a_groups_quota(
    tmp_path: Path, groups: str, files: dict[str, str], cores: int | None
) -> None:
    everything = cpu_count(str(tmp_path / "nowhere"))
    assert everything >= 1
    assert cpu_count(machine(tmp_path, groups, files)) == (cores or everything)


NESTED = {
    "user/job/memory.max": "max\n",
    "user/job/memory.current": "1\n",
    "user/memory.max": "500000\n",
    "user/memory.current": "300000\n",
    "user/memory.stat": "anon 5\ninactive_file 100000\n",
}
AT_THE_TOP = {"memory.max": "70000\n", "memory.current": "20000\n", "memory.stat": "anon 1\n"}
OF_VERSION_1 = {
    "memory/memory.limit_in_bytes": "90000\n",
    "memory/memory.usage_in_bytes": "60000\n",
    "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 10000\n",
}


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, 1000 << 10),
        ("0::/user/job\n", NESTED, 300_000),  # its limit less what is used and can't be given back
        ("0::/docker/0123abc\n", AT_THE_TOP, 50_000),
        ("0::/\n", {"memory.max": "10\n", "memory.current": "20\n"}, 0),
        (V1, OF_VERSION_1, 40_000),
    ],
)
def test_free_memory_is_the_least_that_the_machine_and_its_control_groups_leave(
    tmp_path: Path, groups: str, files: dict[str, str], free: int
) -> None:
    assert free_memory_bytes(machine(tmp_path, groups, files)) == free


def test_a_system_that_does_not_tell_has_unknown_memory(tmp_path: Path) -> None:
    assert free_memory_bytes(str(tmp_path)) is None
