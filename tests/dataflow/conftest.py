"""What tests of Dataflow share: the API's stand-in, in one time zone."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.dataflow.api import FakeDataflow
from tests.servers import serving


@pytest.fixture(autouse=True, scope="session")
def _utc() -> Iterator[None]:
    """The times of the API are told as the clock here shows them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def api() -> Iterator[FakeDataflow]:
    """A Dataflow without jobs."""
    with serving(FakeDataflow()) as server:
        yield server
