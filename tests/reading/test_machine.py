"""What the machine or the container leaves to a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from reader.machine import cpu_count, free_memory_bytes


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "99900000 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu.max": "nonsense"}, None),
    ],
)
def test_cores_are_those_of_the_machine_or_of_the_groups_quota(
    tmp_path: Path, files: dict[str, str], cores: int | None
) -> None:
    nowhere = cpu_count(str(tmp_path / "empty"))
    assert nowhere >= 1
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert cpu_count(str(tmp_path)) == (cores or nowhere)


def test_free_memory_is_that_of_the_machine_or_of_its_group(tmp_path: Path) -> None:
    assert free_memory_bytes(str(tmp_path)) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8000 kB\nMemAvailable:    3000 kB\n")
    assert free_memory_bytes(str(tmp_path)) == 3000 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("500000\n")
    assert free_memory_bytes(str(tmp_path)) == 3000 << 10
    (group / "memory.max").write_text("900000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 70000\n")
    assert free_memory_bytes(str(tmp_path)) == 470000
