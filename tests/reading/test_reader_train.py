"""`python -m reader train`: what it prints and writes is what the model really does."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import numpy as np
import pytest

import reader
from reader.commands import main
from tests.reading.shards import make_dataset

FEW = ["--epochs", "2", "--batch_size", "64", "--seed", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("train") / "1.0.0", {"train": [40], "validation": [3]}, size=(16, 16))


def cross_entropy(model_file: str, info: reader.DatasetInfo) -> float:
    """The mean over the validation records, one after the other."""
    evals = reader.eval_dataset(info, "validation", global_batch_size=1)
    images, labels, _ = map(np.concatenate, zip(*reader.as_numpy(evals), strict=True))
    logits = keras.models.load_model(model_file).predict(images, verbose=0).astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(3), labels]))


def test_val_loss_is_the_mean_over_the_records_not_over_the_padding(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """3 records at a batch of 64: Keras' own val_loss would be 21 times too small."""
    assert main(["train", folder, "--out", str(tmp_path), *FEW]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [set(line) for line in lines] == [{"epoch", "loss", "accuracy", "val_loss", "val_accuracy"}] * 2
    expected = cross_entropy(str(tmp_path / "model.keras"), reader.load_info(folder))
    assert lines[-1]["val_loss"] == pytest.approx(expected, rel=1e-3)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "training small_cnn on the CPU: 1 step an epoch, 64 images each"
    assert f"val_loss {lines[-1]['val_loss']:.4f}" in out[2]
    assert out[3] == f"validation accuracy {lines[-1]['val_accuracy']:.3f}: {tmp_path / 'model.keras'}"


def test_programs_get_one_json_object(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", folder, "--out", str(tmp_path), *FEW, "--epochs", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert document == {
        "model_file": str(tmp_path / "model.keras"),
        "devices": "the CPU",
        "steps_per_epoch": 1,
        "epochs": [line],
    }


def test_wrong_values_are_told_before_anything_is_built(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    for arguments, message in (
        (["--epochs", "0"], "--epochs '0': give a whole number from 1"),
        (["--image_size", "8"], "--image_size '8': give a whole number from 16"),
        (["--learning_rate", "0"], "--learning_rate '0': give a number above 0"),
        (["--weights", "none.keras"], "--weights 'none.keras': no such file; use none, imagenet or a file"),
        (["--out", str(tmp_path / "file")], f"--out {str(tmp_path / 'file')!r}: it is a file; choose a folder"),
    ):
        assert main(["train", folder, "--out", str(tmp_path / "out"), *arguments]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"
    for name, size_of, stored in (
        ("oblong", lambda number: (20, 30), "20x30, which is no square"),
        ("mixed", lambda number: (20, 20 + number), "of mixed sizes, 20x20 to 20x22"),
    ):
        other = make_dataset(tmp_path / name / "1.0.0", {"train": [3]}, size_of=size_of)
        assert main(["train", other, "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err == (
            f"error: --image_size is missing: the stored images are {stored}; give a side in pixels\n"
        )
    assert not (tmp_path / "out").exists()
