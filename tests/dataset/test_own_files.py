"""Which names are a job's to give, and that deleting them leaves all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from beam_pipeline import storage
from beam_pipeline.dataset.state import delete_own_files, own_files
from beam_pipeline.schema import is_ours
from tests import make
from tests.servers import Gcs

OURS = (
    "photos-train.tfrecord-00000-of-00012",
    "photos-val_2.tfrecord-100000-of-123456",
    "index/photos-train.tfrecord-00000-of-00012.idx",
    "index/train.runs.npy",
    "class.labels.txt",
    "features.json",
    "dataset_info.json",
    "rejects.jsonl",
    "duplicates.jsonl",
    "run.json",
    "manifest.json",
)
THEIRS = (
    "pics-train.tfrecord-00000-of-00012",
    "photos-train.tfrecord-000000-of-00012",
    "photos-train.tfrecord-00000-of-00012.idx",
    "photos-train.tfrecord-00000-of-00012.bak",
    "index/photos-train.tfrecord-00000-of-00012",
    "index/pics-train.tfrecord-00000-of-00012.idx",
    "index/My notes.runs.npy",
    "index/notes.txt",
    "train.runs.npy",
    "index/manifest.json",
    "old/manifest.json",
    "old/photos-train.tfrecord-00000-of-00012",
    "notes.txt",
    "report.html",
)


@pytest.mark.parametrize("name", OURS)
def test_a_name_that_a_job_gives_is_ours(name: str) -> None:
    assert is_ours(name, "photos")


@pytest.mark.parametrize("name", THEIRS)
def test_any_other_name_is_the_users(name: str) -> None:
    assert not is_ours(name, "photos")


def test_a_published_version_has_no_other_files(photos: Path, tmp_path: Path) -> None:
    version = make.published(photos, tmp_path, "--duplicates", "report")
    assert sorted(own_files(storage.LocalStorage(), str(version), "photos")) == sorted(make.files(version))


@pytest.mark.parametrize("place", ["local", "gs"])
def test_deleting_ours_leaves_theirs(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = str(tmp_path / "version")
    if place == "gs":
        gcs: Gcs = request.getfixturevalue("gcs")
        url = f"gs://{gcs.new_bucket()}/version"
    store = storage.open_storage(url)
    for name in (*OURS, *THEIRS):
        store.write(storage.join(url, name), b"x")
    delete_own_files(store, url, "photos")
    assert {file.path for file in store.files(url)} == set(THEIRS)


def test_an_index_folder_of_ours_alone_is_gone_and_so_is_what_never_was(tmp_path: Path) -> None:
    store, version = storage.LocalStorage(), tmp_path / "version"
    delete_own_files(store, str(version), "photos")
    store.write(f"{version}/index/train.runs.npy", b"x")
    delete_own_files(store, str(version), "photos")
    assert not list(version.iterdir())
