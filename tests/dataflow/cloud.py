"""A Google of this machine's own: storage, credentials, and a job that is written to a file instead of sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests import make
from tests.servers import Gcs

PROJECT = ("--runner=DataflowRunner", "--project=my-project", "--region=europe-west4")


class MetadataServer(BaseHTTPRequestHandler):
    """Answers as a Google VM's metadata server does: without credentials Beam waits 25 s before it goes on."""

    def do_GET(self) -> None:
        answer, kind = b"my-project", "text/plain"
        if "/token" in self.path or "recursive" in self.path:
            answer = b'{"access_token": "x", "expires_in": 3600, "token_type": "Bearer", "email": "me@example.com"}'
            kind = "application/json"
        elif "universe" in self.path:
            answer = b"googleapis.com"
        self.send_response(200)
        for header in (("Metadata-Flavor", "Google"), ("Content-Type", kind), ("Content-Length", str(len(answer)))):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Not on the tests' output."""


class Cloud:
    """Runs the command beside a running storage server and a metadata server.

    Args:
        gcs: the storage.
        metadata: host and port of the metadata server.
        folder: for templates.
    """

    def __init__(self, gcs: Gcs, metadata: str, folder: Path) -> None:
        self.gcs = gcs
        self._folder = folder
        self.environment = {**os.environ, "GCE_METADATA_HOST": metadata, "GCE_METADATA_IP": metadata}

    def input(self, images: int = 10) -> str:
        """URL of a new bucket with so many images."""
        bucket = self.gcs.new_bucket()
        for number in range(images):
            self.gcs.put(bucket, f"class_{number % 5}/{number:05d}.jpg", b"")
        return f"gs://{bucket}"

    def run(self, *flags: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """`imageshards write` for Dataflow with more flags."""
        command = [sys.executable, "-m", "beam_pipeline", *PROJECT, "--name=photos", *flags]
        environment = {**self.environment, **(environment or {})}
        return subprocess.run(command, cwd=make.ROOT, env=environment, capture_output=True, text=True, timeout=120)

    def manifest(self, images: int) -> tuple[str, ...]:
        """Flags of an input with so many images, by rows of a manifest."""
        bucket = self.gcs.new_bucket()
        rows = "".join(f"class_{number % 5}/{number:06d}.jpg,class_{number % 5}\n" for number in range(images))
        self.gcs.put(bucket, "rows.csv", f"path,label\n{rows}".encode())
        return ("--layout=manifest", f"--manifest=gs://{bucket}/rows.csv")

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
