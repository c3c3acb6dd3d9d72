"""The README's commands and programs run as written, one after the other, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from beam_pipeline.config import FLAGS, Config

README = Path(__file__).parent.parent / "README.md"
INSTALLS = "pip install"


def recipes() -> list[tuple[str, str]]:
    """(language, text) of each block that is marked as bash or python; unmarked ones need more than a machine has."""
    found = re.findall(r"^```(bash|python)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return [(language, text) for language, text in found if INSTALLS not in text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


@pytest.mark.parametrize("number", range(len(recipes())))
def test_recipe_runs_as_written(number: int, folder: Path) -> None:
    language, text = recipes()[number]
    command = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else [sys.executable, "-c", text]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr[-2000:]}"
    assert result.stdout.strip() or "<<" in text or text == reading(), f"prints nothing:\n{text}"


def reading() -> str:
    """The recipe that opens a dataset for a trainer."""
    (text,) = (text for language, text in recipes() if language == "python" and "train_dataset(" in text)
    return text


# What trainers do with `train` and `info`.
_TRAINERS = """
images, labels = next(train.as_numpy_iterator())
assert images.shape == (64, 96, 96, 3) and labels.shape == (64,)
import keras
layers = keras.layers
model = keras.Sequential([layers.Rescaling(1 / 255), layers.GlobalAveragePooling2D(), layers.Dense(info.num_classes)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
history = model.fit(train, epochs=2, verbose=0)
assert len(history.history["loss"]) == 2
print(keras.backend.backend())
"""


@pytest.mark.parametrize("framework", ["tensorflow", "jax"])
def test_what_the_recipe_opens_feeds_a_numpy_loop_and_keras(framework: str, folder: Path) -> None:
    if framework == "jax":
        pytest.importorskip("jax", reason="JAX is not installed: make setup EXTRAS=pipeline,heic,reader,jax,torch,test")
    assert (folder / "datasets" / "photos" / "1.0.0" / "manifest.json").exists(), "the recipes before it write it"
    command, environment = [sys.executable, "-c", reading() + _TRAINERS], {**os.environ, "KERAS_BACKEND": framework}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == framework


def test_there_are_recipes_for_both_sides() -> None:
    texts = "\n".join(text for _, text in recipes())
    wanted = ("imageshards write ", "imageshards.run(", "imageshards verify ", "imageshards.train_dataset(", "tfds.")
    assert [one for one in wanted if one not in texts] == []


def test_the_table_of_flags_says_what_the_flags_are() -> None:
    rows = re.findall(r"^\| (`--.*?) \| .* \| (.*?) ?\|$", README.read_text(), re.MULTILINE)
    told = {name: (value.replace("\\|", "|"), default) for cell, default in rows for name, value in _flags(cell)}
    assert len(told) > 12
    for name, (value, default) in told.items():
        flag = FLAGS[name]
        if isinstance(flag.values, tuple):
            assert value == "|".join(map(str, flag.values))
        elif flag.default is False:
            assert value == ""
        else:
            Config(**{"input": "in", "output": "out", "name": "x", name: value})
        assert flag.default in (None, "", False) or str(flag.default) in default.split(", "), name


def _flags(cell: str) -> list[tuple[str, str]]:
    return re.findall(r"`--(\w+)(?: ([^`]+))?`", cell)
