"""`imageshards show`: a PNG with the images, labels and sizes of a dataset, and with what training makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import reader
from beam_pipeline import schema
from beam_pipeline.errors import UsageError
from imageshards import main
from reader.augment import BY_NAME
from reader.tools.show import choose, tiled
from reader.training.options import AUGMENTS
from tests.reading.shards import CLASSES, make_dataset, numbers_in


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
        assert record.file == f"{record.label}/{record.number:06}.jpg"
    assert len(choose(info, "validation", 9)) == 2
    assert len(choose(info, "train", 130)) == 130


@pytest.mark.parametrize("image_format", ["jpeg", "png"])
def test_grey_images_are_shown(tmp_path: Path, image_format: str) -> None:
    folder = make_dataset(tmp_path / "1.0.0", {"train": [1]}, image_format=image_format, channels=1)
    assert choose(reader.load_info(folder), "train", 1)[0].image.mode == "RGB"


def trained_on(url: str, split: str, epochs: int, **options: Any) -> dict[int, list[np.ndarray]]:
    """Record number → its pixels in each epoch, as `train_batches` yields them."""
    found: dict[int, list[np.ndarray]] = {}
    train = reader.train_batches(url, split, global_batch_size=1, features=["filename"], **options)
    for _ in range(epochs):
        for inputs, _ in train:
            found.setdefault(numbers_in([(inputs,)])[0], []).append(inputs["image"][0].copy())
    return found


@pytest.mark.parametrize("name", ["flip_crop", "random_resized_crop"])
def test_augmented_images_are_those_of_training_to_the_pixel_epoch_after_epoch(name: str, tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "1.0.0", {"train": [20, 5]})
    augment = reader.augment.flip_crop if name == "flip_crop" else reader.augment.random_resized_crop()
    options: dict[str, Any] = {"augment": augment, "seed": 3, "image_size": (16, 24)}
    trained = trained_on(folder, "train[10:]", 3, **options)
    shown = choose(reader.load_info(folder), "train[10:]", 6, epochs=3, **options)
    assert len(shown) == 6
    for record in shown:
        of_training = trained[10 + record.number]
        assert len(record.augmented) == len(of_training) == 3
        for image, pixels in zip(record.augmented, of_training, strict=True):
            np.testing.assert_array_equal(np.asarray(image), pixels)
    assert len({image.tobytes() for record in shown for image in record.augmented}) > 6


def test_a_grid_has_a_row_of_augmented_images_for_each_record(folder: str) -> None:
    plain = reader.show(folder, count=2)
    augmented = reader.show(folder, count=2, augment=reader.augment.flip, image_size=16, epochs=3)
    assert (plain.width - 8) // 168 == 2 and (augmented.width - 8) // 168 == 4
    assert augmented.height - 8 == 2 * (plain.height - 8)


def test_what_augmentation_needs_is_said(folder: str) -> None:
    info = reader.load_info(folder)
    for options, text in (
        ({"augment": reader.augment.flip}, r"mixed sizes \(16x16 to 16x20\), which make no batch: give image_size"),
        ({"image_size": 16}, "give augment, too"),
        ({"augment": reader.augment.flip, "image_size": 16, "epochs": 0}, "epochs must be"),
        (
            {"augment": reader.augment.flip, "image_size": 200_000},
            "image_size must be at most 16384 pixels a side, got 200000",
        ),
        ({"augment": lambda image, seed: image[:2], "image_size": 16}, r"the augment returned uint8 \[2, 16, 3\]"),
    ):
        with pytest.raises(UsageError, match=text):
            choose(info, "train", 2, **options)


def test_the_command_names_the_augmentations_of_training(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "grid.png"
    command = ["show", folder, "--count", "1", "--epochs", "2", "--image_size", "16", "--out", str(path), "--augment"]
    assert tuple(BY_NAME) == AUGMENTS
    for name in AUGMENTS:
        assert main([*command, name]) == 0
    with Image.open(path) as drawn:
        assert drawn.width == 3 * 168 + 8


def test_python_takes_the_words_of_the_command(folder: str) -> None:
    for name, function in BY_NAME.items():
        drawn = [reader.show(folder, count=2, augment=one, image_size=16) for one in (name, function)]
        assert drawn[0].tobytes() == drawn[1].tobytes()
    for wrong in ("rotate", "none", ""):
        with pytest.raises(UsageError, match=rf"^augment '{wrong}': choose one of {', '.join(AUGMENTS)}$"):
            reader.show(folder, augment=wrong, image_size=16)


@pytest.mark.parametrize("break_", ["\n", "\r", "\x1b[2J", "\x00"])
def test_a_name_with_a_line_break_is_drawn_in_one_line(break_: str) -> None:
    assert tiled([(Image.new("RGB", (9, 9)), f"a{break_}b", f"c{break_}d.jpg")]).height < 70


def test_the_command_writes_a_png(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "grid.png"
    assert main(["show", folder, "--count", "5", "--out", str(path)]) == 0
    assert capsys.readouterr().out == f"5 images of train in {path}\n"
    with Image.open(path) as drawn:
        assert drawn.width > 3 * 160
    assert main(["show", folder, "--json", "--count", "2"]) == 0
    (first, _) = json.loads(capsys.readouterr().out)["records"]
    assert [*first] == ["record", "file", "label", "height", "width"]
    assert first["file"] == reader.records(folder, "train")[first["record"]]["filename"]
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
