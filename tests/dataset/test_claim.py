"""One writer at a time: a lock on this machine; in an object store a claim that jobs of one plan share."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.claim import CLAIM_FILE, SharedClaim, open_claim
from beam_pipeline.errors import ImageShardsError, StorageError
from beam_pipeline.schema.job import ClaimHolder, document_bytes
from tests import make
from tests.servers import Gcs

BY_ANOTHER = rf"/1\.0\.0 is being written by another job \(process {os.getpid()} on \S+, since \d{{4}}-\S+ \S+ UTC\)"


def job(output: object, **more: bool) -> SharedClaim:
    """The claim of a new job."""
    return open_claim(Config(input="/in", output=str(output), name="photos", **more))


def claim_file(output: object) -> str:
    return f"{output}/photos/_state/1.0.0/{CLAIM_FILE}"


# --- a lock of this machine

HOLD = """
import os, sys, time
from beam_pipeline.config import Config
from beam_pipeline.dataset.claim import open_claim
open_claim(Config(input="/in", output=sys.argv[1], name="photos")).acquire()
print("held", flush=True)
time.sleep(600)
"""


def holder(output: Path) -> subprocess.Popen[str]:
    """A process that has taken the lock."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(output)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_second_job_is_told_by_whom_and_since_when(tmp_path: Path) -> None:
    first, second = job(tmp_path), job(tmp_path)
    first.acquire()
    with pytest.raises(ImageShardsError, match=BY_ANOTHER + r": wait for it to finish$"):
        second.acquire()
    first.release()
    assert not Path(claim_file(tmp_path)).exists()
    second.acquire()
    second.release()


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.class_folders(tmp_path_factory.mktemp("few"), {"ant": 3})


def test_no_command_touches_a_local_version_that_another_job_writes(few: Path, tmp_path: Path) -> None:
    version = make.published(few, tmp_path)
    commands = ((), ("--overwrite",), ("--restart",), ("--repair",))
    (version / "features.json").unlink()
    with holder(tmp_path) as child:
        before = make.files(tmp_path)
        for flags in commands:
            finished = make.job(few, tmp_path, *flags)
            assert finished.code == 1
            assert f"is being written by another job (process {child.pid} on " in finished.err
            assert make.files(tmp_path) == before
        child.kill()
    for flags in commands:
        (version / "features.json").unlink(missing_ok=True)
        assert make.job(few, tmp_path, *flags).code == 0
        assert (version / "features.json").exists()
        assert not (tmp_path / "photos/_state").exists()


def test_a_link_in_its_place_is_an_error_not_a_loop(tmp_path: Path) -> None:
    path = Path(claim_file(tmp_path))
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "missing" / "claim.json")
    with pytest.raises(StorageError, match=r"claim\.json: too many levels of symbolic links"):
        job(tmp_path).acquire()


def at_once(threads: int, work: Callable[[str], None]) -> None:
    """Calls `work` with a name of its own in each thread, all together."""
    start = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda name: (start.wait(), work(name)), map(str, range(threads))))


def test_a_lock_is_never_held_on_a_deleted_file(tmp_path: Path) -> None:
    was_alone: list[bool] = []
    inside = threading.Lock()

    def hold_and_release(_: str) -> None:
        for _ in range(50):
            one = job(tmp_path)
            with suppress(ImageShardsError):
                one.acquire()
                was_alone.append(inside.acquire(blocking=False))
                if was_alone[-1]:
                    inside.release()
                one.release()

    at_once(4, hold_and_release)
    assert len(was_alone) >= 4 and all(was_alone)
    assert not Path(claim_file(tmp_path)).exists()


# --- in an object store


@pytest.fixture(params=["gs", "s3"])
def bucket(request: pytest.FixtureRequest) -> str:
    return f"{request.param}://{request.getfixturevalue('gcs' if request.param == 'gs' else 's3').new_bucket()}"


def plan_of(output: str) -> str | None:
    """The plan that is claimed."""
    writer = job(output).holder()
    return writer and writer.plan


def test_jobs_of_one_plan_share_the_claim_and_another_is_told_by_whom_and_what_to_do(bucket: str) -> None:
    first = job(bucket)
    assert first.acquire("plan") == job(bucket).acquire("plan") == (first.holder().run, False)
    line = " with other images or flags: wait until it is published, or restart=True discards what it has written$"
    with pytest.raises(ImageShardsError, match=BY_ANOTHER + line):
        job(bucket).acquire("other")
    assert plan_of(bucket) == "plan"


def test_a_job_whose_process_has_ended_is_told_as_ended(bucket: str, tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    ended = ClaimHolder("run", "plan", socket.gethostname(), process.pid, "then")
    line = r"was begun by another job \(process .*, whose process has ended: if its job has, too, restart=True discards"
    for output in (bucket, str(tmp_path)):
        storage.open_storage(output).write(claim_file(output), document_bytes(ended))
        with pytest.raises(ImageShardsError, match=line):
            job(output).acquire("other")
        assert job(output, restart=True).acquire("other")[1]


def test_restart_and_overwrite_replace_the_claim_of_another_plan_once(bucket: str) -> None:
    job(bucket).acquire("plan")
    one = job(bucket, restart=True)
    assert one.acquire("plan")[1], "--restart begins again, whatever is there"
    assert not one.acquire("plan")[1], "a repeated step has it already: what it has written since stays"
    assert job(bucket, restart=True).acquire("other")[1]
    assert plan_of(bucket) == "other"
    assert job(bucket, overwrite=True).acquire("third")[1]
    assert plan_of(bucket) == "third"
    assert not job(bucket, overwrite=True).acquire("third")[1], "a killed --overwrite resumes"


def test_after_a_job_of_another_plan_died_the_command_names_restart_which_publishes(gcs: Gcs, few: Path) -> None:
    output = f"gs://{(name := gcs.new_bucket())}"
    job(output).acquire("plan")
    finished = make.job(few, output)
    assert (finished.code, finished.err.count("\n")) == (1, 1)
    assert finished.err.endswith("wait until it is published, or --restart discards what it has written\n")
    assert make.job(few, output, "--restart").out.startswith("published")
    assert make.job(few, output, "--restart").out.startswith("already published")
    assert not any("_state" in file for file in gcs.names(name))


def test_of_many_plans_at_once_one_is_claimed(bucket: str) -> None:
    taken: list[str] = []

    def compete(plan: str) -> None:
        with suppress(ImageShardsError):
            job(bucket).acquire(plan)
            taken.append(plan)

    at_once(8, compete)
    assert taken == [plan_of(bucket)]


def test_only_the_job_that_made_a_claim_gives_it_up(bucket: str) -> None:
    first, second = job(bucket), job(bucket)
    first.acquire("plan")
    second.acquire("plan")
    second.discard()
    assert plan_of(bucket) == "plan"
    first.discard()
    first.discard()
    assert plan_of(bucket) is None


def test_a_claim_that_cannot_be_read_is_another_job_s(bucket: str) -> None:
    storage.open_storage(bucket).write(claim_file(bucket), b"{")
    with pytest.raises(ImageShardsError, match=r"by another job with other images or flags"):
        job(bucket).acquire("plan")


def test_a_run_survives_copies_of_its_configuration_and_is_no_part_of_it() -> None:
    one, other = (Config(input="/in", output="/out", name="x") for _ in range(2))
    assert dataclasses.replace(one, seed=1).run_id == one.run_id != other.run_id
    assert one == other, "the same configuration"
