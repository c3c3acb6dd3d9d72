"""A run that was stopped in the middle of an epoch ends as if it hadn't been, to the bit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from reader.info import load_info
from tests.examples.runs import HALVES, TWO_DEVICES
from tests.reading.shards import make_dataset
from tests.reading.without import run_together
from tests.train import runs


def environment_of(backend: str, compiled: Path) -> dict[str, str]:
    """Of a process; the same model is compiled more than ten times, so what JAX compiles is kept in a folder."""
    environment = {"KERAS_BACKEND": backend, "TF_DETERMINISTIC_OPS": "1", "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(compiled), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**os.environ, **environment, "PYTHONPATH": str(runs.ROOT)}


def check_same(run: Path, plain: Path) -> None:
    """Fail the test unless both have the same best and last models, and metrics."""
    for file in ("model.keras", "last.keras"):
        ours, theirs = (runs.weights_of(one, file) for one in (run, plain))
        assert len(ours) == len(theirs) > 0 and all(map(np.array_equal, ours, theirs)), file
    assert runs.metrics_of(run) == runs.metrics_of(plain)


@pytest.fixture(
    scope="module", params=["here", *(pytest.param(one, marks=pytest.mark.soak) for one in ("tensorflow", "jax"))]
)
def folder(request: pytest.FixtureRequest, dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of runs.py on a backend; or `here` of one kill in this process."""
    folder: Path = tmp_path_factory.mktemp(request.param) / "runs"
    if request.param == "here":
        with runs.random_layers_in(folder):
            runs.kill_and_continue(load_info(dataset), folder, ["evaluation"])
    else:
        pytest.importorskip(request.param)
        environment = environment_of(request.param, folder.with_name("jax"))
        subprocess.run([sys.executable, runs.__file__, dataset, str(folder)], env=environment, check=True, timeout=600)
    return folder


def test_a_stopped_run_continues_to_the_same_bits(folder: Path) -> None:
    killed = [folder / moment for moment in runs.MOMENTS if (folder / moment).exists()]
    assert killed
    for run in killed:
        check_same(run, folder / "plain")
        (_, here), (_, plain) = map(runs.checkpoint_of, (run, folder / "plain"))
        assert all(map(np.array_equal, here[:-4], plain[:-4])), run  # but the sums of metrics, which an epoch resets
        assert len(list(run.glob("checkpoints/step-*"))) == 2, run


def test_early_stopping_ends_with_the_best_epoch(folder: Path) -> None:
    lines, run = runs.metrics_of(folder / "plain"), json.loads((folder / "plain/run.json").read_text())
    losses = [line["val_loss"] for line in lines]
    assert len(lines) == run["best_epoch"] + 2 < runs.OPTIONS["epochs"]
    assert losses.index(min(losses)) + 1 == run["best_epoch"]
    models = [runs.weights_of(folder / "plain", file) for file in ("model.keras", "last.keras")]
    assert not all(map(np.array_equal, *models))


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_a_step_on_two_devices_is_that_of_one(tmp_path: Path, backend: str) -> None:
    pytest.importorskip(backend)
    url = make_dataset(tmp_path / "1.0.0", {"train": [8]}, size=(16, 16))
    flags, found = "--image_size 16 --batch_size 8 --epochs 1 --seed 5 --eval_split none", []
    halves = ["-c", HALVES, runs.ROOT / "reader" / "__main__.py"]
    for name in ("one", "two"):
        program = halves if name == "two" and backend == "tensorflow" else ["-m", "reader"]
        command = [*program, "train", url, *flags.split(), "--out", tmp_path / name]
        two = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {TWO_DEVICES}"} if name == "two" else {}
        run_together([command], [{**environment_of(backend, tmp_path / "jax"), **two}])
        assert ("2 CPU devices" in (tmp_path / name / "run.json").read_text()) == (name == "two")
        found.append(runs.checkpoint_of(tmp_path / name))
    (one, here), (two, there) = found
    assert one["step"] == two["step"] == 1 and one["position"] == two["position"]
    assert len(here) == len(there) > 10
    for array, other in zip(here, there, strict=True):
        # Not element by element: Adam divides each gradient by its size, and so enlarges the errors of tiny ones.
        assert np.linalg.norm(array - other) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_a_command_that_is_killed_at_any_moment_ends_with_the_same_models(tmp_path: Path, backend: str) -> None:
    pytest.importorskip(backend)
    (tmp_path / "models.py").write_text(runs.MODEL)
    url = make_dataset(tmp_path / "1.0.0", {"train": [24, 16], "validation": [11]}, size=(16, 16))
    flags = "--image_size 16 --batch_size 8 --epochs 12 --early_stopping 4 --learning_rate 0.02 --checkpoint_steps 3"

    def start(out: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "reader", "train", url, "--out", out, "--model", "models:random_layers"]
        options = [*flags.split(), "--device", "cpu"]
        return subprocess.Popen([*command, *options], cwd=tmp_path, env=environment_of(backend, tmp_path / "jax"))

    began = time.monotonic()
    assert start("plain").wait(600) == 0
    seconds, draw = time.monotonic() - began, random.Random(backend)
    for _ in range(2):
        process = start("killed")
        time.sleep(seconds * draw.uniform(0.4, 0.9))
        process.kill()
        process.wait()
    assert start("killed").wait(600) == 0
    check_same(tmp_path / "killed", tmp_path / "plain")
