"""What tests of the command share: inputs to change and to reject, checks of how it ended."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import make


@pytest.fixture
def changed(photos: Path, tmp_path: Path) -> Path:
    """A copy of the pictures with their times, to be changed."""
    return Path(shutil.copytree(photos, tmp_path / "changed"))


@pytest.fixture(scope="session")
def with_broken(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`photos` and three broken images in a class of two good ones."""
    folder = Path(shutil.copytree(photos, tmp_path_factory.mktemp("broken") / "in"))
    make.class_folders(folder, {"dog": 2})
    good = make.encoded(make.picture(120, 90, seed=77))
    for name, data in (("cut", good[: len(good) // 2]), ("text", b"hello, this is no image"), ("empty", b"")):
        (folder / "dog" / f"{name}.jpg").write_bytes(data)
    return folder


def refused(finished: make.Finished, code: int, line: str) -> None:
    """Exit with this code and line."""
    assert (finished.code, finished.err) == (code, f"error: {line}\n")


def failed(finished: make.Finished, *parts: str) -> None:
    """Exit 1 and one line that holds these parts."""
    assert (finished.code, finished.err.count("\n")) == (1, 1), finished
    assert [part for part in parts if part not in finished.err] == [], finished.err


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = make.traces(folder)
    yield
    assert make.traces(folder) == before
