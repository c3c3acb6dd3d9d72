"""Which names are a job's to give, and that deleting them leaves all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.state import JobState, own_files
from beam_pipeline.schema import is_ours
from tests import make
from tests.dataset.test_state import PLAN

# fmt: off
OURS = (
    "photos-train.tfrecord-00000-of-00012", "photos-val_2.tfrecord-100000-of-123456", "index/train.runs.npy",
    "index/photos-train.tfrecord-00000-of-00012.idx", "class.labels.txt", "features.json", "dataset_info.json",
    "rejects.jsonl", "duplicates.jsonl", "run.json", "manifest.json",
)
THEIRS = (
    "pics-train.tfrecord-00000-of-00012", "photos-train.tfrecord-000000-of-00012",
    "photos-train.tfrecord-00000-of-00012.idx", "photos-train.tfrecord-00000-of-00012.bak",
    "index/photos-train.tfrecord-00000-of-00012", "index/pics-train.tfrecord-00000-of-00012.idx",
    "index/My notes.runs.npy", "index/notes.txt", "train.runs.npy", "index/manifest.json", "old/manifest.json",
    "old/photos-train.tfrecord-00000-of-00012", "notes.txt", "report.html",
)
# fmt: on


def test_a_name_that_a_job_gives_is_ours_and_any_other_is_the_users() -> None:
    assert [name for name in (*OURS, *THEIRS) if is_ours(name, "photos")] == list(OURS)


def test_a_published_version_has_no_other_files(photos: Path, tmp_path: Path) -> None:
    version = make.published(photos, tmp_path, "--duplicates", "report")
    assert sorted(own_files(storage.LocalStorage(), str(version), "photos")) == sorted(make.files(version))


@pytest.mark.parametrize("place", ["local", "gs"])
def test_a_job_that_begins_from_nothing_deletes_ours_and_leaves_theirs(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    output = str(tmp_path) if place == "local" else f"gs://{request.getfixturevalue('gcs').new_bucket()}"
    config = Config(input="/in", output=output, name="photos", repair=True)
    store = storage.open_storage(output)
    for name in (*OURS, *THEIRS):
        store.write(storage.join(config.dataset_url, name), b"x")
    JobState(config).claim.hold()
    JobState(config).prepare(PLAN)
    assert {file.path for file in store.files(config.dataset_url)} == set(THEIRS)
    JobState(config).claim.release()


def test_an_index_folder_of_ours_alone_is_gone(tmp_path: Path) -> None:
    config = Config(input="/in", output=str(tmp_path), name="photos", repair=True)
    storage.LocalStorage().write(f"{config.dataset_url}/index/train.runs.npy", b"x")
    JobState(config).claim.hold()
    JobState(config).prepare(PLAN)
    assert not list(Path(config.dataset_url).iterdir())
    JobState(config).claim.release()
