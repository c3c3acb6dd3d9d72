"""The cloud of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from tests.dataflow.cloud import Cloud, MetadataServer
from tests.servers import Gcs, serving


@pytest.fixture(scope="module")
def cloud(gcs: Gcs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), MetadataServer)) as server:
        yield Cloud(gcs, f"127.0.0.1:{server.server_port}", tmp_path_factory.mktemp("cloud"))
