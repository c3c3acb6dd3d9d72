"""Finds, submits and follows a Dataflow job, by Beam's own poller; prints the states of jobs elsewhere, too."""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

from google.cloud import dataflow_v1beta3 as api

from beam_pipeline.cli import dataflow
from beam_pipeline.cli.progress import ProgressText, StatusLine
from beam_pipeline.cli.service import Service, ServiceError, as_service_error
from beam_pipeline.config import Config
from beam_pipeline.errors import RESUMES, ImageShardsError, from_worker
from beam_pipeline.pipeline import elements
from beam_pipeline.text import print_line

_LOG_LINE_EVERY_S = 59.0
_MAX_CHARACTERS = 500  # of a message
# What Beam logs of a job: its state, and on Dataflow its messages.
_STATE = re.compile(r"Job state changed to (\w+)|Job \S+ is in state JOB_STATE_(\w+)")
_MESSAGE = re.compile(r"(\S+ \S+): JOB_MESSAGE_\w+: (.*)", re.DOTALL)
_EXCEPTION_LINE = re.compile(r" \[while running|^[\w.]+(?:Error|Exception)\b")  # the last one of a traceback
_NOT_STARTED = "stopped"  # a job's first state


def submit_and_watch(service: Service, config: Config, name: str, submit: Callable[[str], str]) -> bool:
    """Follow this command's running job, or submit it and follow it.

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
    then = "nothing was started"
    try:
        job, how = find_running_job(service, config, name), "is already running"
        if job is None:
            then = f"job {name!r} may be running: the same command finds it or submits it"
            print_line(f"submitting job {name}", sys.stderr)
            job, how = _submit(service, config, name, submit, then)
        then = _runs_on(service, config, job.id)
        print_line(f"job {job.id} {how}: {service.console(job.id)}", sys.stderr)
        if config.detach:
            print_line(then, sys.stderr)
            return False
        _follow(service, config, job)
        return True
    except ServiceError as error:
        raise ImageShardsError(f"{error}; {then}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {then}") from None


def find_running_job(service: Service, config: Config, name: str) -> Any:
    """This command's running job, which has this name; None without one.

    Raises:
        ServiceError: the API refused, or can't be reached.
        ImageShardsError: the job is another command's.
    """
    job = service.running(name)
    if job is not None and job.labels.get(dataflow.LABEL) != dataflow.label(config):
        what = f"job {job.id} runs under the name {name!r} with another configuration, input or output"
        fix = f"cancel it ({service.cancel_command(job.id)}), or choose another --version or --job_name"
        raise ImageShardsError(f"{what}: wait for its end, {fix}")
    return job


def _submit(service: Service, config: Config, name: str, submit: Callable[[str], str], may_run: str) -> tuple[Any, str]:
    """Submit the job; returns it, or that which was submitted just before, and what to say of it."""
    try:
        return api.Job(id=submit(may_run)), "is submitted"
    except Exception as error:
        with suppress(ServiceError):  # the reply may be lost, or another command was faster
            if job := find_running_job(service, config, name):
                return job, "is already running"
        refusal = as_service_error(error.__cause__ or error)
        if refusal is None:
            raise
        if 400 <= refusal.code < 500:
            raise ImageShardsError(f"{refusal}; nothing was started") from error
        raise refusal from error


def _runs_on(service: Service, config: Config, job_id: str) -> str:
    """The last line if this command stops watching."""
    how = _resumes(config)
    then = "" if how == RESUMES else f" until it ends (then {how})"
    cancel = service.cancel_command(job_id)
    return f"job {job_id} runs on and is billed; the same command watches it{then}; to cancel it: {cancel}"


def _resumes(config: Config) -> str:
    """How to resume a job that didn't publish."""
    discards = next((f"--{flag} " for flag in ("overwrite", "restart") if getattr(config, flag)), "")
    return f"without {discards}{RESUMES}" if discards else RESUMES


def _follow(service: Service, config: Config, job: Any) -> None:
    """Print states, warnings, errors and progress of a job until it has ended.

    Beam's poller asks every five seconds. `service` stands in for the runner's client, which only a runner that has
    submitted the job has.

    Raises:
        ServiceError: the API refused.
        ImageShardsError: the job failed or was cancelled.
    """
    from apache_beam.runners.dataflow.dataflow_metrics import DataflowMetrics
    from apache_beam.runners.dataflow.dataflow_runner import DataflowPipelineResult, DataflowRunner

    line, progress, runner = StatusLine(log_every_s=_LOG_LINE_EVERY_S), ProgressText(), DataflowRunner()
    result = DataflowPipelineResult(job, runner)
    metrics = DataflowMetrics(service, result)

    def get_job(job_id: str) -> Any:
        with suppress(ServiceError):  # a job can be followed without
            if text := progress(_counts(metrics.query()["counters"])):
                line.show(text)
        return service.get_job(job_id)

    runner.dataflow_client = SimpleNamespace(get_job=get_job, list_messages=service.list_messages)
    with printing_job_states(DataflowRunner.__module__, Service.__module__, line=line):
        poll = partial(DataflowRunner.poll_for_job_completion, runner, result, None)
        poll()
        while not result.is_in_terminal_state():  # it returns a minute after a job began to be cancelled
            poll()
        if result.state == "FAILED":  # after any earlier error it returns without having read the last ones
            poll()
    if result.state == "FAILED":
        reason = runner.last_error_msg or f"Dataflow gives no reason, see {service.console(job.id)}"
        failed = ImageShardsError(f"job {job.id} failed: {_message_line(reason)}; {_resumes(config)}")
        raise from_worker(Exception(reason)) or failed
    if result.state != "DONE":
        raise ImageShardsError(f"job {job.id} was {_state_text(result.state)}; {_resumes(config)}")


def _counts(counters: Iterable[Any]) -> dict[str, int]:
    """A job's counters, each of one step, by the names in `ProgressText`."""
    counts = Counter({counter.key.metric.name: counter.attempted for counter in counters})
    return {
        "images_listed": counts[elements.IMAGES_LISTED],
        "images_planned": counts[elements.IMAGES_PLANNED],
        "images": counts[elements.IMAGES_DONE],
        "rejects": counts[elements.IMAGES_REJECTED],
        "shards_planned": counts[elements.SHARDS_PLANNED],
        "shards": counts[elements.SHARDS_WRITTEN] + counts[elements.SHARDS_KEPT],
    }


@contextmanager
def printing_job_states(*names: str, line: StatusLine | None = None) -> Iterator[None]:
    """Print states, warnings and errors of a job, which Beam only logs, one line each.

    Args:
        names: of the loggers to hear.
        line: stays below what is printed.
    """
    line, loggers = line or StatusLine(), [logging.getLogger(name) for name in names]
    handlers, levels = logging.root.handlers[:], [logger.level for logger in loggers]
    logging.root.handlers[:] = [_OneLine(line)]
    for logger in loggers:
        logger.setLevel(logging.INFO)
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; the job may run on in the cluster until it is cancelled there; {RESUMES}"
        ) from None
    finally:
        line.wipe()
        logging.root.handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _OneLine(logging.Handler):
    """Prints states, warnings and errors above a status line, each once: a message is that of each of four attempts."""

    def __init__(self, line: StatusLine) -> None:
        super().__init__()
        self._line = line
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        when, text = datetime.now(), record.getMessage()
        if record.name == logging.root.name and from_worker(Exception(text)):
            return  # a job server's message of what failed the job, which is the command's last line
        if message := _MESSAGE.fullmatch(text):
            when, text = datetime.fromisoformat(message[1]).astimezone(), message[2]
        state = _STATE.match(text)
        said = f"{record.levelname.lower()}: {_message_line(text).removeprefix('WARNING: ')}"
        line = _state_text(state[1] or state[2]) if state else said
        if line == _NOT_STARTED:
            return
        if (state or record.levelno >= logging.WARNING) and line not in self._printed:
            self._printed.add(line)
            self._line.print_above(f"{when:%H:%M:%S} {line}")


def _state_text(state: str) -> str:
    return state.lower().replace("_", " ")


def _message_line(text: str) -> str:
    """A message in one line; of a worker's traceback only the exception."""
    text = "".join(letter for letter in text if letter.isprintable() or letter == "\n")
    if ours := from_worker(Exception(text)):
        return str(ours)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["(no text)"]
    raised = [line for line in lines if _EXCEPTION_LINE.search(line)]
    line = raised[-1].partition(" [while running")[0] if raised else lines[0]
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}…"
