"""`imageshards train` killed at any moment: it ends with the same best, last and average weights."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.make import ROOT
from tests.reading.shards import make_dataset
from tests.soak import harness
from tests.train import runs

pytestmark = pytest.mark.soak

KILLS = 2
OPTIONS = "--image_size 16 --batch_size 8 --epochs 12 --early_stopping 4 --learning_rate 0.02 --checkpoint_steps 3"


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_a_run_that_is_killed_at_any_moment_ends_with_the_same_models(tmp_path: Path, backend: str) -> None:
    harness.skip_without(f"keras {backend}")
    (tmp_path / "models.py").write_text(runs.MODEL)
    url = make_dataset(tmp_path / "1.0.0", {"train": [24, 16], "validation": [11]}, size=(16, 16))
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_DETERMINISTIC_OPS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"JAX_COMPILATION_CACHE_DIR": f"{tmp_path}/jax", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def start(out: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "reader", "train", url, "--out", out, "--model", "models:random_layers"]
        quiet = subprocess.DEVNULL
        options = [*OPTIONS.split(), "--device", "cpu"]
        return subprocess.Popen([*command, *options], cwd=tmp_path, env=environment, stdout=quiet, stderr=quiet)

    began = time.monotonic()
    assert start("plain").wait(600) == 0
    seconds, draw = time.monotonic() - began, random.Random(backend)
    for _ in range(KILLS):
        process = start("killed")
        time.sleep(seconds * draw.uniform(0.4, 0.9))
        process.kill()
        process.wait()
    assert start("killed").wait(600) == 0
    for file in ("model.keras", "last.keras"):
        here, plain = (runs.weights_of(tmp_path / name, file) for name in ("killed", "plain"))
        assert len(here) == len(plain) > 0 and all(map(np.array_equal, here, plain)), file
    assert runs.metrics_of(tmp_path / "killed") == runs.metrics_of(tmp_path / "plain")
