"""What is in the output already: nothing of the user's is read as input, replaced or deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import make
from tests.servers import Gcs


def line_of(finished: make.Finished) -> str:
    """The one line of a usage error."""
    assert (finished.code, finished.out, finished.err.count("\n")) == (2, "", 1), finished
    return finished.err.removeprefix("error: ").removesuffix("\n")


# --- files that are not ours


@pytest.mark.parametrize("flags", [(), ("--repair",)])
@pytest.mark.parametrize(
    "names",
    [
        ("notes.txt", "drafts/1.txt"),
        # What TFDS itself writes, and a dataset that got another name and lost its manifest.
        ("photos-train.tfrecord-00000-of-00001", "features.json", "dataset_info.json", "label.labels.txt"),
        ("index/pics-train.tfrecord-00000-of-00001.idx", "index/train.runs.npy", "rejects.jsonl", "class.labels.txt"),
    ],
)
def test_files_of_others_are_refused_and_left_alone(
    photos: Path, tmp_path: Path, flags: tuple[str, ...], names: tuple[str, ...]
) -> None:
    for name in names:
        path = tmp_path / "photos" / "1.0.0" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("keep")
    assert "/photos/1.0.0 holds files of another program ('" in line_of(make.job(photos, tmp_path, *flags))
    assert make.files(tmp_path) == {f"photos/1.0.0/{name}": b"keep" for name in names}


def test_objects_of_others_are_refused_and_left_alone(photos: Path, gcs: Gcs) -> None:
    bucket = gcs.new_bucket()
    gcs.put(bucket, "out/photos/1.0.0/notes.txt", b"keep")
    assert "('notes.txt')" in line_of(make.job(photos, f"gs://{bucket}/out", "--repair"))
    assert gcs.names(bucket) == ["out/photos/1.0.0/notes.txt"]


@pytest.mark.parametrize("name", ["manifest.json", "index"])
def test_overwrite_deletes_everything_there(photos: Path, original: Path, version: Path, name: str) -> None:
    shutil.rmtree(version / "index")
    if name == "index":
        (version / name).write_text("mine")
    else:
        (version / name).unlink()
    for other in {"drafts", name} - {"index"}:
        (version / other).mkdir()
        (version / other / "mine").write_text("old")
    finished = make.again(photos, version, "--overwrite")
    assert finished.code == 0, finished.err
    assert make.same_each_time(version) == make.same_each_time(original)


# --- input and output in one another


@pytest.mark.parametrize(
    ("place", "flags"), [("1.0.0/source", ("--overwrite",)), ("_state/source", ("--repair",)), ("link", ())]
)
def test_an_input_in_the_version_is_refused(photos: Path, version: Path, place: str, flags: tuple[str, ...]) -> None:
    source = version.parent / place
    shutil.copytree(photos, version / "source" if place == "link" else source)
    if place == "link":
        source.symlink_to(version / "source")
    before = make.files(version.parent)
    folder = version.parent / "_state" if place.startswith("_") else version
    line = f"--input '{source}': it is in {folder}, which belongs to the job; move it elsewhere"
    assert line_of(make.again(source, version, *flags)) == line
    assert make.files(version.parent) == before


def test_a_file_of_the_input_inside_the_version_is_refused(photos: Path, version: Path) -> None:
    (file := version / "mine.csv").write_text("path,label\nant/0000.jpg,ant\n")
    for flag, *more in (("--manifest", "--layout", "manifest"), ("--labels_file",)):
        line = line_of(make.job(photos, version.parent.parent, flag, file, *more, "--overwrite"))
        assert line == f"{flag} '{file}': it is in {version}, which belongs to the job; move it elsewhere"
        assert file.exists()


def test_a_neighbour_of_the_version_is_no_part_of_it(photos: Path, version: Path) -> None:
    source = Path(shutil.copytree(photos, version.parent / "1.0.0-source"))
    assert make.again(source, version).out.startswith("already published")


@pytest.mark.parametrize("linked", ["output", "input"])
def test_an_output_inside_the_input_is_seen_through_a_link(photos: Path, tmp_path: Path, linked: str) -> None:
    images = Path(shutil.copytree(photos, tmp_path / "in"))
    link = tmp_path / "link"
    link.symlink_to(images)
    source, output = (images, link) if linked == "output" else (link, images)
    before = make.files(tmp_path)
    line = line_of(make.job(source, output))
    assert line == f"--output '{output}': it is inside --input '{source}'; choose another folder"
    assert make.files(tmp_path) == before
