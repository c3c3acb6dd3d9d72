"""What an unpublished job keeps: a plan that voids all else when it differs, sidecars, temporary files that go."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.state import JobState
from beam_pipeline.errors import ImageShardsError, StorageError
from beam_pipeline.planning.cuts import SplitPlan
from beam_pipeline.planning.plan import JobPlan, split_documents, split_plans
from beam_pipeline.schema import ShardName
from tests.servers import Gcs

PLAN = JobPlan(
    configuration={"seed": 0},
    classes=("a",),
    columns=(),
    splits={"train": SplitPlan(9, 90, (5, 1 << 63))},
    statistics={"mean": ["0.1"]},
    references="9-abc",
    codec={"pillow": "1"},
)
NAME = ShardName("photos", "train", 1, 3)


@pytest.fixture(params=["local", "gs"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    if request.param == "local":
        return Config(input="/in", output=str(tmp_path), name="photos")
    gcs: Gcs = request.getfixturevalue("gcs")
    return Config(input="/in", output=f"gs://{gcs.new_bucket()}/out", name="photos")


def files(config: Config) -> set[str]:
    return {file.path for file in storage.open_storage(config.output).files(config.output)}


plans = st.dictionaries(
    st.sampled_from(["train", "validation", "test"]),
    st.builds(SplitPlan, st.integers(1), st.integers(1), st.lists(st.integers(0, (1 << 64) - 1)).map(tuple)),
)


@given(plans)
def test_plans_read_back_from_json_with_every_bit_of_their_keys(some: dict[str, SplitPlan]) -> None:
    text = json.dumps(split_documents(some))
    assert split_plans(json.loads(text)) == some
    assert all(isinstance(cut, str) for plan in json.loads(text).values() for cut in plan["cuts"]), "JSON has 53 bits"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(JobPlan)])
def test_every_part_of_a_plan_is_in_its_hash(field: str) -> None:
    others = {
        "configuration": {"seed": 1},
        "classes": ("b",),
        "columns": ({"name": "x"},),
        "splits": {"train": SplitPlan(9, 90, (6, 1 << 63))},
        "statistics": {},
        "references": "9-abd",
        "codec": {"pillow": "2"},
    }
    assert dataclasses.replace(PLAN, **{field: others[field]}).sha256 != PLAN.sha256


def test_preparing_again_with_the_same_plan_keeps_finished_shards(config: Config) -> None:
    state = JobState(config)
    assert not state.exists()
    state.prepare(PLAN)
    assert state.exists()
    state.save_sidecar(NAME, {"plan": PLAN.sha256}, b"reject\n")
    storage.open_storage(config.output).write(f"{config.dataset_url}/{NAME.file}", b"shard")
    before = files(config)
    state.prepare(PLAN)
    assert files(config) == before
    sidecar = state.sidecar(NAME)
    assert sidecar is not None
    assert sidecar["plan"] == PLAN.sha256
    assert state.is_kept(sidecar)
    assert state.rejects(NAME) == b"reject\n"


@pytest.mark.parametrize("flag", ["overwrite", "repair"])
def test_another_plan_voids_all_and_what_was_published(config: Config, flag: str) -> None:
    state, store = JobState(config), storage.open_storage(config.output)
    state.prepare(PLAN)
    state.save_sidecar(NAME, {"plan": PLAN.sha256}, b"reject\n")
    for file in (NAME.file, NAME.index_file, "manifest.json", "dataset_info.json", "notes.txt"):
        store.write(f"{config.dataset_url}/{file}", b"old")
    store.write(f"{config.output}/photos/2.0.0/manifest.json", b"another version")
    state.owner.release()
    anew = dataclasses.replace(config, **{flag: True})
    JobState(anew).prepare(dataclasses.replace(PLAN, references="other"))
    assert files(config) - {"photos/1.0.0/notes.txt"} == {
        "photos/_state/1.0.0/owner.json",
        "photos/_state/1.0.0/plan.json",
        "photos/2.0.0/manifest.json",
    }
    assert ("photos/1.0.0/notes.txt" in files(config)) == (flag == "repair"), (
        "only --overwrite deletes the user's files"
    )
    assert state.sidecar(NAME) is None


def test_the_manifest_goes_before_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(input="/in", output=str(tmp_path), name="photos", overwrite=True)
    store = storage.open_storage(config.output)
    for file in (NAME.file, "manifest.json", "dataset_info.json"):
        store.write(f"{config.dataset_url}/{file}", b"old")
    deleted: list[str] = []
    for method in ("delete", "delete_tree"):
        monkeypatch.setattr(
            storage.LocalStorage,
            method,
            lambda self, url, keep=(), kind=method: deleted.append(f"{kind} {Path(url).name}"),
        )
    JobState(config).prepare(PLAN)
    assert deleted[:3] == ["delete manifest.json", "delete dataset_info.json", "delete_tree 1.0.0"]


def test_a_version_that_another_job_published_meanwhile_is_left_alone(config: Config) -> None:
    storage.open_storage(config.output).write(f"{config.dataset_url}/manifest.json", b"theirs")
    with pytest.raises(ImageShardsError, match=r"was published by another job meanwhile; run the command again$"):
        JobState(config).prepare(PLAN)
    assert files(config) == {"photos/1.0.0/manifest.json"}


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    state = JobState(Config(input="/in", output=str(tmp_path), name="photos"))
    line = r"tmp: no space left on device; make room; the same command resumes$"
    with pytest.raises(StorageError, match=line), state.temporary_file() as file, open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), file.fileno())
        file.write(b"x" * (2 << 20))
    assert not list((tmp_path / "photos/_state/1.0.0/tmp").iterdir())


def test_clearing_takes_along_what_killed_writes_left(tmp_path: Path) -> None:
    config = Config(input="/in", output=str(tmp_path), name="photos")
    JobState(config).prepare(PLAN)
    folder = Path(config.dataset_url)
    (folder / "index").mkdir(parents=True)
    for name in ("features.json.123-0123abcd.tmp", "index/a.idx.9-ffffffff.tmp", "notes.tmp", "index/a.idx"):
        (folder / name).write_bytes(b"x")
    JobState(config).clear()
    assert files(config) == {"photos/1.0.0/index/a.idx", "photos/1.0.0/notes.tmp"}


def test_a_broken_sidecar_is_none(config: Config) -> None:
    state = JobState(config)
    assert state.sidecar(NAME) is None
    state.save_sidecar(NAME, {"plan": "x", "records": 3}, b"")
    whole = storage.open_storage(config.output).read(f"{state.url}/shards/train-00001.json")
    changed = (whole.replace(b'"records":3', b'"records":7'), whole.replace(b',"records":3', b""))
    for data in (b"", b"{}\n", b"[]\n", b'{"plan":"x"}\n', whole[:-9], *changed):
        state.write("shards/train-00001.json", data)
        assert state.sidecar(NAME) is None, data
    state.write("shards/train-00001.json", whole)
    assert state.sidecar(NAME) is not None


def test_what_was_saved_with_a_sidecar_is_known_when_it_is_cut_short_or_gone(config: Config) -> None:
    file = "rejects/train-00001.jsonl"
    state, store = JobState(config), storage.open_storage(config.output)
    state.save_sidecar(NAME, {"plan": "x"}, b"reject\n")
    sidecar = state.sidecar(NAME)
    assert sidecar is not None
    assert state.is_kept(sidecar)
    state.write(file, b"")
    assert not state.is_kept(sidecar)
    store.delete(f"{state.url}/{file}")
    assert not state.is_kept(sidecar)


def test_clearing_leaves_nothing_of_the_state(config: Config) -> None:
    state = JobState(config)
    state.prepare(PLAN)
    storage.open_storage(config.output).write(f"{config.dataset_url}/manifest.json", b"published")
    state.save_sidecar(NAME, {}, b"x")
    state.clear()
    state.clear()
    assert files(config) == {"photos/1.0.0/manifest.json"}
    if storage.is_local(config.output):
        assert not Path(state.url).parent.exists()


def test_clearing_leaves_the_state_of_another_version(config: Config) -> None:
    other = JobState(dataclasses.replace(config, version="2.0.0"))
    other.prepare(PLAN)
    state = JobState(config)
    state.prepare(PLAN)
    state.clear()
    assert other.exists()


def test_a_temporary_file_is_gone_in_any_case(config: Config) -> None:
    state = JobState(config)
    with pytest.raises(ValueError, match="x"), state.temporary_file() as file:
        file.write(b"data")
        path = Path(file.name)
        assert path.exists()
        raise ValueError("x")
    assert not path.exists()
    with state.temporary_file() as file:
        file.close()
        storage.open_storage(config.output).publish(file.name, f"{config.output}/x")
    assert not Path(file.name).exists()
    assert "x" in files(config)


def test_a_local_temporary_file_is_on_the_outputs_disk(tmp_path: Path) -> None:
    state = JobState(Config(input="/in", output=str(tmp_path), name="photos"))
    with state.temporary_file() as file:
        assert Path(file.name).is_relative_to(tmp_path)


def test_plan_only_leaves_the_users_empty_output_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    state = JobState(Config(input="/in", output=str(tmp_path / "mine"), name="photos"))
    state.attempts.begin_sampling([])
    state.attempts.end_sampling()
    for _ in range(2):
        state.save_plan_only(PLAN)
        state.take_plan_only()
        assert list((tmp_path / "mine").iterdir()) == []


def test_what_a_killed_plan_only_left_makes_a_version_nobodys_own(config: Config) -> None:
    state = JobState(config)
    state.attempts.begin_sampling([])
    assert state.has_leftovers()
    assert not state.exists(), "the next job would delete files of another program"


@pytest.mark.parametrize("steps", range(6))
def test_a_kill_while_the_output_is_made_ready_leaves_a_version_that_is_known_as_ours(
    config: Config, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, done = storage.open_storage(config.output), []
    for file in (NAME.file, "manifest.json", "dataset_info.json"):
        store.write(f"{config.dataset_url}/{file}", b"old")

    class Killed(BaseException):
        pass

    def stop_after(method: str) -> None:
        real = getattr(type(store), method)

        def step(self: object, *arguments: object) -> None:
            if len(done) == steps:
                raise Killed
            done.append(method)
            real(self, *arguments)

        monkeypatch.setattr(type(store), method, step)

    for method in ("write", "delete", "delete_tree"):
        stop_after(method)
    with contextlib.suppress(Killed):
        JobState(dataclasses.replace(config, overwrite=True)).prepare(PLAN)
    monkeypatch.undo()
    assert JobState(config).exists() or store.stat(f"{config.dataset_url}/manifest.json")
    # What a job that fails does, or the next one with a dead job's lease.
    JobState(dataclasses.replace(config, overwrite=True)).owner.release()
    assert JobState(config).exists() or store.stat(f"{config.dataset_url}/manifest.json")


@pytest.mark.parametrize("folder", ["_state/1.0.0", "_state"])
def test_an_empty_folder_of_the_state_is_a_leftover(tmp_path: Path, folder: str) -> None:
    config = Config(input="/in", output=str(tmp_path), name="photos")
    storage.open_storage(config.output).write(f"{config.dataset_url}/manifest.json", b"published")
    state = JobState(config)
    assert not state.has_leftovers()
    os.makedirs(tmp_path / "photos" / folder)
    assert state.has_leftovers()
    assert not state.exists()
    state.owner.acquire("")
    state.clear()
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["1.0.0"]


def test_the_plan_of_plan_only_is_read_once(config: Config) -> None:
    state = JobState(config)
    storage.open_storage(config.output).write(f"{config.output}/mine", b"")
    state.save_plan_only(PLAN)
    assert state.take_plan_only() == json.loads(json.dumps(PLAN.document()))
    assert files(config) == {"mine"}
