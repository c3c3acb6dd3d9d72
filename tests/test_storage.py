"""Local folders, gs:// on the real fake-gcs-server, and fsspec: names survive, listings stream, writes are whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_pipeline import storage
from beam_pipeline.errors import StorageError
from beam_pipeline.storage import ListedFile, google, join, normalize, open_storage, retries
from beam_pipeline.storage.retries import retry
from tests.servers import Gcs

ODD_NAMES = [
    "plain.jpg",
    "a space.jpg",
    " leading and trailing .jpg",
    "trailing space ",
    "hash#1.jpg",
    "percent%20.jpg",
    "percent%.jpg",
    "plus+.jpg",
    "brackets[x].jpg",
    "star*.jpg",
    "question?.jpg",
    "quote'\".jpg",
    "back\\slash.jpg",
    "semi;colon,comma&and=equals.jpg",
    "curly{a,b}.jpg",
    "tilde~.jpg",
    "at@colon:.jpg",
    "a..b.jpg",
    "folder/with #/nested.jpg",
    "folder/trailing space /x.jpg",
    unicodedata.normalize("NFC", "größe é 1.jpg"),
    unicodedata.normalize("NFD", "größe é 2.jpg"),
    unicodedata.normalize("NFC", "twin é.jpg"),
    unicodedata.normalize("NFD", "twin é.jpg"),
    "日本語 🐈.jpg",
    "x" * 240 + ".jpg",
    "generation.jpg#123",
]
ONLY_REMOTE = [
    "double//slash.jpg",
    "/leading slash.jpg",
    "dot/./in.jpg",
    "dots/../in.jpg",
    "y" * 900 + ".jpg",
    "a/b//c///d.jpg",
]
ONLY_LOCAL = ["new\nline.jpg", "tab\t.jpg", "return\r.jpg"]


def content(name: str) -> bytes:
    return f"content of {name}".encode()


def names_below(url: str) -> dict[str, ListedFile]:
    listed = list(open_storage(url).files(url))
    assert len({file.path for file in listed}) == len(listed), "listed twice"
    return {file.path: file for file in listed}


# --- odd names


def test_odd_local_names_are_listed_as_they_are_and_read_back(tmp_path: Path) -> None:
    for name in ODD_NAMES + ONLY_LOCAL:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(name))
    url = str(tmp_path / "in")
    listed = names_below(url)
    assert set(listed) == {*ODD_NAMES, *ONLY_LOCAL}
    for name, file in listed.items():
        assert file.bytes == len(content(name))
        assert open_storage(url).read(join(url, name)) == content(name)


def test_a_local_name_that_is_no_utf8_reads_back(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9.jpg", "wb") as file:
        file.write(b"x")
    (name,) = names_below(str(tmp_path))
    assert open_storage("").read(join(str(tmp_path), name)) == b"x"


def test_odd_object_names_are_listed_as_they_are_and_read_back(gcs: Gcs) -> None:
    bucket = gcs.new_bucket()
    for name in ODD_NAMES + ONLY_REMOTE:
        gcs.put(bucket, f"in/{name}", content(name))
    url = f"gs://{bucket}/in"
    listed = names_below(url)
    assert set(listed) == {*ODD_NAMES, *ONLY_REMOTE}
    for name, file in listed.items():
        assert file.bytes == len(content(name))
        assert open_storage(url).read(join(url, name)) == content(name)
        assert open_storage(url).read(join(url, name), 3, 7) == content(name)[3:7]
        stat = open_storage(url).stat(join(url, name))
        assert stat is not None
        assert (stat.bytes, stat.etag, stat.crc32c) == (file.bytes, file.etag, file.crc32c)


def test_odd_object_names_can_be_written_and_deleted(gcs: Gcs, tmp_path: Path) -> None:
    bucket = gcs.new_bucket()
    store = open_storage("gs://")
    names = ODD_NAMES + ONLY_REMOTE
    for number, name in enumerate(names):
        if number % 2:
            store.write(f"gs://{bucket}/out/{name}", content(name))
        else:
            (tmp_path / "file").write_bytes(content(name))
            store.publish(str(tmp_path / "file"), f"gs://{bucket}/out/{name}")
            assert not (tmp_path / "file").exists()
    assert gcs.names(bucket) == sorted(f"out/{name}" for name in names)
    assert all(gcs.get(bucket, f"out/{name}") == content(name) for name in names)
    for name in names:
        store.delete(f"gs://{bucket}/out/{name}")
    assert gcs.names(bucket) == []


# --- what a listing says


def test_a_google_listing_gives_size_md5_and_crc32c(gcs: Gcs) -> None:
    import hashlib

    bucket = gcs.new_bucket()
    gcs.put(bucket, "in/a.jpg", b"12345")
    (file,) = open_storage("gs://").files(f"gs://{bucket}/in")
    assert file == ListedFile("a.jpg", 5, f"md5:{hashlib.md5(b'12345').hexdigest()}", google_crc32c.value(b"12345"))


def test_a_composite_object_has_its_crc32c_for_an_etag() -> None:
    # GCS leaves out md5Hash there, https://cloud.google.com/storage/docs/composite-objects
    item = {"name": "x", "size": "7", "crc32c": "AAAA/w=="}
    assert google.listed_file("x", item) == ListedFile("x", 7, "crc32c:000000ff", 0xFF)


def test_a_local_listing_tells_an_edit_of_the_same_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (before,) = open_storage("").files(str(tmp_path))
    os.utime(tmp_path / "a", ns=(1, 1))
    (after,) = open_storage("").files(str(tmp_path))
    assert before.etag.startswith("mtime_ns:")
    assert before.etag != after.etag
    assert after.crc32c is None


def test_placeholder_objects_are_no_files_but_their_folders_are_folders(gcs: Gcs) -> None:
    bucket = gcs.new_bucket()
    for name in ("in/", "in/cat/", "in/dog/", "in/dog/sub/"):
        gcs.put(bucket, name, b"")
    gcs.put(bucket, "in/cat/a.jpg", b"1")
    store = open_storage("gs://")
    assert [file.path for file in store.files(f"gs://{bucket}/in")] == ["cat/a.jpg"]
    assert sorted(store.names(f"gs://{bucket}/in")) == ["cat/", "dog/"]
    assert list(store.names(f"gs://{bucket}")) == ["in/"]


def test_a_prefix_is_a_folder_not_the_start_of_a_name(gcs: Gcs) -> None:
    bucket = gcs.new_bucket()
    for name in ("in/a.jpg", "inner/b.jpg", "in.jpg"):
        gcs.put(bucket, name, b"1")
    assert [file.path for file in open_storage("gs://").files(f"gs://{bucket}/in")] == ["a.jpg"]


def test_a_listing_of_several_pages_is_whole(gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google, "_PAGE_NAMES", 100)
    bucket = gcs.new_bucket()
    names = {f"{number:05d}" for number in range(203)}
    for name in names:
        gcs.put(bucket, f"in/{name}", b"")
    before = len(gcs.requests())
    assert set(names_below(f"gs://{bucket}/in")) == names
    assert sum(request.listed_prefix == "in/" for request in gcs.requests()[before:]) == 3


def test_folders_are_told_from_files_by_their_slash(tmp_path: Path) -> None:
    for name in ("b", "a", "B", "é"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_bytes(b"")
    assert sorted(open_storage("").names(str(tmp_path))) == ["B/", "a/", "b/", "file", "é/"]
    assert list(open_storage("").names(str(tmp_path / "missing"))) == []
    assert list(open_storage("").names(str(tmp_path / "file"))) == []


# --- symbolic links


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.jpg").write_bytes(b"1")
    (tmp_path / "in" / "cat").mkdir(parents=True)
    (tmp_path / "in" / "cat" / "file.jpg").symlink_to(tmp_path / "elsewhere" / "x.jpg")
    (tmp_path / "in" / "dog").symlink_to(tmp_path / "elsewhere")
    assert set(names_below(str(tmp_path / "in"))) == {"cat/file.jpg", "dog/x.jpg"}
    assert sorted(open_storage("").names(str(tmp_path / "in"))) == ["cat/", "dog/"]


@pytest.mark.parametrize("target", ["self", ".", "..", "loop", "missing"])
def test_links_that_lead_nowhere_or_back_end(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "in" / "cat"
    folder.mkdir(parents=True)
    (folder / "x.jpg").write_bytes(b"1")
    if target == "loop":  # one to the other
        (folder / "a").symlink_to(folder / "b")
        (folder / "b").symlink_to(folder / "a")
    else:
        (folder / "self").symlink_to(
            {"self": folder / "self", ".": folder, "..": folder.parent}.get(target, folder / "no")
        )
    assert set(names_below(str(tmp_path / "in"))) == {"cat/x.jpg"}
    assert set(open_storage("").names(str(folder))) <= {"x.jpg", "self/", "self", "a", "b"}


@pytest.mark.parametrize("target", ["in", ".", "in/cat", "linked"])
def test_a_link_to_a_folder_that_holds_the_listed_one_is_not_followed(tmp_path: Path, target: str) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / f"{name}.jpg").write_bytes(b"1")
    (tmp_path / "linked").symlink_to("in")
    (tmp_path / "in" / "cat" / "loop").symlink_to(tmp_path / target)
    for folder in ("in", "linked"):
        assert set(names_below(str(tmp_path / folder / "cat"))) == {"cat.jpg"}


def test_a_listed_link_to_a_folder_that_holds_it_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "dog").mkdir()
    (tmp_path / "dog" / "x.jpg").write_bytes(b"1")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "elsewhere").symlink_to("dog")
    assert names_below(str(tmp_path / "loop")) == {}
    assert set(names_below(str(tmp_path / "elsewhere"))) == {"x.jpg"}


def no_files(folder: Path) -> list[str]:
    """A name of each kind that leads to no file, right inside `folder`."""
    folder.mkdir(parents=True)
    (folder / "nowhere").symlink_to(folder / "gone")
    (folder / "below a file").symlink_to(Path(__file__) / "x")
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "device").symlink_to(os.devnull)
    os.mkfifo(folder / "pipe")
    with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as listening:  # an address has 107 bytes at most
        listening.bind("socket")
    return sorted(path.name for path in folder.iterdir())


def test_what_is_no_file_is_listed_where_every_name_is_asked_for(tmp_path: Path) -> None:
    names = no_files(tmp_path / "in")
    (tmp_path / "in" / "x.jpg").write_bytes(b"1")
    store, url = open_storage(""), str(tmp_path / "in")
    assert [file.path for file in store.files(url)] == ["x.jpg"]
    listed = {file.path: file for file in store.files(url, every_name=True)}
    assert listed.pop("x.jpg").bytes == 1
    assert listed == {name: ListedFile(name, 0, "") for name in names}
    assert sorted(store.names(url)) == sorted([*names, "x.jpg"])


def test_what_is_no_file_is_not_found_and_never_waited_for(tmp_path: Path) -> None:
    store = open_storage("")
    for name in [*no_files(tmp_path / "in"), "missing", "pipe/x"]:
        url = str(tmp_path / "in" / name)
        assert store.stat(url) is None, name
        with pytest.raises(FileNotFoundError):
            store.read(url)
        with pytest.raises(FileNotFoundError):
            store.open(url)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    store = open_storage("")
    assert store.stat(str(tmp_path)) is None
    with pytest.raises(IsADirectoryError):
        store.read(str(tmp_path))


def test_a_folder_that_goes_while_it_is_listed_is_no_failure(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jpg").write_bytes(b"1")
    listing = open_storage("").files(str(tmp_path))
    first = next(listing).path
    other = "b" if first.startswith("a") else "a"
    shutil.rmtree(tmp_path / other)
    assert list(listing) == []


@contextmanager
def as_another_user() -> Iterator[None]:
    """Without root's right to everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_whose_files_may_not_be_looked_at_is_an_error_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in" / "cat" / "kittens").mkdir(parents=True)
    (tmp_path / "in" / "cat" / "x.jpg").write_bytes(b"1")
    monkeypatch.chdir(tmp_path / "in")  # folders above are pytest's own
    os.chmod("cat", 0o744 if os.geteuid() == 0 else 0o644)  # its names can be read, no more
    try:
        with as_another_user():
            with pytest.raises(StorageError, match=r"^cat/(x\.jpg|kittens): permission denied; give this account"):
                list(open_storage("").files("cat"))
            with pytest.raises(StorageError, match=r"^cat/(x\.jpg|kittens): permission denied; give this account"):
                list(open_storage("").names("cat"))
    finally:
        os.chmod("cat", 0o755)


def test_a_file_that_cannot_be_looked_at_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").symlink_to("y" * 300)
    for listed in (open_storage("").files, open_storage("").names):
        with pytest.raises(StorageError, match=r"x\.jpg: file name too long$"):
            list(listed(str(tmp_path)))


def test_two_folders_that_link_to_each_other_end(tmp_path: Path) -> None:
    for one, other in (("a", "b"), ("b", "a")):
        (tmp_path / one).mkdir()
        (tmp_path / one / f"{one}.jpg").write_bytes(b"1")
        (tmp_path / one / "link").symlink_to(tmp_path / other)
    assert set(names_below(str(tmp_path))) == {"a/a.jpg", "a/link/b.jpg", "b/b.jpg", "b/link/a.jpg"}


# --- reading and writing


@pytest.fixture(params=["local", "gs", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty folder, each kind of storage in turn."""
    if request.param == "gs":
        gcs = request.getfixturevalue("gcs")
        yield f"gs://{gcs.new_bucket()}/place"
    elif request.param == "local":
        yield str(tmp_path / "place")
    else:
        import fsspec

        yield f"memory://{tmp_path.name}/place"
        fsspec.filesystem("memory").store.clear()


def test_files_are_written_read_in_parts_and_deleted(place: str, tmp_path: Path) -> None:
    store = open_storage(place)
    store.write(join(place, "a/b.txt"), b"0123456789")
    (tmp_path / "made").write_bytes(b"published")
    store.publish(str(tmp_path / "made"), join(place, "a/c.txt"))
    assert not (tmp_path / "made").exists()
    assert store.read(join(place, "a/b.txt")) == b"0123456789"
    assert store.read(join(place, "a/b.txt"), 2, 5) == b"234"
    assert store.read(join(place, "a/b.txt"), 0, 1) == b"0"
    assert store.read(join(place, "a/b.txt"), 7) == b"789"
    with store.open(join(place, "a/c.txt")) as file:
        assert file.read() == b"published"
    assert {file.path: file.bytes for file in store.files(place)} == {"a/b.txt": 10, "a/c.txt": 9}
    assert list(store.names(place)) == ["a/"]
    store.write(join(place, "a/b.txt"), b"anew")
    assert store.read(join(place, "a/b.txt")) == b"anew"
    store.delete(join(place, "a/b.txt"))
    store.delete(join(place, "a/b.txt"))
    store.delete_tree(place)
    store.delete_tree(place)
    assert store.stat(join(place, "a/c.txt")) is None


def test_what_is_not_there_is_not_found(place: str) -> None:
    store = open_storage(place)
    assert store.stat(join(place, "no")) is None
    with pytest.raises(FileNotFoundError):
        store.read(join(place, "no"))
    with pytest.raises(FileNotFoundError):
        store.open(join(place, "no"))


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1])
def test_the_crc_of_a_file_is_read_in_pieces(place: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pieces of 1 MiB, so that a file ends inside a piece, at its end and right behind it; an empty one has none.
    monkeypatch.setattr(storage, "_PIECE_BYTES", 1 << 20)
    data = os.urandom(size)
    store = open_storage(place)
    store.write(join(place, "x"), data)
    assert storage.crc32c_of(store, join(place, "x"), size) == google_crc32c.value(data)


def test_a_large_object_arrives_whole(gcs: Gcs, tmp_path: Path) -> None:
    # More than one chunk of a resumable upload.
    data = os.urandom(12 << 20)
    (tmp_path / "big").write_bytes(data)
    url = f"gs://{gcs.new_bucket()}/big"
    open_storage(url).publish(str(tmp_path / "big"), url)
    assert open_storage(url).read(url) == data


def test_a_local_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="directory"):
        open_storage("").write(str(tmp_path / "x"), b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_link_to_an_emptied_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    for names in (("x", "y"), ()):
        for name in names:
            (tmp_path / "disk" / name).write_bytes(b"1")
        open_storage("").delete_tree(str(tmp_path / "link"))
        assert list((tmp_path / "link").iterdir()) == []


def test_one_read_is_one_request(gcs: Gcs) -> None:
    bucket = gcs.new_bucket()
    gcs.put(bucket, "a #1.jpg", b"12345")
    store = open_storage("gs://")
    before = len(gcs.requests())
    store.read(f"gs://{bucket}/a #1.jpg")
    assert [request.object_read for request in gcs.requests()[before:]] == ["a #1.jpg"]


# --- URLs


@pytest.mark.parametrize(
    ("base", "relative", "joined"),
    [
        ("/data", "a//b", "/data/a//b"),
        ("/", "a", "/a"),
        ("gs://bucket", "a b#?", "gs://bucket/a b#?"),
        ("gs://bucket/x", "../y", "gs://bucket/x/../y"),
    ],
)
def test_join_changes_nothing(base: str, relative: str, joined: str) -> None:
    assert join(base, relative) == joined


def test_normalize_makes_local_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert normalize("photos/") == str(tmp_path / "photos")
    assert normalize("./a/../photos") == str(tmp_path / "photos")
    assert normalize("~/photos") == str(tmp_path / "home" / "photos")
    assert normalize("file:///data/a b%20/") == "/data/a b%20"
    assert normalize("gs://bucket/photos/") == "gs://bucket/photos"
    assert normalize("gs://bucket/") == "gs://bucket"


@pytest.mark.parametrize("url", ["gs://", "gs:///", "s3://", "memory://"])
def test_normalize_never_makes_a_url_local(url: str) -> None:
    assert not storage.is_local(normalize(url))


def test_an_unknown_protocol_is_one_line() -> None:
    with pytest.raises(StorageError, match="can't open nope:// URLs"):
        open_storage("nope://x")


def test_a_version_is_told_where_a_proxy_leaves_its_generation_out(gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = gcs.new_bucket()
    gcs.put(bucket, "x", b"content")
    media = google.GoogleStorage._media
    monkeypatch.setattr(google.GoogleStorage, "_media", lambda *arguments: media(*arguments)._replace(headers={}))
    found = storage.open_versioned("gs://").version(f"gs://{bucket}/x")
    assert found is not None
    assert found.data == b"content"


# --- retries


class Status(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.code = code


@pytest.mark.parametrize(
    "error",
    [Status(408), Status(429), Status(500), Status(503), ConnectionResetError(), TimeoutError(), BrokenPipeError()],
    ids=repr,
)
def test_passing_failures_are_retried(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(retries.time, "sleep", pauses.append)
    failures = iter([error, error, error])

    def request() -> str:
        for failure in failures:
            raise failure
        return "done"

    assert retry(request, "gs://b/x", 600) == "done"
    assert len(pauses) == 3
    assert pauses[0] < pauses[2], "backoff"


@pytest.mark.parametrize(
    "error",
    [
        Status(400),
        Status(401),
        Status(403),
        Status(412),
        ValueError("bad"),
        PermissionError(errno.EACCES, "no"),
        PermissionError("Access Denied"),  # of s3fs
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EROFS, "read-only"),
        # No wait makes a folder a file.
        IsADirectoryError(errno.EISDIR, "folder"),
        NotADirectoryError(errno.ENOTDIR, "file"),
    ],
    ids=repr,
)
def test_lasting_failures_are_raised_at_once(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(retries.time, "sleep", pauses.append)

    def request() -> None:
        if len(pauses) > 3:
            raise FileNotFoundError("still retried")
        raise error

    with pytest.raises((StorageError, NotADirectoryError, IsADirectoryError), match=r"gs://b/x|\["):
        retry(request, "gs://b/x", 600)
    assert pauses == []


@pytest.mark.parametrize(
    ("module", "name", "fix"),
    [
        ("google.auth.exceptions", "DefaultCredentialsError", "gcloud auth application-default login"),
        ("botocore.exceptions", "NoCredentialsError", "aws configure"),
        ("botocore.exceptions", "UnauthorizedSSOTokenError", "aws configure"),
    ],
)
def test_missing_credentials_are_no_reason_to_wait_and_name_their_command(module: str, name: str, fix: str) -> None:
    def request() -> None:
        raise type(name, (Exception,), {"__module__": module})("unable to locate\ncredentials")

    with pytest.raises(
        StorageError, match=rf"^s3://b/x: {name}: unable to locate credentials; credentials .*: {fix}; the"
    ):
        retry(request, "s3://b/x", 600)


def test_a_refusal_without_a_number_says_what_is_missing() -> None:
    def request() -> None:
        raise PermissionError("Access Denied")

    with pytest.raises(StorageError, match=r"PermissionError: Access Denied; give this account the right to it"):
        retry(request, "s3://b/x", 600)


def test_a_missing_file_is_no_failure_of_storage() -> None:
    def request() -> None:
        raise FileNotFoundError("x")

    with pytest.raises(FileNotFoundError):
        retry(request, "gs://b/x", 600)


def test_retries_end_at_the_deadline_with_one_line() -> None:
    def request() -> None:
        raise ConnectionResetError("reset\nby peer")

    line = r"^gs://b/x: no success for 0 s: ConnectionResetError: reset by peer; the same .* longer$"
    with pytest.raises(StorageError, match=line):
        retry(request, "gs://b/x", 0.1)


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A local server in a thread; yields its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def in_a_process(code: str, url: str) -> str:
    """What a fresh Python prints that runs `code` with gs:// leading to `url`."""
    environment = {**os.environ, "STORAGE_EMULATOR_HOST": url}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_real_server_that_fails_twice_is_asked_again() -> None:
    answers: list[int] = []

    class Failing(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answers.append(503 if len(answers) < 2 else 200)
            body = b"content" if answers[-1] == 200 else b"busy"
            self.send_response(answers[-1])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    code = "from beam_pipeline import storage; print(storage.open_storage('gs://b').read('gs://b/x').decode())"
    with http_server(Failing) as url:
        assert in_a_process(code, url) == "content\n"
    assert answers == [503, 503, 200]


# --- the listing of very many objects


class MillionObjects(BaseHTTPRequestHandler):
    """The list call of the GCS JSON API over 1,000,000 objects that nobody stores."""

    protocol_version = "HTTP/1.1"
    total = 1_000_000
    pages = 0

    def do_GET(self) -> None:
        parameters = parse_qs(urlsplit(self.path).query)
        size = int(parameters["maxResults"][0])
        start = int(parameters.get("pageToken", ["0"])[0])
        items = ",".join(
            f'{{"name":"in/cat/photo-{number:09d}.jpg","size":"{number}","md5Hash":"rL0Y20zC+Fzt72VPzMSk2A==",'
            '"crc32c":"AAAA/w=="}'
            for number in range(start, min(start + size, self.total))
        )
        end = start + size
        token = f'"nextPageToken":"{end}",' if end < self.total else ""
        body = f'{{"kind":"storage#objects",{token}"items":[{items}]}}'.encode()
        type(self).pages += 1
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


ITERATE = """
import json, psutil
from beam_pipeline import storage
process, store = psutil.Process(), storage.open_storage("gs://b")
files = store.files("gs://b/in/cat")
count, bytes, most = 0, 0, 0
for file in files:
    count, bytes = count + 1, bytes + file.bytes
    if count == 2_000:
        before = process.memory_info().rss
    if count > 2_000 and count % 1_000 == 0:
        most = max(most, process.memory_info().rss)
print(json.dumps([count, bytes, (most - before) / 1e6]))
"""


def test_iterating_a_million_objects_grows_memory_by_less_than_50_mb() -> None:
    with http_server(MillionObjects) as url:
        count, total, growth_mb = json.loads(in_a_process(ITERATE, url))
    assert (count, total) == (1_000_000, 999_999 * 500_000)
    assert MillionObjects.pages == 1_000
    assert growth_mb < 50


# --- local paths under any names


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=30).filter(
            lambda name: name not in (".", "..") and len(name.encode()) < 250
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_local_name_reads_back(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("any")
    path = "/".join(parts)
    url = str(folder)
    open_storage(url).write(join(url, path), b"content")
    assert list(names_below(url)) == [path]
    assert open_storage(url).read(join(url, path)) == b"content"


def test_a_gs_configuration_imports_gcsfs_without_its_probe_of_the_buckets_type() -> None:
    code = (
        "from beam_pipeline import Config; Config(input='gs://a/b', output='gs://c/d', name='x'); "
        "import gcsfs; print(gcsfs.GCSFileSystem.__module__)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GCSFS_")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "gcsfs.core"  # the probing one is gcsfs.extended_gcsfs
