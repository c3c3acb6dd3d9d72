"""Follows a job on Dataflow until it has ended or is left alone, and tells what other job servers say of theirs."""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, TypeVar

from beam_pipeline.cli import dataflow
from beam_pipeline.cli.service import ENDED, Message, Service, ServiceError, explained, state_of
from beam_pipeline.config import Config
from beam_pipeline.dataset.progress import ProgressText, StatusLine, duration
from beam_pipeline.errors import ImageShardsError, from_worker, say
from beam_pipeline.pipeline import elements

_LOOK_EVERY_S = 2.0
_PROGRESS_EVERY_S = 30.0  # the service collects counters no oftener
_LOG_LINE_EVERY_S = 59.0
_MOST_PAUSE_S = 60.0  # between two requests, while the API fails
# With an API that fails before there is a job, with a job that it doesn't know yet, with a failure without a message.
_PATIENCE_S = 30.0
_RESUMES = "the same command resumes"
_MOST_CHARACTERS = 500  # of a message
_RECENT = timedelta(minutes=1)  # before the last error
_CLEANING_UP = timedelta(minutes=10)  # at most, from the error that fails a job to its end
_RAISED = re.compile(r" \[while running|^[\w.]+(?:Error|Exception)\b")  # the last line of a traceback
Answer = TypeVar("Answer")


def attend(service: Service, config: Config, name: str, submit: Callable[[str], str]) -> bool:
    """Follow the job that this command has running, or submits now.

    Args:
        service: where it runs.
        config: what it does.
        name: of the job.
        submit: starts a job and returns its id; given what to tell if it fails.

    Returns:
        Whether the job is done; False if it is left alone, with `--detach`.

    Raises:
        ImageShardsError: as `Watch` says; or the API refused, or another command's job has the name.
        KeyboardInterrupt: with the line to tell.
    """
    happens = "nothing was started"
    try:
        try:
            job_id = _running(service, config, name)
        except ServiceError as error:
            raise ImageShardsError(f"{error}; {happens}") from error
        begun = "is already running"
        if job_id is None:
            happens = f"job {name!r} may be running: the same command finds it or submits it"
            _tell(f"submitting job {name}")
            job_id, begun = _submitted(service, config, name, submit, happens)
        watch = Watch(service, config, job_id)
        happens = watch.runs_on
        _tell(f"job {job_id} {begun}: {service.console(job_id)}")
        if config.detach:
            _tell(happens)
            return False
        ended = watch.follow()
        happens = f"job {job_id} has ended; {_again(config)}"
        watch.conclude(ended)
        return True
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {happens}") from None


def _running(service: Service, config: Config, name: str) -> str | None:
    """Id of this command's running job, or None if no job of the name runs."""
    job = _answer(lambda: find(service, config, name), _PATIENCE_S)
    if job is None:
        return None
    if state_of(job) == "CANCELLING":
        _tell(f"job {job.id} is being cancelled: waiting for its end")
        while state_of(_answer(lambda: service.job(job.id), _PATIENCE_S)) not in ENDED:
            time.sleep(_LOOK_EVERY_S)
        return None
    return str(job.id)


def find(service: Service, config: Config, name: str) -> Any:
    """The running job of a name, if it is this command's, or None.

    Raises:
        ServiceError: as `Service` says.
        ImageShardsError: it is another command's.
    """
    job = service.running(name)
    if job is not None and job.labels.get(dataflow.LABEL) != dataflow.label(config):
        raise ImageShardsError(
            f"job {job.id} runs under the name {name!r} with another configuration, input or output: let it end, "
            f"cancel it ({service.cancel_command(job.id)}), or choose another --version or --job_name"
        )
    return job


def _submitted(
    service: Service, config: Config, name: str, submit: Callable[[str], str], perhaps: str
) -> tuple[str, str]:
    """Id of the job that is submitted, or was meanwhile, and which of these is true."""
    try:
        return submit(perhaps), "is submitted"
    except Exception as error:
        with suppress(ServiceError):  # another command was faster, or only the reply was lost
            if job := find(service, config, name):
                return str(job.id), "is already running"
        if why := explained(error.__cause__ or error):
            raise ImageShardsError(f"{why}; {'nothing was started' if 400 <= why.code < 500 else perhaps}") from error
        raise


def _again(config: Config) -> str:
    """How what is finished of a job that didn't publish is used."""
    discards = next((f"--{flag}" for flag in ("overwrite", "restart") if getattr(config, flag)), "")
    return f"without {discards} {_RESUMES}" if discards else _RESUMES


def _tell(line: str) -> None:
    say(line, sys.stderr)


def _answer(
    ask: Callable[[], Answer],
    patience_s: float = math.inf,
    tell: Callable[[str], None] = _tell,
    unknown_until: float = 0.0,
) -> Answer:
    """What the API answers, asked again while it fails.

    Args:
        patience_s: how long.
        tell: is given a line about each failure but the first, which is common.
        unknown_until: on the monotonic clock: so long a job may be unknown.
    """
    pause, waited = _LOOK_EVERY_S, 0.0
    while True:
        try:
            return ask()
        except ServiceError as error:
            is_new = error.code == 404 and time.monotonic() < unknown_until
            if not is_new and (not error.is_fleeting or waited >= patience_s):
                raise
            if waited and not is_new:
                tell(f"warning: {error}; next try in {duration(pause)}")
        time.sleep(pause)
        waited, pause = waited + pause, min(2 * pause, _MOST_PAUSE_S)


class Watch:
    """Follows one job, with lines on stderr.

    Args:
        service: where the job is.
        config: what it does.
        job_id: which job it is.
    """

    def __init__(self, service: Service, config: Config, job_id: str) -> None:
        self._service, self._id, self._again = service, job_id, _again(config)
        self._line = StatusLine(log_every_s=_LOG_LINE_EVERY_S)
        self._progress = ProgressText()
        self._told: set[str] = set()
        self._errors: deque[Message] = deque(maxlen=100)
        self._since: datetime | None = None  # time of the last message

    @property
    def runs_on(self) -> str:
        """That the job needs nobody, and how to see or end it."""
        again = "" if self._again == _RESUMES else f" until it ends (then {self._again})"
        cancel = self._service.cancel_command(self._id)
        return f"job {self._id} runs on and is billed; the same command watches it{again}; to cancel it: {cancel}"

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
        unknown_until = time.monotonic() + _PATIENCE_S
        while True:
            job = _answer(lambda: self._service.job(self._id), math.inf, self._tell, unknown_until)
            unknown_until = 0.0
            if (latest := state_of(job)) not in (state, *ENDED):
                state = latest
                self._tell(_words(state), job.current_state_time)
            self._tell_messages()
            if latest in ENDED:
                return job
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
        state = state_of(job)
        self._tell(f"{_words(state)}{self._spent(job)}", job.current_state_time)
        if state == "FAILED":
            until = time.monotonic() + _PATIENCE_S  # the service's messages may come later than its states
            while not self._last_errors(job) and time.monotonic() < until:
                time.sleep(_LOOK_EVERY_S)
                self._tell_messages(_PATIENCE_S)
            raise self._failure(job)
        if state == "CANCELLED":
            raise ImageShardsError(f"job {self._id} was cancelled; {self._again}")
        if state != "DONE":
            raise ImageShardsError(f"job {self._id} ended in state {state}; {self._again}")

    def _failure(self, job: Any) -> ImageShardsError:
        """The one line of a job that failed: a worker's own error, if it is one of the last."""
        last = self._last_errors(job)
        for text in reversed(last):
            if ours := from_worker(Exception(text)):
                return ours
        causes = [text for text in last if "Traceback" in text] or [
            *last,
            f"no reason is given, see {self._service.console(self._id)}",
        ]
        return ImageShardsError(f"job {self._id} failed: {_message_line(causes[0])}; {self._again}")

    def _last_errors(self, job: Any) -> list[str]:
        """What failed just before the job did: what failed earlier was tried again."""
        errors = [one for one in self._errors if (job.current_state_time or one.time) - one.time < _CLEANING_UP]
        return [one.text for one in errors if errors[-1].time - one.time < _RECENT]

    def _tell_messages(self, patience_s: float = math.inf) -> None:
        """Tell each new warning and error; what has failed four times is told once."""
        for message in self._asked(lambda: self._service.messages(self._id, self._since), patience_s) or ():
            self._since = max(self._since or message.time, message.time)
            if message.is_error and message not in self._errors:
                self._errors.append(message)
            kind = "error" if message.is_error else "warning"
            self._tell_once(f"{kind}: {_message_line(message.text)}", message.time)

    def _counts(self) -> dict[str, int]:
        """The job's counters as a progress line names them."""
        counts = self._asked(lambda: self._service.counts(self._id)) or Counter[str]()
        return {
            "images_listed": counts[elements.IMAGES_LISTED],
            "images_planned": counts[elements.IMAGES_PLANNED],
            "images": counts[elements.IMAGES_DONE],
            "rejects": counts[elements.IMAGES_REJECTED],
            "shards_planned": counts[elements.SHARDS_PLANNED],
            "shards": counts[elements.SHARDS_WRITTEN] + counts[elements.SHARDS_KEPT],
        }

    def _asked(self, ask: Callable[[], Answer], patience_s: float = math.inf) -> Answer | None:
        """What the API answers, or None if it refuses: a job can be followed by its state alone."""
        try:
            return _answer(ask, patience_s, self._tell)
        except ServiceError as error:
            self._tell_once(f"warning: {error}")
            return None

    def _tell_once(self, line: str, when: datetime | None = None) -> None:
        if line not in self._told:
            self._told.add(line)
            self._tell(line, when)

    def _tell(self, line: str, when: datetime | None = None) -> None:
        self._line.tell(f"{_clock(when)} {line}")

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
    raised = [line for line in lines if _RAISED.search(line)]
    line = raised[-1].partition(" [while running")[0] if raised else lines[0]
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}…"
