"""What an unpublished job keeps: a plan that voids all else when it differs, sidecars, temporary files that go."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.attempts import Attempts, sample_marker
from beam_pipeline.dataset.claim import SharedClaim, SupersededError, open_claim
from beam_pipeline.dataset.state import JobState, own_files
from beam_pipeline.errors import ImageShardsError, StorageError
from beam_pipeline.schema import ShardName, is_ours
from beam_pipeline.schema.job import Counts, Plan, PlannedJob, Sidecar
from beam_pipeline.schema.manifest import Column, FileSums, PlannedSplit, Shard, Statistics, seal_manifest
from beam_pipeline.storage.local import LocalStorage
from tests import make
from tests.servers import Gcs

PLAN = make.plan_of(classes=("a",), splits={"train": PlannedSplit(9, 90, ("5", str(1 << 63)))}, inputs="9-abc")
OTHER = replace(PLAN, inputs="other")
NAME = ShardName("photos", "train", 1, 3)
STATE = "photos/_state/1.0.0"
EMPTY = {f"{STATE}/claim.json", f"{STATE}/plan.json"}


@pytest.fixture
def local(tmp_path: Path) -> Config:
    return Config(input="/in", output=str(tmp_path), name="photos", has_launcher=True)


@pytest.fixture
def claim(local: Config) -> Iterator[SharedClaim]:
    """The lock of a local version."""
    claim = open_claim(local)
    claim.acquire()
    yield claim
    claim.release()


@pytest.fixture
def remote(gcs: Gcs) -> Config:
    return Config(input="/in", output=f"gs://{gcs.new_bucket()}", name="photos")


@pytest.fixture(params=["local", "remote"])
def config(request: pytest.FixtureRequest, claim: SharedClaim) -> Config:
    """A job that may write the version."""
    return request.getfixturevalue(request.param)


def files(config: Config) -> set[str]:
    return {file.path for file in storage.open_storage(config.output).files(config.output)}


def put(config: Config, *names: str) -> None:
    """Files of the version."""
    for name in names:
        storage.open_storage(config.output).write(f"{config.dataset_url}/{name}", b"old")


def another(config: Config, **more: bool) -> JobState:
    """The state as another job of the same version sees it."""
    return JobState(dataclasses.replace(config, run_id=uuid.uuid4().hex, **more))


def save_sidecar(state: JobState) -> None:
    sums = FileSums(1, 2, "0" * 64)
    shard = Shard(NAME.file, 3, 1, 2, 3, "0" * 32, "0" * 32, sums)
    sidecar = Sidecar(PLAN.sha256, shard, "", sums, (), Counts(records=3), ())
    state.put(state.sidecar_url(NAME), seal_manifest(sidecar), None, lambda: None)


def test_every_part_of_a_plan_is_in_its_hash() -> None:
    # fmt: off
    others = {
        "configuration": {"seed": 1}, "classes": ("b",), "features": (Column("x", "bytes", False),),
        "statistics": Statistics(("0.5",), (), 0), "splits": {"train": PlannedSplit(9, 90, ("6", str(1 << 63)))},
        "inputs": "9-abd", "codec": {"pillow": "2"},
    }
    # fmt: on
    assert set(others) == set(PLAN.__struct_fields__)
    assert len({PLAN.sha256, *(replace(PLAN, **{key: value}).sha256 for key, value in others.items())}) == 8


# --- making the output ready


def test_preparing_again_with_the_same_plan_keeps_finished_shards(config: Config) -> None:
    state = JobState(dataclasses.replace(config, restart=True))  # which discards what was there before, not what came
    state.prepare(PLAN)
    assert state.exists()
    save_sidecar(state)
    put(config, NAME.file)
    before = files(config)
    state.prepare(PLAN)
    assert files(config) == before
    assert state.sidecar(NAME) is not None


def test_without_a_launcher_a_local_version_has_the_rules_of_object_stores(local: Config) -> None:
    config = dataclasses.replace(local, has_launcher=False)
    state = JobState(config)
    run = state.prepare(PLAN)
    save_sidecar(state)
    put(config, NAME.file)
    before = files(config)
    assert (
        state.prepare(PLAN) == JobState(config).prepare(PLAN) == another(config).prepare(PLAN) == run == config.run_id
    )
    assert files(config) == before, "a repeated step and another pipeline of the same plan change nothing"
    with pytest.raises(ImageShardsError, match=r"is being written by another job .* restart=True discards"):
        another(config).prepare(OTHER)
    again = another(config, restart=True)
    assert again.prepare(PLAN) != run
    assert files(config) == EMPTY
    again.check()
    with pytest.raises(SupersededError, match="another job has taken over this version"):
        JobState(config, run).check()


@pytest.mark.parametrize("flag", ["overwrite", "restart"])
def test_another_plan_voids_all_that_was_written(config: Config, flag: str) -> None:
    state = JobState(config)
    state.prepare(PLAN)
    save_sidecar(state)
    put(config, NAME.file, NAME.index_file, "dataset_info.json", "notes.txt", *["manifest.json"] * (flag != "restart"))
    storage.open_storage(config.output).write(f"{config.output}/photos/2.0.0/manifest.json", b"old")
    JobState(dataclasses.replace(config, **{flag: True})).prepare(OTHER)
    kept = {"photos/1.0.0/notes.txt"} if flag == "restart" else set()
    assert files(config) == {*EMPTY, *kept, "photos/2.0.0/manifest.json"}, "only --overwrite deletes the user's files"
    assert state.sidecar(NAME) is None


def test_overwrite_deletes_files_of_others_where_there_is_nothing_else(config: Config) -> None:
    put(config, "notes.txt", "drafts/1.txt")
    JobState(dataclasses.replace(config, overwrite=True)).prepare(PLAN)
    assert files(config) == EMPTY


def test_a_restart_of_the_same_plan_stops_the_job_before_it(remote: Config) -> None:
    # It would publish while its shards are deleted.
    claimed = JobState(remote).prepare(PLAN)
    joined = another(remote).prepare(PLAN)
    JobState(remote, joined).check()
    again = another(remote, restart=True)
    again.prepare(PLAN)
    again.check()
    for run in (claimed, joined):
        with pytest.raises(SupersededError, match="another job has taken over this version"):
            JobState(remote, run).check()


def test_an_overwrite_of_the_same_plan_stops_a_job_that_is_about_to_publish_it_again(remote: Config) -> None:
    # The one that it shared the claim with has published, and was killed before it deleted the claim.
    joined = JobState(remote).prepare(PLAN)
    put(remote, "manifest.json", NAME.file)
    overwriting = another(remote, overwrite=True)
    overwriting.prepare(PLAN)
    overwriting.check()
    assert files(remote) == EMPTY
    with pytest.raises(SupersededError, match="another job has taken over this version"):
        JobState(remote, joined).check()


@pytest.mark.parametrize("plan", [PLAN, OTHER], ids=["the same plan", "another plan"])
def test_restart_voids_any_plan_and_a_local_job_another_one_by_itself(
    config: Config, claim: SharedClaim, plan: Plan
) -> None:
    JobState(config).prepare(PLAN)
    put(config, NAME.file)
    claim.release()
    again = another(config, restart=plan == PLAN or not storage.is_local(config.output))
    again.claim.acquire()
    if storage.is_local(config.output):
        again.invalidate_plan()  # as the launcher does with --restart
    again.prepare(plan)
    assert files(config) == EMPTY


def test_in_an_object_store_another_plan_changes_nothing_unless_it_is_told_to(remote: Config) -> None:
    JobState(remote).prepare(PLAN)
    put(remote, NAME.file)
    before = files(remote)
    with pytest.raises(ImageShardsError, match=r"is being written by another job .* restart=True discards"):
        another(remote).prepare(OTHER)
    assert files(remote) == before


def test_the_manifest_goes_before_the_shards(
    local: Config, claim: SharedClaim, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(local, NAME.file, "manifest.json", "dataset_info.json")
    deleted: list[str] = []
    monkeypatch.setattr(LocalStorage, "delete", lambda self, url, generation="": deleted.append(Path(url).name))
    JobState(dataclasses.replace(local, overwrite=True)).prepare(PLAN)
    assert deleted == ["manifest.json", "dataset_info.json", NAME.file]


@pytest.mark.parametrize("repair", [False, True])
def test_a_version_that_another_job_published_meanwhile_is_left_alone(
    config: Config, claim: SharedClaim, repair: bool
) -> None:
    # With --repair one that can't be read is written again.
    valid = (make.ROOT / "tests" / "schema" / "manifests" / "photos.json").read_bytes()
    put(config, NAME.file)
    storage.open_storage(config.output).write(f"{config.dataset_url}/manifest.json", valid if repair else b"theirs")
    line = r"was published by another job while this one was running; run the command again$"
    with pytest.raises(ImageShardsError, match=line):
        JobState(dataclasses.replace(config, repair=repair)).prepare(PLAN)
    claim.release()
    assert files(config) == {"photos/1.0.0/manifest.json", f"photos/1.0.0/{NAME.file}"}


@pytest.mark.parametrize("steps", range(6))
def test_a_kill_of_the_preparation_leaves_a_version_of_ours(
    config: Config, claim: SharedClaim, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, done = storage.open_storage(config.output), []
    put(config, NAME.file, "manifest.json", "dataset_info.json")

    class Killed(BaseException):
        pass

    def step(*_: object) -> None:
        if len(done) == steps:
            raise Killed
        done.append(None)

    def is_known() -> bool:
        return JobState(config).exists() or store.stat(f"{config.dataset_url}/manifest.json") is not None

    for method in ("write", "replace", "delete", "delete_tree"):
        if hasattr(store, method):
            make.before(monkeypatch, type(store), method, step)
    with contextlib.suppress(Killed):
        JobState(dataclasses.replace(config, overwrite=True)).prepare(PLAN)
    monkeypatch.undo()
    assert is_known()
    claim.release()  # as a job does that fails
    assert is_known()


# --- which files are a job's own

# fmt: off
OURS = (
    "photos-train.tfrecord-00000-of-00012", "photos-val_2.tfrecord-100000-of-123456", "index/train.runs.npy",
    "index/photos-train.tfrecord-00000-of-00012.idx", "class.labels.txt", "features.json", "dataset_info.json",
    "rejects.jsonl", "run.json", "manifest.json",
)
THEIRS = (
    "pics-train.tfrecord-00000-of-00012", "photos-train.tfrecord-000000-of-00012",
    "photos-train.tfrecord-00000-of-00012.idx", "photos-train.tfrecord-00000-of-00012.bak",
    "index/photos-train.tfrecord-00000-of-00012", "index/pics-train.tfrecord-00000-of-00012.idx",
    "index/My notes.runs.npy", "index/notes.txt", "train.runs.npy", "index/manifest.json", "old/manifest.json",
    "old/photos-train.tfrecord-00000-of-00012", "notes.txt", "report.html",
)
# fmt: on


def test_a_name_that_a_job_gives_is_ours_and_any_other_is_the_users(photos: Path, tmp_path: Path) -> None:
    assert [name for name in (*OURS, *THEIRS) if is_ours(name, "photos")] == list(OURS)
    version = make.published(photos, tmp_path)
    assert sorted(own_files(LocalStorage(), str(version), "photos")) == sorted(make.files(version))


def test_a_job_that_begins_from_nothing_deletes_ours_and_leaves_theirs(config: Config) -> None:
    put(config, *OURS, *THEIRS)
    JobState(dataclasses.replace(config, repair=True)).prepare(PLAN)
    assert files(config) == {*EMPTY, *(f"photos/1.0.0/{name}" for name in THEIRS)}


def test_an_index_folder_of_ours_alone_is_gone(local: Config, claim: SharedClaim) -> None:
    put(local, "index/train.runs.npy")
    JobState(dataclasses.replace(local, repair=True)).prepare(PLAN)
    assert not list(Path(local.dataset_url).iterdir())


# --- who may write


@pytest.mark.parametrize("meanwhile", ["begun again", "begun again and published"])
def test_a_zombie_may_not_write(config: Config, claim: SharedClaim, meanwhile: str) -> None:
    zombie = JobState(config)
    zombie.prepare(PLAN)
    zombie.check()
    if meanwhile == "begun again and published":  # while a worker slept
        storage.open_storage(config.output).delete(f"{config.output}/{STATE}/claim.json")
    elif storage.is_local(config.output):
        claim.release()
        another(config).claim.acquire()
    else:
        another(config, restart=True).prepare(OTHER)
    line = r"/1\.0\.0: another job has taken over this version; this one stops and publishes"
    with pytest.raises(ImageShardsError, match=line):
        zombie.check()


# --- sidecars


def test_a_broken_sidecar_is_none(config: Config) -> None:
    state = JobState(config)
    assert state.sidecar(NAME) is None
    save_sidecar(state)
    valid = storage.open_storage(config.output).read(f"{state.url}/shards/train-00001.json")
    changed = (valid.replace(b'"records":3', b'"records":7'), valid.replace(b',"records":3', b""))
    for data in (b"", b"{}\n", b"[]\n", b'{"plan":"x"}\n', valid[:-9], *changed):
        state.write("shards/train-00001.json", data)
        assert state.sidecar(NAME) is None, data
    state.write("shards/train-00001.json", valid)
    assert state.sidecar(NAME) is not None


# --- temporary files


def test_a_full_disk_is_one_line_that_names_the_file(local: Config, claim: SharedClaim) -> None:
    state = JobState(local)
    line = r"tmp: no space left on device; make room; the same command resumes$"
    with pytest.raises(StorageError, match=line), state.temporary_file() as file, open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), file.fileno())
        file.write(b"x" * (2 << 20))
    assert not list(Path(state.url, "tmp").iterdir())


def test_a_temporary_file_is_gone_in_any_case(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    state, url = JobState(config), f"{config.output}/x"
    with pytest.raises(ValueError, match="x"), state.temporary_file() as file:
        file.write(b"data")
        raise ValueError("x")
    with state.temporary_file() as file:
        file.write(b"data")
        assert not list((tmp_path / "scratch").iterdir()), "a kill leaves nothing: it is in the state, or has no name"
        storage.open_storage(config.output).publish(file, url)
    assert storage.open_storage(config.output).read(url) == b"data"
    assert not list(tmp_path.rglob("*.tmp"))


# --- deleting the state


def test_clearing_takes_along_what_killed_writes_left(local: Config, claim: SharedClaim) -> None:
    JobState(local).prepare(PLAN)
    put(local, "features.json.123-0123abcd.tmp", "index/a.idx.9-ffffffff.tmp", "notes.tmp", "index/a.idx")
    JobState(local).clear()
    claim.release()
    assert files(local) == {"photos/1.0.0/index/a.idx", "photos/1.0.0/notes.tmp"}


def test_clearing_leaves_nothing_of_the_state_but_that_of_another_version(config: Config, claim: SharedClaim) -> None:
    state, other = JobState(config), JobState(dataclasses.replace(config, version="2.0.0"))
    other.claim.acquire()
    other.prepare(PLAN)
    state.prepare(PLAN)
    put(config, "manifest.json")
    save_sidecar(state)
    remote = not storage.is_local(config.output)
    for _ in range(2):  # what a killed publisher left in an object store is cleared by any later job
        (another(config) if remote else state).clear()
    claim.release()
    assert other.exists()
    other.claim.discard() if remote else other.clear()
    other.claim.release()
    assert {file for file in files(config) if "2.0.0" not in file} == {"photos/1.0.0/manifest.json"}
    assert remote or not Path(state.url).parent.exists()


@pytest.mark.parametrize("moment", ["it has the claim", "the old version is gone"])
def test_clearing_leaves_the_state_of_a_job_that_overwrites(remote: Config, moment: str) -> None:
    put(remote, "manifest.json")
    overwriting = another(remote, overwrite=True)
    if moment == "it has the claim":
        overwriting.claim.acquire(OTHER.sha256)
    else:
        overwriting.prepare(OTHER)
    before = files(remote)
    JobState(remote).clear()
    assert files(remote) == before
    overwriting.check()


def test_without_a_launcher_a_job_that_overwrites_what_has_just_been_published_keeps_its_state(local: Config) -> None:
    config = dataclasses.replace(local, has_launcher=False)
    published = JobState(config)
    published.prepare(PLAN)
    put(config, "manifest.json")
    overwriting = another(config, overwrite=True)
    overwriting.prepare(OTHER)
    before = files(config)
    published.clear()
    assert files(config) == before
    overwriting.check()
    overwriting.clear()
    assert files(config) == set()


def test_what_a_killed_clearing_left_goes_by_the_next_job(local: Config) -> None:
    config = dataclasses.replace(local, has_launcher=False)
    JobState(config).prepare(PLAN)
    put(config, "manifest.json")
    storage.open_storage(config.output).delete(f"{config.output}/{STATE}/plan.json")
    another(local).clear_leftovers()
    assert files(local) == {"photos/1.0.0/manifest.json"}


def test_a_job_whose_temporary_file_is_gone_because_another_one_has_published_is_told_so(local: Config) -> None:
    state = JobState(dataclasses.replace(local, has_launcher=False))
    state.prepare(PLAN)
    with state.temporary_file() as file:
        put(local, "manifest.json")
        state.clear()
        with pytest.raises(SupersededError):
            state.put(f"{local.dataset_url}/{NAME.file}", file, None, state.check)
    assert files(local) == {"photos/1.0.0/manifest.json"}


@pytest.mark.parametrize("folder", [STATE, "photos/_state"])
def test_an_empty_folder_of_the_state_is_a_leftover(local: Config, tmp_path: Path, folder: str) -> None:
    put(local, "manifest.json")
    state = JobState(local)
    assert not state.has_leftovers()
    os.makedirs(tmp_path / folder)
    assert state.has_leftovers()
    assert not state.exists()
    state.claim.acquire()
    state.clear()
    state.claim.release()
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["1.0.0"]


# --- --plan_only


def test_plan_only_leaves_its_plan_once_and_nothing_else(local: Config, remote: Config) -> None:
    for config in (local, remote):
        state = JobState(config)
        Attempts(config).begin(sample_marker([]))
        assert state.has_leftovers()
        assert not state.exists(), "the next job would delete files of another program"
        Attempts(config).end(sample_marker([]))
        planned = PlannedJob(PLAN, 500, 9, 5, 4, 0.5)
        state.leave(planned)
        assert state.take(PlannedJob) == planned
        assert files(config) == set()
    assert list(Path(local.output).iterdir()) == [], "the output folder is the user's"
