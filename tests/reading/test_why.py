"""docs/why.md: its blocks run as written, and its figures are those that were measured."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest

import beam_pipeline
import imageshards
from tests import make

DOCUMENT = make.ROOT / "docs" / "why.md"
MEASURED = make.ROOT / "benchmarks" / "results" / "experiment.json"
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("why")
    photos = make.class_folders(folder / "photos", {"ant": 70, "bee": 60, "cat": 50})
    common = {"input": str(photos), "output": str(folder / "datasets"), "image_size": 72}
    assert beam_pipeline.run(beam_pipeline.Config(name="photos", splits="train=0.8,validation=0.2", **common))
    return folder


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs_as_written(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    language, text = BLOCKS[number]
    monkeypatch.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if language == "python":
            exec(compile(text, str(DOCUMENT), "exec"), {"__name__": "block"})
        else:
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                assert (program, imageshards.main(arguments)) == ("imageshards", 0), line
    assert printed.getvalue().strip()


def test_no_block_is_left_out() -> None:
    assert len(BLOCKS) == DOCUMENT.read_text().count("\n```") / 2 >= 3


def test_the_figures_of_the_experiment_are_those_that_it_printed() -> None:
    rows = {row["name"]: row for row in json.loads(MEASURED.read_text())["rows"]}
    told = re.findall(r"^\| ([^|]+?) \| ([\d,]+) \(([\d,]+) – ([\d,]+)\) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert {name for name, *_ in told} == set(rows)
    for name, *figures in told:
        row = rows[name]
        measured = [row["images_per_s"], *row["images_per_s_spread"]]
        assert [int(figure.replace(",", "")) for figure in figures] == [round(rate) for rate in measured], name


def test_every_picture_is_there_in_light_and_dark_and_small() -> None:
    named = re.findall(r'(?:srcset|src)="(images/[^"]+)"', DOCUMENT.read_text())
    assert {name.replace("-dark", "-light") for name in named} == {name for name in named if "-light" in name}
    for path in [*(DOCUMENT.parent / name for name in named), *(DOCUMENT.parent / "images").iterdir()]:
        assert path.stat().st_size < (300_000 if path.suffix == ".png" else 200_000), path
