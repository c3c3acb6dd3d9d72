"""Every page of the documents runs as written: its blocks in their order, in a folder that has what the page says."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import imageshards
from beam_pipeline.sample_data import draw_folder
from reader.commands import parser
from tests.archives import imagenet
from tests.blocks import blocks, environment, run
from tests.make import ROOT
from tests.reading.without import run_without
from tests.test_moving import write_cities

APART = "moving.md"  # tests/test_moving.py
PAGES = sorted(page for page in ROOT.glob("docs/**/*.md") if blocks(page) and page.name != APART)
NAMES = [page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES]
# Measuring, training and Beam's own pipelines take long.
SLOW = ("why", "start", "howto/train", "howto/predict", "howto/beam", "howto/keras", "howto/columns", "works-with")
# As the Hub numbers them: not in the order of their names, 2 before 10, and one without an image.
HUB_NAMES = ["zebra", *(f"kind {number}" for number in range(1, 12)), "apple/pie", "never seen"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What most pages begin with: images, a dataset of them, and one with a column."""
    folder = tmp_path_factory.mktemp("pages")
    draw_folder(folder / "photos", images=100, broken=0)
    photos = sorted((folder / "photos").rglob("*.*"))
    rows = [
        f"{photo.relative_to(folder / 'photos')},{photo.parent.name},train,{n % 60}" for n, photo in enumerate(photos)
    ]
    (folder / "tagged.csv").write_text("\n".join(["path,label,split,width_cm:int64", *rows]) + "\n")
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        common = "--input photos --output datasets"
        for flags in (
            "--name photos --splits train=0.7,validation=0.3",
            "--name tagged --layout manifest --manifest tagged.csv",
        ):
            assert imageshards.main(shlex.split(f"write {common} {flags}")) == 0
    return folder


def nothing(folder: Path) -> None:
    for name in ("photos", "datasets"):
        shutil.rmtree(folder / name)


def flat_folder(folder: Path) -> None:
    (folder / "flat").mkdir()
    for number, photo in enumerate(pictures(folder)[:9]):
        shutil.copy(photo, folder / "flat" / f"{('cat', 'dog')[number % 2]}_{number:03}.jpg")


def parquet_files(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (folder / "parquet").mkdir()
    rows = [
        {"image": {"bytes": photo.read_bytes(), "path": None}, "label": n % 13}
        for n, photo in enumerate(pictures(folder)[:26])
    ]
    metadata = {
        "huggingface": json.dumps({"info": {"features": {"label": {"names": HUB_NAMES, "_type": "ClassLabel"}}}})
    }
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(table, folder / "parquet" / "0000.parquet")


def trained_run(folder: Path) -> None:
    options = imageshards.TrainOptions(out=str(folder / "runs/photos"), image_size=32, epochs=1)
    imageshards.train(folder / "datasets/photos/1.0.0", options)


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def pictures(folder: Path) -> list[Path]:
    return sorted((folder / "photos").rglob("*.jpg"))


PREPARATIONS: dict[str, Callable[[Path], None]] = {
    "start": nothing,
    "howto/archives": imagenet.stand_in,
    "howto/tables": flat_folder,
    "howto/parquet": parquet_files,
    "howto/columns": lambda folder: write_cities(folder),
    "howto/predict": trained_run,
    "works-with": trained_run,
}


def of_the_hub(folder: Path) -> None:
    """Ids are the Hub's, and every row is there."""
    info = imageshards.load_info(folder / "datasets" / "unpacked")
    assert list(info.classes) == [name.replace("/", "-") for name in HUB_NAMES]
    features = ["filename"]
    ((inputs, labels, weights),) = imageshards.eval_batches(info, "all", global_batch_size=26, features=features)
    rows = [int(name.decode().rpartition("-")[2].partition(".")[0]) for name in inputs["filename"]]
    assert labels.tolist() == [row % 13 for row in rows] and sorted(rows) == list(range(26)) and weights.all()


def of_the_flat_folder(folder: Path) -> None:
    assert imageshards.load_info(folder / "datasets" / "flat").records("all") == 9


CHECKS: dict[str, Callable[[Path], None]] = {
    "howto/archives": imagenet.of_the_unpacked_folders,
    "howto/parquet": of_the_hub,
    "howto/tables": of_the_flat_folder,
}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=[pytest.mark.soak] * (name in SLOW))
        for page, name in zip(PAGES, NAMES, strict=True)
    ],
)
def test_a_page_runs_as_written(page: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, folder = page.relative_to(ROOT / "docs").with_suffix("").as_posix(), tmp_path / "work"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    PREPARATIONS.get(name, lambda _: None)(folder)
    variables: dict[str, Any] = {"__name__": "block"}
    printed, missing = "", []
    for number, (language, text) in enumerate(blocks(page)):
        if "--weights imagenet" in text:  # a download
            parser("train").parse_args(shlex.split(text, comments=True)[2:])
            continue
        imports = re.findall(r"^(?:import|from) ([\w.]+)", text, re.MULTILINE)
        if absent := [module for module in imports if not is_installed(module)]:
            missing += absent
            continue
        if name == "works-with":  # libraries that don't bear each other in one process
            command = [sys.executable, "-c", text]
            printed += subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
        elif not missing:  # else it goes on where a block ended that didn't run
            printed += run(language, text, f"{page} ({number})", variables)
    if missing:
        pytest.skip(f"not installed, so not all of it ran: {', '.join(missing)}")
    assert printed.strip()
    CHECKS.get(name, lambda _: None)(folder)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_keras_page_runs_on_other_backends_without_tensorflow(backend: str, prepared: Path, tmp_path: Path) -> None:
    pytest.importorskip(backend, reason=f"{backend} is not installed: pip install 'imageshards[{backend}]'")
    program = "\n".join(text for language, text in blocks(ROOT / "docs/howto/keras.md"))
    assert run_without("tensorflow", program, tmp_path, cwd=prepared, KERAS_BACKEND=backend).stdout.strip()


def test_every_preparation_is_of_a_page() -> None:
    assert {*PREPARATIONS, *CHECKS, *SLOW} <= {*NAMES}


def test_the_pages_show_every_way_to_read() -> None:
    from beam_pipeline.names import SHELVES

    text = "".join(page.read_text() for page in [*PAGES, *ROOT.glob("examples/*.py")])
    for shelf in ("imageshards", "imageshards.tools"):
        for name, home in SHELVES[shelf].items():
            is_shown = home.startswith("reader.") and (name.islower() or name in ("Position", "TrainOptions"))
            assert f"{shelf}.{name}" in text or not is_shown, name
    for layer in ("Normalization", "Hashing", "Embedding", "StringLookup", "Discretization", "HashedCrossing"):
        assert f"layers.{layer}(" in text, layer
    for verb in ("info", "index", "show", "bench", "diff", "duplicates"):
        assert f"imageshards {verb} " in text, verb


def words(text: str) -> int:
    """Of prose: without blocks of code."""
    return len(re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE).split())


def test_the_pages_are_short() -> None:
    pages = {
        page: words(page.read_text())
        for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/howto/*.md")]
    }
    assert pages[ROOT / "README.md"] <= 750
    assert sum(pages.values()) <= 14_500
    understand = ("why", "architecture", "scale")
    assert sum(pages[ROOT / f"docs/{name}.md"] for name in understand) <= 2_500
    assert pages[ROOT / "docs/format.md"] <= 2_500
    assert {page.name: count for page, count in pages.items() if page.parent.name == "howto" and count > 400} == {}
    decisions = {page.name: words(page.read_text()) for page in ROOT.glob("docs/decisions/*.md")}
    assert {name: count for name, count in decisions.items() if count > 400} == {}
