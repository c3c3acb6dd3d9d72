"""Who may write a version: one claim, for folders and object stores; on this machine a lock says if a command runs."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.dataset import claim
from beam_pipeline.dataset.claim import CLAIM_FILE, Claim, ClaimedError, SupersededError, VersionLock
from beam_pipeline.dataset.state import JobState
from beam_pipeline.dataset.version import prepare
from beam_pipeline.errors import StorageError
from beam_pipeline.schema.manifest import PlannedSplit
from tests import make

PLAN = make.plan_of(classes=("a",), splits={"train": PlannedSplit(9, 90, ("5", str(1 << 63)))}, inputs="9-abc")
OTHER = replace(PLAN, inputs="other")
BY_ANOTHER = rf"/1\.0\.0 is being written by another job \(process {os.getpid()} on \S+, since \d{{4}}-\S+ \S+ UTC\)"
WAIT = r"/1\.0\.0 is being written by another job \(process \d+ on .* UTC\): wait for it to finish$"
RESTART = (
    r"/1\.0\.0 is being written by another job( \(process \d+ on \S+, since \d{4}-\S+ \S+ UTC\))? with other images or "
    "flags: wait until it is published or, if it has ended, "
    r"--restart \(in Python restart=True\) discards what it has written$"
)


def config(output: object, **more: bool) -> Config:
    """Of a new job."""
    return Config(input="/in", output=str(output), name="photos", **more)


def job(output: object, **more: bool) -> Claim:
    """The claim of a new job."""
    return Claim(config(output, **more))


def lock(output: object) -> VersionLock:
    return VersionLock(config(output))


def claim_file(output: object) -> str:
    return f"{output}/photos/_state/1.0.0/{CLAIM_FILE}"


def plan_of(output: object) -> str | None:
    """The plan that is claimed."""
    holder = job(output).holder()
    return holder and holder.plan


@pytest.fixture(params=["local", "gs", "s3"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path)
    return f"{request.param}://{request.getfixturevalue('gcs' if request.param == 'gs' else 's3').new_bucket()}"


def at_once(threads: int, work: Callable[[str], None]) -> None:
    """Calls `work` with a name of its own in each thread, all together."""
    start = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda name: (start.wait(), work(name)), map(str, range(threads))))


# --- claim.json


def test_of_many_plans_at_once_one_is_claimed(output: str) -> None:
    taken: list[str] = []

    def compete(plan: str) -> None:
        with suppress(ClaimedError):
            job(output).acquire(plan)
            taken.append(plan)

    at_once(8, compete)
    assert taken == [plan_of(output)]


def test_only_the_job_that_made_a_claim_gives_it_up(output: str) -> None:
    first, second = job(output), job(output)
    first.acquire("plan")
    second.acquire("plan")
    second.discard()
    assert plan_of(output) == "plan"
    first.discard()
    first.discard()
    assert plan_of(output) is None


def test_a_claim_that_cannot_be_read_is_another_job_s_in_a_store_and_left_by_a_power_cut_here(output: str) -> None:
    storage.open_storage(output).write(claim_file(output), b"{")
    if output.startswith("/"):
        assert job(output).acquire("plan")[1]
    else:
        with pytest.raises(ClaimedError, match=RESTART):
            job(output).acquire("plan")


def test_a_link_in_place_of_a_file_is_an_error_not_a_loop(tmp_path: Path) -> None:
    for path, acquire in (
        (Path(claim_file(tmp_path)), lambda: job(tmp_path).acquire("plan")),
        (tmp_path / "photos/_state/1.0.0.lock", lambda: lock(tmp_path).acquire()),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(tmp_path / "missing")
        with pytest.raises(StorageError, match=r"too many levels of symbolic links|a link to a file that isn't there"):
            acquire()
        path.unlink()


# --- the lock of a command


def test_a_second_command_is_told_by_whom_and_since_when(tmp_path: Path) -> None:
    first, second = lock(tmp_path), lock(tmp_path)
    first.acquire()
    first.acquire()  # as often as it likes
    for ask in (second.acquire, second.check):
        with pytest.raises(ClaimedError, match=BY_ANOTHER + ": wait for it to finish$"):
            ask()
    first.release()
    assert list(tmp_path.iterdir()) == []
    second.check()
    second.acquire()
    second.release()


def test_a_lock_is_never_held_on_a_deleted_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (lock(tmp_path) for _ in range(3))
    first.acquire()
    calls: list[object] = []

    def change_hands(*_: object) -> None:
        calls.append(None)
        if len(calls) == 1:  # the second has opened the file of the first
            first.release()
            third.acquire()

    make.before(monkeypatch, claim, "_lock", change_hands)
    with pytest.raises(ClaimedError, match=WAIT):
        second.acquire()
    third.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_without_locks_a_warning_says_so_and_the_claim_alone_decides(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    some = config(tmp_path)
    one = VersionLock(some)
    one.acquire()
    one.acquire()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "1.0.0.lock: can't be locked here" in lines[0] and os.strerror(number) in lines[0]
    assert list((tmp_path / "photos/_state").iterdir()) == []
    lock(tmp_path).check()
    prepare(some, PLAN)
    one.release()
    assert prepare(config(tmp_path), PLAN) == some.context.id
    with pytest.raises(ClaimedError, match=RESTART):
        prepare(config(tmp_path), OTHER)


# --- who may write: the rules

# Who has the claim; who comes, with which plan and flag; what becomes of it here, and in an object store.
# "waits" and "restarts" are refusals that advise this; "joins" shares the claim, "replaces" takes it.
RULES = [
    ("running command", "command", PLAN, "", "waits", "joins"),
    ("running command", "command", OTHER, "", "waits", "restarts"),
    ("running command", "command", OTHER, "restart", "waits", "replaces"),
    ("running command", "command", OTHER, "overwrite", "waits", "replaces"),
    ("running command", "pipeline", PLAN, "", "joins", "joins"),
    ("running command", "pipeline", OTHER, "", "waits", "restarts"),
    ("running command", "pipeline", OTHER, "restart", "waits", "replaces"),
    ("killed command", "command", PLAN, "", "joins", "joins"),
    ("killed command", "command", PLAN, "restart", "replaces", "replaces"),
    ("killed command", "command", OTHER, "", "replaces", "restarts"),
    ("killed command", "pipeline", PLAN, "", "joins", "joins"),
    ("killed command", "pipeline", OTHER, "", "replaces", "restarts"),
    # A pipeline of somebody's own has no lock: nothing tells whether it runs.
    ("pipeline", "command", PLAN, "", "joins", "joins"),
    ("pipeline", "command", OTHER, "", "restarts", "restarts"),
    ("pipeline", "command", OTHER, "restart", "replaces", "replaces"),
    ("pipeline", "pipeline", PLAN, "", "joins", "joins"),
    ("pipeline", "pipeline", PLAN, "restart", "replaces", "replaces"),
    ("pipeline", "pipeline", OTHER, "", "restarts", "restarts"),
    ("pipeline", "pipeline", OTHER, "overwrite", "replaces", "replaces"),
]


def in_a_killed_process(act: Callable[[], object]) -> None:
    """Whatever it holds is free again."""
    if (child := os.fork()) == 0:
        try:
            act()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize(("first", "second", "plan", "flag", "here", "in_a_store"), RULES)
def test_who_may_write(
    first: str, second: str, plan: object, flag: str, here: str, in_a_store: str, output: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    is_local = output.startswith("/")
    expected = here if is_local else in_a_store
    before, after = config(output), config(output, **({flag: True} if flag else {}))
    locks = {run.context.id: VersionLock(run) for run in (before, after)}

    def begin(run: Config, plan: object, is_command: bool) -> str:
        if is_command:
            locks[run.context.id].acquire()
        return prepare(run, plan)

    def begin_first() -> None:
        begin(before, PLAN, first.endswith("command"))

    with monkeypatch.context() as elsewhere:  # a container's name says nothing
        elsewhere.setattr("socket.gethostname", lambda: "elsewhere")
        if first == "killed command" and is_local:
            in_a_killed_process(begin_first)
        else:
            begin_first()
    if expected in ("waits", "restarts"):
        with pytest.raises(ClaimedError, match=WAIT if expected == "waits" else RESTART):
            begin(after, plan, second == "command")
        JobState(before).check()
    else:
        run = begin(after, plan, second == "command")
        assert run == (before if expected == "joins" else after).context.id
        assert begin(after, plan, is_command=False) == run, "a repeated step changes nothing"
        JobState(after, run).check()
        if expected == "replaces":
            with pytest.raises(SupersededError, match="another job has taken over this version"):
                JobState(before).check()
    for one in locks.values():
        one.release()


def test_before_it_has_a_plan_a_command_keeps_pipelines_out(tmp_path: Path) -> None:
    command = lock(tmp_path)
    command.acquire()
    with pytest.raises(ClaimedError, match=WAIT):
        prepare(config(tmp_path), PLAN)
    command.release()
    prepare(config(tmp_path), PLAN)


def test_a_killed_command_s_claim_on_a_version_that_is_published_goes_with_the_next_command(tmp_path: Path) -> None:
    # It would have overwritten it, with other flags.
    before, after = config(tmp_path, overwrite=True), config(tmp_path)
    in_a_killed_process(lambda: (VersionLock(before).acquire(), Claim(before).acquire("plan")))
    storage.open_storage(after.output).write(f"{after.dataset_url}/manifest.json", b"published")
    JobState(after).clear()
    assert plan_of(tmp_path) == "plan", "not by a pipeline: a command may just begin"
    command = VersionLock(after)
    command.acquire()
    JobState(after).clear()
    command.release()
    assert list(make.files(tmp_path)) == ["photos/1.0.0/manifest.json"]
    assert not JobState(after).has_leftovers()


# --- commands: what they say is in tests/cli/messages.txt


def test_a_command_that_is_refused_ends_before_it_imports_beam(photos: Path, tmp_path: Path) -> None:
    program = 'import sys; from beam_pipeline.cli.main import main; print(main(), "apache_beam" in sys.modules)'
    arguments = ["--input", str(photos), "--output", str(tmp_path), "--name", "photos"]
    (first := lock(tmp_path)).acquire()
    done = subprocess.run([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    first.release()
    assert done.stdout == "1 False\n"


@pytest.mark.parametrize("flag", ["--preflight", "--plan_only"])
def test_what_only_reads_may_run_beside_a_command_that_writes(photos: Path, tmp_path: Path, flag: str) -> None:
    (first := lock(tmp_path)).acquire()
    assert make.job(photos, tmp_path, flag).code == 0
    first.release()


def test_a_run_survives_copies_of_its_configuration_and_is_no_part_of_it() -> None:
    one, other = (Config(input="/in", output="/out", name="x") for _ in range(2))
    assert dataclasses.replace(one, seed=1).context.id == one.context.id != other.context.id
    assert one == other, "the same configuration"
