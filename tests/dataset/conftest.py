"""A copy of a published version, to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import make


@pytest.fixture
def version(original: Path, tmp_path: Path) -> Path:
    """`tmp_path`/out/photos/1.0.0."""
    return Path(shutil.copytree(original, tmp_path / "out" / "photos" / "1.0.0"))


def again(images: Path, version: Path, *flags: object) -> make.Finished:
    """The same command once more."""
    return make.job(images, version.parent.parent, *make.TWO_SPLITS, *flags)
