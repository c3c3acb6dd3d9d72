"""A published version: `original`, not to be changed, and `version`, a copy of it to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import make

FLAGS = ("--splits", "train=0.8,validation=0.2", "--num_shards", "2")


@pytest.fixture(scope="session")
def original(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.published(photos, tmp_path_factory.mktemp("original"), *FLAGS)


@pytest.fixture
def version(original: Path, tmp_path: Path) -> Path:
    """`tmp_path`/out/photos/1.0.0."""
    return Path(shutil.copytree(original, tmp_path / "out" / "photos" / "1.0.0"))


def again(images: Path, version: Path, *flags: object) -> make.Finished:
    """The same command once more."""
    return make.job(images, version.parent.parent, *FLAGS, *flags)
