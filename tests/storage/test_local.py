"""Files of this machine: any name, links, folders that may not be read; paths and URLs as text."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from beam_pipeline.errors import StorageError
from beam_pipeline.storage import ListedFile, is_local, join, normalize, open_storage
from beam_pipeline.storage.local import delete_tree
from tests import make
from tests.make import ODD_NAMES

STORE = open_storage("/")


def names_below(url: str) -> dict[str, int]:
    """Name → bytes of what is listed."""
    listed = list(STORE.files(url))
    assert len({file.path for file in listed}) == len(listed), "listed twice"
    return {file.path: file.bytes for file in listed}


any_name = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(st.lists(any_name.filter(lambda name: name not in (".", "..")), min_size=1, max_size=4))
@example([name for name in ODD_NAMES if len(name) < 200])
@example(["new\nline.jpg"])
@example(["tab\t.jpg", "return\r.jpg"])
def test_any_local_name_reads_back(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    url = str(tmp_path_factory.mktemp("any"))
    paths = {*names, "below/" + "/".join(name for name in names if "/" not in name)[:200].rstrip("/")}
    for path in paths:
        STORE.write(join(url, path), path.encode())
    assert names_below(url) == {path: len(path.encode()) for path in paths}
    assert all(STORE.read(join(url, path)) == path.encode() for path in paths)


def test_a_local_name_that_is_no_utf8_reads_back(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9.jpg", "wb") as file:
        file.write(b"x")
    (name,) = names_below(str(tmp_path))
    assert STORE.read(join(str(tmp_path), name)) == b"x"


def test_a_local_listing_tells_an_edit_of_the_same_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (before,) = STORE.files(str(tmp_path))
    os.utime(tmp_path / "a", ns=(1, 1))
    (after,) = STORE.files(str(tmp_path))
    assert str(before.etag).startswith("mtime_ns:")
    assert before.etag != after.etag
    assert after.crc32c is None


def test_folders_are_told_from_files_by_their_slash(tmp_path: Path) -> None:
    for name in ("b", "a", "B", "é"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("a")
    assert STORE.names(str(tmp_path)) == ["B/", "a/", "b/", "file", "link/", "é/"]
    assert STORE.names(str(tmp_path / "missing")) == STORE.names(str(tmp_path / "file")) == []


ROUND = {"a/link": "b", "b/link": "a"}


@pytest.mark.parametrize(
    ("links", "listed", "expected"),
    [
        ({"a/file.jpg": "b/b.jpg", "a/dog": "b"}, "a", {"a.jpg", "file.jpg", "dog/b.jpg"}),
        # what leads nowhere or back
        *(({"a/link": target}, "a", {"a.jpg"}) for target in ("a/link", "a", "", "missing")),
        ({"a/one": "a/other", "a/other": "a/one"}, "a", {"a.jpg"}),
        # folders above the listed one, by any name
        ({"linked": "", "a/loop": "linked"}, "linked/a", {"a.jpg"}),
        ({"loop": ""}, "loop", set()),
        ({"elsewhere": "b"}, "elsewhere", {"b.jpg"}),
        (ROUND, "", {"a/a.jpg", "a/link/b.jpg", "b/b.jpg", "b/link/a.jpg"}),
    ],
)
def test_links_are_followed_but_never_back(
    tmp_path: Path, links: dict[str, str], listed: str, expected: set[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.jpg").write_bytes(b"1")
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    assert set(names_below(str(tmp_path / listed))) == expected


@pytest.mark.parametrize("levels", [3, 17, pytest.param(30, marks=pytest.mark.soak)])
def test_links_that_multiply_paths_are_followed_a_hundred_times_at_most(tmp_path: Path, levels: int) -> None:
    for number in range(levels):
        (tmp_path / f"d{number}").mkdir()
        for link in "xy" if number + 1 < levels else "":
            (tmp_path / f"d{number}" / link).symlink_to(tmp_path / f"d{number + 1}")
    (tmp_path / f"d{levels - 1}" / "photo.jpg").write_bytes(b"1")
    if levels == 3:  # a folder that is linked twice is meant twice
        assert set(names_below(str(tmp_path / "d0"))) == {f"{x}/{y}/photo.jpg" for x in "xy" for y in "xy"}
        return
    with pytest.raises(StorageError, match=r"^/.*/d\d+: more than 100 paths lead to it by links; remove some links$"):
        list(STORE.files(str(tmp_path / "d0")))


@pytest.mark.parametrize("file", ["/proc/kmsg", "/dev/null", "/dev/zero", "/dev/urandom", "/proc/self/mem", "pipe"])
def test_nothing_that_blocks_or_never_ends_is_waited_for(tmp_path: Path, file: str) -> None:
    if file == "pipe":
        os.mkfifo(tmp_path / "pipe")
    elif not Path(file).exists():
        pytest.skip(f"no {file} here")
    (tmp_path / "x.jpg").symlink_to(file)
    read = subprocess.run(
        [sys.executable, "-c", _READS, str(tmp_path / "x.jpg")], timeout=30, capture_output=True, text=True, check=True
    )
    assert int(read.stdout) < 1 << 24


_READS = """import sys
from beam_pipeline import storage
try:
    print(len(storage.open_storage("/").read(sys.argv[1])))
except storage.StorageError:
    print(0)
"""


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


def test_what_is_no_file_is_listed_only_if_every_name_is_asked_for_and_never_waited_for(tmp_path: Path) -> None:
    names, url = no_files(tmp_path / "in"), str(tmp_path / "in")
    (tmp_path / "in" / "x.jpg").write_bytes(b"1")
    assert [file.path for file in STORE.files(url)] == ["x.jpg"]
    listed = {file.path: file for file in STORE.files(url, every_name=True)}
    assert listed.pop("x.jpg").bytes == 1
    assert listed == {name: ListedFile(name, 0, "") for name in names}
    assert STORE.names(url) == sorted([*names, "x.jpg"])
    for name in [*names, "missing", "pipe/x"]:
        assert STORE.stat(join(url, name)) is None, name
        for ask in (STORE.read, STORE.open):
            with pytest.raises(FileNotFoundError):
                ask(join(url, name))


def test_a_folder_is_no_file_and_no_file_is_written_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    url = str(tmp_path / "x")
    assert STORE.stat(url) is None
    with pytest.raises(FileNotFoundError, match="is a folder, not a file"):
        STORE.read(url)
    with pytest.raises(StorageError, match="directory"):
        STORE.write(url, b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["x"], "nothing is left"


def test_a_range_is_read_into_the_given_memory(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    out = memoryview(bytearray(8))
    for start, end, expected in ((3, 7, b"3456"), (8, 12, b"89"), (12, 14, b"")):
        got = STORE.read_range(str(tmp_path / "x"), start, end, out)
        assert bytes(got) == expected == bytes(out[: len(got)])
    with pytest.raises(StorageError, match="is missing"):
        STORE.read_range(str(tmp_path / "no"), 0, 1, out)


def test_a_folder_that_goes_while_it_is_listed_is_no_failure(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jpg").write_bytes(b"1")
    listing = STORE.files(str(tmp_path))
    first = next(listing).path
    other = "b" if first.startswith("a") else "a"
    shutil.rmtree(tmp_path / other)
    assert list(listing) == []


def test_a_folder_whose_files_may_not_be_looked_at_is_an_error_not_empty(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "in" / "cat" / "kittens").mkdir(parents=True)
    (tmp_path / "in" / "cat" / "x.jpg").write_bytes(b"1")
    monkeypatch.chdir(tmp_path / "in")  # folders above are pytest's own
    user = os.geteuid()
    os.chmod("cat", 0o744 if user == 0 else 0o644)  # its names can be read, no more
    try:
        with contextlib.suppress(PermissionError):
            os.seteuid(65534)  # without root's right to everything
        with pytest.raises(StorageError, match=r"^cat/(x\.jpg|kittens): permission denied; give this account"):
            list(STORE.files("cat"))
    finally:
        os.seteuid(user)
        os.chmod("cat", 0o755)


def test_of_a_link_only_the_link_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "x").write_bytes(b"1")
    (tmp_path / "top").mkdir()
    for link in ("link", "top/link"):
        (tmp_path / link).symlink_to(tmp_path / "disk")
    for url in ("link", "top", "missing"):
        delete_tree(str(tmp_path / url))
    assert [*names_below(str(tmp_path))] == ["disk/x"]
    assert os.listdir(tmp_path) == ["disk"]


@pytest.mark.parametrize("change", ["create", "replace"])
def test_of_many_threads_one_creates_or_replaces_a_file(tmp_path: Path, change: str) -> None:
    url, done = str(tmp_path / "folder" / "x"), []
    for _ in range(50):
        found = STORE.stat(url)
        generation = found.generation if found and change == "replace" else ""
        start = threading.Barrier(4)

        def write(number: int, generation: str = generation, start: threading.Barrier = start) -> None:
            start.wait()
            if STORE.write(url, b"%d" % number, generation):
                done.append(number)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
        assert [STORE.read(url)] == [b"%d" % number for number in done]
        done.clear()
        if change == "create":
            STORE.delete(url)
    assert os.listdir(tmp_path / "folder") in ([], ["x"])


def test_without_hard_links_or_locks_a_file_is_still_created_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no such thing here")

    monkeypatch.setattr("os.link", refuse)
    monkeypatch.setattr("fcntl.flock", refuse)
    url = str(tmp_path / "x")
    assert STORE.create(url, b"1") and not STORE.create(url, b"2")
    found = STORE.stat(url)
    assert found and STORE.write(url, b"3", found.generation) and not STORE.write(url, b"4", found.generation)
    assert make.files(tmp_path) == {"x": b"3"}


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file 1,100 levels down, more than Python's calls can be nested."""
    path = tmp_path / "top"
    for _ in range(1100):
        path.mkdir()
        path /= "d"
    path.write_bytes(b"1")
    yield tmp_path / "top"
    subprocess.run(["rm", "-r", tmp_path / "top"], check=False)  # pytest's own cleaning up would end in the same error


def test_folders_may_be_nested_deeply(deep: Path) -> None:
    (deep / "d/back").symlink_to(deep)
    (name,) = names_below(str(deep))
    assert name == "/".join(["d"] * 1100)
    assert STORE.read(f"{deep}/{name}") == b"1"


def test_folders_nested_too_deeply_for_a_pattern_or_a_deletion_are_one_line(deep: Path) -> None:
    for ask in (lambda: STORE.glob(f"{deep}/**/d"), lambda: delete_tree(str(deep))):
        with pytest.raises(StorageError, match="nested too deeply"):
            ask()


def test_a_file_is_written_though_its_folder_is_deleted_whenever_it_is_empty(tmp_path: Path) -> None:
    url = str(tmp_path / "state/inflight/marker")
    ends = threading.Event()

    def delete() -> None:
        while not ends.is_set():
            STORE.delete_empty_folders(os.path.dirname(url), str(tmp_path))

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        for _ in range(150):
            assert STORE.create(url, b"x")
            STORE.delete(url)
    finally:
        ends.set()
        thread.join()


def test_a_file_in_place_of_a_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        STORE.write(str(tmp_path / "file/name"), b"")


def test_join_changes_nothing() -> None:
    assert (join("/data", "a//b"), join("/", "a")) == ("/data/a//b", "/a")
    assert join("gs://bucket/x", "../y b#?") == "gs://bucket/x/../y b#?"


def test_normalize_makes_local_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert normalize("photos/") == normalize("./a/../photos") == str(tmp_path / "photos")
    assert normalize("~/photos") == str(tmp_path / "home" / "photos")
    assert normalize("file:///data/a b%20/") == "/data/a b%20"
    assert (normalize("gs://bucket/photos/"), normalize("gs://bucket/")) == ("gs://bucket/photos", "gs://bucket")
    assert not any(is_local(normalize(url)) for url in ("gs://", "gs:///", "nope://"))
