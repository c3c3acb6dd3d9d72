"""Follows a job on Dataflow until it has ended or is left alone, and tells what other job servers say of theirs."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, TypeVar

from beam_pipeline.cli import dataflow
from beam_pipeline.cli.service import Message, Service, ServiceError, explained
from beam_pipeline.dataset.progress import ProgressText, StatusLine, duration
from beam_pipeline.errors import ImageShardsError, from_worker, say
from beam_pipeline.pipeline import elements

_LOOK_EVERY_S = 2.0
_PROGRESS_EVERY_S = 30.0  # the service collects counters no oftener
_LOG_LINE_EVERY_S = 59.0
_MOST_PAUSE_S = 60.0  # between two requests, while the API fails
# With an API that fails before there is a job, with a job that it doesn't know yet, with a failure without a message.
_PATIENCE_S = 30.0
_ENDED = frozenset({"DONE", "FAILED", "CANCELLED", "UPDATED", "DRAINED"})
_MOST_CHARACTERS = 500  # of a message
_RECENT = timedelta(minutes=1)  # before the last error: what failed earlier was tried again, and didn't fail the job
Answer = TypeVar("Answer")


def attend(service: Service, name: str, label: str, submit: Callable[[], str], detach: bool, again: str) -> bool:
    """Follow the job that this command has running, or submits now.

    Args:
        name: of the job.
        label: of the command, as `dataflow.label` makes it.
        submit: starts a job and returns its id.
        detach: don't follow it.
        again: how what is finished of a job that didn't publish is used.

    Returns:
        Whether the job is done; False if it is left alone.

    Raises:
        ImageShardsError: as `Watch.follow` says; or the API refused, or another command's job has the name.
        KeyboardInterrupt: with the line to tell.
    """
    happens = f"job {name!r} may be running: the same command finds it or submits it"
    try:
        try:
            job_id = _running(service, name, label, _PATIENCE_S)
        except ServiceError as error:
            raise ImageShardsError(f"{error}; nothing was started") from error
        begun = "is already running"
        if job_id is None:
            job_id, begun = _submitted(service, name, label, submit, happens)
        watch = Watch(service, job_id, again)
        happens = watch.runs_on
        _tell(f"job {job_id} {begun}: {service.console(job_id)}")
        if detach:
            _tell(happens)
            return False
        ended = watch.follow()
        happens = f"job {job_id} has ended; {again}"
        watch.conclude(ended)
        return True
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {happens}") from None


def _submitted(service: Service, name: str, label: str, submit: Callable[[], str], perhaps: str) -> tuple[str, str]:
    """Id of the job that is submitted, or was meanwhile, and which of these is true."""
    try:
        return submit(), "is submitted"
    except Exception as error:
        with suppress(ServiceError):  # another command was faster, or only the reply was lost
            if job_id := _running(service, name, label):
                return job_id, "is already running"
        if why := explained(error.__cause__ or error):
            raise ImageShardsError(f"{why}; {'nothing was started' if 400 <= why.code < 500 else perhaps}") from error
        raise


def _running(service: Service, name: str, label: str, patience_s: float = 0.0) -> str | None:
    """Id of this command's running job, or None if no job of the name runs."""
    job = _answer(lambda: service.running(name), patience_s, _tell)
    if job is None:
        return None
    if job.labels.get(dataflow.LABEL) != label:
        raise ImageShardsError(
            f"job {job.id} runs under the name {name!r} with another configuration, input or output: let it end, "
            f"cancel it ({service.cancel_command(job.id)}), or choose another --version or --job_name"
        )
    if _state(job) == "CANCELLING":
        _tell(f"job {job.id} is being cancelled: waiting for its end")
        while _state(_answer(lambda: service.job(job.id), _PATIENCE_S, _tell)) not in _ENDED:
            time.sleep(_LOOK_EVERY_S)
        return None
    return str(job.id)


def _tell(line: str) -> None:
    say(line, sys.stderr)


def _answer(
    ask: Callable[[], Answer], patience_s: float, tell: Callable[[str], None], unknown_until: float = 0.0
) -> Answer:
    """What the API answers, asked again while it fails.

    Args:
        patience_s: how long.
        tell: is given one line about a failure.
        unknown_until: on the monotonic clock: so long a job may be unknown.
    """
    pause, waited = _LOOK_EVERY_S, 0.0
    while True:
        try:
            return ask()
        except ServiceError as error:
            is_new = error.code == 404 and time.monotonic() < unknown_until
            if not (error.is_fleeting or is_new) or waited >= patience_s:
                raise
            if not (is_new or waited):
                tell(f"warning: {error}; retrying")
        time.sleep(pause)
        waited, pause = waited + pause, min(2 * pause, _MOST_PAUSE_S)


class Watch:
    """Follows one job, with lines on stderr.

    Args:
        service: where the job is.
        job_id: which.
        again: how what is finished of a job that didn't publish is used.
    """

    def __init__(self, service: Service, job_id: str, again: str) -> None:
        self._service, self._id, self._again = service, job_id, again
        self._line = StatusLine(log_every_s=_LOG_LINE_EVERY_S)
        self._progress = ProgressText()
        self._told: set[str] = set()
        self._errors: deque[Message] = deque(maxlen=100)
        self._since: datetime | None = None  # time of the last message
        self._unknown_until = time.monotonic() + _PATIENCE_S

    @property
    def runs_on(self) -> str:
        """That the job needs nobody, and how to see or end it."""
        return (
            f"job {self._id} runs on and is billed: the same command watches it, "
            f"{self._service.cancel_command(self._id)} cancels it"
        )

    def follow(self) -> Any:
        """Tell what happens until the job has ended; returns it.

        Raises:
            ImageShardsError: it can't be followed any more.
        """
        try:
            return self._ended()
        except ServiceError as error:
            raise ImageShardsError(f"{error}; {self.runs_on}") from error
        finally:
            self._line.wipe()

    def _ended(self) -> Any:
        """Look now and then until the job has ended; returns it."""
        state, next_progress = "UNKNOWN", 0.0  # as that of a job that has just been made
        while True:
            job = self._ask(lambda: self._service.job(self._id))
            self._unknown_until = 0.0
            self._tell_messages()
            if (latest := _state(job)) in _ENDED:
                return job
            if latest != state:
                state = latest
                self._line.tell(f"{_clock(job.current_state_time)} {_words(state)}")
            if time.monotonic() >= next_progress:
                next_progress = time.monotonic() + _PROGRESS_EVERY_S
                if text := self._progress(self._counts()):
                    self._line.show(text)
            time.sleep(_LOOK_EVERY_S)

    def conclude(self, job: Any) -> None:
        """Tell how a job has ended, and what it cost.

        Raises:
            ImageShardsError: it isn't done.
        """
        state = _state(job)
        self._line.tell(f"{_clock(job.current_state_time)} {_words(state)}{self._spent(job)}")
        if state == "FAILED":
            until = time.monotonic() + _PATIENCE_S  # the service's messages may come later than its states
            with suppress(ServiceError):
                while not self._errors and time.monotonic() < until:
                    time.sleep(_LOOK_EVERY_S)
                    self._tell_messages(_PATIENCE_S)
            raise self._failure()
        if state == "CANCELLED":
            raise ImageShardsError(f"job {self._id} was cancelled; {self._again}")
        if state != "DONE":
            raise ImageShardsError(f"job {self._id} ended in state {state}; {self._again}")

    def _failure(self) -> ImageShardsError:
        """The one line of a job that failed: a worker's own error, if it is one of the last."""
        last = [one.text for one in self._errors if self._errors[-1].time - one.time < _RECENT]
        for text in reversed(last):
            if ours := from_worker(Exception(text)):
                return ours
        causes = [text for text in last if "Traceback" in text] or [
            *last,
            f"no reason is given, see {self._service.console(self._id)}",
        ]
        return ImageShardsError(f"job {self._id} failed: {_message_line(causes[0])}; {self._again}")

    def _tell_messages(self, patience_s: float = math.inf) -> None:
        """Tell each new warning and error; what has failed four times is told once."""
        for message in self._ask(lambda: self._service.messages(self._id, self._since), patience_s):
            self._since = max(self._since or message.time, message.time)
            if message.is_error and message not in self._errors:
                self._errors.append(message)
            self._tell_once(
                f"{'error' if message.is_error else 'warning'}: {_message_line(message.text)}", message.time
            )

    def _tell_once(self, line: str, when: datetime | None = None) -> None:
        if line not in self._told:
            self._told.add(line)
            self._line.tell(f"{_clock(when)} {line}")

    def _ask(self, ask: Callable[[], Answer], patience_s: float = math.inf) -> Answer:
        return _answer(ask, patience_s, self._tell_once, self._unknown_until)

    def _counts(self) -> dict[str, int]:
        """The job's counters as a progress line names them."""
        counts = self._ask(lambda: self._service.counts(self._id))
        return {
            "images_listed": counts[elements.IMAGES_LISTED],
            "images_planned": counts[elements.IMAGES_PLANNED],
            "images": counts[elements.IMAGES_DONE],
            "rejects": counts[elements.IMAGES_REJECTED],
            "shards_planned": counts[elements.SHARDS_PLANNED],
            "shards": counts[elements.SHARDS_WRITTEN] + counts[elements.SHARDS_KEPT],
        }

    def _spent(self, job: Any) -> str:
        """How long a job took, and what of it is billed."""
        begun, ended = job.create_time, job.current_state_time
        text = f" after {duration((ended - begun).total_seconds())}" if begun and ended else ""
        with suppress(ServiceError):
            vcpu_hours = self._service.counts(self._id)["TotalVcpuTime"] / 3600  # the service counts seconds
            pools = self._service.job(self._id, "JOB_VIEW_DESCRIPTION").environment.worker_pools
            machine = pools[0].machine_type if pools else ""
            if vcpu_hours:
                text += f", {vcpu_hours:,.2f} vCPU-hours"
                if cores := dataflow.cores_of(machine):
                    text += f" = {vcpu_hours / cores:,.2f} worker-hours of {machine}"
        return text


@contextmanager
def telling_job_server() -> Iterator[None]:
    """Tell states and messages of a job on Flink, Spark or another cluster, each in one line: Beam only logs them.

    Its `PipelineResult` keeps the first answer to `metrics()`, so there is no progress to tell.
    """
    client = logging.getLogger("apache_beam.runners.portability.portable_runner")
    handlers, level = logging.root.handlers[:], client.level
    logging.root.handlers[:] = [_OneLine()]
    client.setLevel(logging.INFO)
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "interrupted; a job on a cluster runs on until it is cancelled there; the same command resumes"
        ) from None
    finally:
        logging.root.handlers[:] = handlers
        client.setLevel(level)


class _OneLine(logging.Handler):
    """States, warnings and errors, each as a line on stderr, and once."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text, _, state = record.getMessage().partition("Job state changed to ")
        line = _words(state) or f"{record.levelname.lower()}: {_message_line(text)}"
        if (state or record.levelno >= logging.WARNING) and line not in self._told:
            self._told.add(line)
            _tell(f"{_clock(None)} {line}")


def _state(job: Any) -> str:
    """`RUNNING`; a state that is newer than the library is a number."""
    return str(getattr(job.current_state, "name", job.current_state)).removeprefix("JOB_STATE_")


def _words(state: str) -> str:
    return state.lower().replace("_", " ")


def _clock(when: datetime | None) -> str:
    """The time here, of now if `when` is None."""
    return (when.astimezone() if when else datetime.now()).strftime("%H:%M:%S")


def _message_line(text: str) -> str:
    """A message of the service, of a worker's traceback what was raised last."""
    text = "".join(letter for letter in text if letter.isprintable() or letter == "\n")
    if ours := from_worker(Exception(text)):
        return str(ours)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["(no text)"]
    raised = [line for line in lines if " [while running" in line]
    line = raised[-1].partition(" [while running")[0] if raised else lines[0]
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}…"
