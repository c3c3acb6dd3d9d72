"""A Google of this machine's own: storage, credentials, and a job that is written to a file instead of sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests import make
from tests.dataflow.api import FakeDataflow
from tests.servers import Gcs, serving

PROJECT = ("--runner=DataflowRunner", "--project=my-project", "--region=europe-west4")


class TokenServer(BaseHTTPRequestHandler):
    """Gives a token to whoever asks, as https://oauth2.googleapis.com/token does for an account's key."""

    def do_POST(self) -> None:
        answer = b'{"access_token": "x", "expires_in": 3600, "token_type": "Bearer"}'
        self.send_response(200)
        for header in (("Content-Type", "application/json"), ("Content-Length", str(len(answer)))):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Not on the tests' output."""


@contextmanager
def account_key(folder: Path) -> Iterator[Path]:
    """A file for GOOGLE_APPLICATION_CREDENTIALS: without any, Beam waits 20 s before it goes on."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), TokenServer)) as server:
        url = f"http://127.0.0.1:{server.server_port}/token"
        account = {"client_email": "me@example.com", "private_key": pem, "token_uri": url, "project_id": "my-project"}
        file = folder / "account.json"
        file.write_text(json.dumps({"type": "service_account", **account}))
        yield file


class Cloud:
    """Runs the command with a storage server, a Dataflow API and an account's key.

    Args:
        gcs: the storage.
        api: the Dataflow API.
        folder: for templates.
        key: file of the key.
    """

    def __init__(self, gcs: Gcs, api: FakeDataflow, folder: Path, key: Path) -> None:
        self.gcs = gcs
        self.api = api
        self.flags = [*PROJECT, f"--dataflow_endpoint={api.url}", "--name=photos"]
        self._folder = folder
        self._environment = {**os.environ, "GOOGLE_APPLICATION_CREDENTIALS": str(key)}

    def input(self, images: int = 10) -> str:
        """URL of a new bucket with so many images."""
        bucket = self.gcs.new_bucket()
        for number in range(images):
            self.gcs.put(bucket, f"class_{number % 5}/{number:05d}.jpg", b"")
        return f"gs://{bucket}"

    def run(self, *flags: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """`imageshards write` for Dataflow with more flags."""
        command = [sys.executable, "-m", "beam_pipeline", *self.flags, *flags]
        environment = {**self._environment, **(environment or {})}
        return subprocess.run(command, cwd=make.ROOT, env=environment, capture_output=True, text=True, timeout=120)

    def submit(self, bucket: str, *flags: str) -> dict[str, Any]:
        """The job that would be sent; what it stages is in a new bucket of that name."""
        output, template = f"gs://{self.gcs.new_bucket(bucket)}", self._folder / f"{bucket}.json"
        finished = self.run(f"--output={output}", f"--template_location={template}", *flags)
        assert finished.returncode == 0, finished.stderr
        return dict(json.loads(template.read_text()))

    def read(self, bucket: str, suffix: str) -> bytes:
        """Content of the one object whose name ends so."""
        (name,) = (name for name in self.gcs.names(bucket) if name.endswith(suffix))
        return self.gcs.get(bucket, name)
