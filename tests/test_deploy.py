"""Submitting to Dataflow: what deploy/dataflow.sh says and does, up to the job that Dataflow would be sent."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.make import ROOT
from tests.servers import Gcs, serving

SCRIPT = ROOT / "deploy" / "dataflow.sh"
WHERE = ("--project", "my-project", "--region", "europe-west4")
JOB = (*WHERE, "--input", "gs://photos", "--output", "gs://out/datasets", "--name", "photos")


def dataflow(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run([SCRIPT, *arguments], cwd=ROOT, env=inherited, capture_output=True, text=True)


@pytest.fixture(scope="module")
def printer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands in for Python: prints the arguments it is run with."""
    program = tmp_path_factory.mktemp("bin") / "print arguments"
    program.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    program.chmod(0o755)
    return program


def dry_run(printer: Path, *arguments: str) -> list[str]:
    """The arguments that a shell passes on when it is given what a dry run prints."""
    done = dataflow(*arguments, "--dry_run", PYTHON=str(printer))
    assert done.returncode == 0, done.stderr
    head, _, command = done.stdout.partition("\n")
    assert head == f"would run, in {ROOT}:"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    return ran.stdout.split("\0")[:-1]


def test_dry_run_prints_the_command_with_the_defaults(printer: Path) -> None:
    command = dry_run(printer, *JOB)
    assert command[:3] == ["-m", "beam_pipeline", "--runner=DataflowRunner"]
    assert set(command[3:]) == {
        "--project=my-project",
        "--region=europe-west4",
        "--input=gs://photos",
        "--output=gs://out/datasets",
        "--name=photos",
        "--temp_location=gs://out/_dataflow/temp",
        "--staging_location=gs://out/_dataflow/staging",
        "--job_name=imageshards-photos-1-0-0",
        "--machine_type=e2-standard-4",
        "--autoscaling_algorithm=THROUGHPUT_BASED",
        "--max_num_workers=32",
        "--disk_size_gb=50",
        "--no_save_main_session",
        f"--setup_file={ROOT}/setup.py",
        f"--requirements_file={ROOT}/deploy/requirements-worker.txt",
        "--requirements_cache=skip",
    }


def test_an_image_takes_the_place_of_installing(printer: Path) -> None:
    command = dry_run(printer, *JOB, "--sdk_container_image", "registry/imageshards:1")
    assert {"--sdk_container_image=registry/imageshards:1", "--sdk_location=container"} <= set(command)
    assert not [flag for flag in command if flag.startswith(("--setup_file", "--requirements"))]


@pytest.mark.parametrize(
    ("given", "absent"),
    [
        (["--max_num_workers=5"], "--max_num_workers=32"),
        (["--worker_machine_type", "n2d-standard-8"], "--machine_type=e2-standard-4"),
        (["--temp_location", "gs://other/temp"], "--temp_location=gs://out/_dataflow/temp"),
        (["--job_name=mine"], "--job_name=imageshards-photos-1-0-0"),
    ],
)
def test_what_is_given_replaces_the_default(printer: Path, given: list[str], absent: str) -> None:
    command = dry_run(printer, *JOB, *given)
    assert "=".join(given) in command
    assert absent not in command


READ = "error: --input 'photos': Dataflow's workers can't read this machine's files; copy it to gs://BUCKET/…"
WRITE = "error: --output 'out': Dataflow's workers can't write there; give gs://BUCKET/…"
RUNNER = "error: --runner=DirectRunner: leave it out, this script submits to Dataflow"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "error: no flags; see deploy/dataflow.sh --help"),
        (JOB[2:], "error: --project is missing: name the Google Cloud project that pays"),
        ((*JOB[2:], "--project"), "error: --project is missing: name the Google Cloud project that pays"),
        (JOB[:-2], "error: --name is missing: give the dataset a name such as photos"),
        ((*JOB[:-6], *JOB[-4:]), "error: --input is missing: give the gs:// folder whose sub-folders are classes"),
        ((*JOB, "--input", "photos"), READ),
        ((*JOB, "--output=out"), WRITE),
        ((*JOB, "--runner=DirectRunner"), RUNNER),
        ((*JOB, "photos"), "error: 'photos' belongs to no flag; quote a value that holds spaces"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    done = dataflow(*arguments)
    assert (done.returncode, done.stderr) == (2, f"{said}\n")


def test_a_python_without_the_package_is_named() -> None:
    done = dataflow(*JOB, PYTHON="false")
    said = "error: false has no imageshards[pipeline]; run make setup, or set PYTHON to one that has it\n"
    assert (done.returncode, done.stderr) == (2, said)


class _MetadataServer(BaseHTTPRequestHandler):
    """Answers as a Google VM's metadata server does: without credentials Beam waits 25 s before it goes on."""

    def do_GET(self) -> None:
        answer, kind = b"my-project", "text/plain"
        if "/token" in self.path or "recursive" in self.path:
            answer = b'{"access_token": "x", "expires_in": 3600, "token_type": "Bearer", "email": "x"}'
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
    """A fake Google: storage and credentials on this machine; a job is written to a file instead of sent."""

    def __init__(self, gcs: Gcs, metadata: str, folder: Path) -> None:
        self._gcs = gcs
        self._folder = folder
        self._environment = {"GCE_METADATA_HOST": metadata, "GCE_METADATA_IP": metadata}

    def read(self, bucket: str, suffix: str) -> bytes:
        """Content of the one object whose name ends so."""
        (name,) = (name for name in self._gcs.names(bucket) if name.endswith(suffix))
        return self._gcs.get(bucket, name)

    def submit(self, images: int, name: str, *more: str) -> dict[str, Any]:
        """The job that would be sent; what it stages lies in the bucket `name`."""
        source = self._gcs.new_bucket()
        for number in range(images):
            self._gcs.put(source, f"class_{number % 5}/{number:05d}.jpg", b"")
        self._gcs.new_bucket(name)
        template = self._folder / f"{name}.json"
        job = (*WHERE, "--input", f"gs://{source}", "--output", f"gs://{name}", "--name", "photos")
        done = dataflow(*job, "--template_location", str(template), *more, **self._environment)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(template.read_text()))


@pytest.fixture(scope="module")
def cloud(gcs: Gcs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), _MetadataServer)) as server:
        yield Cloud(gcs, f"127.0.0.1:{server.server_port}", tmp_path_factory.mktemp("cloud"))


def test_the_job_asks_for_the_workers_of_the_defaults_and_is_as_large_for_any_number_of_images(cloud: Cloud) -> None:
    image = ("--sdk_container_image", "registry/imageshards:1", "--service_account_email=me@example.com")
    few, many = (cloud.submit(images, f"{images}-out", *image) for images in (10, 300))
    graphs = [cloud.read(bucket, "pipeline.pb") for bucket in ("10-out", "300-out")]
    assert b"WriteShards" in graphs[1]
    assert len(json.dumps(many)) + len(graphs[1]) < 1_000_000  # Dataflow takes 10 MB
    # Beam numbers its parts in no fixed order: a few hundred bytes; 290 references would be 15 kB.
    assert abs(len(json.dumps(many)) - len(json.dumps(few))) < 1000
    assert abs(len(graphs[1]) - len(graphs[0])) < 1000

    (workers,) = few["environment"]["workerPools"]
    assert few["name"] == "imageshards-photos-1-0-0"
    assert (workers["machineType"], workers["diskSizeGb"]) == ("e2-standard-4", 50)
    assert workers["autoscalingSettings"]["maxNumWorkers"] == 32
    assert workers["workerHarnessContainerImage"] == "registry/imageshards:1"
    assert few["environment"]["serviceAccountEmail"] == "me@example.com"
    assert "pickled_main_session" not in [package["name"] for package in workers.get("packages", ())]


def test_without_an_image_the_workers_get_the_package_and_its_requirements(cloud: Cloud) -> None:
    cloud.submit(10, "package-out")
    assert cloud.read("package-out", "requirements.txt") == (ROOT / "deploy" / "requirements-worker.txt").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(cloud.read("package-out", "workflow.tar.gz"))) as package:
        names = {name.partition("/")[2] for name in package.getnames()}
    assert {"setup.py", "beam_pipeline/pipeline/graph.py", "beam_pipeline/py.typed"} <= names
