"""What is wrong with an input is told before there is a job; labels files."""

from __future__ import annotations

from pathlib import Path

import pytest

from beam_pipeline.config import Config
from beam_pipeline.errors import UsageError
from beam_pipeline.inputs.checks import check_input, read_labels
from beam_pipeline.inputs.folders import ListingSummary, class_folders
from tests.inputs.test_folders import config, touch
from tests.servers import Gcs


def refused(some: Config) -> str:
    with pytest.raises(UsageError) as caught:
        check_input(some)
    return str(caught.value)


LOOKED_FOR = "looked for DIR/CLASS/image.jpg, found"
SPLITS = "split_class_folders"


@pytest.mark.parametrize(
    ("names", "layout", "what"),
    [
        ([f"{number}.jpg" for number in range(1_001)], "class_folders", "1,000 images or more directly in it; "),
        (["cat/1.jpg", "1.jpg"], SPLITS, "looked for DIR/SPLIT/CLASS/image.jpg, found no class folders; for DIR/CLASS"),
        ([".cat/1.jpg", ".dog/2.jpg"], "class_folders", f"{LOOKED_FOR} only 2 hidden folders"),
        (["a/1.txt", "b/.2.jpg"], "class_folders", "no image in 2 class folders (1 file without an image suffix, 1 hi"),
    ],
    ids=["images", "classes", "hidden", "no image"],
)
def test_what_is_wrong_with_a_folder(tmp_path: Path, names: list[str], layout: str, what: str) -> None:
    # More, to the letter: tests/cli/messages.txt.
    folder = touch(tmp_path / "in", *names)
    assert refused(config(folder, layout=layout)).startswith(f"--input '{folder}': {what}")


def test_what_is_wrong_with_a_bucket(gcs: Gcs) -> None:
    assert refused(config("gs://not-there/in")) == "--input 'gs://not-there/in': no such bucket"
    bucket = gcs.new_bucket()
    url = f"gs://{bucket}"
    assert refused(config(url)) == f"--input '{url}': {LOOKED_FOR} nothing"
    gcs.put(bucket, "1.jpg", b"x")
    assert refused(config(url)) == f"--input '{url}': {LOOKED_FOR} no class folders"
    gcs.put(bucket, "a/1.jpg", b"1")
    check_input(config(f"{url}/"))
    gcs.put(bucket, "a.tgz", b"an archive")
    gcs.put(bucket, "b.tar/a/1.jpg", b"1")
    assert refused(config(f"{url}/a.tgz")).startswith(f"--input '{url}/a.tgz': an archive, not a folder; copy it to")
    check_input(config(f"{url}/b.tar"))


@pytest.mark.parametrize("classes", [("train",), ("train", "bus"), ("test", "dev")])
def test_classes_may_have_names_of_splits(tmp_path: Path, classes: tuple[str, ...]) -> None:
    check_input(config(touch(tmp_path, *(f"{name}/1.jpg" for name in classes))))


def test_a_split_folder_that_tfds_cannot_read(tmp_path: Path) -> None:
    assert refused(config(touch(tmp_path, "Train/a/1.jpg"), layout=SPLITS)) == (
        "--input: folder 'Train' can't be a split: rename it to a-z, 0-9 and _, a letter first"
    )


@pytest.mark.parametrize("name", ["a ", "a\nb", "\u00a0a", "a\u2028b", " "])
def test_class_names_that_tfds_would_change(tmp_path: Path, name: str) -> None:
    assert refused(config(touch(tmp_path, f"{name}/1.jpg"))) == (
        f"class folder {name!r}: write a name in UTF-8 without line breaks or white space around it"
    )


def test_class_names_that_are_fine(tmp_path: Path) -> None:
    names = ["#1", "100%", "a b", "a,b", "größe", "n01440764"]
    check_input(config(touch(tmp_path, *(f"{name}/1.jpg" for name in names))))
    assert [folder.label for folder in class_folders(config(tmp_path), ListingSummary())] == names


# --- labels files


def labels_file(tmp_path: Path, data: bytes) -> str:
    (tmp_path / "labels.txt").write_bytes(data)
    return str(tmp_path / "labels.txt")


@pytest.mark.parametrize("data", [b"dog\ncat\n", b"dog\r\ncat", b"\xef\xbb\xbfdog\ncat\n", b"dog\n\ncat\n\n"])
def test_labels_are_the_lines_in_their_order(tmp_path: Path, data: bytes) -> None:
    assert read_labels(labels_file(tmp_path, data), 1) == ("dog", "cat")


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\n \n", "it is empty"),
        (b"a\nb\na\n", "class 'a' is repeated"),
        (b"\xff\xfe", "not UTF-8; give a UTF-8 text file"),
    ],
)
def test_labels_files_that_say_nothing(tmp_path: Path, data: bytes, what: str) -> None:
    url = labels_file(tmp_path, data)
    with pytest.raises(UsageError, match=f"--labels_file '{url}': {what}"):
        read_labels(url, 1)


def test_a_missing_labels_file(gcs: Gcs, tmp_path: Path) -> None:
    for url in (str(tmp_path / "no"), f"gs://{gcs.new_bucket()}/no"):
        with pytest.raises(UsageError, match=f"--labels_file '{url}'"):
            read_labels(url, 1)


def test_classes_that_are_not_in_the_labels_file_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "b/1.jpg", "c/1.jpg")
    some = config(tmp_path, labels_file="/l", labels=("a",))
    assert refused(some).startswith("--labels_file '/l': it lacks 'b', 'c'; ")
