"""A job on a cluster behind a job server, Beam's own in Python: its states and errors are told, each in one line."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests import make
from tests.servers import free_port
from tools.engines import processes

pytestmark = pytest.mark.soak  # `make engines` has its jobs too, and tests/dataflow/test_watch.py the lines of states
TIME = re.compile(r"^\d\d:\d\d:\d\d ", re.MULTILINE)


QUIET = Path(os.devnull)


def server(module: str, flag: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    # A worker pool starts whatever `python` comes first.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return processes.running([sys.executable, "-m", f"apache_beam.runners.{module}", flag], QUIET, {"PATH": path})


@pytest.fixture(scope="module")
def flags() -> Iterator[list[str]]:
    jobs, workers = free_port(), free_port()
    with (
        server("portability.local_job_service_main", f"--job_port={jobs}") as of_jobs,
        server("worker.worker_pool_main", f"--service_port={workers}") as of_workers,
    ):
        processes.wait_until_up(of_jobs, jobs, QUIET)
        processes.wait_until_up(of_workers, workers, QUIET)
        cluster = ["--runner=PortableRunner", f"--job_endpoint=localhost:{jobs}"]
        yield [*cluster, "--environment_type=EXTERNAL", f"--environment_config=localhost:{workers}"]


def lines(finished: make.Finished) -> list[str]:
    """What is told, without its time; without lines of progress, which a slow machine has."""
    return [line for line in TIME.sub("", finished.err).splitlines() if not line.startswith(("running: ", "shards "))]


def test_states_are_told_as_the_job_server_says_them_and_a_worker_s_error_is_one_line(
    flags: list[str], photos: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "in"))
    (folder / "ant" / "bad.jpg").write_bytes(b"bad")
    finished = make.job(folder, tmp_path / "out", *flags, "--max_reject_fraction=0")
    told = lines(finished)
    error = told[-1]
    assert error.startswith("error: 1 of 41 images rejected, --max_reject_fraction is 0: the first is 'ant/bad.jpg'")
    assert (finished.code, told) == (1, ["starting", "running", "failed", error])


def test_ctrl_c_says_that_the_job_may_run_on(flags: list[str], photos: Path, tmp_path: Path) -> None:
    command = ["--input", str(photos), "--output", str(tmp_path), "--name", "photos", *flags]
    program = [sys.executable, "-m", "beam_pipeline", *command]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.endswith(" running\n"):
                process.send_signal(signal.SIGINT)
                break
        assert process.stderr.read() == (
            "error: interrupted; the job may run on in the cluster until it is cancelled there; "
            "the same command resumes\n"
        )
        assert process.wait(timeout=60) == 1
