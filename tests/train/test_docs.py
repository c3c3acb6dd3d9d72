"""The commands that the documents show are commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from reader.commands import parser
from reader.info import load_info
from reader.training.models import build
from reader.training.options import TrainOptions, application_name, make_recipe

ROOT = Path(__file__).parents[2]
SHOWN = [
    line.partition("imageshards train ")[2]
    for file in (ROOT / "docs/howto/train.md", ROOT / "README.md")
    for block in re.findall(r"```bash\n(.*?)```", file.read_text(), re.DOTALL)
    for line in block.splitlines()
    if "imageshards train " in line
]


@pytest.mark.parametrize("arguments", SHOWN)
def test_a_command_of_the_documents_is_read(arguments: str) -> None:
    values = parser("train").parse_args(shlex.split(arguments))
    assert application_name(getattr(values, "model", "small_cnn"))


def test_the_documents_show_commands() -> None:
    assert len(SHOWN) > 2


def test_the_model_of_the_document_is_built(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model,) = re.findall(r"```python\n(import keras\n.*?)```", (ROOT / "docs/howto/train.md").read_text(), re.DOTALL)
    (tmp_path / "my_models.py").write_text(model)
    monkeypatch.chdir(tmp_path)
    info = load_info(dataset)
    recipe = make_recipe(info, TrainOptions(model="my_models:wide", image_size=160))
    assert build(info, recipe).full.output_shape == (None, info.num_classes)
