"""fake-gcs-server on this machine, and the tests' proxy in front of it with a latency on each request.

Both take their part of the CPUs. The proxy's threads are in the process that calls; what is measured is in others.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import material  # noqa: F401 - makes the tests importable

from tests import servers
from tests.faults.proxy import Proxy


class SlowProxy(Proxy):
    """Forwards each request after a wait; `bytes_sent` counts the bytes of the replies."""

    def __init__(self, upstream: str, latency_ms: float) -> None:
        super().__init__(upstream, share=0)
        self.bytes_sent, self._latency_s = 0, latency_ms / 1000

    def before(self, request: str, body: bytes) -> None:
        time.sleep(self._latency_s)

    def after(self, body: bytes) -> None:
        with self._lock:
            self.bytes_sent += len(body)


@contextmanager
def server() -> Iterator[servers.Gcs]:
    """Run the server, which logs its requests; gs:// means it in processes that are started then."""
    with tempfile.TemporaryDirectory(prefix="imageshards-gs-") as folder:
        log = Path(folder) / "requests.log"
        with servers.fake_gcs(log) as url:
            os.environ["STORAGE_EMULATOR_HOST"] = url
            yield servers.Gcs(url, log)


@contextmanager
def slowed(gcs: servers.Gcs, latency_ms: float) -> Iterator[SlowProxy]:
    """Run a proxy in front of the server; gs:// means the proxy in processes that are started then."""
    with servers.serving(SlowProxy(gcs.url, latency_ms)) as proxy:
        os.environ["STORAGE_EMULATOR_HOST"] = proxy.url
        yield proxy
