"""Runs a pipeline to its end, on whatever runner, and turns what goes wrong there into one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.portability import fn_api_runner  # noqa: F401 - loaded with Beam, not with the first job
from apache_beam.runners.runner import PipelineState
from apache_beam.runners.worker import statesampler

from beam_pipeline.errors import ImageShardsError, UsageError, from_worker, one_line
from beam_pipeline.options import Config
from beam_pipeline.progress import ProgressLine
from beam_pipeline.quiet import RunnerLog, runner_log
from beam_pipeline.state import JobState

IN_PROCESS_RUNNER = "FnApiRunner"  # plain DirectRunner would first try to download another one
_FIRST_CONTACT_S = 15.0
# Beam notes every 200 ms which step a worker is in, and no stage ends before the next note: 0.1 s a stage are lost.
_STATE_SAMPLING_MS = 20
LOCAL_RUNNERS = frozenset({"FnApiRunner", "DirectRunner", "PrismRunner", "BundleBasedDirectRunner"})


def runner_of(options: PipelineOptions) -> str | None:
    """Name of the runner that was asked for."""
    runner: str | None = options.view_as(StandardOptions).runner
    return runner


def is_local(options: PipelineOptions) -> bool:
    """Whether the job ends with this process."""
    return runner_of(options) in LOCAL_RUNNERS


def first_contact_s(config: Config) -> float:
    """Seconds in which a store must answer at all: a wrong URL or no network should not take ten minutes."""
    return min(config.io_deadline, _FIRST_CONTACT_S)


def execute(job: beam.Pipeline, config: Config, options: PipelineOptions, quiet: bool) -> None:
    """Run a pipeline to its end; a worker's error comes back as ours."""
    local = is_local(options)
    result: Any = None
    with runner_log(quiet and local) as log:
        try:
            with ProgressLine(log.stderr) if local else nullcontext(), stages_that_end_at_once():
                result = job.run()
                state = result.wait_until_finish()
            if state not in (None, "DONE", "UNKNOWN"):
                raise ImageShardsError(f"the job ended as {state}: see the runner's log; the same command resumes")
        except BaseException as error:
            if local or _has_ended(result):
                _give_up(config)
            if not isinstance(error, Exception):
                raise
            raise _in_one_line(error, log) from error


def _has_ended(result: Any) -> bool:
    """Whether a runner knows that the job is over, not only that waiting for it is."""
    try:
        return result is not None and bool(PipelineState.is_terminal(result.state))
    except Exception:
        return False


def _give_up(config: Config) -> None:
    """Let others write the version at once: the job has ended."""
    with suppress(ImageShardsError):
        JobState(dataclasses.replace(config, io_deadline=first_contact_s(config))).owner.release()


def _in_one_line(error: Exception, log: RunnerLog) -> ImageShardsError:
    known = from_worker(error)
    if known is not None:
        return known
    path = log.save()
    more = f"; what the runner said is in {path}" if path else ""
    return ImageShardsError(f"the job failed: {_last_line(error)}{more}; the same command resumes")


@contextmanager
def stages_that_end_at_once() -> Iterator[None]:
    """Lets Beam's workers in this process note their state more often; there is no option for it."""
    start = statesampler.StateSampler.__init__
    before = start.__defaults__
    start.__defaults__ = tuple(
        _STATE_SAMPLING_MS if default == statesampler.DEFAULT_SAMPLING_PERIOD_MS else default for default in before
    )
    try:
        yield
    finally:
        start.__defaults__ = before


def new_pipeline(options: PipelineOptions) -> beam.Pipeline:
    """A pipeline for a runner.

    Raises:
        UsageError: no such runner, or it misses options.
    """
    try:
        return beam.Pipeline(options=options)
    except ValueError as error:
        raise UsageError(f"--runner {options.view_as(StandardOptions).runner}: {one_line(error)}") from None


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(" [while running")[0] if lines else type(error).__name__
