"""A local server that stands for the Dataflow API: jobs in memory, which go on as a test has written down.

The real DataflowRunner submits to it with `--dataflow_endpoint=http://localhost:PORT`; it answers in the API's JSON
(https://cloud.google.com/dataflow/docs/reference/rest).
"""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import struct
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

PROJECT, REGION = "my-project", "europe-west4"
RESET, SILENCE = -1, -2  # in place of a status: the connection is reset, or nothing comes for a second
_SUMMARY = "1"  # of JobView
_PAGE = 2  # messages a page, so that every test turns pages
_TERMINAL = {"DONE", "FAILED", "CANCELLED", "UPDATED", "DRAINED"}


class Message(NamedTuple):
    """A message of a job: `importance` is WARNING, ERROR, BASIC, ..."""

    importance: str
    text: str


@dataclasses.dataclass
class Step:
    """What a job is found at by one look, and by all that follow until the next step.

    Args:
        state: RUNNING, DONE, ...
        messages: new since the step before.
        metrics: counters by name since the job began; a name with a capital is one of the service.
        act: called before the step is shown.
        errors: statuses of the answers before this step's.
        refused: `job`, `messages` or `metrics` → the status that is answered to every request for it.
    """

    state: str
    messages: tuple[Message, ...] = ()
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    act: Callable[[], object] | None = None
    errors: tuple[int, ...] = ()
    refused: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Job:
    """A job of the fake service."""

    content: dict[str, Any]
    steps: list[Step]
    errors: list[int]
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    looks: int = 0

    @property
    def step(self) -> Step:
        return self.steps[0]


class FakeDataflow(ThreadingHTTPServer):
    """The server. What a test sets before a request is what that request meets.

    Attributes:
        steps: of every job that is created from now on; a look takes one.
        create_errors, list_errors: statuses of the next answers to these requests.
        jobs: id → job.
        requests: every request, as `METHOD path`.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://localhost:{self.server_port}"
        self.steps: list[Step] = [Step("RUNNING")]
        self.create_errors: list[int] = []
        self.list_errors: list[int] = []
        self.before_create: Callable[[dict[str, Any]], object] | None = None
        self.jobs: dict[str, Job] = {}
        self.requests: list[str] = []

    def create(self, content: dict[str, Any]) -> dict[str, Any]:
        """A job begins; the same request again finds its job, another job of the name is refused by the caller."""
        number = len(self.jobs) + 1
        job_id = f"2026-11-23_00_00_00-{number}"
        given = {"id": job_id, "projectId": PROJECT, "location": REGION, "createTime": "2026-11-23T12:00:00Z"}
        content = {**content, **given}
        self.jobs[job_id] = Job(content, [], [])
        self.go_on(job_id, *self.steps)
        return content

    def go_on(self, job_id: str, *steps: Step) -> None:
        """Replace what a job has before it."""
        job = self.jobs[job_id]
        job.steps, job.messages, job.looks = list(steps), [], 0
        job.errors = list(steps[0].errors)
        self._enter(job)

    def running(self, name: str) -> list[dict[str, Any]]:
        """Jobs of a name that haven't ended."""
        jobs = [job for job in self.jobs.values() if job.step.state not in _TERMINAL]
        return [job.content for job in jobs if job.content["name"] == name]

    def look(self, job: Job, takes_a_step: bool) -> dict[str, Any]:
        """The job as a GET shows it; the first look at a job shows its first step."""
        job.looks += takes_a_step
        if takes_a_step and job.looks > 1 and len(job.steps) > 1:
            job.steps.pop(0)
            job.errors = list(job.step.errors)
            self._enter(job)
        since = f"2026-11-23T12:{self._minute(job):02d}:00Z"
        return {**job.content, "currentState": f"JOB_STATE_{job.step.state}", "currentStateTime": since}

    def _enter(self, job: Job) -> None:
        if job.step.act is not None:
            job.step.act()
        for message in job.step.messages:
            number = len(job.messages)
            stamp = f"2026-11-23T12:{self._minute(job):02d}:{30 + number // 2}Z"  # two of them have the same time
            importance = f"JOB_MESSAGE_{message.importance}"
            job.messages.append(
                {"id": str(number), "time": stamp, "messageImportance": importance, "messageText": message.text}
            )

    @staticmethod
    def _minute(job: Job) -> int:
        order = ["QUEUED", "PENDING", "RUNNING", "CANCELLING"]
        return order.index(job.step.state) if job.step.state in order else len(order)


def metrics_json(metrics: dict[str, float]) -> list[dict[str, Any]]:
    """Counters as the service tells them: committed and tentative, the user's with their step."""
    found = []
    for name, value in metrics.items():
        is_service = name[0].isupper()
        context = {} if is_service else {"namespace": "imageshards", "step": "ref_WriteShards"}
        for tentative, number in ((False, value // 2), (True, value)):
            more = {"tentative": "true"} if tentative else {}
            origin = "dataflow/v1b3" if is_service else "user"
            found.append({"name": {"origin": origin, "name": name, "context": {**context, **more}}, "scalar": number})
    return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeDataflow

    def _answer(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(f"{self.command} {url.path}")
        found = re.fullmatch(rf"/v1b3/projects/{PROJECT}/locations/{REGION}/jobs(?:/([^/]+))?(?:/(\w+))?", url.path)
        if found is None:
            self._fail(404)
            return
        job_id, part = found.groups()
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if job_id is None:
            self._jobs(query, json.loads(body) if body else {})
            return
        job = self.server.jobs.get(job_id)
        if job is None:
            self._fail(404)
        elif job.errors:
            self._fail(job.errors.pop(0))
        elif status := job.step.refused.get(part or "job"):
            self._fail(status)
        elif part is None:
            self._send(200, self.server.look(job, takes_a_step=query.get("view") == _SUMMARY))
        elif part == "messages":
            self._messages(job, query)
        else:
            self._send(200, {"metrics": metrics_json(job.step.metrics)})

    do_GET = do_POST = do_PUT = _answer

    def _jobs(self, query: dict[str, str], content: dict[str, Any]) -> None:
        if self.command == "GET":
            if self.server.list_errors:
                self._fail(self.server.list_errors.pop(0))
                return
            # Summaries, which have no labels; of ended jobs too, so that nobody relies on the filter.
            jobs = [
                {**job.content, "labels": {}, "currentState": f"JOB_STATE_{job.step.state}"}
                for job in self.server.jobs.values()
                if job.content["name"] == query["name"]
            ]
            self._send(200, {"jobs": jobs})
            return
        if self.server.before_create is not None:
            self.server.before_create(content)
        if self.server.create_errors:
            self._fail(self.server.create_errors.pop(0))
        elif others := self.server.running(content["name"]):
            self._fail(409, f"There is already an active job named {content['name']} with id {others[0]['id']}")
        else:
            self._send(200, self.server.create(content))

    def _messages(self, job: Job, query: dict[str, str]) -> None:
        since, first = query.get("startTime", ""), int(query.get("pageToken", 0))
        least = query.get("minimumImportance", "0")
        wanted = {"3": ("WARNING", "ERROR"), "4": ("ERROR",)}.get(least, ())
        new = [
            message
            for message in job.messages
            if message["time"] >= since
            and (not wanted or message["messageImportance"].removeprefix("JOB_MESSAGE_") in wanted)
        ]
        more = {"nextPageToken": str(first + _PAGE)} if len(new) > first + _PAGE else {}
        self._send(200, {"jobMessages": new[first : first + _PAGE], **more})

    def _fail(self, status: int, words: str = "the API's\nown words") -> None:
        if status == RESET:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.rfile.close()
            self.connection.close()
            return
        if status == SILENCE:
            time.sleep(1)
            return
        self._send(status, {"error": {"code": status, "message": words, "status": "SOME_STATUS"}})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not on the tests' output."""
