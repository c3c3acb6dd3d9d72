"""A run that was stopped in the middle of an epoch ends as if it hadn't been, to the bit."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reader.info import load_info
from tests.train import runs

SOAKED = [pytest.param(backend, marks=pytest.mark.soak) for backend in ("tensorflow", "jax")]
on_all_backends = pytest.mark.parametrize("folder", ["here", *SOAKED], indirect=True)
on_soaked_backends = pytest.mark.parametrize("folder", SOAKED, indirect=True)


@pytest.fixture(scope="module")
def folder_of(dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The runs of `runs.stop_and_continue` on a backend, or `here` of one kill in this process; made once for each."""

    @functools.cache
    def made(where: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(where) / "runs"
        if where == "here":
            with runs.random_layers_in(folder):
                runs.kill_and_continue(load_info(dataset), folder, ["evaluation"])
            return folder
        environment = {"KERAS_BACKEND": where, "TF_DETERMINISTIC_OPS": "1", "JAX_PLATFORMS": "cpu"}
        # The same model is compiled more than ten times.
        environment |= {"JAX_COMPILATION_CACHE_DIR": f"{folder}.jax", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        environment = {**os.environ, **environment, "PYTHONPATH": str(runs.ROOT)}
        subprocess.run([sys.executable, runs.__file__, dataset, str(folder)], env=environment, check=True, timeout=600)
        return folder

    return made


@pytest.fixture
def folder(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Path:
    if request.param != "here":
        pytest.importorskip(request.param)
    return folder_of(request.param)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("here", "evaluation"),
        *(
            pytest.param(backend, name, marks=pytest.mark.soak)
            for backend in ("tensorflow", "jax")
            for name in ("stopped", "killed", *runs.MOMENTS)
        ),
    ],
    indirect=["folder"],
)
def test_a_stopped_run_continues_to_the_same_bits(folder: Path, name: str) -> None:
    for file in ("model.keras", "last.keras"):
        here, plain = (runs.weights_of(folder / run, file) for run in (name, "plain"))
        assert len(here) == len(plain) > 0 and all(map(np.array_equal, here, plain)), file
    assert runs.metrics_of(folder / name) == runs.metrics_of(folder / "plain")
    (_, here), (_, plain) = (runs.checkpoint_of(folder / run) for run in (name, "plain"))
    assert all(map(np.array_equal, here[:-4], plain[:-4]))  # all but the sums of metrics, which an epoch resets
    assert len(list(folder.glob(f"{name}/checkpoints/step-*"))) == 2


@on_all_backends
def test_early_stopping_ends_with_the_best_epoch(folder: Path) -> None:
    lines, run = runs.metrics_of(folder / "plain"), json.loads((folder / "plain/run.json").read_text())
    losses = [line["val_loss"] for line in lines]
    assert len(lines) == run["best_epoch"] + 2 < runs.OPTIONS["epochs"]
    assert losses.index(min(losses)) + 1 == run["best_epoch"]
    models = [runs.weights_of(folder / "plain", file) for file in ("model.keras", "last.keras")]
    assert not all(map(np.array_equal, *models))


@on_soaked_backends
def test_a_signal_is_told_with_the_way_to_continue(folder: Path) -> None:
    said = (folder / "said").read_text()
    assert said.startswith("stopped after step ") and said.endswith(f"--out {folder}/stopped continues")


@on_soaked_backends
def test_a_step_on_two_devices_is_that_of_one(folder: Path) -> None:
    (one, here), (two, there) = (runs.checkpoint_of(folder / name) for name in ("one", "two"))
    assert one["step"] == two["step"] == 1 and one["position"] == two["position"]
    assert len(here) == len(there) > 10
    for array, other in zip(here, there, strict=True):
        # Not element by element: Adam divides each gradient by its size, and so enlarges the errors of tiny ones.
        assert np.linalg.norm(array - other) <= 1e-5 * np.linalg.norm(other)
