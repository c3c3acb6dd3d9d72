"""Today's writer writes the bytes that were recorded."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from beam_pipeline.images.codec import OWN_VERSION
from tests.pinned import record

FAST = ("defaults", "csv", "gzip", "own_size", "splits")  # `make soak` has the others


def recorded(name: str, *codecs: str) -> dict[str, Any]:
    """A JSON file of `record`; skips the test if bytes depend on other versions of these codecs."""
    content: dict[str, Any] = json.loads((record.FOLDER / f"{name}.json").read_text())
    for codec in codecs:
        if content["codecs"][codec] != record.codecs()[codec]:
            pytest.skip(f"recorded with {codec} {content['codecs'][codec]}, here is {record.codecs()[codec]}")
    return content


@pytest.fixture(scope="module", params=["samples", "photos"])
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    photos = Path(os.environ.get("IMAGESHARDS_PHOTOS", "")) if request.param == "photos" else None
    if photos == Path():
        pytest.skip("set IMAGESHARDS_PHOTOS to the class folders that photos.json was recorded from")
    expected, folder = recorded(request.param, "pillow", "libjpeg_turbo"), tmp_path_factory.mktemp(request.param)
    assert record.prepare(folder, photos) == expected["inputs"], "these images are not those of the recording"
    return request.param, folder


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.soak) for case in record.CASES]
)
def test_files_are_those_that_were_recorded(inputs: tuple[str, Path], case: str) -> None:
    expected = recorded(inputs[0], *["zlib"] * (case == "gzip"))
    assert record.published(case, inputs[1]) == expected["cases"][case]


def test_the_number_of_our_own_code_stands_for_these_bytes() -> None:
    """A base with another number isn't taken: images would keep bytes that today's code doesn't write."""
    noted = json.loads((record.FOLDER / "own_version.json").read_text())
    assert noted["shards"] == record.shards_hash(recorded("samples")["cases"]), "run tests/pinned/record.py"
    assert noted["imageshards"] == OWN_VERSION
