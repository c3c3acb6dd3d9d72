"""What an unpublished job keeps: a plan that voids all else when it differs, sidecars, temporary files that go."""

from __future__ import annotations

import dataclasses
import os
import uuid
from pathlib import Path

import pytest
from msgspec.structs import replace

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.attempts import Attempts, sample_marker
from beam_pipeline.dataset import answers
from beam_pipeline.dataset.claim import SupersededError
from beam_pipeline.dataset.shard_files import ShardFiles
from beam_pipeline.dataset.state import JobState
from beam_pipeline.dataset.version import own_files, prepare
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
    return Config(input="/in", output=str(tmp_path), name="photos")


@pytest.fixture
def remote(gcs: Gcs) -> Config:
    return Config(input="/in", output=f"gs://{gcs.new_bucket()}", name="photos")


@pytest.fixture(params=["local", "remote"])
def config(request: pytest.FixtureRequest) -> Config:
    """Of a job."""
    return request.getfixturevalue(request.param)


def files(config: Config) -> set[str]:
    return {file.path for file in storage.open_storage(config.output).files(config.output)}


def put(config: Config, *names: str) -> None:
    """Files of the version."""
    for name in names:
        storage.open_storage(config.output).write(f"{config.dataset_url}/{name}", b"old")


def another(config: Config, **more: bool) -> Config:
    """Of another job of the same version."""
    return dataclasses.replace(config, **more).in_run(id=uuid.uuid4().hex)


def save_sidecar(state: JobState) -> None:
    sums = FileSums(1, 2, "0" * 64)
    shard = Shard(NAME.file, 3, 1, 2, 3, "0" * 32, "0" * 32, sums)
    sidecar = Sidecar(PLAN.sha256, shard, "", sums, (), Counts(records=3), ())
    state.put(f"{state.url}/shards/{NAME.short}.json", seal_manifest(sidecar), None, lambda: None)


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


@pytest.mark.parametrize(("flag", "plan"), [("overwrite", OTHER), ("restart", OTHER), ("restart", PLAN)])
def test_another_plan_or_restart_voids_all_that_was_written(config: Config, flag: str, plan: Plan) -> None:
    prepare(config, PLAN)
    save_sidecar(JobState(config))
    put(config, NAME.file, NAME.index_file, "dataset_info.json", "notes.txt", *["manifest.json"] * (flag != "restart"))
    storage.open_storage(config.output).write(f"{config.output}/photos/2.0.0/manifest.json", b"old")
    prepare(another(config, **{flag: True}), plan)
    kept = {"photos/1.0.0/notes.txt"} if flag == "restart" else set()
    assert files(config) == {*EMPTY, *kept, "photos/2.0.0/manifest.json"}, "only --overwrite deletes the user's files"
    assert ShardFiles(config, NAME).read_sidecar() is None


def test_overwrite_follows_the_link_of_a_version_and_none_inside_it(local: Config, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name in ("disk", "notes", "index"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_bytes(b"1")
    for name in ("notes", "index"):
        (tmp_path / "disk" / name).symlink_to(tmp_path / name)
    Path(local.dataset_url).symlink_to(tmp_path / "disk")
    prepare(dataclasses.replace(local, overwrite=True), PLAN)
    assert Path(local.dataset_url).is_symlink() and not list((tmp_path / "disk").iterdir())
    assert files(local) == {*EMPTY, "notes/mine.txt", "index/mine.txt"}


def test_overwrite_deletes_the_user_s_file_or_folder_in_the_place_of_a_file_or_folder_of_ours(
    local: Config, tmp_path: Path
) -> None:
    version = Path(local.dataset_url)
    for name in ("drafts/mine", "manifest.json/mine", "index"):
        (version / name).parent.mkdir(parents=True, exist_ok=True)
        (version / name).write_text("mine")
    prepare(dataclasses.replace(local, overwrite=True), PLAN)
    assert files(local) == EMPTY


def test_an_overwrite_of_the_same_plan_stops_a_job_that_is_about_to_publish_it_again(config: Config) -> None:
    # The one that it shared the claim with has published, and was killed before it deleted the claim.
    joined = prepare(config, PLAN)
    put(config, "manifest.json", NAME.file)
    other = another(config, overwrite=True)
    prepare(other, PLAN)
    overwriting = JobState(other)
    overwriting.check()
    assert files(config) == EMPTY
    with pytest.raises(SupersededError, match="another job has taken over this version"):
        JobState(config, joined).check()
    storage.open_storage(config.output).delete(overwriting.claim.url)
    with pytest.raises(SupersededError, match="another job has taken over this version"):
        overwriting.check()


def test_a_claim_is_there_first_and_the_manifest_and_the_plan_go_before_the_shards(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After a kill at any step the claim, or else the manifest, says that the files are a job's.
    put(config, NAME.file, "manifest.json", "dataset_info.json", "../_state/1.0.0/plan.json")
    steps: list[tuple[str, str]] = []

    def note(step: str) -> None:
        store = type(storage.open_storage(config.output))
        make.before(monkeypatch, store, step, lambda _, url, *more: steps.append((step, Path(url).name)))

    note("write")
    note("delete")
    prepare(dataclasses.replace(config, overwrite=True), PLAN)
    deleted = ("manifest.json", "dataset_info.json", "plan.json", NAME.file)
    assert steps == [("write", "claim.json"), *(("delete", name) for name in deleted), ("write", "plan.json")]


@pytest.mark.parametrize("repair", [False, True])
def test_a_version_that_another_job_published_meanwhile_is_left_alone(config: Config, repair: bool) -> None:
    # With --repair one that can't be read is written again.
    valid = (make.ROOT / "tests" / "schema" / "manifests" / "photos.json").read_bytes()
    put(config, NAME.file)
    storage.open_storage(config.output).write(f"{config.dataset_url}/manifest.json", valid if repair else b"theirs")
    line = r"was published by another job while this one was running; run the command again$"
    with pytest.raises(ImageShardsError, match=line):
        prepare(dataclasses.replace(config, repair=repair), PLAN)
    assert files(config) == {"photos/1.0.0/manifest.json", f"photos/1.0.0/{NAME.file}"}


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
    prepare(dataclasses.replace(config, repair=True), PLAN)
    assert files(config) == {*EMPTY, *(f"photos/1.0.0/{name}" for name in THEIRS)}
    put(one := another(config, version="2.0.0", repair=True), "index/train.runs.npy")
    prepare(one, PLAN)
    assert not list(Path(one.dataset_url).glob("*")), "not even the folder"


# --- sidecars


def test_a_broken_sidecar_is_none(config: Config) -> None:
    state = JobState(config)
    assert ShardFiles(config, NAME).read_sidecar() is None
    save_sidecar(state)
    url = f"{state.url}/shards/train-00001.json"
    valid = storage.open_storage(config.output).read(url)
    changed = (valid.replace(b'"records":3', b'"records":7'), valid.replace(b',"records":3', b""))
    for data in (b"", b"{}\n", b"[]\n", b'{"plan":"x"}\n', valid[:-9], *changed):
        storage.open_storage(config.output).write(url, data)
        assert ShardFiles(config, NAME).read_sidecar() is None, data
    storage.open_storage(config.output).write(url, valid)
    assert ShardFiles(config, NAME).read_sidecar() is not None


# --- temporary files


def test_a_full_disk_is_one_line_that_names_the_file(local: Config) -> None:
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


def test_clearing_takes_along_what_killed_writes_left(local: Config) -> None:
    prepare(local, PLAN)
    put(
        local,
        "manifest.json",
        "features.json.123-0123abcd.tmp",
        "index/a.idx.9-ffffffff.tmp",
        "notes.tmp",
        "index/a.idx",
    )
    put(local, "../_state/1.0.0/tmp/0123.tmp", "../_state/1.0.0/.7-0123abcd.tmp")
    JobState(local).clear()
    assert files(local) == {f"photos/1.0.0/{name}" for name in ("manifest.json", "index/a.idx", "notes.tmp")}


def test_clearing_leaves_nothing_of_the_state_but_that_of_another_version(config: Config) -> None:
    state, other = JobState(config), JobState(dataclasses.replace(config, version="2.0.0"))
    prepare(dataclasses.replace(config, version="2.0.0"), PLAN)
    prepare(config, PLAN)
    put(config, "manifest.json")
    save_sidecar(state)
    for _ in range(2):  # what a killed publisher left is cleared by any later job
        JobState(another(config)).clear()
    assert other.exists() and not state.has_leftovers()
    assert {file for file in files(config) if "2.0.0" not in file} == {"photos/1.0.0/manifest.json"}
    storage.open_storage(config.output).write(f"{config.output}/photos/2.0.0/manifest.json", b"")
    other.clear()
    assert not other.has_leftovers() and not Path(state.url).parent.exists()


@pytest.mark.parametrize("moment", ["it has the claim", "the old version is gone"])
def test_clearing_leaves_the_state_of_a_job_that_overwrites(config: Config, moment: str) -> None:
    put(config, "manifest.json")
    other = another(config, overwrite=True)
    overwriting = JobState(other)
    if moment == "it has the claim":
        overwriting.claim.acquire(OTHER.sha256)
    else:
        prepare(other, OTHER)
    before = files(config)
    JobState(config).clear()
    assert files(config) == before
    overwriting.check()


def test_a_job_whose_temporary_file_is_gone_because_another_one_has_published_is_told_so(local: Config) -> None:
    prepare(local, PLAN)
    state = JobState(local)
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
    state.clear()
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
        answers.leave(config, planned)
        assert answers.take(config, PlannedJob) == planned
        assert files(config) == set()
    assert list(Path(local.output).iterdir()) == [], "the output folder is the user's"
