"""The drawn sample data: deterministic, varied, not told apart by colour; other files in the folder are left alone."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from beam_pipeline import sample_data
from beam_pipeline.errors import UsageError
from tests import make


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    sample_data.draw_folder(folder, images=150, classes=3, broken=4)
    return folder


def pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if not path.name.startswith("broken"))


def test_same_arguments_give_the_same_bytes_again_over_damaged_ones_too_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 6)):
        sample_data.draw_folder(tmp_path / name, images=8, classes=4, seed=seed, broken=3)
    before = make.files(tmp_path / "a")
    pictures_a, pictures_b = ({path.read_bytes() for path in pictures(tmp_path / name)} for name in "ab")
    assert len(pictures_a) == 8 and not pictures_a & pictures_b
    next(tmp_path.glob("a/star/*")).write_bytes(b"cut sh")
    sample_data.draw_folder(tmp_path / "a", images=8, classes=4, seed=5, broken=3)
    assert make.files(tmp_path / "a") == before


def test_a_picture_does_not_depend_on_how_many_there_are(drawn: Path, tmp_path: Path) -> None:
    sample_data.draw_folder(tmp_path / "few", images=9, classes=3, broken=0)
    assert make.files(tmp_path / "few").items() <= make.files(drawn).items()


def test_pictures_differ_in_class_format_size_and_orientation(drawn: Path) -> None:
    assert Counter(path.parent.name for path in pictures(drawn)) == {"circle": 50, "square": 50, "triangle": 50}
    images = [Image.open(path) for path in pictures(drawn)]
    assert {image.format for image in images} == {"JPEG", "PNG"}
    assert {image.mode for image in images} == {"RGB", "L"}
    assert len({image.size for image in images}) >= 6
    assert {image.getexif().get(0x0112) for image in images} >= {None, 3, 6, 8}
    assert all(path.suffix.lower() in (".jpg", ".jpeg", ".png") for path in pictures(drawn))


def test_every_picture_decodes_and_no_broken_file_does(drawn: Path) -> None:
    broken = sorted(drawn.glob("*/broken_*"))
    assert len(broken) == 4
    for path in pictures(drawn):
        Image.open(path).load()
    for path in broken:
        with pytest.raises(OSError):
            Image.open(path).load()


def test_colour_alone_does_not_tell_the_class(drawn: Path) -> None:
    colours = np.array([np.asarray(Image.open(path).convert("RGB")).mean((0, 1)) for path in pictures(drawn)])
    labels = np.array([path.parent.name for path in pictures(drawn)])
    train, test = slice(0, None, 2), slice(1, None, 2)
    means = {label: colours[train][labels[train] == label].mean(0) for label in set(labels)}
    guesses = [min(means, key=lambda label: float(np.linalg.norm(means[label] - colour))) for colour in colours[test]]
    assert np.mean(guesses == labels[test]) < 0.6  # chance is 0.33


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    sample_data.draw_folder(tmp_path, images=2, classes=2)
    (tmp_path / "circle" / "mine.jpg").write_bytes(b"precious")
    before = make.files(tmp_path)
    with pytest.raises(UsageError, match=r"circle/mine\.jpg"):
        sample_data.draw_folder(tmp_path, images=2, classes=2)
    assert make.files(tmp_path) == before


@pytest.mark.parametrize(
    ("folder", "arguments", "code", "said"),
    [
        ("new", ["--classes", "0"], 2, "error: --classes '0': give a number from 1 to 5: there are no more shapes\n"),
        ("new", ["--images", "4"], 2, "error: --images '4': give a number from 5 (one per class) to 999999\n"),
        ("new", ["--broken", "-1"], 2, "error: --broken '-1': give a number from 0 to 999\n"),
        ("file", [], 2, "error: {} is a file; name a new or an empty folder\n"),
        ("file/below", [], 1, "error: can't draw into {}: "),
    ],
)
def test_a_mistake_is_one_line_and_draws_nothing(
    folder: str, arguments: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert sample_data.main([str(tmp_path / folder), *arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith(said.format(tmp_path / folder))
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_the_command_says_what_it_drew(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "beam_pipeline.sample_data", tmp_path, "--images=4", "--classes=2")
    assert make.done(*command).stdout.startswith(f"{tmp_path}: 4 pictures of circle, square; 0 broken files (")
