"""A job on Dataflow is found, followed, left alone, ended: each line of the real command, on a stand-in of the API."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

import beam_pipeline
from beam_pipeline.cli import service, watch
from beam_pipeline.cli.main import main, parse
from tests import make
from tests.dataflow.api import RESET, SILENCE, FakeDataflow, Message, Step
from tests.dataflow.commands import Command, command, told
from tests.servers import Gcs, serving

ID = "2026-11-23_00_00_00-1"
LINK = f"https://console.cloud.google.com/dataflow/jobs/europe-west4/{ID}?project=my-project"
CANCEL = f"gcloud dataflow jobs cancel {ID} --region=europe-west4 --project=my-project"
UNPUBLISHED = "error: the job has ended, but {}/photos/1.0.0 isn't published: see its log"
RUNS_ON = f"job {ID} runs on and is billed: the same command watches it, {CANCEL} cancels it"
FOUND = f"job {ID} is already running: {LINK}"
ANSWERS = "the Dataflow API answers {} (the API's own words)"
FAILURES = {
    RESET: "Google's API can't be reached (ConnectionError)",
    SILENCE: "Google's API can't be reached (ReadTimeout)",
    # No token is accepted: the library asks for a new one.
    401: "Google's credentials can't be used (Anonymous credentials cannot be refreshed); log in again: gcloud "
    "auth application-default login",
    403: f"{ANSWERS.format(403)}; give your account roles/dataflow.developer and enable the Dataflow API",
    404: f"{ANSWERS.format(404)}; check --project and --region",
    409: f"{ANSWERS.format(409)}; choose another --version or --job_name",
    429: f"{ANSWERS.format(429)}; wait for the project's quota",
    500: ANSWERS.format(500),
    503: ANSWERS.format(503),
}
POST = "POST /v1b3/projects/my-project/locations/europe-west4/jobs"
TRACEBACK = """\
Error message from worker: generic::unknown: Traceback (most recent call last):
  File "apache_beam/runners/common.py", line 1498, in apache_beam.runners.common.DoFnRunner.process
  File "/usr/local/lib/python3.11/site-packages/beam_pipeline/x.py", line 94, in read
{} [while running 'WriteShards/WriteShard-ptransform-34']

passed through:
==>
    dist_proc/dax/workflow/worker/fnapi_service_impl.cc:1333
"""
OURS = Message("ERROR", TRACEBACK.format("beam_pipeline.errors.ImageShardsError: 70 of 100 images are rejected"))
OTHERS = Message("ERROR", TRACEBACK.format("OSError: [Errno 28] No space left on device"))
LAST = Message("ERROR", "Workflow failed. Causes: S05:WriteShards failed., a work item has failed 4 times.")


@pytest.fixture(scope="module")
def submitted(gcs: Gcs, photos: Path) -> Iterator[tuple[FakeDataflow, Command]]:
    """A job that was submitted once, by the real runner."""
    with serving(FakeDataflow()) as api:
        one = command(gcs, photos, api.url)
        finished = one.run("--detach")
        assert (finished.code, finished.out) == (0, "")
        assert told(finished.err) == [f"job {ID} is submitted: {LINK}", RUNS_ON]
        assert [request for request in api.requests if request.endswith("/messages")] == []
        yield api, one


class Watched:
    """The same command again, while the job goes on as a test says."""

    def __init__(self, api: FakeDataflow, again: Command) -> None:
        self.api = api
        self._again = again

    def lines(self, *steps: Step, code: int, more: tuple[str, ...] = ()) -> list[str]:
        """What is told of a job that goes through these steps: of one that is done, that it has published nothing."""
        self.api.go_on(ID, *steps)
        finished = self._again.run(*more)
        lines = told(finished.err)
        if steps[-1].state == "DONE":
            assert lines.pop() == UNPUBLISHED.format(self._again.dataset[3])
            code = 1
        assert (finished.code, finished.out) == (code, ""), finished.err
        return lines


@pytest.fixture
def watched(submitted: tuple[FakeDataflow, Command], monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(watch, "_LOOK_EVERY_S", 0.02)
    api, again = submitted
    yield Watched(api, again)
    api.list_errors = []


def test_states_warnings_and_errors_are_told_once_with_their_time_and_what_is_billed_at_the_end(
    watched: Watched,
) -> None:
    slow = Message("WARNING", "A worker is slow.\nSee the log.")
    steps = [
        Step("QUEUED"),
        Step("PENDING"),
        Step("RUNNING", (slow, Message("BASIC", "Autoscaling: raised the number of workers"), OTHERS)),
        Step("RUNNING", (OTHERS, slow, Message("WARNING", "Another one."))),
        Step("DONE", metrics={"TotalVcpuTime": 14400.0}),
    ]
    assert watched.lines(*steps, code=0) == [
        FOUND,
        "12:00:00 queued",
        "12:01:00 pending",
        "12:02:30 warning: A worker is slow.",
        "12:02:31 error: OSError: [Errno 28] No space left on device",
        "12:02:00 running",
        "12:02:32 warning: Another one.",
        "12:04:00 done after 4 min 00 s, 4.00 vCPU-hours = 1.00 worker-hours of e2-standard-4",
    ]


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ((OURS, OURS, LAST), "70 of 100 images are rejected"),
        ((OTHERS, LAST), f"job {ID} failed: OSError: [Errno 28] No space left on device; the same command resumes"),
        ((LAST,), f"job {ID} failed: {LAST.text}; the same command resumes"),
    ],
)
def test_a_job_that_fails_ends_with_the_one_line_of_its_cause(
    watched: Watched, messages: tuple[Message, ...], line: str
) -> None:
    lines = watched.lines(Step("RUNNING"), Step("FAILED", messages), code=1)
    assert lines[-2:] == ["12:04:00 failed after 4 min 00 s", f"error: {line}"]
    assert len(lines) == 3 + len(set(messages)) + 1


def test_an_error_that_was_overcome_is_not_the_cause(watched: Watched) -> None:
    lost = Message("ERROR", "Workflow failed. Causes: The worker lost contact with the service.")
    lines = watched.lines(Step("PENDING", (OURS,)), Step("RUNNING"), Step("RUNNING"), Step("FAILED", (lost,)), code=1)
    assert lines[-1] == f"error: job {ID} failed: {lost.text}; the same command resumes"


def test_what_a_restart_discards_is_kept_by_the_command_without_it(gcs: Gcs, photos: Path, api: FakeDataflow) -> None:
    again = command(gcs, photos, api.url)
    api.steps = [Step("RUNNING"), Step("CANCELLED")]
    finished = again.run("--restart")
    assert finished.err.endswith(f"error: job {ID} was cancelled; without --restart the same command resumes\n")


def test_a_failure_waits_for_its_message(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.1)
    without = f"error: job {ID} failed: no reason is given, see {LINK}; the same command resumes"
    assert watched.lines(Step("RUNNING"), Step("FAILED"), code=1)[-1] == without


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ("CANCELLED", f"job {ID} was cancelled; the same command resumes"),
        ("DRAINED", f"job {ID} ended in state DRAINED; the same command resumes"),
    ],
)
def test_a_job_that_is_ended_from_outside_is_exit_1(watched: Watched, state: str, line: str) -> None:
    lines = watched.lines(Step("RUNNING"), Step("CANCELLING"), Step(state), code=1)
    ended = f"12:04:00 {state.lower()} after 4 min 00 s"
    assert lines == [FOUND, "12:02:00 running", "12:03:00 cancelling", ended, f"error: {line}"]


PLANNED = {"images-listed": 1000, "images-planned": 1000, "shards-planned": 4}


def test_a_log_gets_a_line_of_progress_now_and_then(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr(watch, "_LOG_LINE_EVERY_S", 0.0)
    done = {"images-done": 200, "shards-written": 1, "shards-kept": 1, "images-rejected": 3}
    steps = [
        Step("RUNNING"),
        Step("RUNNING", metrics={"images-listed": 700}),
        Step("RUNNING", metrics=PLANNED),
        Step("RUNNING", metrics={**PLANNED, **done}),
    ]
    lines = watched.lines(*steps, Step("DONE"), code=0)
    assert lines[2:4] == ["listing: 700 images", "shards 0/4 · images 0/1,000"]
    assert re.fullmatch(r"shards 2/4 · images 200/1,000 · 3 rejects · [\d,]+ images/s · \d+ s left", lines[4]), lines
    assert lines[5:] == ["12:04:00 done after 4 min 00 s"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_of_progress_below_all_others(
    watched: Watched, submitted: tuple[FakeDataflow, Command]
) -> None:
    api, again = submitted
    slow = Message("WARNING", "slow")
    api.go_on(ID, Step("RUNNING", metrics=PLANNED), Step("RUNNING", (slow,)), Step("DONE"))
    with redirect_stderr(Terminal()) as screen:
        assert main([*again.dataset, *again.cloud]) == 1
    progress, wipe = "shards 0/4 · images 0/1,000", "\r\033[K"
    assert screen.getvalue().partition(f"{FOUND}\n")[2] == (
        f"{wipe}12:02:00 running\n{wipe}{progress}{wipe}12:02:30 warning: slow\n{progress}"
        f"{wipe}{wipe}12:04:00 done after 4 min 00 s\n{UNPUBLISHED.format(again.dataset[3])}\n"
    )


@pytest.mark.parametrize("code", [429, 500, 503, RESET, SILENCE])
def test_an_api_that_fails_is_asked_again_and_told_from_the_second_time_on(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    if code == SILENCE:
        monkeypatch.setattr(service, "_TIMEOUT_S", 0.5)
    lines = watched.lines(Step("RUNNING"), Step("RUNNING", errors=(code,) * 2), Step("DONE"), code=0)
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines] == [
        FOUND,
        "running",
        f"warning: {FAILURES[code]}; next try in 0 s",
        "done after 4 min 00 s",
    ]


@pytest.mark.parametrize("code", [401, 403, 404])
def test_an_api_that_refuses_ends_the_watching_with_one_line(watched: Watched, code: int) -> None:
    lines = watched.lines(Step("RUNNING"), Step("RUNNING", refused={"job": code}), code=1)
    assert lines == [FOUND, "12:02:00 running", f"error: {FAILURES[code]}; {RUNS_ON}"]


def test_a_job_whose_messages_and_metrics_are_refused_is_followed_by_its_state(watched: Watched) -> None:
    refused = {"messages": 403, "metrics": 403}
    lines = watched.lines(Step("RUNNING", refused=refused), Step("DONE", refused=refused), code=0)
    warning = f"warning: {FAILURES[403]}"
    assert [line[9:] for line in lines[1:]] == [warning, "running", "done after 4 min 00 s"]


@pytest.mark.parametrize("code", [401, 403, 404, 429, 500, RESET])
def test_an_api_that_refuses_to_look_for_the_job_ends_the_command_before_anything_is_started(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.05)
    watched.api.list_errors = [code] * 100
    before = watched.api.requests.count(POST)
    lines = watched.lines(Step("RUNNING"), code=1)
    assert lines[-1] == f"error: {FAILURES[code]}; nothing was started"
    assert set(lines[:-1]) <= {f"warning: {FAILURES[code]}; next try in 0 s"}
    assert watched.api.requests.count(POST) == before


def test_no_api_at_all_is_one_line(submitted: tuple[FakeDataflow, Command], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.0)
    _, again = submitted
    finished = again.run("--dataflow_endpoint=http://localhost:9")
    line = "error: Google's API can't be reached (ConnectionError); nothing was started"
    assert (finished.code, told(finished.err)) == (1, [line])


@pytest.mark.parametrize("flag", ["--seed=7", "--overwrite", "--plan_only"])
def test_a_job_of_another_command_under_the_name_is_left_alone(watched: Watched, flag: str) -> None:
    before = watched.api.requests.count(POST)
    lines = watched.lines(Step("RUNNING"), code=1, more=(flag,))
    assert lines == [
        f"error: job {ID} runs under the name 'imageshards-photos-1-0-0' with another configuration, input or output: "
        f"let it end, cancel it ({CANCEL}), or choose another --version or --job_name"
    ]
    assert watched.api.requests.count(POST) == before


def test_detached_again_it_says_so_and_looks_no_more(watched: Watched) -> None:
    assert watched.lines(Step("RUNNING"), code=0, more=("--detach",)) == [FOUND, RUNS_ON]


def test_from_python_a_job_is_found_and_left_alone_too(submitted: tuple[FakeDataflow, Command]) -> None:
    api, again = submitted
    api.go_on(ID, Step("RUNNING"))
    config, options = parse([*again.dataset, *again.cloud, "--detach"])
    with redirect_stderr(io.StringIO()) as err:
        assert beam_pipeline.run(config, PipelineOptions(options)) is None
    assert told(err.getvalue()) == [FOUND, RUNS_ON]


def test_detach_is_for_dataflow(photos: Path, tmp_path: Path) -> None:
    finished = make.job(photos, tmp_path, "--detach")
    line = "error: --detach works only with --runner DataflowRunner; leave it out\n"
    assert (finished.code, finished.err) == (2, line)


def test_ctrl_c_leaves_the_job_and_says_how_to_end_it(submitted: tuple[FakeDataflow, Command]) -> None:
    api, again = submitted
    api.go_on(ID, Step("RUNNING"))
    program = [sys.executable, "-m", "beam_pipeline", *again.dataset, *again.cloud]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        lines = []
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if line.endswith(" running\n"):
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 1
        assert process.stdout.read() == ""
    assert told("\n".join(lines)) == [FOUND, "12:02:00 running", f"error: interrupted; {RUNS_ON}"]
    assert api.jobs[ID].step.state == "RUNNING"
    assert not [request for request in api.requests if request.startswith("PUT")]
