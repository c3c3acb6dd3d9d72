"""Every block of docs/reader.md runs as written, in its order, on datasets that the pipeline wrote."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import beam_pipeline
import imageshards
from beam_pipeline.names import SHELVES
from tests import make
from tests.reading.without import run_without

DOCUMENT = make.ROOT / "docs" / "reader.md"
NEEDS = {
    "torch": "PyTorch is not installed: pip install 'imageshards[torch]'",
    "jax": "JAX is not installed: pip install 'imageshards[jax]'",
}


def blocks() -> list[tuple[str, str, str]]:
    """(heading, language, text) of each block of code."""
    found = []
    for section in re.split(r"^## ", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]:
        heading = section.splitlines()[0]
        found += [
            (heading, *block) for block in re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        ]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the document says there is."""
    folder = tmp_path_factory.mktemp("recipes")
    photos = make.class_folders(
        folder / "photos", {"circle": 30, "cross": 20, "square": 20, "star": 30, "triangle": 20}
    )
    common = {"input": str(photos), "output": str(folder / "datasets"), "image_size": 72}
    assert beam_pipeline.run(beam_pipeline.Config(name="photos", splits="train=0.7,validation=0.3", **common))
    rows = [
        f"{path.relative_to(photos)},{path.parent.name},train,{number % 60}"
        for number, path in enumerate(sorted(photos.rglob("*.jpg")))
    ]
    (folder / "photos.csv").write_text("\n".join(["path,label,split,width_cm:int64", *rows]) + "\n")
    assert beam_pipeline.run(
        beam_pipeline.Config(name="tagged", layout="manifest", manifest=str(folder / "photos.csv"), **common)
    )
    return folder


@pytest.fixture(scope="module")
def variables() -> dict[str, dict[str, Any]]:
    """Variables of each section: a block goes on where the one before it ended."""
    return {heading: {"__name__": "recipe"} for heading, _, _ in blocks()}


def marks(text: str) -> Any:
    """Measuring takes long, whatever is measured."""
    return [pytest.mark.soak] if re.search(r"imageshards[ .]bench\b", text) else []


@pytest.mark.parametrize(
    ("heading", "language", "text"),
    [pytest.param(*one, id=f"{number}-{one[0][:12]}", marks=marks(one[2])) for number, one in enumerate(blocks())],
)
def test_recipe_runs_as_written(
    heading: str,
    language: str,
    text: str,
    folder: Path,
    variables: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "skipped" in variables[heading]:  # it continues with what the block before it made
        pytest.skip(variables[heading]["skipped"])
    monkeypatch.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if language == "python":  # in this process: TensorFlow and Keras take 10 s to import
            try:
                exec(compile(text, f"{DOCUMENT} ({heading})", "exec"), variables[heading])
            except ModuleNotFoundError as error:
                if error.name not in NEEDS:
                    raise
                variables[heading]["skipped"] = NEEDS[error.name]
                pytest.skip(NEEDS[error.name])
        else:
            for line in text.splitlines():
                program, *arguments = shlex.split(line, comments=True)
                assert (program, imageshards.main(arguments)) == ("imageshards", 0), line
    assert printed.getvalue().strip()


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_augmentation_runs_on_other_backends_without_tensorflow(backend: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip(backend, reason=NEEDS[backend])
    program = "\n".join(text for heading, _, text in blocks() if heading == "Augmentation")
    assert run_without("tensorflow", program, tmp_path, cwd=folder, KERAS_BACKEND=backend).stdout.strip()


def test_the_document_shows_every_way_to_read() -> None:
    text = DOCUMENT.read_text() + (make.ROOT / "docs" / "serving.md").read_text()
    for shelf in ("imageshards", "imageshards.tools"):
        for name, home in SHELVES[shelf].items():
            is_shown = home.startswith("reader.") and (name.islower() or name in ("Position", "TrainOptions"))
            assert f"{shelf}.{name}" in text or not is_shown, name
    for layer in ("Normalization", "Discretization", "StringLookup", "Hashing", "HashedCrossing", "Embedding"):
        assert f"layers.{layer}(" in text, layer
    for verb in ("info", "index", "show", "bench"):
        assert f"imageshards {verb} " in text, verb
