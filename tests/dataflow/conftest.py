"""The cloud of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataflow.cloud import Cloud, account_key
from tests.servers import Gcs


@pytest.fixture(autouse=True, scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The credentials of these tests."""
    with account_key(tmp_path_factory.mktemp("key")) as file, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        yield file


@pytest.fixture(scope="module")
def cloud(gcs: Gcs, key: Path, tmp_path_factory: pytest.TempPathFactory) -> Cloud:
    """Storage, and commands whose jobs are written to files."""
    return Cloud(gcs, tmp_path_factory.mktemp("cloud"), key)
