"""Figures: RESULTS.md's tables are those of benchmarks/results/*.json, and so are the figures of the pages."""

from __future__ import annotations

import re

import pytest

from benchmarks.results import PAGE, kept, page
from tests.make import ROOT

# Page → the head of a table → the files that its figures are in.
FIGURES = {
    ("README.md", "reader"): ("reading",),
    ("docs/scale.md", "a million images of"): ("cost",),
    ("docs/howto/sizes.md", "stored"): ("sizes",),
    ("docs/howto/records.md", "PyTorch, 224 px, 2 cores"): ("records",),
    ("docs/howto/select.md", "of 20,350 photos of 224 × 224"): ("selection",),
}


def test_the_tables_are_made_from_the_files() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run python -m benchmarks.results"
    named = {*re.findall(r"^<!-- table: (\w+) -->$", text, re.MULTILINE)} | {"experiment"}
    assert named == {path.stem for path in PAGE.parent.glob("results/*.json")}


@pytest.mark.parametrize("place", FIGURES, ids="-".join)
def test_a_page_s_figures_are_those_that_are_kept(place: tuple[str, str]) -> None:
    name, head = place
    text = (ROOT / name).read_text()
    (rows,) = re.findall(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    measured = {
        number for file in FIGURES[place] for row in kept(file)["rows"] for cell in row for number in numbers(cell)
    }
    for row in rows.splitlines():
        cells = row.strip("|").split("|")[1:]
        found = [number for cell in cells for number in numbers(cell)]
        assert found and [number for number in found if not any(is_it(number, one) for one in measured)] == [], row


def numbers(cell: str) -> list[str]:
    return re.findall(r"\d[\d,]*(?:\.\d+)?", cell)


def is_it(told: str, measured: str) -> bool:
    """Whether a figure is the measured one, or that rounded."""
    told_value, value = float(told.replace(",", "")), float(measured.replace(",", ""))
    digits = len(told.partition(".")[2])
    return abs(told_value - value) <= 0.5 * 10**-digits + 1e-9


def test_the_page_is_short() -> None:
    prose = re.sub(r"^(\||<!--|`).*$", "", PAGE.read_text(), flags=re.MULTILINE)
    assert len(prose.split()) <= 1_500
