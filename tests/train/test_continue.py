"""A run that was stopped in the middle of an epoch ends as if it hadn't been, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from reader.info import load_info
from reader.training.fit import train
from reader.training.options import TrainOptions
from tests.train import runs


@pytest.fixture(scope="module", params=["tensorflow", "jax"])
def folder(request: pytest.FixtureRequest, dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of `runs.stop_and_continue` on a backend."""
    pytest.importorskip(request.param)
    folder: Path = tmp_path_factory.mktemp(request.param) / "runs"
    environment = {"KERAS_BACKEND": request.param, "TF_DETERMINISTIC_OPS": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, runs.__file__, dataset, str(folder)]
    subprocess.run(command, env={**os.environ, **environment, "PYTHONPATH": str(runs.ROOT)}, check=True, timeout=600)
    return folder


def check_equal(folder: Path, name: str) -> None:
    """The run that was stopped ended as the plain one."""
    for file in ("model.keras", "last.keras"):
        here, plain = (runs.weights_of(folder / run, file) for run in (name, "plain"))
        assert len(here) == len(plain) > 0 and all(map(np.array_equal, here, plain)), file
    assert runs.metrics_of(folder / name) == runs.metrics_of(folder / "plain")


def test_a_stopped_run_continues_to_the_same_bits(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.write_model(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    options, info = {**runs.OPTIONS, "epochs": 2, "model": "models:random_layers"}, load_info(dataset)
    train(info, TrainOptions(out=str(tmp_path / "plain"), **options))
    with suppress(runs.Killed), runs.killed_at("evaluation"):
        train(info, TrainOptions(out=str(tmp_path / "killed"), **options))
    train(info, TrainOptions(out=str(tmp_path / "killed"), **options))
    check_equal(tmp_path, "killed")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["stopped", "killed", *runs.MOMENTS])
def test_a_run_that_is_stopped_at_any_moment_continues_to_the_same_bits(folder: Path, name: str) -> None:
    check_equal(folder, name)
    (_, here), (_, plain) = (runs.checkpoint_of(folder / run) for run in (name, "plain"))
    assert all(map(np.array_equal, here[:-4], plain[:-4]))  # all but the sums of metrics, which an epoch resets
    assert len(list(folder.glob(f"{name}/checkpoints/step-*"))) == 2


@pytest.mark.soak
def test_early_stopping_ends_with_the_best_epoch(folder: Path) -> None:
    lines, run = runs.metrics_of(folder / "plain"), json.loads((folder / "plain/run.json").read_text())
    losses = [line["val_loss"] for line in lines]
    assert len(lines) == run["best_epoch"] + 2 < runs.OPTIONS["epochs"]
    assert losses.index(min(losses)) + 1 == run["best_epoch"]
    models = [runs.weights_of(folder / "plain", file) for file in ("model.keras", "last.keras")]
    assert not all(map(np.array_equal, *models))
    assert [path.name for path in folder.glob("plain/checkpoints/best-*")] == [f"best-{5 * run['best_epoch']:09}.npz"]


@pytest.mark.soak
def test_the_model_is_the_average_and_training_goes_on_with_the_weights(folder: Path) -> None:
    _, arrays = runs.checkpoint_of(folder / "plain")
    last = runs.weights_of(folder / "plain", "last.keras")
    kernel = max(last, key=lambda array: array.size)
    equal = [array for array in arrays if array.shape == kernel.shape]
    assert sum(np.array_equal(array, kernel) for array in equal) == 1  # of weights, average and Adam's moments


@pytest.mark.soak
def test_a_signal_is_told_with_the_way_to_continue(folder: Path) -> None:
    said = (folder / "said").read_text()
    assert said.startswith("stopped after step ") and said.endswith(f"--out {folder}/stopped continues")


@pytest.mark.soak
def test_a_step_on_two_devices_is_that_of_one(folder: Path) -> None:
    (one, here), (two, there) = (runs.checkpoint_of(folder / name) for name in ("one", "two"))
    assert one["step"] == two["step"] == 1 and one["position"] == two["position"]
    assert len(here) == len(there) > 10
    for array, other in zip(here, there, strict=True):
        # Not element by element: Adam divides each gradient by its size, and so enlarges the errors of tiny ones.
        assert np.linalg.norm(array - other) <= 1e-5 * np.linalg.norm(other)
