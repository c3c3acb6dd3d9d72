"""What storage counts: each attempt at a request once by its price, and the bytes that came and went."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from beam_pipeline.storage import open_storage, usage
from beam_pipeline.storage.usage import Usage
from tests.servers import S3, Answer, Gcs, telling


def used() -> tuple[int, int, int, int]:
    taken = usage.take()
    return taken.lists_and_writes, taken.reads, taken.bytes_read, taken.bytes_written


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_operations_count_as_a_bill_counts_them(request: pytest.FixtureRequest, scheme: str, tmp_path: Path) -> None:
    server: Gcs | S3 = request.getfixturevalue("gcs" if scheme == "gs" else "s3")
    url = f"{scheme}://{server.new_bucket()}"
    store = open_storage(url)
    used()
    store.write(f"{url}/a", b"12345")
    assert used() == (1, 0, 0, 5)
    assert store.read(f"{url}/a", 1, 3) == b"23"
    assert used() == (0, 1, 2, 0)
    assert store.stat(f"{url}/a") and store.stat(f"{url}/none") is None
    assert used() == (0, 2, 0, 0)
    with open(tmp_path / "large", "w+b") as file:
        file.write(bytes(17 << 20))  # in two parts
        store.publish(file, f"{url}/large")
    assert used() == (1 if scheme == "gs" else 4, 0, 0, 17 << 20), "S3 bills parts, their beginning and their end"
    assert len(list(store.files(url))) == 2
    assert used() == (1, 0, 0, 0)
    store.delete(f"{url}/a")
    assert used() == (0, 0, 0, 0)


def test_what_is_tried_again_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beam_pipeline.storage.causes._FIRST_PAUSE_S", 0.01)
    with telling(Answer(503), Answer(503), Answer(200)) as server:
        url = f"{server.url}/x"
        used()
        assert open_storage(url, 30).read(url) == b"content"
    assert used() == (0, 3, 7, 0)


def test_local_files_are_bytes_and_no_requests(tmp_path: Path) -> None:
    store = open_storage(str(tmp_path))
    used()
    store.write(f"{tmp_path}/a", b"12345")
    assert store.read(f"{tmp_path}/a") == b"12345"
    assert used() == (0, 0, 5, 5)


def test_pieces_of_work_add_up_and_a_forked_process_begins_from_nothing() -> None:
    usage.take()
    usage.count(reads=3)
    total = usage.take()
    if (child := os.fork()) == 0:
        os._exit(usage.take().reads)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    usage.count(reads=4, bytes_read=1)
    total.merge(usage.take())
    assert (total.reads, total.bytes_read) == (7, 1) and total.cpu_s >= 0
    assert usage.take().reads == 0 and Usage() == Usage()
