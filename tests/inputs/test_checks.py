"""What is wrong with an input is told before there is a job; labels files."""

from __future__ import annotations

from pathlib import Path

import pytest

from beam_pipeline.config import Config
from beam_pipeline.errors import UsageError
from beam_pipeline.inputs.checks import check_input, read_labels
from beam_pipeline.inputs.folders import ListingSummary, class_folders
from tests import make
from tests.inputs.test_folders import config, touch
from tests.servers import Gcs


def refused(some: Config) -> str:
    with pytest.raises(UsageError) as caught:
        check_input(some)
    return str(caught.value)


def test_a_whole_bucket_can_be_the_input(gcs: Gcs) -> None:
    bucket = gcs.new_bucket()
    gcs.put(bucket, "a/1.jpg", b"1")
    check_input(config(f"gs://{bucket}/"))


# --- what is refused


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert refused(config(tmp_path / "no")) == f"--input '{tmp_path}/no': no such folder"


def test_a_bucket_that_is_not_there(gcs: Gcs) -> None:
    assert refused(config("gs://not-there/in")) == "--input 'gs://not-there/in': no such bucket"


def test_an_empty_bucket_says_so(gcs: Gcs) -> None:
    url = f"gs://{gcs.new_bucket()}"
    assert refused(config(url)) == (
        f"--input '{url}': no class folders, nothing in it; --layout class_folders wants DIR/CLASS/image.jpg"
    )


def test_images_without_folders_are_counted_up_to_a_thousand(tmp_path: Path) -> None:
    touch(tmp_path, *(f"{number}.jpg" for number in range(1_001)))
    assert ": 1,000 images or more directly in it; " in refused(config(tmp_path))


def test_a_class_folder_as_input_names_the_folder_above(tmp_path: Path) -> None:
    touch(tmp_path, "photos/cat/1.jpg", "photos/cat/notes.txt")
    assert refused(config(tmp_path / "photos/cat")) == (
        f"--input '{tmp_path}/photos/cat': 1 image directly in it; if 'cat' is a class, give --input "
        f"'{tmp_path}/photos', else sort them into DIR/CLASS/image.jpg"
    )


def test_hidden_class_folders_alone_are_told(tmp_path: Path) -> None:
    touch(tmp_path, ".cat/1.jpg", ".dog/2.jpg")
    assert refused(config(tmp_path)) == (
        f"--input '{tmp_path}': no class folders, 2 hidden folders in it; "
        "--layout class_folders wants DIR/CLASS/image.jpg"
    )


def test_images_at_the_top_of_a_bucket_have_no_folder_above(gcs: Gcs) -> None:
    bucket = gcs.new_bucket()
    gcs.put(bucket, "1.jpg", b"x")
    assert refused(config(f"gs://{bucket}")) == (
        f"--input 'gs://{bucket}': no class folders, 1 image directly in it; "
        "--layout class_folders wants DIR/CLASS/image.jpg"
    )


def test_folders_that_are_splits_are_not_taken_for_classes(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.jpg", "val/a/1.jpg")
    assert refused(config(tmp_path)) == (
        f"--input '{tmp_path}': its folders are splits, not classes: train, val; give --layout split_class_folders"
    )


@pytest.mark.parametrize("classes", [("train",), ("train", "bus"), ("test", "dev")])
def test_classes_may_have_names_of_splits(tmp_path: Path, classes: tuple[str, ...]) -> None:
    touch(tmp_path, *(f"{name}/1.jpg" for name in classes))
    check_input(config(tmp_path))


def test_split_folders_without_class_folders(tmp_path: Path) -> None:
    touch(tmp_path, "train/1.jpg")
    assert refused(config(tmp_path, layout="split_class_folders")) == (
        f"--input '{tmp_path}': no class folders in folders of splits (DIR/SPLIT/CLASS/image.jpg); "
        "for DIR/CLASS/image.jpg give --layout class_folders"
    )


def test_a_split_folder_that_tfds_cannot_read(tmp_path: Path) -> None:
    touch(tmp_path, "Train/a/1.jpg")
    assert refused(config(tmp_path, layout="split_class_folders")) == (
        "--input: folder 'Train' can't be a split: rename it to a-z, 0-9 and _, a letter first"
    )


@pytest.mark.parametrize("name", [" a", "a ", "a\nb", "\u00a0a", "a\u2028b", "a\u0085b", " "])
def test_class_names_that_tfds_would_change(tmp_path: Path, name: str) -> None:
    touch(tmp_path, f"{name}/1.jpg")
    assert refused(config(tmp_path)) == (
        f"class folder {name!r}: rename it, white space around a class name and line breaks are lost by TFDS"
    )


@pytest.mark.parametrize("name", ["a b", "größe", "#1", "100%", "a,b", "n01440764"])
def test_class_names_that_are_fine(tmp_path: Path, name: str) -> None:
    touch(tmp_path, f"{name}/1.jpg")
    check_input(config(tmp_path))
    assert [folder.label for folder in class_folders(config(tmp_path), ListingSummary())] == [name]


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
        (b"", "it is empty"),
        (b"\n \n", "it is empty"),
        (b"a\nb\na\n", "class 'a' stands in it twice"),
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


def test_a_folder_that_is_not_in_the_labels_file(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "b/1.jpg", "c/1.jpg")
    assert refused(config(tmp_path, labels_file="/l.txt", labels=("a",))) == (
        "--labels_file '/l.txt': class folder 'b' is not in it, nor 1 more; add a line for each or move the folder away"
    )


def test_labels_of_the_file_are_the_ids(photos: Path, tmp_path: Path) -> None:
    url = labels_file(tmp_path, b"zebra\ncat\nbee\nant\n")
    version = make.published(photos, tmp_path / "out", "--labels_file", url)
    assert (version / "class.labels.txt").read_text() == "zebra\ncat\nbee\nant\n"
    assert make.manifest(version)["splits"]["train"]["class_counts"] == [0, 13, 13, 14]
