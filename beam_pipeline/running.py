"""Runs the job on whatever runner to its end, and turns what goes wrong there into one line. Imports Beam."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    DirectOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
    TypeOptions,
)
from apache_beam.runners.portability import fn_api_runner  # noqa: F401 - loaded with Beam, not with the first job
from apache_beam.runners.runner import PipelineState

from beam_pipeline import __version__, limits, pipeline, repair, secrets
from beam_pipeline.errors import ImageShardsError, from_worker, one_line
from beam_pipeline.flag_values import wrong
from beam_pipeline.identity import Identity
from beam_pipeline.options import Config
from beam_pipeline.progress import ProgressLine
from beam_pipeline.published import Damage
from beam_pipeline.quiet import RunnerLog, runner_log
from beam_pipeline.state import JobState

_IN_PROCESS = "FnApiRunner"  # plain DirectRunner would first try to download another one
_LOCAL = frozenset({"fnapi", "direct", "prism", "bundlebaseddirect", "switchingdirect"})
_RUNNERS = "DataflowRunner, FlinkRunner, SparkRunner, PrismRunner, PortableRunner"
# Beam notes every 200 ms which step a worker is in, and no stage ends before the next note: 0.1 s a stage are lost.
_STATE_SAMPLING_MS = 20


def is_local(options: PipelineOptions) -> bool:
    """Whether the job ends with this process."""
    return _short(_runner_of(options) or _IN_PROCESS) in _LOCAL


def _runner_of(options: PipelineOptions) -> str | None:
    runner: str | None = options.view_as(StandardOptions).runner
    return runner


def _short(runner: str) -> str:
    """A runner's name as Beam compares it: `Direct`, `direct` and `DirectRunner` are one."""
    return runner.lower().removesuffix("runner")


class Job:
    """One run of the job on one runner.

    Args:
        options: Beam's; None for FnApiRunner in this process.
        quiet: keep what local runners print out of stderr.

    Raises:
        UsageError: no such runner, or it misses options.
    """

    def __init__(self, options: PipelineOptions | None, quiet: bool) -> None:
        self._options = options or PipelineOptions([])
        self._quiet = quiet
        standard = self._options.view_as(StandardOptions)
        standard.runner = standard.runner or _IN_PROCESS
        # Our types are checked before; it costs 60 ms a start.
        self._options.view_as(TypeOptions).pipeline_type_check = False
        # All that a worker unpickles lies in this package.
        self._options.view_as(SetupOptions).save_main_session = False
        self._pipeline = _new_pipeline(self._options)

    def configured(self, config: Config) -> Config:
        """The configuration with what only this run knows: which job it is, and what memory a local one has."""
        if not is_local(self._options):
            return dataclasses.replace(config, identity=Identity.new())
        several = self._options.view_as(DirectOptions).direct_running_mode == "multi_processing"
        one_process = not several and _runner_of(self._options) == _IN_PROCESS
        bytes_each = limits.IN_PROCESS_BYTES if one_process else limits.BETWEEN_PROCESSES_BYTES
        return dataclasses.replace(
            config,
            identity=Identity.new(ends_with_this_process=True),
            most_references=limits.most_references(bytes_each),
        )

    def plan(self, config: Config) -> None:
        """Leave the plan in the state."""
        self._run(config, {})

    def write(self, config: Config, command: Sequence[str]) -> None:
        """Convert the images and publish; `command` is for run.json."""
        versions = {
            "imageshards": __version__,
            "apache_beam": beam.__version__,
            "python": platform.python_version(),
        }
        facts = {
            "command": secrets.without_secrets(command),
            "runner": _runner_of(self._options),
            "started_unix_s": int(time.time()),
            "versions": versions,
        }
        self._run(config, facts)

    def _run(self, config: Config, facts: dict[str, Any]) -> None:
        pipeline.build(self._pipeline, config, facts)
        _execute(self._pipeline, config, self._options, self._quiet)

    def repair(self, config: Config, manifest: dict[str, Any], damage: Damage) -> None:
        """Write again what of a published version is damaged."""
        repair.build_repair(self._pipeline, config, manifest, damage)
        _execute(self._pipeline, config, self._options, self._quiet)


def _new_pipeline(options: PipelineOptions) -> beam.Pipeline:
    runner = str(_runner_of(options))
    if _short(runner) == "dataflow":
        cloud = options.view_as(GoogleCloudOptions)
        # Beam would look for them, or make them, over the network.
        missing = [f"--{name}" for name in ("project", "region", "temp_location") if not getattr(cloud, name)]
        if missing:
            raise wrong("--runner", runner, f"it needs {', '.join(missing)} too; deploy/dataflow.sh helps")
    try:
        return beam.Pipeline(options=options)
    except ValueError as error:
        if str(error).startswith("Unexpected pipeline runner"):
            raise wrong("--runner", runner, f"choose one of {_RUNNERS}, or leave it out") from None
        raise wrong("--runner", runner, one_line(error)) from None
    except Exception as error:  # Dataflow's asks Google about what it is given
        raise ImageShardsError(f"--runner {runner!r}: {one_line(error)}; nothing was begun") from error


def _execute(job: beam.Pipeline, config: Config, options: PipelineOptions, quiet: bool) -> None:
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
        JobState(dataclasses.replace(config, io_deadline=config.first_contact_s)).owner.release()


def _in_one_line(error: Exception, log: RunnerLog) -> ImageShardsError:
    known = from_worker(error)
    if known is not None:
        return known
    path = log.save()
    more = f"; what the runner said is in {path}" if path else ""
    return ImageShardsError(f"the job failed: {_last_line(error)}{more}; the same command resumes")


@contextmanager
def stages_that_end_at_once() -> Iterator[None]:
    """Lets Beam's workers in this process note their state more often; there is no option for it.

    Another version of Beam may be made otherwise: then its stages take as long as they take.
    """
    try:
        from apache_beam.runners.worker.statesampler import DEFAULT_SAMPLING_PERIOD_MS, StateSampler

        start: Any = StateSampler.__init__
        before = tuple(start.__defaults__)
        start.__defaults__ = tuple(_STATE_SAMPLING_MS if one == DEFAULT_SAMPLING_PERIOD_MS else one for one in before)
    except (ImportError, AttributeError, TypeError):
        before = None
    try:
        yield
    finally:
        if before is not None:
            start.__defaults__ = before


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(" [while running")[0] if lines else type(error).__name__
