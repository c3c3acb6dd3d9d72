"""Caches: what they keep, what they check, and that reading through them changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import reader
from beam_pipeline.errors import UsageError
from reader.cache import MemoryCache, RecentRuns, _memory_cache, open_cache
from reader.remote import RemoteStorage
from reader.runs import RunReader
from reader.stream import EvalStream, open_source
from tests.reading.shards import make_dataset, train_stream

RECORDS = 300


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A dataset on a remote filesystem."""
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [100, 200]}))
    filesystem = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            filesystem.pipe_file(f"/cached/1.0.0/{path.relative_to(folder).as_posix()}", path.read_bytes())
    _memory_cache.cache_clear()
    yield "memory://cached/1.0.0"
    filesystem.rm("/cached", recursive=True)


@pytest.fixture
def shard_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every range of a shard that is read remotely."""
    reads: list[str] = []
    read = RemoteStorage.read

    def counted(self: RemoteStorage, path: str, *bounds: Any) -> bytes:
        if ".tfrecord-" in path and not path.endswith(".idx"):
            reads.append(path)
        return read(self, path, *bounds)

    monkeypatch.setattr(RemoteStorage, "read", counted)
    return reads


def epoch(url: str, cache: Any, count: int = RECORDS, epoch: int = 0) -> list[bytes]:
    info = reader.load_info(url)
    position = info.position("train", global_batch_size=1).after(epoch * RECORDS)
    return train_stream(info, "train", position, 0, cache=cache).take(count).records


def test_memory_reads_each_run_once(url: str, shard_reads: list[str]) -> None:
    expected = epoch(url, None)
    info = reader.load_info(url)
    train = reader.train_dataset(info, "train", global_batch_size=50, features=["filename"], cache="memory")
    shard_reads.clear()
    first = [name for batch in train for name in batch[0]["filename"].numpy()]
    assert [record.split(b".jpg")[0][-6:] for record in expected] == [name[-10:-4] for name in first]
    assert 2 <= len(shard_reads) <= 6
    reads = len(shard_reads)
    assert sorted(name for batch in train for name in batch[0]["filename"].numpy()) == sorted(first)
    assert len(shard_reads) == reads


def test_a_folder_fills_as_it_is_read_and_outlives_the_process(
    url: str, tmp_path: Path, shard_reads: list[str]
) -> None:
    folder, expected = tmp_path / "cache", epoch(url, None)
    info = reader.load_info(url)
    table = info.run_table("train")
    some = np.arange(64, 100)  # the second run of the first shard
    RunReader(info.shard_storage, table, open_cache(info, table, folder)).read(some)
    (own,) = folder.iterdir()
    assert own.name == f"photos-1.0.0-{info.manifest['self_sha256'][:16]}"
    shard_reads.clear()
    RunReader(info.shard_storage, table, open_cache(info, table, str(folder))).read(some)
    assert shard_reads == []
    assert epoch(url, str(folder)) == expected
    filesystem = fsspec.filesystem("memory")
    for path in own.iterdir():
        assert path.read_bytes() == filesystem.cat_file(f"/cached/1.0.0/{path.name}")
    shard_reads.clear()
    assert epoch(url, str(folder)) == expected
    assert sorted(epoch(url, str(folder), epoch=1)) == sorted(expected)
    assert shard_reads == []


def test_jobs_that_share_a_folder_fetch_each_run_once(url: str, tmp_path: Path, shard_reads: list[str]) -> None:
    info = reader.load_info(url)
    table = info.run_table("train")
    readers = [RunReader(info.shard_storage, table, open_cache(info, table, str(tmp_path / "cache"))) for _ in range(3)]
    shard_reads.clear()
    for begin in range(0, 300, 20):
        for one in readers:  # in turns, as hosts and workers on one machine would
            one.read(np.arange(begin, begin + 20))
    assert len(shard_reads) == len(table.offset) == 6


@pytest.mark.parametrize("spoil", ["a bit", "zeros"])
def test_what_a_disk_or_a_crash_spoiled_is_read_again_once(
    url: str, tmp_path: Path, shard_reads: list[str], spoil: str
) -> None:
    folder, expected = tmp_path / "cache", epoch(url, None)
    epoch(url, str(folder))
    (path,) = folder.glob("*/photos-train.tfrecord-00001-of-00002")
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data if spoil == "a bit" else b"\0" * len(data))
    shard_reads.clear()
    assert epoch(url, str(folder)) == expected
    assert len(shard_reads) == 1
    shard_reads.clear()
    assert epoch(url, str(folder)) == expected
    assert shard_reads == []


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_damage_at_the_source_costs_its_run_a_request_and_no_other(
    url: str, tmp_path: Path, shard_reads: list[str], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = "memory" if kind == "memory" else str(tmp_path / "cache")
    filesystem = fsspec.filesystem("memory")
    path = "/cached/1.0.0/photos-train.tfrecord-00001-of-00002"
    data = bytearray(filesystem.cat_file(path))
    data[5000] ^= 1
    filesystem.pipe_file(path, bytes(data))
    info = reader.load_info(url)
    source = open_source(info, "train", on_error="skip", cache=cache)
    first = EvalStream(source, 1, 0).take(RECORDS)
    shard_reads.clear()
    again = EvalStream(source, 1, 0).take(RECORDS)
    assert shard_reads == [f"{url}/photos-train.tfrecord-00001-of-00002"]
    assert again.records == first.records
    assert (again.weights == 0).sum() == 1
    assert source.skips is not None
    assert source.skips.count == 1


def test_a_copied_dataset_is_a_full_cache(url: str, tmp_path: Path, shard_reads: list[str]) -> None:
    shutil.copytree(tmp_path / "1.0.0", tmp_path / "copy")
    expected = epoch(url, None)
    shard_reads.clear()
    assert epoch(url, str(tmp_path / "copy")) == expected
    assert shard_reads == []


def test_a_full_disk_is_no_error(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("reader.cache._write_at", full)
    assert epoch(url, str(tmp_path / "cache")) == epoch(url, None)
    assert caplog.text.count("takes no more (No space left on device)") == 1


def test_a_reserve_is_left_on_the_disk_and_in_memory(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("reader.cache.RESERVE_BYTES", 1 << 60)
    folder = tmp_path / "cache"
    assert epoch(url, str(folder)) == epoch(url, None)
    assert "are free: what doesn't fit is read anew each epoch" in caplog.text
    assert caplog.text.count("takes no more (less than") == 1
    assert [*folder.glob("*/*")] == []
    with pytest.raises(UsageError, match=r"^cache='memory': \d+\.\d GB of records .* give a local folder instead$"):
        epoch(url, "memory")


def test_a_cache_in_memory_is_kept_once_in_a_process(url: str, shard_reads: list[str]) -> None:
    first = epoch(url, "memory")
    shard_reads.clear()
    assert epoch(url, "memory") == first
    assert shard_reads == []


def test_datasets_share_a_folder_of_caches(url: str, tmp_path: Path) -> None:
    other = make_dataset(tmp_path / "other" / "1.0.0", {"train": [10]})
    for dataset in (url, other):
        assert epoch(dataset, str(tmp_path / "cache"), 10) == epoch(dataset, None, 10)
    assert len([*(tmp_path / "cache").iterdir()]) == 2


def test_a_folder_of_something_else_is_refused(url: str, tmp_path: Path) -> None:
    other = make_dataset(tmp_path / "other" / "1.0.0", {"train": [10]})
    info = reader.load_info(url)
    for folder, message in (
        (other, "another dataset lies there"),
        (f"{tmp_path}/other", r"it holds other files \(1\.0\.0\); give a folder for caches, such as .*/other/cache$"),
        ("gs://bucket/x", "give a local folder, 'memory' or None"),
        (f"{other}/class.labels.txt", "Not a directory; give a folder that can be written"),
    ):
        with pytest.raises(UsageError, match=f"^cache='{folder}': {message}"):
            reader.train_dataset(info, "train", global_batch_size=2, cache=folder)
    for wrong in ("", True, 3):
        with pytest.raises(UsageError, match=f"^cache={wrong!r}: give a local folder, 'memory' or None$"):
            open_cache(info, info.run_table("train"), wrong)  # type: ignore[arg-type]


def test_recent_runs_stand_before_another_cache() -> None:
    behind = MemoryCache()
    recent = RecentRuns(behind, 1)
    recent.put("a", 0, b"run")
    recent.put("a", 3, b"other")
    assert recent.get("a", 3, 8) == b"other"
    assert recent.get("a", 0, 3) == b"run"  # of the one behind
    assert RecentRuns(None, 1).get("a", 0, 3) is None
