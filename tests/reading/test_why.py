"""docs/why.md: its figures are those that were measured, and its pictures are there."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from typing import Any

import pytest

from tests import make

DOCUMENT, README = make.ROOT / "docs" / "why.md", make.ROOT / "README.md"
MEASURED = make.ROOT / "benchmarks" / "results" / "experiment.json"
ONE_AT_A_TIME, FILES_AT_ONCE = "files, one at a time", "files, 32 at a time"
FAIR, OURS = "files of the stored images, 32 at a time", "imageshards, train_batches"


def tables() -> list[tuple[list[str], list[list[str]]]]:
    """Heads and rows of the document's tables."""
    found = re.findall(r"^(\|.*\|)\n\|[-|]+\|\n((?:\|.*\|\n)+)", DOCUMENT.read_text(), re.MULTILINE)
    return [(cells(head), [*map(cells, rows.splitlines())]) for head, rows in found]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_figures_of_the_experiment_are_those_that_it_printed() -> None:
    experiment = json.loads(MEASURED.read_text())
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "images/s": lambda row: "{:,.0f} ({:,.0f} – {:,.0f})".format(row["images_per_s"], *row["images_per_s_spread"]),
        "CPU ms per image": lambda row: f"{row['cpu_s_per_1000']:.2f}",
        "kB per image": lambda row: f"{row['bytes_per_image'] / 1000:.1f}",
        "requests for 1,000 images": lambda row: f"{row['requests_per_1000']:,.1f}",
    }
    measured = {row["name"]: row for row in experiment["rows"]}
    named, headed = set(), set()
    for (_, *head), rows in tables():
        if head[0] != "images/s":
            continue
        for name, *figures in rows:
            assert dict(zip(head, figures, strict=True)) == {column: columns[column](measured[name]) for column in head}
            named.add(name)
        headed.update(head)
    assert (named, headed) == (set(measured), set(columns))


def test_what_storing_small_images_saves_follows_from_the_experiment() -> None:
    rows = {row["name"]: row for row in json.loads(MEASURED.read_text())["rows"]}
    original, stored = rows[FILES_AT_ONCE], rows[FAIR]
    ((_, found),) = [(head, rows) for head, rows in tables() if head[1:2] == ["original"]]
    for (name, *figures), key, unit, digits in zip(
        found, ("cpu_s_per_1000", "bytes_per_image"), (1, 1000), (2, 1), strict=True
    ):
        values = original[key] / unit, stored[key] / unit, (original[key] - stored[key]) / unit
        assert figures == [f"{value:.{digits}f}" for value in values], name
    carried = [f"{125e6 / row['bytes_per_image']:,.0f}" for row in (original, stored)]
    assert "carries {} originals or {} stored images".format(*carried) in DOCUMENT.read_text().replace("\n", " ")


def test_the_readme_s_chart_says_in_words_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(make.ROOT / "benchmarks")
    pictures = runpy.run_path(str(make.ROOT / "benchmarks" / "pictures.py"))
    rates = {row["name"]: row["images_per_s"] for row in json.loads(MEASURED.read_text())["rows"]}
    local = pictures["local_rates"]()
    ours = sorted(rate for name, rate in local.items() if name.startswith("imageshards"))
    shown = {"files one by one": ONE_AT_A_TIME, "files 32 at a time": FAIR, "imageshards": OURS}
    bucket = ", ".join(f"{name} {rates[row]:,.0f}" for name, row in shown.items())
    others = [f"{name} {local[name]:,.0f}" for name in ("MosaicML", "WebDataset", "tfds.load")]
    disk = ", ".join([*others, f"imageshards {ours[0]:,.0f} to {ours[-1]:,.0f}", f"FFCV {local['FFCV']:,.0f}"])
    text = f"From a bucket at 50 ms a request: {bucket}. From the local disk: {disk}."
    (alt,) = re.findall(r'<img alt="Images per second\. (.*?)" src="docs/images/speed-', README.read_text())
    assert alt == text


def test_every_picture_is_there_in_light_and_dark_and_small() -> None:
    named = re.findall(r'(?:srcset|src)="(images/[^"]+)"', DOCUMENT.read_text())
    assert {name.replace("-dark", "-light") for name in named} == {name for name in named if "-light" in name}
    for path in [*(DOCUMENT.parent / name for name in named), *(DOCUMENT.parent / "images").iterdir()]:
        assert path.stat().st_size < (300_000 if path.suffix == ".png" else 200_000), path
