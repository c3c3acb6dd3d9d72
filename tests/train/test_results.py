"""The model that a run ends with, what is held out of training for it, and the tables of what it gets wrong."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import reader
from beam_pipeline.errors import UsageError
from reader.training import inputs
from reader.training.metrics import class_metrics, confusion_counts
from tests import make, servers
from tests.reading.shards import make_dataset
from tests.reading.without import run_together
from tests.train import runs
from tests.train.test_out import trained

pytestmark = pytest.mark.usefixtures("eager", "no_pictures")


def read(file: Path) -> list[list[str]]:
    with file.open() as opened:
        return list(csv.reader(opened))


@pytest.fixture(scope="module")
def six_classes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset without a validation split."""
    folder = tmp_path_factory.mktemp("six") / "1.0.0"
    return make_dataset(folder, {"train": [40, 33], "test": [3]}, size=(16, 16), classes="abcdef")


def test_what_is_held_out_is_never_seen_in_training(
    six_classes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []  # info and split
    for name in ("train_batches", "eval_batches"):
        make.before(monkeypatch, inputs, name, lambda *given: asked.append(given))
    result, lines = trained(six_classes, tmp_path / "out", epochs=2)
    assert lines[0].startswith("photos 1.0.0: 66 training images, 7 validation images (train[90%:]), 6 classes")
    assert "no validation split: train[90%:] is held out of training (--eval_split none trains on it)" in lines
    assert all("val_loss" in line for line in result.epochs)
    more: dict[str, Any] = {"global_batch_size": 8, "image_size": 16, "features": ["filename"]}
    train, evals = reader.train_batches(*asked[0], **more), reader.eval_batches(*asked[1], **more)
    seen = {name for _ in range(2) for inputs_, _ in train for name in inputs_["filename"].tolist()}
    held = {name for inputs_, _, weights in evals for name in inputs_["filename"][weights > 0].tolist()}
    assert (len(seen), len(held), seen & held) == (66, 7, set())


def test_a_run_without_validation_ends_with_the_last_epoch(six_classes: str, tmp_path: Path) -> None:
    result, _ = trained(six_classes, tmp_path / "out", epochs=2, eval_split="none")
    assert result.best_epoch == 2
    models = [runs.weights_of(tmp_path / "out", file) for file in ("model.keras", "last.keras")]
    assert all(map(np.array_equal, *models))
    assert not list(tmp_path.glob("out/*.csv"))
    assert str(result).endswith(f"(epoch 2 of 2): {tmp_path}/out/model.keras")
    with pytest.raises(UsageError, match=r"^--early_stopping needs validation: give --eval_split$"):
        trained(six_classes, tmp_path / "other", eval_split="none", early_stopping=1)


def test_the_tables_are_those_of_the_model_that_is_kept(six_classes: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result, _ = trained(
        six_classes, out, epochs=3, learning_rate=0.1, eval_split="train[60%:]", train_split="train[:60%]"
    )
    best = result.epochs[result.best_epoch - 1]
    counts = np.array([row[1:] for row in read(out / "confusion.csv")[1:]], np.int64)
    assert counts.sum() == 29 and counts.trace() == round(best["val_accuracy"] * 29)
    assert read(out / "confusion.csv")[0] == ["class", *"abcdef"]
    rows = read(out / "per_class.csv")
    assert rows[0] == ["class", "images", "predicted", "precision", "recall"]
    assert [int(row[1]) for row in rows[1:]] == counts.sum(1).tolist()


def test_precision_and_recall_are_empty_where_nothing_is_divided() -> None:
    one, other, third = class_metrics(np.array([[3, 1, 0], [2, 2, 0], [0, 0, 0]]), ["a", "b", "c"])
    assert (one.precision, one.recall) == (0.6, 0.75)
    assert (other.images, other.predicted, other.precision, other.recall) == (4, 3, 0.666667, 0.5)
    assert (third.precision, third.recall) == (None, None)


def test_two_processes_of_jax_count_each_image_once(dataset: str, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    options = (
        "--image_size 16 --batch_size 8 --epochs 3 --learning_rate 0.1 --model tests.train.runs:linear --distributed"
    )
    command = ["-m", "reader", "train", dataset, *options.split(), "--out", f"{tmp_path}/two"]
    environment = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(runs.ROOT)}
    environment |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{servers.free_port()}", "JAX_NUM_PROCESSES": "2"}
    run_together([command] * 2, [{"JAX_PROCESS_ID": process} for process in "01"], **environment)
    ((images, labels, _),) = reader.eval_batches(dataset, "validation", global_batch_size=11)
    predicted = keras.models.load_model(tmp_path / "two" / "model.keras").predict(images, verbose=0).argmax(1)
    counts = np.array([row[1:] for row in read(tmp_path / "two" / "confusion.csv")[1:]], np.int64)
    assert np.array_equal(counts, confusion_counts(labels, predicted, 3)) and counts.sum() == 11
    best = min(runs.metrics_of(tmp_path / "two"), key=lambda line: line["val_loss"])
    assert counts.trace() == round(best["val_accuracy"] * 11)
