"""A network that fails: single requests come out right or say why not, and so does a job."""

from __future__ import annotations

import io
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from beam_pipeline import storage
from beam_pipeline.errors import StorageError
from beam_pipeline.storage import gs
from tests import make
from tests.conftest import forget_clients
from tests.faults import proxy, resumable
from tests.faults.conftest import Through
from tests.servers import Gcs

SOAKED = [pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2)]
some_seeds = pytest.mark.parametrize("seed", [0, *SOAKED])
EACH_FAULT = pytest.mark.parametrize("fault", proxy.FAULTS, ids=lambda fault: fault.replace(" ", "-"))


# --- one request


@EACH_FAULT
def test_every_kind_of_request_survives_every_fault(
    gcs: Gcs, through: Through, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gs, "PAGE_NAMES", 2)
    bucket = gcs.new_bucket()
    for number in range(3):
        gcs.put(bucket, f"in/cat/{number:02d}", os.urandom(500))
    failing = through(0.4, faults=(fault,))
    place = f"gs://{bucket}"
    store = storage.open_storage(place, 60)
    expected = {f"cat/{number:02d}": gcs.get(bucket, f"in/cat/{number:02d}") for number in range(3)}
    listed = list(store.files(f"{place}/in"))
    assert {file.path: (file.bytes, file.crc32c) for file in listed} == {
        name: (500, google_crc32c.value(data)) for name, data in expected.items()
    }
    assert list(store.names(f"{place}/in")) == ["cat/"]
    for name, data in expected.items():
        assert store.read(f"{place}/in/{name}") == data
        assert store.read(f"{place}/in/{name}", 100, 300) == data[100:300]
        assert (stat := store.stat(f"{place}/in/{name}")) is not None and stat.bytes == 500
        store.write(f"{place}/out/{name}", data)
        assert store.create(f"{place}/created/{name}", data), "the 412 of its own second attempt"
        assert not store.create(f"{place}/created/{name}", b"other")
        store.publish(io.BytesIO(data), f"{place}/published/{name}")
        assert (found := store.stat(f"{place}/out/{name}")) is not None
        assert store.write(f"{place}/out/{name}", data[::-1], found.generation)
        assert not store.write(f"{place}/out/{name}", b"", found.generation)
    for folder, turned in (("out", True), ("created", False), ("published", False)):
        for name, data in expected.items():
            assert gcs.get(bucket, f"{folder}/{name}") == (data[::-1] if turned else data)
    with store.open(f"{place}/in/cat/00") as file:
        assert file.read() == expected["cat/00"]
    for name in expected:
        store.delete(f"{place}/out/{name}")
    assert not [name for name in gcs.names(bucket) if name.startswith("out/")]
    assert failing.happened[fault] > 5


Uploads = Callable[..., AbstractContextManager[resumable.UploadServer]]


@pytest.fixture
def uploads(through: Through, monkeypatch: pytest.MonkeyPatch) -> Uploads:
    """Call it for a server that takes uploads in chunks of 1 MiB, to which gs:// requests go from then on."""
    monkeypatch.setattr(gs, "CHUNK_BYTES", 1 << 20)

    @contextmanager
    def start(**more: Any) -> Iterator[resumable.UploadServer]:
        with resumable.upload_server(**more) as server:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
            forget_clients()
            yield server

    return start


def upload(data: bytes, deadline_s: float = 60) -> None:
    storage.open_storage("gs://x", deadline_s).publish(io.BytesIO(data), "gs://b/big file")


@some_seeds
def test_a_failed_chunk_goes_on_from_what_has_arrived(uploads: Uploads, seed: int) -> None:
    data = os.urandom((16 << 20) + 12345)
    with uploads(share=0.3, seed=seed) as server:
        upload(data)
    assert (server.objects, server.sessions) == ({"big file": data}, 1)
    assert server.received < 2 * len(data), "not the entire file once more"


@pytest.mark.parametrize("lost", [{1}, {8}, {17}, {1, 8, 17}], ids=["first", "middle", "last", "all three"])
def test_a_lost_answer_to_a_chunk_loses_and_doubles_nothing(uploads: Uploads, lost: set[int]) -> None:
    data = os.urandom((16 << 20) + 12345)  # 17 chunks
    with uploads() as server:
        server.lost_replies = frozenset(lost)
        upload(data)
    assert server.objects == {"big file": data}


def test_an_upload_that_the_server_forgot_begins_again(uploads: Uploads) -> None:
    data = os.urandom(9 << 20)
    with uploads() as server:
        server.forget_after = 6_000_000
        upload(data)
    assert (server.objects, server.sessions) == ({"big file": data}, 2)


@pytest.mark.parametrize("how", ["answers", "hangs up"])
def test_an_upload_of_which_nothing_more_arrives_ends_at_the_deadline(how: str, uploads: Uploads) -> None:
    with uploads() as server:
        server.keeps_nothing = how
        with pytest.raises(StorageError, match=r"^gs://b/big file: no success for 1 s: .*; the same command resumes"):
            upload(bytes(9 << 20), 1)
    assert server.objects == {}
    assert server.received < 100 << 20, "repeated without a pause"


# --- a complete job


@pytest.fixture(scope="module")
def reference(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return make.same_each_time(make.published(photos, tmp_path_factory.mktemp("reference"), *make.TWO_SPLITS))


@some_seeds
def test_at_ten_percent_faults_the_job_writes_the_same_bytes_and_loses_no_image(
    gcs: Gcs, photos: Path, through: Through, reference: dict[str, bytes], tmp_path: Path, seed: int
) -> None:
    gcs.put_folder(bucket := gcs.new_bucket(), "in", photos)
    failing = through(0.1, seed)
    finished = make.job(f"gs://{bucket}/in", f"gs://{bucket}/out", *make.TWO_SPLITS, "--io_deadline", "60")
    assert finished.code == 0, finished.err
    assert "40 images listed = 40 records + 0 rejects" in finished.out
    assert make.same_each_time(gcs.download(bucket, "out/photos/1.0.0", tmp_path / "down")) == reference
    assert not [name for name in gcs.names(bucket) if "_state" in name]
    assert failing.happened.total() >= 5, "of some 140 requests"


def test_an_image_of_which_a_bit_flips_on_its_way_is_read_again(
    gcs: Gcs, photos: Path, through: Through, reference: dict[str, bytes], tmp_path: Path
) -> None:
    gcs.put_folder(bucket := gcs.new_bucket(), "in", photos)
    failing = through(0.06, faults=(proxy.FLIP,))  # of three in a row the image would be rejected
    finished = make.job(f"gs://{bucket}/in", tmp_path, *make.TWO_SPLITS)
    assert finished.code == 0, finished.err
    assert make.same_each_time(tmp_path / "photos/1.0.0") == reference
    assert failing.happened[proxy.FLIP]


@pytest.mark.parametrize(
    ("faults", "flags", "said", "most"),
    [
        # No request is repeated, those on their way end.
        ((proxy.EXPIRED,), (), r": credentials are missing \(.*gcloud auth application-default login", 40),
        (proxy.FAILURES, ("--io_deadline", "1"), r": no success for 1 s: ", 100),  # 300 in 20 s
    ],
)
def test_a_store_that_fails_from_then_on_ends_the_job_with_one_line(
    gcs: Gcs, photos: Path, through: Through, faults: tuple[str, ...], flags: tuple[str, ...], said: str, most: int
) -> None:
    gcs.put_folder(bucket := gcs.new_bucket(), "in", photos)
    failing = through(0.0, faults=faults)
    failing.fail_from(60)
    finished = make.job(f"gs://{bucket}/in", f"gs://{bucket}/out", *make.TWO_SPLITS, *flags)
    assert (finished.code, finished.err.count("\n")) == (1, 1), finished.err
    assert re.match(rf"error: gs://{bucket}/.*{said}", finished.err), finished.err
    assert failing.happened.total() < most
    assert not [name for name in gcs.names(bucket) if name.endswith("manifest.json")]


def test_a_full_disk_ends_the_job_with_one_line_and_the_same_command_resumes(photos: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "none", str(small)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        finished = make.job(photos, small, "--num_shards", "2")
        assert (finished.code, finished.err.count("\n")) == (1, 1), finished.err
        assert finished.err.startswith(f"error: {small}/photos/")
        assert finished.err.endswith(": no space left on device; make room; the same command resumes\n")
        assert not (small / "photos/1.0.0/manifest.json").exists()
        subprocess.run(["mount", "-o", "remount,size=10m", str(small)], check=True)
        assert make.job(photos, small, "--num_shards", "2").code == 0
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        assert make.job(photos, small, "--num_shards", "2").out.startswith("already published")
        finished = make.job(photos, small, "--num_shards", "2", "--version", "2.0.0")
        assert finished.code == 2
        assert finished.err.startswith(f"error: --output '{small}': can't be written: ")
        assert "read-only" in finished.err.lower()
    finally:
        subprocess.run(["umount", str(small)], check=True)
