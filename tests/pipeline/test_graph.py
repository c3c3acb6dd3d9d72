"""The same bytes from every way to run the job: runners, workers, storage, folder, order of the listing."""

from __future__ import annotations

import os
import random
import shutil
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import apache_beam as beam
import pytest
from apache_beam.pipeline import PipelineVisitor

import beam_pipeline
from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.writer import ShardWriter
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.pipeline import graph, listing
from beam_pipeline.pipeline.elements import Page
from beam_pipeline.schema.job import Run
from beam_pipeline.storage import ListedFile
from beam_pipeline.storage.local import LocalStorage
from tests import make
from tests.servers import Bucket, Gcs, Request

FLAGS = ("--splits", "train=0.8,validation=0.2", "--num_shards", "train=3,validation=1", "--max_reject_fraction", "0.1")


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every file but run.json of the plain job, in memory in this process."""
    version = make.published(folder, tmp_path_factory.mktemp("reference"), *FLAGS)
    found = make.same_each_time(version)
    assert len(found["rejects.jsonl"].splitlines()) == 1
    return found


def test_a_copy_with_other_times_by_relative_paths_from_another_folder_listed_shuffled_and_in_small_pages(
    folder: Path, reference: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, names = LocalStorage.files, LocalStorage.names

    def shuffled(self: LocalStorage, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        found = list(files(self, url, every_name))
        random.Random(1).shuffle(found)
        return iter(found)

    monkeypatch.setattr(LocalStorage, "files", shuffled)
    monkeypatch.setattr(LocalStorage, "names", lambda self, url: sorted(names(self, url), reverse=True))
    monkeypatch.setattr(listing, "PAGE_REFS", 4)
    shutil.copytree(folder, tmp_path / "in", copy_function=shutil.copyfile)
    monkeypatch.chdir(tmp_path)
    assert make.same_each_time(make.published("in/", Path("quite/another place"), *FLAGS)) == reference


@pytest.mark.parametrize(
    "flags",
    [
        ("--runner=DirectRunner", "--fetch_concurrency=1", "--decode_threads=1"),
        ("--direct_running_mode=multi_threading", "--direct_num_workers=3", "--fetch_concurrency=3"),
        ("--direct_running_mode=multi_processing", "--direct_num_workers=2"),
    ],
    ids=" ".join,
)
def test_other_runners_threads_and_worker_processes(
    folder: Path, reference: dict[str, bytes], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    assert make.same_each_time(make.published(folder, tmp_path, *FLAGS, *flags)) == reference


# --- gs://, s3://


class Remote(NamedTuple):
    files: dict[str, bytes]
    requests: list[Request]
    bucket: str


@pytest.fixture(scope="module")
def remote(gcs: Gcs, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Remote:
    """The job from gs:// to gs://: its files, its requests, its bucket."""
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "in", folder)
    for placeholder in ("in/", "in/ant/"):
        gcs.put(bucket, placeholder, b"")
    before = len(gcs.requests())
    finished = make.job(f"gs://{bucket}/in", f"gs://{bucket}/out", *FLAGS)
    assert finished.code == 0, finished.err
    requests = gcs.requests()[before:]
    version = gcs.download(bucket, "out/photos/1.0.0", tmp_path_factory.mktemp("downloaded"))
    assert not [name for name in gcs.names(bucket) if "_state" in name]
    return Remote(make.same_each_time(version), requests, bucket)


def test_from_and_to_gs(remote: Remote, reference: dict[str, bytes]) -> None:
    assert remote.files == reference


def test_each_image_is_read_once_and_once_if_sampled_and_nothing_else_is_asked_of_the_input(
    remote: Remote, folder: Path
) -> None:
    reads = Counter(name for name in (request.object_read or "" for request in remote.requests) if name[:3] == "in/")
    assert reads == {f"in/{name}": 2 for name in make.files(folder)}, "of 41 images all are sampled"
    assert not [
        request
        for request in remote.requests
        if ("/o/in%2F" in request.target and not request.object_read) or request.method not in ("GET", "POST", "DELETE")
    ], "no request for metadata of an image"
    # The launcher looks for class folders and one image; the job lists the folders once more, and each class once.
    pages = Counter(page for page in (request.listed_prefix or "" for request in remote.requests) if page[:3] == "in/")
    assert pages.pop("in/") == 2
    assert set(pages) == {"in/ant/", "in/bee/", "in/cat/"}
    assert set(pages.values()) <= {1, 2}


def test_no_request_of_a_healthy_job_is_repeated_or_fails(remote: Remote) -> None:
    assert not [request for request in remote.requests if request.status >= 400 and request.status != 404]
    uploads = [request for request in remote.requests if request.method == "POST"]
    shards, sidecars, others = 4, 4, len(["claim", "plan"])
    notes = 4 + len(["32 sampled images", "the last 9"])
    indexes, metadata = 4 + 4 + 2, len(["labels", "features", "info", "rejects", "run", "manifest"])
    assert len(uploads) == shards + sidecars + others + notes + indexes + metadata


@pytest.mark.parametrize("bucket", ["s3", "az"], indirect=True)
def test_from_and_to_other_stores_which_the_same_command_compares_repairs_and_overwrites(
    bucket: Bucket, folder: Path, reference: dict[str, bytes]
) -> None:
    # Listings, reads and conditional writes agree on what an object's etag is.
    for name, data in make.files(folder).items():
        bucket.put(f"in/{name}", data)
    command, url = (f"{bucket.url}/in", f"{bucket.url}/out", *FLAGS), f"{bucket.url}/out/photos/1.0.0"
    store = storage.open_storage(url)
    for flags, outcome in (((), "published"), ((), "already published"), (("--overwrite",), "published")):
        finished = make.job(*command, *flags)
        assert finished.out.startswith(f"{outcome} {url}"), finished.err
    store.delete(f"{url}/photos-train.tfrecord-00001-of-00003")
    finished = make.job(*command)
    assert finished.out.startswith(f"repaired {url}"), finished.err
    found = {file.path: store.read(storage.join(bucket.url, file.path)) for file in store.files(bucket.url)}
    version = {name.removeprefix("out/photos/1.0.0/"): data for name, data in found.items() if name[:3] == "out"}
    del version["run.json"]
    assert version == reference, "nothing else is there"


# --- odd names through a complete job


def test_odd_local_names_become_records_and_twins_in_both_normal_forms_follow_each_other(tmp_path: Path) -> None:
    folder, names = make.class_folders(tmp_path / "in", {"a": 2}), [b"caf\xe9.jpg", b"new\nline.jpg", b"tab\t.jpg"]
    twins = sorted(unicodedata.normalize(form, "é.jpg").encode() for form in ("NFC", "NFD"))
    for number, name in enumerate([*names, *twins]):
        with open(os.fsencode(folder / "a") + b"/" + name, "wb") as file:
            file.write(make.encoded(make.picture(seed=9 + number)))
    version = make.published(folder, tmp_path / "out", "--num_shards", "7")
    assert make.manifest(version)["records"] == 7
    shards = [shard.read_bytes() for shard in make.shard_files(version)]
    assert len(shards) == 6, "one key, so one shard for both twins"
    assert all(b"a/" + name in b"".join(shards) for name in names)
    (of_twins,) = (data for data in shards if b"a/" + twins[0] in data)
    assert of_twins.index(b"a/" + twins[0]) < of_twins.index(b"a/" + twins[1])
    assert make.job(folder, tmp_path / "out", "--num_shards", "7").out.startswith("already published")


# --- the graph


class Steps(PipelineVisitor):
    """Labels of the steps at the top, and the types of what goes into each step."""

    def __init__(self) -> None:
        self.top: list[str] = []
        self.types: dict[str, str] = {}

    def enter_composite_transform(self, node) -> None:
        self.visit_transform(node)

    def visit_transform(self, node) -> None:
        if node.full_label and "/" not in node.full_label:
            self.top.append(node.full_label)
        self.types[node.full_label] = str([one.element_type for one in node.inputs])


@pytest.fixture(params=["class_folders", "manifest"])
def steps(request: pytest.FixtureRequest, photos: Path, tmp_path: Path) -> Steps:
    manifest = {"layout": "manifest", "manifest": "/m.csv"} if request.param == "manifest" else {}
    some = Config(input=str(photos), output=str(tmp_path), name="x", **manifest)
    job, found = beam.Pipeline(runner="FnApiRunner"), Steps()
    graph.build(job, some, Run())
    job.visit(found)
    return found


def test_pages_are_encoded_as_pages_wherever_they_are_grouped(steps: Steps) -> None:
    groups = ("SameListForAll", "GroupByPath", "SpreadSample", "GroupByShard")
    found = {label: kind for label, kind in steps.types.items() if label.endswith(groups)}
    assert len(found) >= 3
    assert all(str(Page) in kind for kind in found.values()), found


def test_a_shard_that_fails_stops_the_one_that_is_in_work_with_it(
    gcs: Gcs, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[bool] = []

    def write(self: ShardWriter, split: str, index: int, refs: object) -> None:
        if index == 0:
            raise ImageShardsError("shard 0 failed")
        stopped.append(self._cancelled.wait(20))
        raise ImageShardsError("stopped")

    monkeypatch.setattr(ShardWriter, "write", write)
    gcs.put_folder(bucket := gcs.new_bucket(), "in", folder)
    config = Config(
        input=f"gs://{bucket}/in", output=tmp_path / "out", name="photos", num_shards=2, max_reject_fraction=0.5
    )
    with pytest.raises(ImageShardsError, match=r"^shard 0 failed$"):
        beam_pipeline.run(config)
    assert stopped == [True]
