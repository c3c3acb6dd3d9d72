"""One writer at a time: locks on this machine, leases in an object store, takeovers of the dead and the stale."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beam_pipeline import storage
from beam_pipeline.dataset import owner
from beam_pipeline.dataset.owner import Owner, owner_of
from beam_pipeline.errors import ImageShardsError, StorageError
from beam_pipeline.storage import gs
from beam_pipeline.storage.identity import Identity, Process
from tests import make
from tests.servers import Gcs


@pytest.fixture(params=["local", "gs", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a dataset's folder, on each kind of storage in turn."""
    if request.param == "gs":
        gcs: Gcs = request.getfixturevalue("gcs")
        yield f"gs://{gcs.new_bucket()}/photos"
    elif request.param == "s3":
        yield f"s3://{request.getfixturevalue('s3').new_bucket()}/photos"
    else:
        yield str(tmp_path / "photos")


@pytest.fixture(autouse=True)
def _look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_next_look", {})


def job(place: str, identity: Identity | None = None) -> Owner:
    """The owner object of one job."""
    return owner_of(f"{place}/_state/1.0.0", f"{place}/1.0.0", identity or Identity.new(), 10)


def owner_file(place: str) -> str:
    return f"{place}/_state/1.0.0/owner.json"


def dead_process() -> Process:
    """A process of this machine that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        here = Process.here()
        assert here is not None
        started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    return here._replace(pid=child.pid, started=started)


# --- for every storage


def test_the_first_gets_it_and_the_second_is_told_since_when(place: str) -> None:
    first, second = job(place), job(place)
    first.acquire("plan")
    with pytest.raises(ImageShardsError, match=r"/1\.0\.0 is being written by another job.*\d s ago.*taken over"):
        second.acquire("plan")
    first.check()
    first.release()
    second.acquire("plan")
    second.check()
    with pytest.raises(ImageShardsError, match=r"/1\.0\.0: another job has taken over .* nothing of it is published$"):
        first.check()


def test_a_repeated_step_of_the_same_job_has_it_already(place: str) -> None:
    identity = Identity.new()
    job(place, identity).acquire("plan")
    job(place, identity).acquire("plan")
    job(place, identity).check()


def test_who_has_not_got_it_gives_nothing_up(place: str) -> None:
    first = job(place)
    first.acquire("plan")
    job(place).release()
    first.check()


def test_releasing_leaves_nothing(place: str) -> None:
    one = job(place)
    one.acquire("plan")
    one.release()
    one.release()
    assert not storage.open_storage(place).stat(owner_file(place))
    if storage.is_local(place):
        assert not Path(place).exists()


def test_nobody_has_it_after_the_file_is_gone(place: str) -> None:
    # A worker that was asleep while its job was taken over and the other one published must write no more.
    one = job(place)
    one.acquire("plan")
    storage.open_storage(place).delete(owner_file(place))
    with pytest.raises(ImageShardsError, match="another job has taken over"):
        one.check()


def test_of_many_at_once_one_gets_it(place: str) -> None:
    if place.startswith("memory"):
        pytest.skip("a store without preconditions promises less, docs/decisions/006-one-writer.md")
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def compete() -> None:
        one = job(place)
        start.wait()
        try:
            one.acquire("plan")
            outcomes.append("owner")
        except ImageShardsError:
            outcomes.append("refused")

    threads = [threading.Thread(target=compete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["owner"] + ["refused"] * 7


# --- which process


def test_this_process_lives_and_an_ended_one_is_dead() -> None:
    here = Process.here()
    assert here is not None
    assert here.pid == os.getpid()
    assert not here.is_dead()
    assert dead_process().is_dead()


def test_a_process_that_nobody_has_waited_for_is_dead() -> None:
    here = Process.here()
    assert here is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    process = here._replace(pid=child.pid, started=started)
    assert not process.is_dead()
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert process.is_dead()
    child.communicate()


@pytest.mark.parametrize("other", [{"boot": "x"}, {"namespace": "pid:[1]"}])
def test_nothing_is_said_of_processes_elsewhere(other: dict[str, Any]) -> None:
    # Another machine, another start of it, another container: their process numbers mean nothing here.
    assert not dead_process()._replace(**other).is_dead()


def test_a_number_that_another_process_has_now_is_a_dead_one() -> None:
    here = Process.here()
    assert here is not None
    assert here._replace(started=here.started - 1).is_dead()


# --- a lock of this machine

HOLD = """
import sys, time
from beam_pipeline.storage.identity import Identity
from beam_pipeline.owner import owner_of
owner_of(sys.argv[1] + "/_state/1.0.0", sys.argv[1] + "/1.0.0", Identity.new(True), 10).acquire("")
print("held", flush=True)
time.sleep(600)
"""


def holder(place: str) -> subprocess.Popen[str]:
    """A process that has the right and keeps it."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, place], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_the_lock_of_another_process_names_it_and_goes_with_it(tmp_path: Path) -> None:
    place = str(tmp_path / "photos")
    with holder(place) as child:
        with pytest.raises(ImageShardsError, match=rf"another job \(process {child.pid}\), begun \d s ago"):
            job(place).acquire("")
        child.kill()
    one = job(place)
    one.acquire("")
    one.check()


@pytest.mark.parametrize("flags", [(), ("--overwrite",), ("--repair",)], ids=["plain", "overwrite", "repair"])
def test_no_command_touches_a_version_that_another_job_writes(
    photos: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    version = make.published(photos, tmp_path)
    (version / "features.json").unlink()
    with holder(str(tmp_path / "photos")) as child:
        before = make.files(tmp_path)
        finished = make.job(photos, tmp_path, *flags)
        assert finished.code == 1
        assert f"is being written by another job (process {child.pid})" in finished.err
        assert make.files(tmp_path) == before
        child.kill()
    assert make.job(photos, tmp_path, *flags).code == 0
    assert (version / "features.json").exists()
    assert not (tmp_path / "photos/_state").exists()


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    forking = "import os\nif os.fork():\n    os._exit(0)\nprint('child', flush=True)\ntime.sleep(600)"
    code = HOLD.replace("time.sleep(600)", forking)
    place = str(tmp_path / "photos")
    command = [sys.executable, "-c", code, place]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(2)] == ["held\n", "child\n"]
        child.wait()
        try:
            job(place).acquire("")
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def test_a_link_in_its_place_is_an_error_not_a_loop(tmp_path: Path) -> None:
    state = tmp_path / "photos" / "_state" / "1.0.0"
    state.mkdir(parents=True)
    (state / "owner.json").symlink_to(tmp_path / "missing" / "owner.json")
    with pytest.raises(StorageError, match=r"owner\.json: too many levels of symbolic links"):
        job(str(tmp_path / "photos")).acquire("")


def test_a_lock_is_never_held_on_a_deleted_file(tmp_path: Path) -> None:
    place = str(tmp_path / "photos")
    owned: list[bool] = []  # whether nobody else was the owner
    inside = threading.Lock()

    def acquire_and_release() -> None:
        for _ in range(50):
            one = job(place)
            try:
                one.acquire("")
            except ImageShardsError:
                continue
            alone = inside.acquire(blocking=False)
            owned.append(alone)
            one.check()
            if alone:
                inside.release()
            one.release()

    threads = [threading.Thread(target=acquire_and_release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(owned) >= 4 and all(owned)
    assert not (tmp_path / "photos").exists()


# --- a lease of an object store


def age(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """From now on the store's clock goes so much ahead of the time at which it wrote what it holds."""
    version = gs.GoogleStorage.version

    def aged(self: Any, url: str) -> storage.Version | None:
        found = version(self, url)
        return found and found._replace(age_s=found.age_s + seconds)

    monkeypatch.setattr(gs.GoogleStorage, "version", aged)


@pytest.fixture
def bucket_place(gcs: Gcs) -> str:
    storage.open_storage("gs://")
    return f"gs://{gcs.new_bucket()}/photos"


def test_a_dead_process_of_this_machine_is_followed_at_once(bucket_place: str) -> None:
    job(bucket_place, Identity("a", dead_process())).acquire("plan")
    one = job(bucket_place)
    one.refuse_if_taken()
    one.acquire("plan")
    one.check()


def test_a_live_process_and_a_cluster_are_not(bucket_place: str) -> None:
    identity = Identity.new(ends_with_this_process=True)
    alive = job(bucket_place, identity)
    alive.acquire("plan")
    line = (
        rf"^{bucket_place}/1\.0\.0 is being written by another job \(process {os.getpid()}\), last heard of 0 s ago: "
        r"wait for its end; it may be taken over in 10 min, at once if its process is gone from this machine$"
    )
    with identity.runs(), pytest.raises(ImageShardsError, match=line):
        job(bucket_place).refuse_if_taken()
    alive.release()
    job(bucket_place).acquire("plan")
    with pytest.raises(ImageShardsError, match=r"by another job, last heard of 0 s ago: .* taken over in 10 min$"):
        job(bucket_place).refuse_if_taken()


def test_a_job_of_this_process_that_has_failed_is_followed_at_once(bucket_place: str) -> None:
    # A notebook's: the network failed it, and kept it from giving up the right.
    identity = Identity.new(ends_with_this_process=True)
    with identity.runs():
        job(bucket_place, identity).acquire("plan")
    job(bucket_place).refuse_if_taken()
    job(bucket_place).acquire("plan")


def test_one_that_was_not_refreshed_for_ten_minutes_is_taken_over(
    bucket_place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(bucket_place).acquire("plan")
    age(monkeypatch, 598)
    with pytest.raises(ImageShardsError, match=r"last heard of 9 min ago: .* in [123] s$"):
        job(bucket_place).acquire("plan")
    age(monkeypatch, 5)
    job(bucket_place).acquire("plan")


def test_a_worker_refreshes_what_is_older_than_thirty_seconds(
    gcs: Gcs, bucket_place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job(bucket_place)
    one.acquire("plan")
    store = storage.open_versioned("gs://", 10)

    def generation() -> str:
        found = store.version(owner_file(bucket_place))
        assert found is not None
        return found.generation

    first = generation()
    one.check()
    assert generation() == first
    age(monkeypatch, 31)
    one.check()
    assert generation() != first
    before = len(gcs.requests())
    for _ in range(1000):
        one.keep()
    assert len(gcs.requests()) == before, "looked at a moment ago"


def test_the_servers_clock_tells_the_age(gcs: Gcs, bucket_place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job(bucket_place).acquire("plan")
    monkeypatch.setattr(time, "time", lambda: 4e9)  # this machine's clock is a century ahead
    found = storage.open_versioned("gs://", 10).version(owner_file(bucket_place))
    assert found is not None
    assert -1 <= found.age_s < 30


def test_another_plan_under_the_same_token_is_another_job(bucket_place: str) -> None:
    # Two jobs started from one classic Dataflow template carry the same token.
    identity = Identity.new()
    job(bucket_place, identity).acquire("plan")
    with pytest.raises(ImageShardsError, match="is being written by another job"):
        job(bucket_place, identity).acquire("other plan")


def test_an_owner_file_that_cannot_be_read_is_somebodys(bucket_place: str) -> None:
    storage.open_storage("gs://").write(owner_file(bucket_place), b"{")
    with pytest.raises(ImageShardsError, match="is being written by another job"):
        job(bucket_place).acquire("plan")


def test_an_identity_survives_its_copies_but_not_a_new_configuration() -> None:
    from beam_pipeline import Config

    one = Config(input="/in", output="/out", name="x")
    other = Config(input="/in", output="/out", name="x")
    assert dataclasses.replace(one, seed=1).identity == one.identity != other.identity
    assert one == other, "the same configuration"
