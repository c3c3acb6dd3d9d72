"""What tests of Dataflow share: a cloud each, one time zone, and no network."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataflow.api import FakeDataflow
from tests.dataflow.cloud import Cloud, account_key
from tests.servers import Gcs, serving


@pytest.fixture(autouse=True)
def _clock() -> Iterator[None]:
    """The times of the API are told as the clock here shows them, and nobody sleeps for seconds, as Beam does."""
    sleep = time.sleep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.02)))
        # Google's library asks a real host about every account, in a thread: this ends at once.
        patch.setenv("HTTPS_PROXY", "http://localhost:9")
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The account of every command: of the session, since Beam keeps the first credentials that it finds."""
    with account_key(tmp_path_factory.mktemp("key")) as file:
        yield file


@pytest.fixture
def api() -> Iterator[FakeDataflow]:
    """A Dataflow without jobs."""
    with serving(FakeDataflow()) as server:
        yield server


@pytest.fixture
def cloud(gcs: Gcs, api: FakeDataflow, tmp_path: Path, key: Path) -> Cloud:
    """A command whose job neither runs nor has run."""
    return Cloud(gcs, api, tmp_path, key)
