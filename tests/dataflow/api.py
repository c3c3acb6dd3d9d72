"""A local server in place of the Dataflow API, https://cloud.google.com/dataflow/docs/reference/rest"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from tests.faults.proxy import Handler
from tests.servers import RESET, reset

PROJECT, REGION = "my-project", "europe-west4"
_WARNING, _ACTIVE = "3", "3"  # of JobMessageImportance, and of the filter for jobs
_PAGE = 2  # messages a page, so that every test turns pages
_TERMINAL = {"DONE", "FAILED", "CANCELLED", "UPDATED", "DRAINED"}


class Message(NamedTuple):
    """A message of a job: `importance` is WARNING, ERROR, BASIC, ..."""

    importance: str
    text: str


@dataclasses.dataclass
class Step:
    """What a job is found at until its messages are read."""

    state: str  # RUNNING, DONE, ...
    messages: tuple[Message, ...] = ()  # new since the step before
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # so far; the service's have a capital letter
    act: Callable[[], object] | None = None  # called before the step is shown
    errors: tuple[int, ...] = ()  # statuses of the answers before this step's
    refused: int = 0  # status of every answer


@dataclasses.dataclass
class Job:
    """A job of the fake service: its content as it was posted, and what is before it."""

    content: dict[str, Any]
    steps: list[Step] = dataclasses.field(default_factory=list)
    errors: list[int] = dataclasses.field(default_factory=list)
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def step(self) -> Step:
        return self.steps[0]

    @property
    def minute(self) -> int:
        """Of the clock, when the job came into its state."""
        order = ["QUEUED", "PENDING", "RUNNING", "CANCELLING"]
        return order.index(self.step.state) if self.step.state in order else len(order)

    def enter(self) -> None:
        """Begin the step that is now the first."""
        self.errors = list(self.step.errors)
        if self.step.act is not None:
            self.step.act()
        for message in self.step.messages:
            number = len(self.messages)
            stamp = f"2026-11-23T12:{self.minute:02d}:{30 + number // 2}Z"  # two of them have the same time
            importance = f"JOB_MESSAGE_{message.importance}"
            self.messages.append(
                {"id": str(number), "time": stamp, "messageImportance": importance, "messageText": message.text}
            )


class FakeDataflow(ThreadingHTTPServer):
    """Jobs in memory, which go on as a test has written down, and tokens for everybody."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://localhost:{self.server_port}"
        self.steps: list[Step] = [Step("RUNNING")]  # of every job that is created from now on; a look takes one
        self.create_errors: list[int] = []  # statuses of the next answers
        self.list_errors: list[int] = []
        self.before_create: Callable[[dict[str, Any]], object] | None = None  # called with what is posted, ahead of all
        self.jobs: dict[str, Job] = {}
        self.requests: list[str] = []  # every one, as `METHOD path`

    def create(self, content: dict[str, Any]) -> dict[str, Any]:
        """A job begins, whether there is another one of its name or not."""
        job_id = f"2026-11-23_00_00_00-{len(self.jobs) + 1}"
        given = {"id": job_id, "projectId": PROJECT, "location": REGION, "createTime": "2026-11-23T12:00:00Z"}
        self.jobs[job_id] = Job({**content, **given})
        self.go_on(job_id, *self.steps)
        return self.jobs[job_id].content

    def go_on(self, job_id: str, *steps: Step) -> None:
        """Replace what a job has before it."""
        job = self.jobs[job_id]
        job.steps, job.messages = list(steps), []
        job.enter()

    def running(self, name: str) -> list[dict[str, Any]]:
        """Jobs of a name that haven't ended."""
        jobs = [job for job in self.jobs.values() if job.step.state not in _TERMINAL]
        return [job.content for job in jobs if job.content["name"] == name]


def _metrics(counters: dict[str, float]) -> list[dict[str, Any]]:
    """Counters as the service tells them: committed and tentative, the user's with their step."""
    found = []
    for name, value in counters.items():
        user = ("user", {"namespace": "imageshards", "step": "ref_WriteShards"})
        origin, context = ("dataflow/v1b3", {}) if name[0].isupper() else user
        for more, number in (({}, value // 2), ({"tentative": "true"}, value)):
            found.append({"name": {"origin": origin, "name": name, "context": {**context, **more}}, "scalar": number})
    return found


class _Handler(Handler):
    server: FakeDataflow

    def _answer(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(f"{self.command} {url.path}")
        answer = self._found(url.path, dict(parse_qsl(url.query)), body)
        if answer == RESET:
            reset(self)
        else:
            content = _error(answer) if isinstance(answer, int) else answer
            status = content.get("error", {}).get("code", 200)
            self._reply(status, {"Content-Type": "application/json"}, json.dumps(content).encode())

    do_GET = do_POST = do_PUT = _answer

    def _found(self, path: str, query: dict[str, str], body: bytes) -> dict[str, Any] | int:
        """What is answered, or the status of a refusal."""
        jobs = f"/v1b3/projects/{PROJECT}/locations/{REGION}/jobs"
        job_id, _, part = path.removeprefix(f"{jobs}/").partition("/")
        if path == "/token":  # as https://oauth2.googleapis.com/token gives for an account's key
            return {"access_token": "x", "expires_in": 3600, "token_type": "Bearer"}
        if path == jobs:
            return self._created(json.loads(body)) if self.command == "POST" else self._listed(query)
        job = self.server.jobs.get(job_id)
        if job is None:
            return 404
        if job.errors:
            return job.errors.pop(0)
        if job.step.refused:
            return job.step.refused
        if part == "messages":
            return self._messages(job, query)
        return {"metrics": _metrics(job.step.metrics)} if part else self._seen(job)

    def _listed(self, query: dict[str, str]) -> dict[str, Any] | int:
        if self.server.list_errors:
            return self.server.list_errors.pop(0)
        assert query["filter"] == _ACTIVE, query
        # Summaries, which have no labels.
        return {"jobs": [{**job, "labels": {}} for job in self.server.running(query["name"])]}

    def _created(self, content: dict[str, Any]) -> dict[str, Any] | int:
        if self.server.before_create is not None:
            self.server.before_create(content)
        if self.server.create_errors:
            return self.server.create_errors.pop(0)
        if others := self.server.running(content["name"]):
            return _error(409, f"There is already an active job named {content['name']} with id {others[0]['id']}")
        return self.server.create(content)

    def _seen(self, job: Job) -> dict[str, Any]:
        since = f"2026-11-23T12:{job.minute:02d}:00Z"
        return {**job.content, "currentState": f"JOB_STATE_{job.step.state}", "currentStateTime": since}

    def _messages(self, job: Job, query: dict[str, str]) -> dict[str, Any]:
        since, first = query.get("startTime", ""), int(query.get("pageToken", 0))
        is_any = query.get("minimumImportance") != _WARNING
        new = [
            one
            for one in job.messages
            if one["time"] >= since and (is_any or one["messageImportance"].endswith(("_WARNING", "_ERROR")))
        ]
        more = {"nextPageToken": str(first + _PAGE)} if len(new) > first + _PAGE else {}
        if not more and len(job.steps) > 1:
            job.steps.pop(0)
            job.enter()
        return {"jobMessages": new[first : first + _PAGE], **more}


def _error(status: int, words: str = "the API's\nown words") -> dict[str, Any]:
    return {"error": {"code": status, "message": words, "status": "SOME_STATUS"}}
