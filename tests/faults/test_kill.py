"""A kill and two collisions; `make soak` has more; `python -m tests.faults.steps`, `race` and `collide` have many."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import make, servers
from tests.faults import collide, jobs, steps
from tests.faults.jobs import Job, Output, Reference
from tests.servers import Gcs


@pytest.fixture(scope="module")
def expected(many: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return alone(many, tmp_path_factory.mktemp("reference"))


def alone(images: Path, folder: Path, *more: str) -> Reference:
    output = Output(str(folder / "out"))
    finished = make.run("--input", images, "--output", output.url, *jobs.FLAGS, *more)
    assert finished.code == 0, finished.err
    return Reference(make.dataset_hash(Path(output.url) / jobs.VERSION), frozenset(output.files()))


def place(gcs: Gcs, tmp_path: Path, remote: bool) -> Output:
    return Output(f"gs://{gcs.new_bucket()}", gcs.url) if remote else Output(str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("mode", "remote"), [pytest.param("multi_processing", False, marks=pytest.mark.soak), ("in_memory", True)], ids=str
)
def test_after_a_kill_the_same_command_keeps_finished_shards_and_gives_the_same_bytes(
    gcs: Gcs, many: Path, expected: Reference, tmp_path: Path, mode: str, remote: bool
) -> None:
    output = place(gcs, tmp_path, remote)
    job = Job(many, output, mode)
    job.wait_for("plan.json")
    job.wait_for_shards(3)
    job.kill()
    finished = output.finished_shards()
    assert 3 <= len(finished) < 16, "killed too late to show anything"
    result = Job(many, output, mode).result()
    assert (result.code, "error" in result.err) == (0, False), result
    expected.check(output, tmp_path / "scratch")
    assert finished.items() <= output.files().items(), "written again"


@pytest.mark.soak
def test_workers_end_with_a_launcher_that_is_killed(many: Path, tmp_path: Path) -> None:
    output = Output(str(tmp_path / "out"))
    job = Job(many, output, "multi_processing")
    job.wait_for_shards(1)
    job.kill_launcher()
    for _ in range(300):
        if not (left := job.processes()):
            break
        time.sleep(0.1)
    job.kill()
    assert not left, "a worker is left after 30 s"


# Fewer rounds than each has by itself.
PROGRAMS = ("steps --steps 1", "race --rounds 2", "collide --runs 50 --kinds local", "collide --runs 4 --kinds gs")


@pytest.mark.soak
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.skipif(servers.fake_gcs_binary() is None, reason=servers.HOW_TO_ENABLE)
def test_kills_at_single_steps_takeovers_and_collisions_lose_nothing_and_leave_nothing(program: str) -> None:
    name, *flags = program.split()
    command = [sys.executable, "-m", f"tests.faults.{name}", *flags]
    done = subprocess.run(command, cwd=make.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert name != "steps" or done.stdout.count("killed at 1 of ") == len(steps.CASES)


def test_of_two_commands_one_publishes_and_the_other_says_at_once_that_it_does_not(
    many: Path, expected: Reference, tmp_path: Path
) -> None:
    both = {(): expected, collide.OTHER: alone(many, tmp_path / "other", *collide.OTHER)}
    collide.collide(many, Output(str(tmp_path / "out")), both, 0.3, tmp_path / "scratch", collide.OTHER)
