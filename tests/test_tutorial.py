"""docs/tutorial.ipynb is docs/tutorial.py with its outputs, and runs from the first cell to the last."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tools.notebook import NOTEBOOK, SCRIPT, execute, from_script


@pytest.fixture(scope="module")
def kept() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def said(notebook: Any) -> list[tuple[str, list[str]]]:
    """Of each cell its code, and of each output its kinds and its text without numbers, which follow the machine."""
    return [
        (cell.source, [f"{sorted(output.get('data', ()))} {_without_numbers(output)}" for output in cell.outputs])
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def _without_numbers(output: Any) -> str:
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return re.sub(r"[\d.,]+", "#", re.sub(r" +", " ", text))


def test_the_notebook_is_made_from_the_script(kept: Any) -> None:
    made = from_script(SCRIPT.read_text())
    of_script, of_notebook = ([(cell.cell_type, cell.source) for cell in one.cells] for one in (made, kept))
    assert of_notebook == of_script, "run python -m tools.notebook"
    text = SCRIPT.read_text()
    assert text.count("# %%") == len(made.cells)
    for cell in made.cells:
        if cell.cell_type == "code":
            assert cell.source in text


def test_the_notebook_holds_pictures_and_nothing_of_the_machine_that_ran_it(kept: Any) -> None:
    assert NOTEBOOK.stat().st_size < 500_000
    text = NOTEBOOK.read_text()
    for folder in ("/root/", "/home/", f"{tempfile.gettempdir()}/", str(NOTEBOOK.parent.parent)):
        assert folder not in text
    assert [cell.metadata for cell in kept.cells if cell.metadata] == []  # such as when a cell ran
    assert "stderr" not in text
    kinds = {kind for cell in kept.cells for output in cell.get("outputs", ()) for kind in output.get("data", ())}
    assert kinds == {"text/plain", "image/jpeg", "image/png"}


@pytest.mark.soak
def test_every_cell_runs_and_says_what_the_notebook_says(kept: Any, tmp_path: Path) -> None:
    for package in ("tensorflow", "keras", "matplotlib"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[tensorflow,train]'")
    made = from_script(SCRIPT.read_text())
    execute(made, tmp_path)
    assert said(made) == said(kept), "run python -m tools.notebook"


def test_links_lead_to_files(kept: Any) -> None:
    text = "\n".join(cell.source for cell in kept.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 4 and [link for link in links if not (NOTEBOOK.parent / link).exists()] == []
