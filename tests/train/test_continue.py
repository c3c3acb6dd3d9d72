"""A training that was stopped in the middle of an epoch ends as if it hadn't been, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.train import runs


@pytest.fixture(scope="module", params=["tensorflow", "jax"])
def folder(request: pytest.FixtureRequest, dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trainings of `runs.stop_and_continue` on a backend."""
    pytest.importorskip(request.param)
    folder: Path = tmp_path_factory.mktemp(request.param) / "runs"
    environment = {**os.environ, "KERAS_BACKEND": request.param, "TF_DETERMINISTIC_OPS": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, runs.__file__, dataset, str(folder)]
    subprocess.run(command, env={**environment, "PYTHONPATH": str(runs.ROOT)}, check=True, timeout=300)
    return folder


@pytest.mark.parametrize("name", ["stopped", "killed"])
def test_a_stopped_training_continues_to_the_same_bits(folder: Path, name: str) -> None:
    here, plain = runs.weights_of(folder / name), runs.weights_of(folder / "plain")
    assert len(here) == len(plain) > 0 and all(map(np.array_equal, here, plain))
    assert runs.metrics_of(folder / name) == runs.metrics_of(folder / "plain")
    assert len(list(folder.glob(f"{name}/checkpoints/*"))) == 2


def test_a_signal_is_told_with_the_way_to_continue(folder: Path) -> None:
    said = (folder / "said").read_text()
    assert said.startswith("stopped after step ") and said.endswith(f"--out {folder}/stopped continues")


def test_a_step_on_two_devices_is_that_of_one(folder: Path) -> None:
    (one, here), (two, there) = (runs.checkpoint_of(folder / name) for name in ("one", "two"))
    assert one["step"] == two["step"] == 1 and one["position"] == two["position"]
    assert len(here) == len(there) > 10
    for array, other in zip(here, there, strict=True):
        # Not element by element: Adam divides each gradient by its size, and so enlarges the errors of tiny ones.
        assert np.linalg.norm(array - other) <= 1e-5 * np.linalg.norm(other)
