"""What tests of Dataflow share: the API's stand-in, in one time zone, and credentials."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataflow.api import FakeDataflow
from tests.dataflow.cloud import Cloud, account_key
from tests.servers import Gcs, serving


@pytest.fixture(autouse=True, scope="session")
def _utc() -> Iterator[None]:
    """The times of the API are told as the clock here shows them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(autouse=True, scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The credentials of these tests."""
    with account_key(tmp_path_factory.mktemp("key")) as file, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        yield file


@pytest.fixture(scope="module")
def cloud(gcs: Gcs, key: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """Storage, a Dataflow without jobs, and commands whose jobs are written to files."""
    with serving(FakeDataflow()) as api:
        yield Cloud(gcs, api, tmp_path_factory.mktemp("cloud"), key)


@pytest.fixture
def api() -> Iterator[FakeDataflow]:
    """A Dataflow without jobs."""
    with serving(FakeDataflow()) as server:
        yield server
