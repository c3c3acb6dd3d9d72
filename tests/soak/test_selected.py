"""Trainings on selected and balanced classes that are killed and go on: the weights are those of one that wasn't."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.make import ROOT
from tests.reading import shards
from tests.soak.selected import KINDS

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("selected") / "1.0.0"
    return shards.make_dataset(folder, {"train": [200, 130, 77]})


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_on_balanced_classes_ends_with_the_same_weights(url: str, tmp_path: Path, kind: str) -> None:
    pytest.importorskip(kind.rpartition("-")[2])
    environment = {**os.environ, "KERAS_BACKEND": kind.rpartition("-")[2], "PYTHONPATH": str(ROOT)}

    def train(folder: str, *kill: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.soak.selected", kind, url, str(tmp_path / folder), *kill]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)

    plain = train("plain")
    assert plain.returncode == 0, plain.stderr
    assert train("killed", "29").returncode == -signal.SIGKILL
    resumed = train("killed")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]
