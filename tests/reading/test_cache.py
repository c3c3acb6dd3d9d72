"""Caches: reading through them changes nothing, and the second reading asks the bucket for no shard."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import reader
from beam_pipeline.errors import UsageError
from reader.cache import DiskCache
from tests import make, servers
from tests.reading.shards import make_dataset, numbers_in


class Bucket:
    """A dataset in a bucket, and the requests for its shards."""

    def __init__(self, gcs: servers.Gcs, folder: Path) -> None:
        name = gcs.new_bucket()
        gcs.put_folder(name, "photos/1.0.0", folder)
        self.folder, self.url = folder, f"gs://{name}/photos/1.0.0"
        self.gcs, self.name = gcs, name

    def epoch(self, cache: Any, **options: Any) -> list[int]:
        """The record numbers of one iteration of 300 records, in order."""
        options |= {"global_batch_size": 50, "features": ["filename"], "cache": cache}
        return numbers_in(reader.train_batches(self.url, "train", **options))

    def reads(self) -> int:
        """Requests for shards so far."""
        return sum((one.object_read or "").endswith("-of-00002") for one in self.gcs.requests())


@pytest.fixture
def bucket(gcs: servers.Gcs, tmp_path: Path) -> Bucket:
    return Bucket(gcs, Path(make_dataset(tmp_path / "source" / "1.0.0", {"train": [100, 200]})))


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_what_was_read_once_is_not_requested_again(bucket: Bucket, tmp_path: Path, kind: str) -> None:
    cache = "memory" if kind == "memory" else tmp_path / "cache"
    expected = bucket.epoch(None)
    assert bucket.epoch(cache) == expected
    reads = bucket.reads()
    assert bucket.epoch(cache) == expected
    assert sorted(bucket.epoch(cache, seed=1)) == sorted(expected)
    assert bucket.reads() == reads
    if kind == "folder":
        (own,) = (tmp_path / "cache").iterdir()
        assert own.name.startswith("photos-1.0.0-")
        for path in own.iterdir():
            assert path.read_bytes() == (bucket.folder / path.name).read_bytes()


@pytest.mark.parametrize(("start", "spoiled"), [(5000, b"?"), (0, bytes(12))], ids=["a byte", "the head of a run"])
def test_what_a_disk_or_a_crash_spoiled_is_read_again_once(
    bucket: Bucket, tmp_path: Path, start: int, spoiled: bytes
) -> None:
    expected = bucket.epoch(tmp_path / "cache")
    (path,) = tmp_path.glob("cache/*/photos-train.tfrecord-00001-of-00002")
    with path.open("r+b") as file:
        file.seek(start)
        file.write(spoiled)
    before = bucket.reads()
    assert bucket.epoch(tmp_path / "cache") == expected
    assert bucket.reads() > before
    assert path.read_bytes() == (bucket.folder / path.name).read_bytes()
    before = bucket.reads()
    assert bucket.epoch(tmp_path / "cache") == expected
    assert bucket.reads() == before


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_a_corrupt_record_at_the_source_is_never_kept(bucket: Bucket, tmp_path: Path, kind: str) -> None:
    cache = "memory" if kind == "memory" else tmp_path / "cache"
    shard = "photos-train.tfrecord-00001-of-00002"
    make.flip_byte(bucket.folder / shard, 5000)
    bucket.gcs.put(bucket.name, f"photos/1.0.0/{shard}", (bucket.folder / shard).read_bytes())
    first = bucket.epoch(cache, on_error="skip")
    before = bucket.reads()
    assert bucket.epoch(cache, on_error="skip") == first
    assert bucket.reads() > before  # its run


def test_a_copied_dataset_is_a_full_cache(bucket: Bucket, tmp_path: Path) -> None:
    shutil.copytree(bucket.folder, tmp_path / "copy")
    before = bucket.reads()
    names = bucket.epoch(tmp_path / "copy")
    assert bucket.reads() == before
    assert names == bucket.epoch(None)


def test_a_full_disk_is_no_error(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("reader.cache.RESERVE_BYTES", 1 << 60)
    assert bucket.epoch(tmp_path / "cache") == bucket.epoch(None)
    assert caplog.text.count("takes no more (less than") == 1
    assert [*tmp_path.glob("cache/*/*")] == []
    with pytest.raises(UsageError, match=r"^cache='memory': [\d.]+ kB of records .* give a local folder instead$"):
        bucket.epoch("memory")


def test_a_disk_that_refuses_writes_is_no_error(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.epoch(tmp_path / "cache")
    for path in tmp_path.glob("cache/*/*"):
        path.unlink()
        path.mkdir()
    assert bucket.epoch(tmp_path / "cache") == bucket.epoch(None)
    assert caplog.text.count("takes no more (Is a directory): the rest is read again each epoch") == 1


@pytest.mark.parametrize("kind", ["pipe", "pipe with a reader", "folder", "link to a pipe", "device"])
def test_a_shard_that_is_no_file_is_never_waited_for(kind: str, tmp_path: Path) -> None:
    path, other, descriptors = tmp_path / "shard", tmp_path / "other", len(os.listdir("/proc/self/fd"))
    reading = -1
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(other if "link" in kind else path)
        if "link" in kind:
            path.symlink_to(other)
        if "reader" in kind:
            reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    cache, found = DiskCache(tmp_path, {"a": "shard"}), []

    def use() -> None:
        cache.put("a", 0, b"x" * 100)
        found.append(cache.get("a", 0, 100))

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(20)
    if reading >= 0:
        os.close(reading)
    assert found == [None]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_pipe_in_the_folder_of_caches_is_told(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    os.mkfifo(tmp_path / "cache" / "manifest.json")
    with pytest.raises(UsageError, match=r"^cache='.*/cache': .*/manifest.json is missing; give a folder that can be"):
        bucket.epoch(str(tmp_path / "cache"))


def test_an_index_of_files_anywhere_is_cached(bucket: Bucket, tmp_path: Path) -> None:
    """In the folder that holds the caches of other datasets."""
    bucket.epoch(tmp_path / "cache")
    info = reader.index(f"{bucket.url}/photos-train*", tmp_path / "index").info
    cached = {"global_batch_size": 50, "cache": tmp_path / "cache"}
    first = [labels.tolist() for _, labels in reader.train_batches(info, "train", **cached)]
    before = bucket.reads()
    assert [labels.tolist() for _, labels in reader.train_batches(info, "train", **cached)] == first
    assert bucket.reads() == before
    assert len([*(tmp_path / "cache").iterdir()]) == 2


def test_a_folder_of_something_else_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    other = make_dataset(tmp_path / "other" / "1.0.0", {"train": [10]})
    for folder, message in (
        (other, "it holds another dataset; give a folder for caches"),
        (f"{tmp_path}/other", r"it holds other files \(1\.0\.0\); give a folder for caches, such as .*/other/cache$"),
        ("gs://bucket/x", "give a local folder, 'memory' or None"),
        (f"{other}/class.labels.txt", "Not a directory; give a folder that can be written"),
    ):
        with pytest.raises(UsageError, match=f"^cache='{folder}': {message}"):
            bucket.epoch(folder)
    for wrong in ("", True, 3):
        with pytest.raises(UsageError, match=f"^cache={wrong!r}: give a local folder, 'memory' or None$"):
            bucket.epoch(wrong)
