"""What `train` fills in by itself, and what it warns of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_pipeline.errors import UsageError
from reader.info import DatasetInfo, load_info
from reader.training.options import TrainOptions, make_recipe, warnings
from tests.reading.shards import make_dataset


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> DatasetInfo:
    folder = tmp_path_factory.mktemp("options") / "1.0.0"
    return load_info(make_dataset(folder, {"train": [40], "val": [3], "test": [2]}, size=(120, 120)))


def of_records(info: DatasetInfo, monkeypatch: pytest.MonkeyPatch, records: int) -> DatasetInfo:
    """The dataset as if its train split had so many records."""
    train = dataclasses.replace(info.splits["train"], records=records)
    monkeypatch.setattr(DatasetInfo, "records", lambda self, split: records)
    return dataclasses.replace(info, splits={**info.splits, "train": train})


@pytest.mark.parametrize(
    ("records", "batch", "epochs"),
    [
        (1, 8, 150),
        (100, 8, 13),
        (399, 8, 6),
        (400, 16, 6),
        (473, 16, 6),
        (1599, 32, 6),
        (1600, 64, 6),
        (1_281_167, 64, 6),
    ],
)
def test_defaults_give_150_updates_and_6_epochs(
    info: DatasetInfo, monkeypatch: pytest.MonkeyPatch, records: int, batch: int, epochs: int
) -> None:
    recipe = make_recipe(of_records(info, monkeypatch, records), TrainOptions())
    assert (recipe.batch_size, recipe.epochs) == (batch, epochs)
    assert recipe.steps * recipe.epochs >= 150


def test_small_cnn_sees_96_pixels_and_other_models_the_stored_size(info: DatasetInfo) -> None:
    assert make_recipe(info, TrainOptions()).image_size == 96
    assert make_recipe(info, TrainOptions(model="resnet50")).image_size == 120
    assert make_recipe(info, TrainOptions(image_size=50)).image_size == 50


def test_validation_is_on_the_first_of_validation_val_and_test(info: DatasetInfo) -> None:
    assert make_recipe(info, TrainOptions()).eval_split == "val"
    assert make_recipe(info, TrainOptions(eval_split="test[:50%]")).eval_split == "test[:50%]"
    with pytest.raises(UsageError, match="vall"):
        make_recipe(info, TrainOptions(eval_split="vall"))


def test_the_learning_rate_grows_with_the_root_of_the_batch(info: DatasetInfo) -> None:
    rates = [make_recipe(info, TrainOptions(batch_size=batch)).phases[0].learning_rate for batch in (16, 64)]
    assert rates == pytest.approx([0.0015, 0.003])


def test_a_batch_is_shared_evenly_by_the_devices(info: DatasetInfo) -> None:
    assert make_recipe(info, TrainOptions(batch_size=32), 8).batch_size == 32
    with pytest.raises(UsageError, match="--batch_size 30: 8 devices share it; the next that fits is 32"):
        make_recipe(info, TrainOptions(batch_size=30), 8)
    assert make_recipe(info, TrainOptions(), 3).batch_size % 3 == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "rotate"}, "--augment 'rotate': choose one of none, flip, flip_crop, random_resized_crop"),
        ({"epochs": 0}, "--epochs '0': give a whole number from 1"),
        ({"epochs": 1.5}, "--epochs '1.5': give a whole number from 1"),
        ({"label_smoothing": 1.0}, "--label_smoothing '1.0': give a number from 0 to 0.99"),
    ],
)
def test_values_from_python_are_checked_as_those_of_the_command(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        TrainOptions(**options)
    assert str(caught.value) == message


def test_text_and_paths_are_read_as_on_the_command_line() -> None:
    options = TrainOptions(epochs="3", learning_rate="1e-3", out=Path("runs"), seed=np.int64(-1))
    assert options == TrainOptions(epochs=3, learning_rate=0.001, out="runs", seed=-1)
    with pytest.raises(UsageError, match="--seed 'None': give a whole number"):
        TrainOptions(seed=None)


def test_weights_make_two_phases(info: DatasetInfo) -> None:
    recipe = make_recipe(info, TrainOptions(model="MobileNetV2", weights="imagenet", epochs=4))
    assert [(phase.name, phase.epochs) for phase in recipe.phases] == [("head", 4), ("fine_tuning", 2)]
    assert recipe.phases[1].learning_rate == pytest.approx(recipe.phases[0].learning_rate / 100)
    head_only = TrainOptions(model="MobileNetV2", weights="imagenet", fine_tune_epochs=0)
    assert len(make_recipe(info, head_only).phases) == 1
    with pytest.raises(UsageError, match="--fine_tune_epochs"):
        make_recipe(info, TrainOptions(fine_tune_epochs=1))


@pytest.mark.parametrize(
    ("name", "size_of", "stored"),
    [
        ("oblong", lambda number: (20, 30), "20x30, which is not square"),
        ("mixed", lambda number: (20, 20 + number), "of mixed sizes, 20x20 to 20x22"),
    ],
)
def test_a_size_that_does_not_follow_is_asked_for(tmp_path: Path, name: str, size_of: Any, stored: str) -> None:
    url = make_dataset(tmp_path / name, {"train": [3]}, size_of=size_of)
    with pytest.raises(UsageError, match="--image_size is missing") as caught:
        make_recipe(load_info(url), TrainOptions())
    assert stored in str(caught.value)


@pytest.mark.parametrize(
    ("splits", "options", "warning"),
    [
        ({"train": [40]}, {}, "no validation: the dataset has train; write it with --splits"),
        ({"train": [40], "val": [3]}, {"eval_split": "train"}, "on images that were trained on says little"),
        ({"train": [40], "val": [3]}, {"eval_split": "val+train[:50%]"}, "on images that were trained on says little"),
        ({"train": [40], "val": [3]}, {"epochs": 2}, "only 10 updates: raise --epochs"),
        ({"train": [3], "val": [3]}, {"batch_size": 8}, "--batch_size 8: train has 3 images, so images repeat"),
    ],
)
def test_what_will_disappoint_is_warned_of(
    tmp_path: Path, splits: dict[str, list[int]], options: dict[str, Any], warning: str
) -> None:
    info = load_info(make_dataset(tmp_path / "1.0.0", splits, size=(16, 16)))
    assert any(warning in line for line in warnings(info, make_recipe(info, TrainOptions(**options))))


def test_one_class_is_warned_of(tmp_path: Path) -> None:
    url = make_dataset(tmp_path / "1.0.0", {"train": [200], "val": [3]}, size=(16, 16), classes=["cat"])
    info = load_info(url)
    assert list(warnings(info, make_recipe(info, TrainOptions()))) == [
        "the dataset has one class: every prediction is correct"
    ]


def test_good_defaults_are_not_warned_of(info: DatasetInfo) -> None:
    assert list(warnings(info, make_recipe(info, TrainOptions()))) == []
