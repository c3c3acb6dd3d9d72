"""The README's commands and programs run as written, one after the other, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert result.stdout.strip() or "<<" in text, f"prints nothing:\n{text}"


def test_there_are_recipes_for_both_sides() -> None:
    texts = "\n".join(text for _, text in recipes())
    for wanted in ("-m beam_pipeline ", "beam_pipeline.run(", "-m reader verify", "reader.train_dataset(", "tfds."):
        assert wanted in texts
