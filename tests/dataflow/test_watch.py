"""A job on Dataflow is found, followed, left alone, ended: each line of the real command, on a stand-in of the API."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from beam_pipeline.cli.main import main
from beam_pipeline.errors import ImageShardsError
from tests import make
from tests.dataflow.api import FakeDataflow, Message, Step
from tests.dataflow.cloud import IMAGE, Cloud, told
from tests.servers import RESET, Gcs, serving

ID = "2026-11-23_00_00_00-1"
LINK = f"https://console.cloud.google.com/dataflow/jobs/europe-west4/{ID}?project=my-project"
CANCEL = f"gcloud dataflow jobs cancel {ID} --region=europe-west4 --project=my-project"
UNPUBLISHED = "error: the job has ended, but {} isn't published: see its log"
RUNS_ON = f"job {ID} runs on and is billed; the same command watches it; to cancel it: {CANCEL}"
SUBMITTED = ["submitting job imageshards-photos-1-0-0", f"job {ID} is submitted: {LINK}"]
FOUND = f"job {ID} is already running: {LINK}"
ANSWERS = "the Dataflow API answers {} (the API's own words)"
NEEDS = (
    "your account needs roles/dataflow.developer, and roles/iam.serviceAccountUser on the workers' account; "
    "the project needs the Dataflow API"
)
FAILURES = {
    RESET: "Google's API can't be reached (ConnectionError)",
    401: f"{ANSWERS.format(401)}; correct GOOGLE_APPLICATION_CREDENTIALS",
    403: f"{ANSWERS.format(403)}; {NEEDS}",
    404: f"{ANSWERS.format(404)}; check --project and --region",
    409: f"{ANSWERS.format(409)}; choose another --version or --job_name",
    429: f"{ANSWERS.format(429)}; wait, or request more quota",
    500: ANSWERS.format(500),
    503: ANSWERS.format(503),
}
POST = "POST /v1b3/projects/my-project/locations/europe-west4/jobs"
WHILE = " [while running 'WriteShards/WriteShard-ptransform-34']"
TRACEBACK = f"""\
Error message from worker: generic::unknown: Traceback (most recent call last):
  File "apache_beam/runners/common.py", line 1498, in apache_beam.runners.common.DoFnRunner.process
  File "/usr/local/lib/python3.11/site-packages/beam_pipeline/x.py", line 94, in read
{{}}{WHILE}

passed through:
==>
    dist_proc/dax/workflow/worker/fnapi_service_impl.cc:1333
"""
OURS = Message("ERROR", TRACEBACK.format(make.told_by_worker(ImageShardsError("70 of 100 images are rejected"))))
OTHERS = Message("ERROR", TRACEBACK.format("OSError: [Errno 28] No space left on device"))
MISSING = "ModuleNotFoundError: No module named 'beam_pipeline'"
NOT_STARTED = Message("ERROR", TRACEBACK.format(MISSING).replace(WHILE, ""))
LAST = Message("ERROR", "Workflow failed. Causes: S05:WriteShards failed., a work item has failed 4 times.")


Messages = tuple[Message, ...]


def without_times(lines: list[str]) -> list[str]:
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines]


class Watched(Cloud):
    """The same command again, while the job goes on as a test says."""

    def lines(self, *steps: Step, code: int, more: tuple[str, ...] = ()) -> list[str]:
        """What is told of a job that goes through these steps: of one that is done, that it has published nothing."""
        self.api.go_on(ID, *steps)
        finished = self.run(*more)
        lines = without_times(told(finished.err))
        if steps[-1].state == "DONE":
            assert lines.pop() == UNPUBLISHED.format(self.version)
            code = 1
        assert (finished.code, finished.out) == (code, ""), finished.err
        return lines


@pytest.fixture(scope="module")
def submitted(gcs: Gcs, key: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A job that was submitted once, by the real runner."""
    with serving(FakeDataflow()) as api:
        cloud = Watched(gcs, api, tmp_path_factory.mktemp("submitted"), key)
        cloud.flags.append(IMAGE)
        finished = cloud.run("--detach")
        assert (finished.code, finished.out) == (0, "")
        assert told(finished.err) == [*SUBMITTED, RUNS_ON]
        assert [request for request in api.requests if request.endswith("/messages")] == []
        yield cloud


@pytest.fixture
def watched(submitted: Watched) -> Watched:
    submitted.api.list_errors = []
    return submitted


def test_a_message_has_its_own_time_whenever_it_is_read(watched: Watched) -> None:
    watched.api.go_on(ID, Step("RUNNING"), Step("FAILED", (OTHERS,)))
    assert "12:04:30 error: OSError: [Errno 28] No space left on device" in told(watched.run().err)


def test_states_warnings_and_errors_are_told_once(watched: Watched) -> None:
    slow, other = Message("WARNING", "A worker is slow.\nSee the log."), Message("WARNING", "Another one.")
    first = Step("RUNNING", (slow, Message("BASIC", "Autoscaling: raised the number of workers"), OTHERS))
    last = (Step("RUNNING", (OTHERS, slow, other)), Step("DONE"))
    assert watched.lines(Step("QUEUED"), Step("PENDING"), first, *last, code=0) == [
        FOUND,
        "queued",
        "pending",
        "running",
        "warning: A worker is slow.",
        "error: OSError: [Errno 28] No space left on device",
        "warning: Another one.",
        "done",
    ]


@pytest.mark.parametrize(
    ("earlier", "messages", "cause"),
    [
        ((), (OURS, OURS, LAST), None),
        ((OTHERS,), (OURS, LAST), None),
        ((OURS,), (OTHERS, LAST), "OSError: [Errno 28] No space left on device"),
        ((), (NOT_STARTED, LAST), MISSING),
        ((), (LAST,), LAST.text),
        ((), (), f"Dataflow gives no reason, see {LINK}"),
    ],
)
def test_a_job_that_fails_ends_with_the_one_line_of_its_cause(
    watched: Watched, earlier: Messages, messages: Messages, cause: str | None
) -> None:
    lines = watched.lines(Step("RUNNING", earlier), Step("FAILED", messages), code=1)
    line = f"job {ID} failed: {cause}; the same command resumes" if cause else "70 of 100 images are rejected"
    assert (lines[:2], lines[-1]) == ([FOUND, "running"], f"error: {line}")
    assert len(lines) == 4 + len({*earlier, *messages}), "each message is told once"


def test_a_job_that_is_ended_from_outside_is_exit_1(watched: Watched) -> None:
    cancelling = [Step("CANCELLING")] * 60  # for more than a minute
    lines = watched.lines(Step("RUNNING"), *cancelling, Step("CANCELLED"), code=1)
    ended = ["cancelled", f"error: job {ID} was cancelled; the same command resumes"]
    assert lines == [FOUND, "running", "cancelling", *ended]


PLANNED: dict[str, float] = {"images-listed": 1000, "images-planned": 1000, "shards-planned": 4}


def test_a_terminal_gets_one_line_of_progress_below_all_others(watched: Watched) -> None:
    done = {"images-done": 200, "shards-written": 1, "shards-kept": 1, "images-rejected": 3}
    slow = Message("WARNING", "slow")
    steps = (Step("RUNNING", metrics={"images-listed": 700}), Step("RUNNING", (slow,), {**PLANNED, **done}))
    watched.api.go_on(ID, *steps, Step("DONE"))
    with watched.environment(), redirect_stderr(make.Terminal()) as screen:
        assert main(watched.flags) == 1
    shown = without_times(re.split(r"(?:\r\033\[K|\n)+", screen.getvalue()))
    shown = [line for line, _ in itertools.groupby(shown[shown.index(FOUND) + 1 :])]
    listing, writing = "listing: 700 images", "shards 2/4 · images 200/1,000 · 3 rejects"
    assert shown == [
        *(listing, "running", listing, writing, "warning: slow", writing, "done", writing),
        *(UNPUBLISHED.format(watched.version), ""),
    ]


def test_an_api_that_fails_is_asked_again_for_minutes(watched: Watched) -> None:
    outage = (503, 429, RESET, 500, 503, 503, 503, 404, 503)  # 60 s, as the pauses double
    lines = watched.lines(Step("RUNNING"), Step("RUNNING", errors=(503, *outage)), Step("DONE"), code=0)
    failures = [f"warning: {FAILURES[code]}" for code in dict.fromkeys(outage)]
    assert lines == [FOUND, "running", *failures, "done"]


@pytest.mark.parametrize("code", [401, 404, RESET])
def test_an_api_that_refuses_ends_the_watching_or_before_anything_is_started_with_one_line(
    watched: Watched, code: int
) -> None:
    lines = watched.lines(Step("RUNNING"), Step("RUNNING", refused=403), code=1)
    assert lines == [FOUND, "running", f"error: {FAILURES[403]}; {RUNS_ON}"]
    watched.api.list_errors = [code] * 100
    before = watched.api.requests.count(POST)
    lines = watched.lines(Step("RUNNING"), code=1)
    assert lines[-1] == f"error: {FAILURES[code]}; nothing was started"
    assert watched.api.requests.count(POST) == before


@pytest.mark.parametrize("flag", ["--seed=7", "--plan_only"])
def test_a_job_of_another_command_under_the_name_is_left_alone(watched: Watched, flag: str) -> None:
    before = watched.api.requests.count(POST)
    lines = watched.lines(Step("RUNNING"), code=1, more=(flag, "--detach"))
    assert lines == [
        f"error: job {ID} runs under the name 'imageshards-photos-1-0-0' with another configuration, input or output: "
        f"wait for its end, cancel it ({CANCEL}), or choose another --version or --job_name"
    ]
    assert watched.api.requests.count(POST) == before


def test_ctrl_c_leaves_the_job_and_says_how_to_end_it(watched: Watched) -> None:
    watched.api.go_on(ID, Step("RUNNING"))
    with watched.start() as process:
        assert process.stderr is not None and process.stdout is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.endswith(" running\n"):
                process.send_signal(signal.SIGINT)
        assert (process.wait(timeout=60), process.stdout.read()) == (1, "")
    assert without_times(told("".join(lines))) == [FOUND, "running", f"error: interrupted; {RUNS_ON}"]
    assert watched.api.jobs[ID].step.state == "RUNNING"
    assert not [request for request in watched.api.requests if request.startswith("PUT")]
