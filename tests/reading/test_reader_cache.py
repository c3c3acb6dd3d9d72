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
from reader.cache import DiskCache, MemoryCache, open_cache
from reader.run_table import RunTable
from reader.runs import RunReader
from reader.storage import RemoteStorage
from reader.stream import train_stream
from tests.reading.shards import make_dataset

RECORDS = 300


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A dataset on a remote filesystem."""
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [100, 200]}))
    filesystem = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            filesystem.pipe_file(f"/cached/1.0.0/{path.relative_to(folder).as_posix()}", path.read_bytes())
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
    shard_reads.clear()
    info = reader.load_info(url)
    cache = open_cache(info, str(folder))
    table = info.run_table("train")
    some = np.arange(64, 100)  # the second run of the first shard
    RunReader(info.shard_storage, table, cache=cache).read(some)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".imageshards-cache",
        "photos-train.tfrecord-00000-of-00002.have",
        "photos-train.tfrecord-00000-of-00002.part",
    ]
    shard_reads.clear()
    again = open_cache(info, str(folder))  # as another process would
    RunReader(info.shard_storage, table, cache=again).read(some)
    assert shard_reads == []
    assert epoch(url, str(folder)) == expected
    assert sorted(path.name for path in folder.iterdir()) == [
        ".imageshards-cache",
        "photos-train.tfrecord-00000-of-00002",
        "photos-train.tfrecord-00001-of-00002",
    ]
    filesystem = fsspec.filesystem("memory")
    for shard in ("00000", "00001"):
        name = f"photos-train.tfrecord-{shard}-of-00002"
        assert (folder / name).read_bytes() == filesystem.cat_file(f"/cached/1.0.0/{name}")
    shard_reads.clear()
    assert epoch(url, str(folder)) == expected
    assert epoch(url, str(folder), epoch=1) == epoch(url, None, epoch=1)


def test_what_a_disk_spoiled_is_read_again(url: str, tmp_path: Path, shard_reads: list[str]) -> None:
    folder, expected = tmp_path / "cache", epoch(url, None)
    epoch(url, str(folder))
    path = folder / "photos-train.tfrecord-00001-of-00002"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    shard_reads.clear()
    assert epoch(url, str(folder)) == expected
    assert len(shard_reads) == 1  # the one run


def test_a_promise_that_a_crash_broke_is_found_at_the_end(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, expected = tmp_path / "cache", epoch(url, None)
    info = reader.load_info(url)
    table = info.run_table("train")
    RunReader(info.shard_storage, table, cache=open_cache(info, str(folder))).read(np.arange(64))
    part = folder / "photos-train.tfrecord-00000-of-00002.part"
    part.write_bytes(b"\0" * part.stat().st_size)  # what a file system may make of it when the power goes
    have = part.with_suffix("").with_name(part.name.replace(".part", ".have"))
    have.write_text(have.read_text() + "123")  # a line cut short
    assert epoch(url, str(folder)) == expected
    assert not part.exists()
    assert (folder / "photos-train.tfrecord-00000-of-00002").exists()


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


def test_each_dataset_has_its_own_folder(url: str, tmp_path: Path) -> None:
    other = make_dataset(tmp_path / "other" / "1.0.0", {"train": [10]})
    epoch(url, str(tmp_path / "cache"), 10)
    with pytest.raises(UsageError, match="it holds another dataset; give each dataset its own folder"):
        reader.train_dataset(reader.load_info(other), "train", global_batch_size=2, cache=str(tmp_path / "cache"))
    with pytest.raises(UsageError, match="cache='gs://bucket/x': give a local folder, 'memory' or None"):
        open_cache(reader.load_info(url), "gs://bucket/x")


def test_open_caches_are_taken_as_they_are(url: str, tmp_path: Path) -> None:
    info = reader.load_info(url)
    cache = MemoryCache()
    assert open_cache(info, cache) is cache
    assert open_cache(info, None) is None
    assert isinstance(open_cache(info, str(tmp_path / "cache")), DiskCache)
    assert isinstance(info.run_table("train"), RunTable)
