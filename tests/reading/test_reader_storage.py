"""Local folders, memory:// and the real fake-gcs-server give the same bytes, by the requests that are needed."""

from __future__ import annotations

import errno
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path

import numpy as np
import pytest
from aiohttp import ServerDisconnectedError

import reader
from beam_pipeline.errors import CorruptRecordError, NotPublishedError, StorageError
from reader import remote, retries
from reader.hashing import dataset_hash
from reader.runs import RunReader
from reader.storage import open_storage
from reader.verify.dataset import verify
from tests.reading.shards import make_dataset, train_stream
from tests.servers import Gcs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_dataset(tmp_path_factory.mktemp("storage") / "1.0.0", {"train": [1100, 1300], "validation": [9]}))


@pytest.fixture
def bucket(gcs: Gcs, folder: Path) -> Iterator[str]:
    """URL of the dataset on the server; this process' client is made anew for its address."""
    name = gcs.new_bucket()
    gcs.put_folder(name, "data sets/1.0.0", folder)
    remote.open_remote.cache_clear()
    yield f"gs://{name}/data sets/1.0.0"
    remote.open_remote.cache_clear()


@pytest.fixture
def in_memory(folder: Path) -> Iterator[str]:
    import fsspec

    filesystem = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            filesystem.pipe_file(f"/set/1.0.0/{path.relative_to(folder).as_posix()}", path.read_bytes())
    yield "memory://set/1.0.0"
    filesystem.rm("/set", recursive=True)


def check_same(url: str, folder: Path) -> None:
    info, local = reader.load_info(url), reader.load_info(str(folder))
    assert info.classes == local.classes
    assert dataset_hash(url) == dataset_hash(str(folder))
    assert open_storage(url).files(info.url) == open_storage(str(folder)).files(str(folder))
    assert open_storage(url).names(info.url) == open_storage(str(folder)).names(str(folder))
    position = info.position("train", global_batch_size=1)
    expected = train_stream(local, "train", position, 0).take(3000).records
    assert train_stream(info, "train", position, 0).take(3000).records == expected
    assert verify(info) == []
    labels = list(
        itertools.chain.from_iterable(
            batch[1].numpy().tolist() for batch in reader.eval_dataset(info, "validation", global_batch_size=4)
        )
    )
    assert labels[:9] == [number % 3 for number in range(9)]
    names = [record["filename"] for record in reader.record_dataset(f"{url}/photos-valid*").as_numpy_iterator()]
    assert len(names) == 9


@pytest.mark.parametrize("target", ["gone", "link", "file/x"])
def test_a_link_that_leads_nowhere_is_no_file(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / target)
    local = open_storage(str(tmp_path))
    assert local.files(str(tmp_path)) == [("file", 1)]
    assert local.sizes([str(tmp_path / "link"), str(tmp_path / "file")]) == [None, 1]
    assert local.names(str(tmp_path)) == ["file", "link"]


def test_memory_is_as_local(in_memory: str, folder: Path) -> None:
    check_same(in_memory, folder)


def test_gs_is_as_local(bucket: str, folder: Path) -> None:
    check_same(bucket, folder)


def test_gs_takes_one_request_a_run_and_joins_neighbours(bucket: str, gcs: Gcs) -> None:
    info = reader.load_info(bucket)
    table = info.run_table("train")
    numbers = np.concatenate([np.arange(64 * run, 64 * run + 64) for run in (2, 3, 4, 9)])
    attempts = []
    for _ in range(3):  # a kept connection that the server has closed costs a second request
        before = len(gcs.requests())
        assert len(RunReader(info.storage, table).read(numbers)) == 256
        time.sleep(0.2)  # the server writes its log after its reply
        attempts.append([request for request in gcs.requests()[before:] if request.method == "GET"])
    requests = min(attempts, key=len)
    assert len(requests) == 2  # runs 2 to 4 at once, run 9
    assert all(request.object_read for request in requests)
    assert Counter(request.status for request in requests) == {206: 2}


def test_gs_damage_is_named_by_its_url(bucket: str, gcs: Gcs, folder: Path) -> None:
    name, shard = bucket.removeprefix("gs://").split("/", 1)[0], "photos-train.tfrecord-00001-of-00002"
    data = (folder / shard).read_bytes()
    gcs.put(name, f"data sets/1.0.0/{shard}", data[:100])
    info = reader.load_info(bucket)
    stream = RunReader(info.storage, info.run_table("train"))
    with pytest.raises(CorruptRecordError, match=f"^{bucket}/{shard}: record 0 at byte 0: the file ends inside"):
        stream.read(np.array([1100]))
    with pytest.raises(
        CorruptRecordError, match=r"record 128 at byte .*: the file ends before this record"
    ):  # behind its end
        stream.read(np.array([1100 + 128]))


def test_gs_without_a_dataset_or_a_bucket(bucket: str) -> None:
    with pytest.raises(NotPublishedError, match=r"name a version: gs://.*/data sets/1\.0\.0$"):
        reader.load_info(bucket.removesuffix("/1.0.0"))
    with pytest.raises(NotPublishedError, match="there is no such folder, or it is empty"):
        reader.load_info("gs://there-is-no-such-bucket/a/1.0.0")


def test_an_unknown_protocol_is_one_line() -> None:
    with pytest.raises(StorageError, match=r"^can't open nosuch:// URLs: "):
        reader.load_info("nosuch://bucket/1.0.0")


def test_requests_that_fail_in_passing_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries.time, "sleep", lambda _: None)

    def raised(answer: bytes | Exception) -> bytes:
        if isinstance(answer, Exception):
            raise answer
        return answer

    answers = iter([ConnectionResetError("reset"), TimeoutError(), b"data"])
    assert retries.retry(lambda: raised(next(answers)), "gs://b/o") == b"data"
    with pytest.raises(StorageError, match=r"^gs://b/o: ValueError: wrong$"):
        retries.retry(lambda: (_ for _ in ()).throw(ValueError("wrong")), "gs://b/o")
    for error in (  # a fault of ours or of a client, which would only hide for ten minutes
        RuntimeError("cannot schedule new futures after shutdown"),
        KeyError("size"),
        IndexError("list index out of range"),
        OSError(errno.ENOSPC, "No space left on device"),
    ):
        asked = iter([error, b"data"])
        with pytest.raises(StorageError, match=rf"^gs://b/o: {type(error).__name__}: "):
            retries.retry(lambda: raised(next(asked)), "gs://b/o")  # noqa: B023
    for error in (OSError(errno.EIO, "an error inside the server"), ServerDisconnectedError(), IncompleteRead(b"")):
        asked = iter([error, b"data"])
        assert retries.retry(lambda: raised(next(asked)), "gs://b/o") == b"data"  # noqa: B023
    monkeypatch.setattr(retries, "DEADLINE_S", -1.0)
    with pytest.raises(StorageError, match=r"gave up after .* ConnectionResetError: reset"):
        retries.retry(lambda: (_ for _ in ()).throw(ConnectionResetError("reset")), "gs://b/o")
