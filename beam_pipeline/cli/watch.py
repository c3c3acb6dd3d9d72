"""Finds, submits and watches a Dataflow job; also prints the states of jobs on Flink and Spark."""

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
from beam_pipeline.cli.progress import ProgressText, StatusLine, duration
from beam_pipeline.cli.service import ENDED, Message, Service, ServiceError, as_service_error, state_of
from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError, from_worker
from beam_pipeline.pipeline import elements
from beam_pipeline.text import print_line

_POLL_EVERY_S = 2.0
_PROGRESS_EVERY_S = 30.0  # Dataflow updates counters no more often
_LOG_LINE_EVERY_S = 59.0
_MOST_PAUSE_S = 60.0  # between two requests, while the API fails
_PATIENCE_S = 30.0  # if the API fails before a job is submitted, and for the error of a failed job to arrive
_MOST_CHARACTERS = 500  # of a message
_RECENT = timedelta(minutes=1)  # before the last error; an earlier failure was retried
_MOST_CLEANUP = timedelta(minutes=10)  # from the error that fails a job to its end
_RAISED = re.compile(r" \[while running|^[\w.]+(?:Error|Exception)\b")  # the last line of a traceback
_RESUMES = "the same command resumes"
Answer = TypeVar("Answer")


def submit_and_watch(service: Service, config: Config, name: str, submit: Callable[[str], str]) -> bool:
    """Watch this command's running job, or submit it and watch it.

    Args:
        service: the project and region.
        config: what the job does.
        name: of the job.
        submit: starts a job and returns its id; its argument ends an error's text if the job may have been started.

    Returns:
        Whether the job is done; False with `--detach`.

    Raises:
        ImageShardsError: the job failed or can't be watched, the API refused, or another command's job has the name.
        KeyboardInterrupt: its text is the last line to print.
    """
    on_interrupt = "nothing was started"
    try:
        try:
            job_id = _running_id(service, config, name)
        except ServiceError as error:
            raise ImageShardsError(f"{error}; nothing was started") from error
        how = "is already running"
        if job_id is None:
            on_interrupt = f"job {name!r} may be running: the same command finds it or submits it"
            _say(f"submitting job {name}")
            job_id, how = _submit(service, config, name, submit, on_interrupt)
        watch = Watch(service, config, job_id)
        on_interrupt = watch.runs_on
        _say(f"job {job_id} {how}: {service.console(job_id)}")
        if config.detach:
            _say(watch.runs_on)
            return False
        job = watch.follow()
        on_interrupt = f"job {job_id} has ended; {watch.resume}"
        watch.conclude(job)
        return True
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {on_interrupt}") from None


def find_running_job(service: Service, config: Config, name: str) -> Any:
    """This command's running job, which has this name; None without one.

    Raises:
        ServiceError: the API refused, or can't be reached.
        ImageShardsError: the job is another command's.
    """
    job = service.running(name)
    if job is not None and job.labels.get(dataflow.LABEL) != dataflow.label(config):
        raise ImageShardsError(
            f"job {job.id} runs under the name {name!r} with another configuration, input or output: wait for its end, "
            f"cancel it ({service.cancel_command(job.id)}), or choose another --version or --job_name"
        )
    return job


def _running_id(service: Service, config: Config, name: str) -> str | None:
    """Id of this command's running job; None without one."""
    job = _retry(lambda: find_running_job(service, config, name), _PATIENCE_S)
    if job is None:
        return None
    if state_of(job) == "CANCELLING":
        _say(f"job {job.id} is being cancelled; waiting for its end")
        while state_of(_retry(lambda: service.job(job.id), _PATIENCE_S)) not in ENDED:
            time.sleep(_POLL_EVERY_S)
        return None
    return str(job.id)


def _submit(service: Service, config: Config, name: str, submit: Callable[[str], str], may_run: str) -> tuple[str, str]:
    """Submit the job; returns its id, or that of a job that was submitted just before, and what to say of it."""
    try:
        return submit(may_run), "is submitted"
    except Exception as error:
        with suppress(ServiceError):  # the reply may be lost, or another command was faster
            if job_id := _running_id(service, config, name):
                return job_id, "is already running"
        if refusal := as_service_error(error.__cause__ or error):
            outcome = "nothing was started" if 400 <= refusal.code < 500 else may_run
            raise ImageShardsError(f"{refusal}; {outcome}") from error
        raise


def _say(line: str) -> None:
    print_line(line, sys.stderr)


def _retry(ask: Callable[[], Answer], patience_s: float, warn: Callable[[str], None] = _say) -> Answer:
    """Ask the API until it answers; warns of each failure from the second in a row."""
    pause, waited = _POLL_EVERY_S, 0.0
    while True:
        try:
            return ask()
        except ServiceError as error:
            if not error.is_transient or waited >= patience_s:
                raise
            if waited:
                warn(f"warning: {error}; next try in {duration(pause)}")
        time.sleep(pause)
        waited, pause = waited + pause, min(2 * pause, _MOST_PAUSE_S)


class Watch:
    """Follows one job, with lines on stderr.

    Args:
        service: its project and region.
        config: what it does.
        job_id: its id.
    """

    def __init__(self, service: Service, config: Config, job_id: str) -> None:
        self._service, self._config, self._id = service, config, job_id
        self._discards = next((f"--{flag}" for flag in ("overwrite", "restart") if getattr(config, flag)), "")
        self._line = StatusLine(log_every_s=_LOG_LINE_EVERY_S)
        self._progress = ProgressText()
        self._printed: set[str] = set()
        self._errors: deque[Message] = deque(maxlen=100)
        self._since: datetime | None = None  # time of the last message

    @property
    def resume(self) -> str:
        """How to resume a job that didn't publish."""
        return f"without {self._discards} {_RESUMES}" if self._discards else _RESUMES

    @property
    def runs_on(self) -> str:
        """The last line if this command stops watching."""
        then = f" until it ends (then {self.resume})" if self._discards else ""
        cancel = self._service.cancel_command(self._id)
        return f"job {self._id} runs on and is billed; the same command watches it{then}; to cancel it: {cancel}"

    def follow(self) -> Any:
        """Print states, messages and progress until the job has ended; returns it.

        Raises:
            ImageShardsError: the API refused.
        """
        try:
            return self._wait_for_end()
        except ServiceError as error:
            raise ImageShardsError(f"{error}; {self.runs_on}") from error
        finally:
            self._line.wipe()

    def _wait_for_end(self) -> Any:
        state, next_progress = "UNKNOWN", 0.0  # the state of a new job
        while True:
            job = _retry(lambda: self._service.job(self._id), math.inf, self._print)
            if (latest := state_of(job)) not in (state, *ENDED):
                state = latest
                self._print(_state_text(state), job.current_state_time)
            self._print_messages()
            if latest in ENDED:
                return job
            if time.monotonic() >= next_progress:
                next_progress = time.monotonic() + _PROGRESS_EVERY_S
                if text := self._progress(self._counts()):
                    self._line.show(text)
            time.sleep(_POLL_EVERY_S)

    def conclude(self, job: Any) -> None:
        """Print a job's last state, duration and vCPU-hours.

        Raises:
            ImageShardsError: it failed or was cancelled.
        """
        state = state_of(job)
        self._print(f"{_state_text(state)}{self._usage_text(job)}", job.current_state_time)
        if state == "FAILED":
            until = time.monotonic() + _PATIENCE_S
            while not self._last_errors(job) and time.monotonic() < until:
                time.sleep(_POLL_EVERY_S)
                self._print_messages()
            raise self._failure(job)
        if state != "DONE":
            raise ImageShardsError(f"job {self._id} was {_state_text(state)}; {self.resume}")

    def _failure(self, job: Any) -> ImageShardsError:
        """Why a job failed, in one line: an error of ours that a worker raised, if one of the last errors is."""
        last = self._last_errors(job)
        for text in reversed(last):
            if ours := from_worker(Exception(text)):
                return ours
        no_reason = f"Dataflow gives no reason, see {self._service.console(self._id)}"
        cause = next((text for text in last if "Traceback" in text), (last or [no_reason])[0])
        return ImageShardsError(f"job {self._id} failed: {_message_line(cause)}; {self.resume}")

    def _last_errors(self, job: Any) -> list[str]:
        ended = job.current_state_time
        errors = [error for error in self._errors if (ended or error.time) - error.time < _MOST_CLEANUP]
        return [error.text for error in errors if errors[-1].time - error.time < _RECENT]

    def _print_messages(self) -> None:
        """Print new warnings and errors, each text once: Dataflow tries a work item four times."""
        for message in self._optional(lambda: self._service.messages(self._id, self._since)) or ():
            self._since = max(self._since or message.time, message.time)
            if message.is_error and message not in self._errors:
                self._errors.append(message)
            kind = "error" if message.is_error else "warning"
            self._print_once(f"{kind}: {_message_line(message.text)}", message.time)

    def _counts(self) -> dict[str, int]:
        """The job's counters, by the names in `ProgressText`."""
        counts = self._optional(lambda: self._service.counts(self._id)) or Counter[str]()
        return {
            "images_listed": counts[elements.IMAGES_LISTED],
            "images_planned": counts[elements.IMAGES_PLANNED],
            "images": counts[elements.IMAGES_DONE],
            "rejects": counts[elements.IMAGES_REJECTED],
            "shards_planned": counts[elements.SHARDS_PLANNED],
            "shards": counts[elements.SHARDS_WRITTEN] + counts[elements.SHARDS_KEPT],
        }

    def _optional(self, ask: Callable[[], Answer]) -> Answer | None:
        """The API's answer; None if it fails or refuses, since watching needs only the job's state."""
        try:
            return ask()
        except ServiceError as error:
            if not error.is_transient:
                self._print_once(f"warning: {error}")
            return None

    def _print_once(self, line: str, when: datetime | None = None) -> None:
        if line not in self._printed:
            self._printed.add(line)
            self._print(line, when)

    def _print(self, line: str, when: datetime | None = None) -> None:
        self._line.print_above(f"{_clock(when)} {line}")

    def _usage_text(self, job: Any) -> str:
        """A job's duration and vCPU-hours."""
        created, ended = job.create_time, job.current_state_time
        text = f" after {duration((ended - created).total_seconds())}" if created and ended else ""
        with suppress(ServiceError):
            counts = self._service.counts(self._id)
            vcpu_hours = counts["TotalVcpuTime"] / 3600  # the service counts seconds
            pools = self._service.job(self._id, "JOB_VIEW_DESCRIPTION").environment.worker_pools
            machine = pools[0].machine_type if pools else ""
            if vcpu_hours:
                text += f", {vcpu_hours:,.2f} vCPU-hours"
                if cores := dataflow.cores_of(machine):
                    text += f" = {vcpu_hours / cores:,.2f} worker-hours of {machine}"
        return text


@contextmanager
def printing_job_states() -> Iterator[None]:
    """Print states and messages of a job on Flink, Spark or another cluster, which Beam only logs, a line each.

    There is no progress line: Beam's `PipelineResult` caches its first answer to `metrics()`.
    """
    client = logging.getLogger("apache_beam.runners.portability.portable_runner")
    handlers, level = logging.root.handlers[:], client.level
    logging.root.handlers[:] = [_OneLine()]
    client.setLevel(logging.INFO)
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; the job may run on in the cluster until it is cancelled there; {_RESUMES}"
        ) from None
    finally:
        logging.root.handlers[:] = handlers
        client.setLevel(level)


class _OneLine(logging.Handler):
    """Prints states, warnings and errors to stderr, each once."""

    def __init__(self) -> None:
        super().__init__()
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text, _, state = record.getMessage().partition("Job state changed to ")
        line = _state_text(state) or f"{record.levelname.lower()}: {_message_line(text)}"
        if (state or record.levelno >= logging.WARNING) and line not in self._printed:
            self._printed.add(line)
            _say(f"{_clock(None)} {line}")


def _state_text(state: str) -> str:
    return state.lower().replace("_", " ")


def _clock(when: datetime | None) -> str:
    """Local time of `when`; now if it is None."""
    return (when.astimezone() if when else datetime.now()).strftime("%H:%M:%S")


def _message_line(text: str) -> str:
    """A message in one line; of a worker's traceback only the exception."""
    text = "".join(letter for letter in text if letter.isprintable() or letter == "\n")
    if ours := from_worker(Exception(text)):
        return str(ours)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["(no text)"]
    raised = [line for line in lines if _RAISED.search(line)]
    line = raised[-1].partition(" [while running")[0] if raised else lines[0]
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}…"
