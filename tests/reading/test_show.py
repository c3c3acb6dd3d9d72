"""`imageshards show`: a PNG with the images, labels and sizes of a dataset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import reader
from beam_pipeline import schema
from imageshards import main
from reader.tools.show import choose
from tests.reading.shards import CLASSES, make_dataset


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return make_dataset(
        tmp_path / "1.0.0", {"train": [100, 30], "validation": [2]}, size_of=lambda number: (16, 16 + number % 5)
    )


def test_records_are_drawn_by_the_seed_with_label_and_size(folder: str) -> None:
    info = reader.load_info(folder)
    shown = choose(info, "train", 9)
    numbers = [record.number for record in shown]
    assert len(set(numbers)) == 9 and numbers == sorted(numbers)
    assert [record.number for record in choose(info, "train", 9, seed=1)] != numbers
    for record in shown:
        assert record.label == CLASSES[record.number % 3]
        assert record.size == (16, 16 + record.number % 5)
    assert len(choose(info, "validation", 9)) == 2
    assert len(choose(info, "train", 130)) == 130


@pytest.mark.parametrize("image_format", ["jpeg", "png"])
def test_grey_images_are_shown(tmp_path: Path, image_format: str) -> None:
    folder = make_dataset(tmp_path / "1.0.0", {"train": [1]}, image_format=image_format, channels=1)
    assert choose(reader.load_info(folder), "train", 1)[0].image.mode == "RGB"


def test_the_command_writes_a_png(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "grid.png"
    assert main(["show", folder, "--count", "5", "--out", str(path)]) == 0
    assert capsys.readouterr().out == f"5 images of train in {path}\n"
    with Image.open(path) as drawn:
        assert drawn.width > 3 * 160
    assert main(["show", folder, "--json", "--count", "2"]) == 0
    assert {"record", "label", "height", "width"} == set(json.loads(capsys.readouterr().out)["records"][0])
    assert main(["show", folder, "--count", "1", "--out", str(tmp_path / "new" / "x.png")]) == 0
    assert capsys.readouterr().out == f"1 image of train in {tmp_path / 'new' / 'x.png'}\n"
    (tmp_path / "file").write_text("mine")
    assert main(["show", folder, "--out", str(tmp_path / "file" / "x.png")]) == 2
    assert capsys.readouterr().err.endswith("; name a file that can be written\n")


def test_a_missing_shard_and_a_record_of_another_dataset_name_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [10]}))
    (shard,) = folder.glob("photos-*")
    records = list(schema.unframe(shard.read_bytes()))
    records[4] = records[4].replace(b"\xff\xd8\xff", b"\xff\xd8\xfe")
    shard.write_bytes(b"".join(map(schema.frame, records)))
    assert main(["show", str(folder)]) == 1
    assert capsys.readouterr().err == (
        f"error: {shard}: record 4 at byte {sum(len(record) + 16 for record in records[:4])}: the image doesn't decode "
        f"(UnidentifiedImageError); imageshards verify {folder} finds every fault\n"
    )
    shard.unlink()
    assert main(["show", str(folder)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {shard} is missing, ") and "run the job again with --repair" in error
