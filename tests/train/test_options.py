"""What `train` fills in by itself, and what it warns of."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_pipeline.errors import UsageError
from beam_pipeline.schema.manifest import FOREIGN_KEY, Manifest
from reader.info import DatasetInfo, load_info
from reader.training.options import TrainOptions, class_counts, make_recipe, warnings
from tests.reading.shards import make_dataset


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> DatasetInfo:
    folder = tmp_path_factory.mktemp("options") / "1.0.0"
    return load_info(make_dataset(folder, {"train": [40], "val": [3], "test": [2]}, size=(120, 120)))


def as_index(info: DatasetInfo) -> DatasetInfo:
    """The dataset as if its shards were third-party files."""
    return dataclasses.replace(info, manifest=Manifest(info.url, {**info.manifest, FOREIGN_KEY: {}}))


def of_records(info: DatasetInfo, monkeypatch: pytest.MonkeyPatch, records: int) -> DatasetInfo:
    """The dataset as if its train split had so many records."""
    train = dataclasses.replace(info.splits["train"], records=records)
    monkeypatch.setattr(DatasetInfo, "records", lambda self, split: records)
    return dataclasses.replace(info, splits={**info.splits, "train": train})


DEFAULTS = [(1, 8, 150), (100, 8, 13), (399, 8, 6), (400, 16, 6), (473, 16, 6), (1599, 32, 6), (1600, 64, 6)]


@pytest.mark.parametrize(("records", "batch", "epochs"), [*DEFAULTS, (1_281_167, 64, 6)])
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


def test_validation_is_on_validation_or_val_and_never_on_test_unasked(info: DatasetInfo) -> None:
    assert make_recipe(info, TrainOptions()).data.evaluation == "val"
    assert make_recipe(info, TrainOptions(eval_split="test[:50%]")).data.evaluation == "test[:50%]"
    assert make_recipe(info, TrainOptions(eval_split="none")).data.evaluation is None
    with pytest.raises(UsageError, match="--eval_split 'vall': there is no split 'vall'"):
        make_recipe(info, TrainOptions(eval_split="vall"))


def test_without_a_validation_split_a_tenth_is_held_out_of_train(tmp_path: Path) -> None:
    info = load_info(make_dataset(tmp_path / "1.0.0", {"train": [25, 15], "few": [4], "test": [20]}, size=(16, 16)))
    data = make_recipe(info, TrainOptions()).data
    assert (data.train, data.evaluation, data.is_held_out) == ("train[:90%]", "train[90%:]", True)
    assert (data.images, data.validation_images) == (36, 4)
    for options in (
        {"eval_split": "none"},
        {"train_split": "train[:50%]"},  # nobody said what is left for
        {"train_split": "few"},
    ):
        recipe = make_recipe(info, TrainOptions(**options))
        assert (recipe.data.evaluation, recipe.data.validation_images) == (None, 0)
        assert any(line.startswith("no validation, so model.keras is") for line in warnings(info, recipe))


def test_third_party_files_are_validated_on_what_is_named(tmp_path: Path) -> None:
    info = as_index(load_info(make_dataset(tmp_path / "1.0.0", {"train": [50]}, size=(16, 16))))
    recipe = make_recipe(info, TrainOptions())
    assert (recipe.data.train, recipe.data.evaluation, recipe.data.images) == ("train", None, 50)
    assert list(warnings(info, recipe)) == [
        "no validation, so model.keras is the last epoch's: if the files are shuffled, --train_split train[:90%] "
        "--eval_split train[90%:] holds out a tenth"
    ]
    named = make_recipe(info, TrainOptions(train_split="train[:90%]", eval_split="train[90%:]"))
    assert named.data.validation_images == 5 and not list(warnings(info, named))


def test_a_run_is_repeated_by_its_configuration(tmp_path: Path) -> None:
    info = load_info(make_dataset(tmp_path / "1.0.0", {"train": [40]}, size=(16, 16)))
    for options in (TrainOptions(), TrainOptions(eval_split="none", classes="cat,dog", optimizer="sgd")):
        recipe = make_recipe(info, options)
        data, configuration = recipe.data, recipe.configuration(info)
        del configuration["dataset"]
        again = make_recipe(info, TrainOptions(**configuration))
        assert again.data._replace(is_held_out=data.is_held_out) == data and again.phases == recipe.phases


def test_the_classes_of_a_part_of_a_split_are_counted_by_its_record_tables(tmp_path: Path) -> None:
    info = load_info(make_dataset(tmp_path / "1.0.0", {"train": [30, 10], "val": [3]}, size=(16, 16)))
    for split, numbers in (
        ("train", range(40)),
        ("train[25:]", range(25, 40)),
        ("train[:5]+val", [*range(5), 0, 1, 2]),
    ):
        options = TrainOptions(train_split=split, classes="cat=x,dog=x,bird")
        labels = ["bird" if number % 3 == 0 else "x" for number in numbers]
        recipe = make_recipe(info, options)
        assert recipe.classes == ("bird", "x")
        assert class_counts(info, recipe.data) == [labels.count("bird"), labels.count("x")]


def test_the_learning_rate_grows_with_the_batch(info: DatasetInfo) -> None:
    for optimizer, rates in {"adam": (0.0015, 0.003), "adamw": (0.0015, 0.003), "sgd": (0.1 / 16, 0.1 / 4)}.items():
        recipes = [make_recipe(info, TrainOptions(batch_size=batch, optimizer=optimizer)) for batch in (16, 64)]
        assert [one.phases[0].learning_rate for one in recipes] == pytest.approx(rates)


def test_best_is_the_first_of_equals_of_its_phase(info: DatasetInfo) -> None:
    def lines(*values: tuple[float, float]) -> list[dict[str, Any]]:
        return [{"phase": "training", "val_loss": loss, "val_accuracy": accuracy} for loss, accuracy in values]

    given = lines((0.5, 0.8), (0.3, 0.8), (0.3, 0.9), (math.nan, 0.9))
    given.append({"phase": "head", "val_loss": 0.1, "val_accuracy": 1.0})
    recipe = make_recipe(info, TrainOptions())
    assert recipe.best(given, recipe.phases[0]) is given[1]
    assert recipe.best([], recipe.phases[0]) is None
    without = [{"phase": "training"}, {"phase": "training"}]
    assert recipe.best(without, recipe.phases[0]) is without[1]


def test_a_batch_is_shared_evenly_by_the_devices(info: DatasetInfo) -> None:
    assert make_recipe(info, TrainOptions(batch_size=32), 8).batch_size == 32
    with pytest.raises(UsageError, match="--batch_size 30: 8 devices share it; the next that fits is 32"):
        make_recipe(info, TrainOptions(batch_size=30), 8)
    assert make_recipe(info, TrainOptions(), 3).batch_size % 3 == 0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("augment", "rotate", "choose one of none, flip, flip_crop, random_resized_crop"),
        ("epochs", 0, "give an integer from 1"),
        ("epochs", 1.5, "give an integer from 1"),
        ("seed", None, "give an integer"),
        ("learning_rate", 0, "give a number above 0"),
        ("learning_rate", "inf", "give a number above 0"),
        ("optimizer", "lamb", "choose one of adam, adamw, sgd"),
    ],
)
def test_values_from_python_are_checked_as_those_of_the_command(option: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        TrainOptions(**{option: value})
    assert str(caught.value) == f"--{option} {str(value)!r}: {message}"


def test_text_and_paths_are_read_as_on_the_command_line() -> None:
    options = TrainOptions(epochs="3", learning_rate="1e-3", out=Path("runs"), seed=np.int64(-1))
    assert options == TrainOptions(epochs=3, learning_rate=0.001, out="runs", seed=-1)


def test_weights_make_two_phases(info: DatasetInfo) -> None:
    recipe = make_recipe(info, TrainOptions(model="MobileNetV2", weights="imagenet", epochs=4))
    assert [(phase.name, phase.epochs) for phase in recipe.phases] == [("head", 4), ("fine_tuning", 2)]
    assert recipe.phases[1].learning_rate == pytest.approx(recipe.phases[0].learning_rate / 100)


def test_a_size_that_does_not_follow_is_asked_for(tmp_path: Path) -> None:
    for name, width, stored in (
        ("oblong", lambda number: 30, "20x30, which is not square"),
        ("mixed", lambda number: 20 + number, "of mixed sizes, 20x20 to 20x22"),
    ):
        url = make_dataset(tmp_path / name, {"train": [3]}, size_of=lambda number, width=width: (20, width(number)))
        with pytest.raises(UsageError, match=f"--image_size is missing: the stored images are {stored}; give a side"):
            make_recipe(load_info(url), TrainOptions())


@pytest.mark.parametrize(
    ("train", "options", "warning"),
    [
        (40, {"eval_split": "none"}, "no validation, so model.keras is the last epoch's: --eval_split names what"),
        (40, {"eval_split": "train"}, "--eval_split train: the accuracy on images that were trained on says little"),
        (40, {"eval_split": "val+train[:50%]"}, "--eval_split val+train[:50%]: the accuracy on images that were tra"),
        (40, {"epochs": 2}, "only 10 updates: raise --epochs"),
        (3, {"batch_size": 8}, "--batch_size 8: train has 3 images, so images repeat within a batch: give at most 3"),
    ],
)
def test_what_will_disappoint_is_warned_of(tmp_path: Path, train: int, options: dict[str, Any], warning: str) -> None:
    info = load_info(make_dataset(tmp_path / "1.0.0", {"train": [train], "val": [3]}, size=(16, 16)))
    assert any(line.startswith(warning) for line in warnings(info, make_recipe(info, TrainOptions(**options))))


def test_images_that_belong_together_are_warned_of_if_a_part_is_held_out(tmp_path: Path) -> None:
    info = load_info(make_dataset(tmp_path / "1.0.0", {"train": [1200]}, size=(16, 16)))
    info = dataclasses.replace(
        info, manifest=Manifest(info.url, {**info.manifest, "configuration": {"split_by": "(.*)_"}})
    )
    warning = "train[90%:] is held out at random, so a group of --split_by may be"
    fix = "in both parts: write the dataset with --splits, or give --eval_split none"
    lines = list(warnings(info, make_recipe(info, TrainOptions())))
    assert [line.startswith(warning) and line.endswith(fix) for line in lines] == [True]
    assert not list(
        warnings(info, make_recipe(info, TrainOptions(train_split="train[:1100]", eval_split="train[-9:]")))
    )


@pytest.mark.parametrize(
    ("classes", "train", "options", "message"),
    [
        (["cat"], 200, {}, "train has one class, cat; training needs two: is --input of imageshards write one level"),
        (["cat"], 200, {"eval_split": "none"}, "train has one class, cat"),
        (["cat", "dog"], 1, {}, "train has one class, cat"),  # dog has images in val only
        (
            ["cat", "dog"],
            9,
            {"classes": "dog"},
            "train has one class, dog; training needs two: name two with --classes",
        ),
        (["cat", "dog"], 9, {"classes": "dog=pet,cat=pet"}, "train has one class, pet"),
        (["cat", "dog"], 1, {"classes": "dog=a,cat=b"}, "train has one class, b"),
        (["cat", "dog"], 9, {"train_split": "one"}, "one has one class, cat"),
        (["cat", "dog"], 9, {"train_split": "one[:1]"}, "one[:1] has one class, cat"),
        (["cat", "dog"], 9, {"train_split": "one+train"}, None),
        (["cat", "dog"], 2, {}, None),
        (["cat", "dog", "cow"], 9, {"classes": "dog,cow"}, None),
    ],
)
@pytest.mark.parametrize("is_index", [False, True])
def test_one_class_is_refused(
    tmp_path: Path, classes: list[str], train: int, options: dict[str, Any], message: str | None, is_index: bool
) -> None:
    splits = {"train": [train], "val": [3], "one": [1]}
    info = load_info(make_dataset(tmp_path / "1.0.0", splits, size=(16, 16), classes=classes))
    if is_index:
        info = as_index(info)
    if message is None:
        assert len(make_recipe(info, TrainOptions(**options)).classes) >= 2
        return
    with pytest.raises(UsageError) as caught:
        make_recipe(info, TrainOptions(**options))
    assert str(caught.value).startswith(f"{info.url}: {message}")


def test_a_part_of_an_index_that_is_in_the_order_of_its_classes_is_refused_too(tmp_path: Path) -> None:
    info = as_index(load_info(make_dataset(tmp_path / "1.0.0", {"train": [9]}, size=(16, 16), classes=["a", "b"])))
    with pytest.raises(UsageError, match=r"train\[:1\] has one class, a; training needs two"):
        make_recipe(info, TrainOptions(train_split="train[:1]"))
    assert make_recipe(info, TrainOptions(train_split="train[:2]")).data.images == 2


def test_good_defaults_are_not_warned_of(info: DatasetInfo) -> None:
    assert list(warnings(info, make_recipe(info, TrainOptions()))) == []
