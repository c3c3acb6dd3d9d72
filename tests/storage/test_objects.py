"""gs:// on fake-gcs-server, s3:// on moto's, az:// on Azurite: odd names, pages of listings, conditional writes."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from pathlib import Path

import google_crc32c
import pytest
from google.cloud.storage import Blob

from beam_pipeline import storage
from beam_pipeline.errors import StorageError
from beam_pipeline.storage import ListedFile, gs, join, objects, open_storage
from beam_pipeline.storage.local import temporary_file
from tests.make import ODD_NAMES, ONLY_REMOTE, REFUSED_BY_OBSTORE
from tests.servers import S3, Bucket, Gcs


def content(name: str) -> bytes:
    return f"content of {name}".encode()


@pytest.fixture
def place(bucket: Bucket) -> str:
    """The URL of an empty folder, each kind of storage in turn."""
    return f"{bucket.url}/place"


ON_BUCKETS = pytest.mark.parametrize("bucket", ["gs", "s3", "az"], indirect=True)


@ON_BUCKETS
def test_odd_names_are_listed_as_they_are_and_read_back(bucket: Bucket) -> None:
    names = ODD_NAMES + (ONLY_REMOTE if bucket.url.startswith("gs") else [])
    if bucket.url.startswith("az"):  # whose names have no backslashes
        names = [name for name in names if "\\" not in name]
    for name in names:
        bucket.put(f"in/{name}", content(name))
    url = f"{bucket.url}/in"
    store = open_storage(url)
    listed = {file.path: file for file in store.files(url)}
    assert set(listed) == set(names)
    for name, file in listed.items():
        assert file.bytes == len(content(name))
        assert store.read(join(url, name)) == content(name)
        assert bytes(store.read_range(join(url, name), 3, 7)) == content(name)[3:7]
        assert bytes(store.read_range(join(url, name), 3, 2000)) == content(name)[3:]
        assert store.read_range(join(url, name), 5000, 6000) == b""
        stat = store.stat(join(url, name))
        assert stat is not None and stat[1:] == file[1:]


def test_odd_object_names_can_be_written_and_deleted(gcs: Gcs) -> None:
    bucket, store = gcs.new_bucket(), open_storage("gs://")
    names = ODD_NAMES + ONLY_REMOTE
    for name in names[::2]:
        store.write(f"gs://{bucket}/out/{name}", content(name))
    for name in names[1::2]:
        store.publish(io.BytesIO(content(name)), f"gs://{bucket}/out/{name}")
    assert gcs.names(bucket) == sorted(f"out/{name}" for name in names)
    assert all(gcs.get(bucket, f"out/{name}") == content(name) for name in names)
    for name in names:
        store.delete(f"gs://{bucket}/out/{name}")
    assert gcs.names(bucket) == []


@pytest.mark.parametrize("name", REFUSED_BY_OBSTORE)
def test_a_name_that_can_not_be_asked_for_on_s3_is_one_line(s3: S3, name: str) -> None:
    bucket = s3.new_bucket()
    url = f"s3://{bucket}/in/{name}" if not name.startswith("/") else f"s3://{bucket}/{name}"
    with pytest.raises(StorageError, match="rename it") as raised:
        open_storage(url).read(url)
    assert "\n" not in repr(str(raised.value)) and not isinstance(raised.value, FileNotFoundError)


def test_a_name_that_can_not_be_listed_on_s3_ends_the_listing_with_one_line(s3: S3) -> None:
    bucket = s3.new_bucket()
    s3.put(bucket, "in/good", b"1")
    s3.put(bucket, "in/a//b", b"1")
    with pytest.raises(StorageError, match=rf"^s3://{bucket}/in: .*can't take this name .*a//b.*; rename it"):
        list(open_storage("s3://").files(f"s3://{bucket}/in"))


def test_a_google_listing_gives_size_crc32c_and_md5_if_there_is_one(gcs: Gcs) -> None:
    bucket = gcs.new_bucket()
    gcs.put(bucket, "in/a.jpg", b"12345")
    (file,) = open_storage("gs://").files(f"gs://{bucket}/in")
    assert file[:4] == ("a.jpg", 5, hashlib.md5(b"12345").digest(), google_crc32c.value(b"12345"))
    # A composite object has no md5Hash, https://cloud.google.com/storage/docs/composite-objects
    blob = Blob("x", None)
    blob._set_properties({"name": "x", "size": "7", "crc32c": "AAAA/w=="})
    assert gs._listed("x", blob) == ListedFile("x", 7, 0xFF, 0xFF)


@ON_BUCKETS
def test_a_listing_holds_the_files_of_a_folder(bucket: Bucket) -> None:
    for name in ("in/", "in/cat/", "in/dog/", "in/dog/sub/", "in/cat/empty.jpg", "inner/b.jpg", "in.jpg"):
        bucket.put(name, b"")  # placeholders of folders; others that begin with the folder's name
    bucket.put("in/cat/a.jpg", b"1")
    store = open_storage(bucket.url)
    assert sorted(file.path for file in store.files(f"{bucket.url}/in")) == ["cat/a.jpg", "cat/empty.jpg"]
    assert store.names(f"{bucket.url}/in") == ["cat/", "dog/"]
    assert store.names(bucket.url) == ["in.jpg", "in/", "inner/"]


@ON_BUCKETS
def test_a_listing_of_several_pages_has_every_name_once_and_asks_for_a_page_when_it_is_needed(
    bucket: Bucket, gcs: Gcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gs, "PAGE_NAMES", 20)
    monkeypatch.setattr(objects, "PAGE_NAMES", 20)
    names = [f"{number:05d}" for number in range(43)]
    for name in names:
        bucket.put(f"in/{name}", b"1")

    def pages() -> int:
        asked = f"/b/{bucket.url.removeprefix('gs://')}/o?"
        return sum(asked in request.target and request.method == "GET" for request in gcs.requests())

    listing = open_storage(bucket.url).files(f"{bucket.url}/in")
    first = next(listing)
    assert not bucket.url.startswith("gs") or pages() == 1
    assert [file.path for file in (first, *listing)] == names
    assert not bucket.url.startswith("gs") or pages() == 3


def test_files_are_found_by_pattern_and_sized(place: str) -> None:
    store = open_storage(place)
    for name in ("a.tfrecord", "b.tfrecord", "in/c.tfrecord", "in/deep/d.tfrecord", "in/[x]"):
        store.write(join(place, name), b"123")
    for pattern, expected in (
        ("*.tfrecord", ["a.tfrecord", "b.tfrecord"]),
        ("[ax].tfrecord", ["a.tfrecord"]),
        ("*/*.tfrecord", ["in/c.tfrecord"]),
        ("**/*.tfrecord", ["a.tfrecord", "b.tfrecord", "in/c.tfrecord", "in/deep/d.tfrecord"]),
        ("a.tfrecord", ["a.tfrecord"]),
        ("none", []),
        ("none*", []),
    ):
        assert sorted(store.glob(join(place, pattern))) == [join(place, name) for name in expected]
    assert store.sizes([join(place, name) for name in ("in/c.tfrecord", "in/no", "in/[x]")]) == [3, None, 3]


def test_files_are_written_read_in_parts_and_deleted(place: str, tmp_path: Path) -> None:
    store, b, c = open_storage(place), join(place, "a/b.txt"), join(place, "a/c.txt")
    store.write(b, b"0123456789")
    with open(tmp_path / "made", "w+b") as made:
        made.write(b"published")
        assert store.publish(made, c)
    assert (tmp_path / "made").exists() != storage.is_local(place), "renamed"
    assert (store.read(b), store.read(b, 2, 5), store.read(b, 7)) == (b"0123456789", b"234", b"789")
    assert store.read(b, 4, 4) == b""
    with store.open(c) as file:
        assert file.read() == b"published"
    assert {file.path: file.bytes for file in store.files(place)} == {"a/b.txt": 10, "a/c.txt": 9}
    assert store.names(place) == ["a/"]
    store.write(b, b"")
    assert store.size(b) == 0
    if not place.startswith("az"):  # Azurite answers with a range of -1 bytes, which Azure doesn't
        assert store.read(b) == b""
    for _ in range(2):
        store.delete(b)
    assert store.stat(c) is not None
    store.delete(c)
    assert store.stat(c) is None


def test_what_is_not_there_is_missing(place: str) -> None:
    store = open_storage(place)
    assert store.stat(join(place, "no")) is None
    for ask in (store.read, store.open, store.size, lambda url: store.read_range(url, 0, 5)):
        with pytest.raises(StorageError, match=f"^{join(place, 'no')} is missing$") as raised:
            ask(join(place, "no"))
        assert isinstance(raised.value, FileNotFoundError)
    assert store.names(join(place, "folder")) == []


def test_a_file_is_created_once(place: str) -> None:
    store = open_storage(place)
    assert store.create(join(place, "x"), b"mine")
    assert store.create(join(place, "x"), b"mine"), "the lost answer to the same request"
    assert not store.create(join(place, "x"), b"other")
    assert store.read(join(place, "x")) == b"mine"


WRITES = (("local", "write"), ("local", "publish"), ("gs", "write"), ("gs", "publish"), ("s3", "write"))


@pytest.mark.parametrize(("bucket", "by"), WRITES, indirect=["bucket"])
def test_a_file_is_replaced_and_deleted_only_as_it_was_found(place: str, by: str, tmp_path: Path) -> None:
    store, url = open_storage(place), join(place, "x")

    def put(data: bytes, generation: str) -> bool:
        if by == "write":
            return store.write(url, data, generation)
        with temporary_file(str(tmp_path) if storage.is_local(url) else None) as file:
            file.write(data)
            return store.publish(file, url, generation)

    assert not put(b"0", "1")
    assert put(b"1", "")
    assert storage.is_local(url) or put(b"1", ""), "the lost answer to the same request"
    assert not put(b"2", "")
    first = store.stat(url)
    assert first is not None and [first.generation] == [file.generation for file in store.files(place)]
    assert put(b"2", first.generation)
    assert not put(b"3", first.generation)
    if not place.startswith("gs"):  # fake-gcs-server deletes whatever the condition
        store.delete(url, first.generation)
    assert store.read(url) == b"2"
    second = store.stat(url)
    assert second is not None and second.generation != first.generation
    store.delete(url, second.generation)
    assert store.stat(url) is None
    assert not put(b"4", second.generation), "it is gone"
    assert [*store.files(place)] == [*tmp_path.glob("*.tmp")] == []


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1])
def test_a_file_of_another_crc_is_not_intact(place: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pieces of 1 MiB, so that a file ends inside a piece, at its end and right behind it; an empty one has none.
    monkeypatch.setattr(storage, "_PIECE_BYTES", 1 << 20)
    data, store, url = os.urandom(size), open_storage(place), join(place, "x")
    store.write(url, data)
    for crc32c in (google_crc32c.value(data), google_crc32c.value(data) ^ 1):
        is_intact = storage.is_intact(store, url, store.stat(url), size, crc32c, "always")
        assert is_intact == (crc32c == google_crc32c.value(data))


@ON_BUCKETS
def test_a_large_object_arrives_complete(place: str) -> None:
    data = os.urandom((40 << 20) + 1)  # three chunks
    with tempfile.TemporaryFile() as big:
        big.write(data)
        open_storage(place).publish(big, f"{place}/big")
    assert open_storage(place).read(f"{place}/big") == data
