"""A command for Dataflow and the Google that it meets, all on this machine: `Cloud`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability import python_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from beam_pipeline import storage
from tests import make
from tests.dataflow.api import PROJECT, REGION, FakeDataflow
from tests.servers import Gcs, serving

IMAGE = "--sdk_container_image=registry/image:1"  # with it no package is built, which takes seconds


class Cloud:
    """Runs `imageshards write` for Dataflow: from a bucket with images into an empty one.

    Args:
        gcs: the storage.
        api: the Dataflow API.
        folder: for templates.
        key: file of an account's key, the credentials of every command.
    """

    def __init__(self, gcs: Gcs, api: FakeDataflow, folder: Path, key: Path) -> None:
        self.gcs, self.api, self.key = gcs, api, key
        self._folder = folder
        self.source, self.bucket = self.input(), gcs.new_bucket()  # what Dataflow stages is in the bucket, too
        self.output = f"gs://{self.bucket}/datasets"
        self.version = f"{self.output}/photos/1.0.0"
        self.flags = [  # of every command; of two flags of a name the later one counts
            *("--runner=DataflowRunner", f"--project={PROJECT}", f"--region={REGION}"),
            *(f"--dataflow_endpoint={api.url}", f"--input={self.source}", f"--output={self.output}", "--name=photos"),
            "--experiments=disable_logging_submission_environment",  # else Beam asks pip each time, for a second
        ]

    def input(self) -> str:
        """URL of a new bucket with ten images in five classes."""
        bucket = self.gcs.new_bucket()
        for number in range(10):
            self.gcs.put(bucket, f"class_{number % 5}/{number}.jpg", make.encoded(make.picture(seed=number)))
        return f"gs://{bucket}"

    @contextmanager
    def environment(self, **more: str) -> Iterator[None]:
        """The credentials, and more variables, for what this process does meanwhile."""
        with mock.patch.dict(os.environ, {"GOOGLE_APPLICATION_CREDENTIALS": str(self.key), **more}):
            storage.storage_of.cache_clear()  # a client keeps the address that it was made with
            try:
                yield
            finally:
                storage.storage_of.cache_clear()

    def run(self, *more: str, **variables: str) -> make.Finished:
        """The command with more flags and variables, in this process."""
        with self.environment(**variables):
            return make.run(*self.flags, *more)

    def start(self) -> subprocess.Popen[str]:
        """The command in a process of its own, which can be interrupted."""
        command, pipe = [sys.executable, "-m", "beam_pipeline", *self.flags], subprocess.PIPE
        with self.environment():
            return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)

    def submit(self, bucket: str, *more: str) -> dict[str, Any]:
        """The job that would be sent; what it stages is in a new bucket of that name."""
        template = self._folder / f"{bucket}.json"
        finished = self.run(f"--output=gs://{self.gcs.new_bucket(bucket)}", f"--template_location={template}", *more)
        assert finished.code == 0, finished.err
        return dict(json.loads(template.read_text()))

    def read(self, bucket: str, suffix: str) -> bytes:
        """Content of the one object whose name ends so."""
        (name,) = (name for name in self.gcs.names(bucket) if name.endswith(suffix))
        return self.gcs.get(bucket, name)

    def work(self) -> Counter[str]:
        """Do what Dataflow's workers would for the latest job: run the graph that was staged; returns its counters."""
        *_, job = self.api.jobs.values()
        url = job.content["environment"]["sdkPipelineOptions"]["options"]["pipelineUrl"]
        graph = beam_runner_api_pb2.Pipeline.FromString(self.gcs.get(*storage.bucket_and_name(url)))
        for environment in graph.components.environments.values():
            environment.urn, environment.payload = python_urns.EMBEDDED_PYTHON, b""  # not the image
        result = FnApiRunner().run_via_runner_api(graph, PipelineOptions([]))
        counters: Counter[str] = Counter()
        for one in result.metrics().query()["counters"]:
            counters[one.key.metric.name] += one.attempted
        return counters


def told(err: str) -> list[str]:
    """The lines that a command printed about its job, without the defaults and checks before them."""
    lines = err.splitlines()
    checks = [number for number, line in enumerate(lines) if line.startswith("ok: ")]
    return lines[checks[-1] + 1 if checks else 0 :]


@contextmanager
def account_key(folder: Path) -> Iterator[Path]:
    """A file for GOOGLE_APPLICATION_CREDENTIALS: without any, Beam waits 20 s before it goes on."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)  # every command checks it: a short one
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    with serving(FakeDataflow()) as server:
        account = {"type": "service_account", "client_email": "me@example.com", "project_id": PROJECT}
        file = folder / "account.json"
        file.write_text(json.dumps({**account, "private_key": pem, "token_uri": f"{server.url}/token"}))
        yield file
