"""Submitting to Dataflow: what deploy/dataflow.sh says and does, up to the job that Dataflow would be sent."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.servers import HOW_TO_ENABLE, fake_gcs_binary, free_port, make_bucket

ROOT = Path(__file__).resolve().parent.parent
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


@pytest.mark.parametrize(
    "odd", ["a b", "it's", 'say "hi"', "$(touch hacked)", "`id`", "a;b&c|d", "*", "ünï\\code", "new\nline"]
)
def test_odd_names_survive_and_are_never_run(printer: Path, odd: str) -> None:
    command = dry_run(
        printer, *WHERE, "--input", f"gs://photos/{odd}", "--output", "gs://out", "--name", "photos", "--one_hot"
    )
    assert f"--input=gs://photos/{odd}" in command
    assert "--one_hot" in command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "error: no flags; see deploy/dataflow.sh --help"),
        (JOB[2:], "error: --project is missing: name the Google Cloud project that pays"),
        ((*JOB[2:], "--project"), "error: --project is missing: name the Google Cloud project that pays"),
        (JOB[:-2], "error: --name is missing: give the dataset a name such as photos"),
        ((*JOB[:-6], *JOB[-4:]), "error: --input is missing: give the gs:// folder whose sub-folders are classes"),
        (
            (*JOB, "--input", "photos"),
            "error: --input 'photos': Dataflow's workers can't read this machine's files; copy it to gs://BUCKET/…",
        ),
        ((*JOB, "--output=out"), "error: --output 'out': Dataflow's workers can't write there; give gs://BUCKET/…"),
        (
            (*JOB, "--runner=DirectRunner"),
            "error: --runner=DirectRunner: leave it out, this script submits to Dataflow",
        ),
        ((*JOB, "photos"), "error: 'photos' belongs to no flag; quote a value that holds spaces"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    done = dataflow(*arguments)
    assert (done.returncode, done.stderr) == (2, f"{said}\n")


def test_a_python_without_the_package_is_named(tmp_path: Path) -> None:
    done = dataflow(*JOB, PYTHON="false")
    assert done.returncode == 2
    assert (
        done.stderr == "error: false has no imageshards[pipeline]; run make setup, or set PYTHON to one that has it\n"
    )


class _MetadataServer(BaseHTTPRequestHandler):
    """Answers as a Google VM's metadata server does: without credentials Beam waits 25 s before it goes on."""

    def do_GET(self) -> None:
        answer = b"my-project"
        kind = "text/plain"
        if "/token" in self.path or "recursive" in self.path:
            answer, kind = (
                b'{"access_token": "x", "expires_in": 3600, "token_type": "Bearer", "email": "x"}',
                "application/json",
            )
        elif "universe" in self.path:
            answer = b"googleapis.com"
        self.send_response(200)
        for header in (("Metadata-Flavor", "Google"), ("Content-Type", kind), ("Content-Length", str(len(answer)))):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Not on the tests' output."""


@contextmanager
def metadata_server() -> Iterator[str]:
    """Runs it; yields HOST:PORT."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _MetadataServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Cloud:
    """A fake Google: storage and credentials on this machine; a job is written to a file instead of sent."""

    def __init__(self, storage_url: str, metadata: str, folder: Path) -> None:
        self.storage_url = storage_url
        self.folder = folder
        self.environment = {
            "STORAGE_EMULATOR_HOST": storage_url,
            "GCE_METADATA_HOST": metadata,
            "GCE_METADATA_IP": metadata,
        }

    def read(self, bucket: str, suffix: str) -> bytes:
        """Content of the one object whose name ends so."""
        url = f"{self.storage_url}/storage/v1/b/{bucket}/o"
        with urllib.request.urlopen(url) as listing:
            (name,) = (item["name"] for item in json.load(listing)["items"] if item["name"].endswith(suffix))
        with urllib.request.urlopen(f"{url}/{urllib.parse.quote(name, safe='')}?alt=media") as content:
            return bytes(content.read())

    def submit(self, source: str, name: str, *more: str) -> dict[str, Any]:
        """The job that would be sent; what it stages lies in the bucket `name`."""
        make_bucket(self.storage_url, name)
        template = self.folder / f"{name}.json"
        job = (*WHERE, "--input", f"gs://{source}", "--output", f"gs://{name}", "--name", "photos")
        done = dataflow(*job, "--template_location", str(template), *more, **self.environment)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(template.read_text()))


@contextmanager
def storage_server(buckets: Path) -> Iterator[str]:
    """The real fake-gcs-server, holding each sub-folder of `buckets` as a bucket; yields its URL."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [str(fake_gcs_binary()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    command += ["-backend", "memory", "-data", str(buckets), "-external-url", url, "-public-host", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(200):
                with suppress(OSError), urllib.request.urlopen(f"{url}/storage/v1/b"):
                    break
                time.sleep(0.05)
            yield url
        finally:
            server.kill()


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    if fake_gcs_binary() is None:
        pytest.skip(HOW_TO_ENABLE)
    folder = tmp_path_factory.mktemp("cloud")
    for bucket, images in (("few", 10), ("lot", 1_000)):
        for number in range(images):
            image = folder / "buckets" / bucket / f"class_{number % 5}" / f"{number:05d}.jpg"
            image.parent.mkdir(parents=True, exist_ok=True)
            image.touch()
    with storage_server(folder / "buckets") as storage_url, metadata_server() as metadata:
        yield Cloud(storage_url, metadata, folder)


class Job(NamedTuple):
    """A job as Dataflow would get it: the request, and the graph that it names."""

    request: dict[str, Any]
    graph: bytes


IMAGE = ("--sdk_container_image", "registry/imageshards:1", "--service_account_email=me@example.com")


@pytest.fixture(scope="module")
def job_of_10_images(cloud: Cloud) -> Job:
    request = cloud.submit("few", "few-out", *IMAGE)
    return Job(request, cloud.read("few-out", "pipeline.pb"))


def test_the_job_is_as_large_for_10_images_as_for_1000(cloud: Cloud, job_of_10_images: Job) -> None:
    request = cloud.submit("lot", "lot-out", *IMAGE)
    graph = cloud.read("lot-out", "pipeline.pb")
    assert b"WriteShards" in graph
    assert len(json.dumps(request)) + len(graph) < 1_000_000  # Dataflow takes 10 MB
    # Beam numbers its parts in no fixed order: a few hundred bytes; 990 references would be 50 kB.
    assert abs(len(json.dumps(request)) - len(json.dumps(job_of_10_images.request))) < 1000
    assert abs(len(graph) - len(job_of_10_images.graph)) < 1000


def test_the_job_asks_for_the_workers_of_the_defaults(job_of_10_images: Job) -> None:
    environment = job_of_10_images.request["environment"]
    (workers,) = environment["workerPools"]
    assert job_of_10_images.request["name"] == "imageshards-photos-1-0-0"
    assert workers["machineType"] == "e2-standard-4"
    assert workers["autoscalingSettings"]["maxNumWorkers"] == 32
    assert workers["diskSizeGb"] == 50
    assert workers["workerHarnessContainerImage"] == "registry/imageshards:1"
    assert environment["serviceAccountEmail"] == "me@example.com"


def test_no_main_session_is_staged(job_of_10_images: Job) -> None:
    (workers,) = job_of_10_images.request["environment"]["workerPools"]
    assert "pickled_main_session" not in [package["name"] for package in workers.get("packages", ())]


def test_without_an_image_the_workers_get_the_package_and_its_requirements(cloud: Cloud) -> None:
    cloud.submit("few", "package-out")
    assert cloud.read("package-out", "requirements.txt") == (ROOT / "deploy" / "requirements-worker.txt").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(cloud.read("package-out", "workflow.tar.gz"))) as package:
        names = {name.partition("/")[2] for name in package.getnames()}
    assert {"setup.py", "beam_pipeline/pipeline/graph.py", "beam_pipeline/py.typed"} <= names
