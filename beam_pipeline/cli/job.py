"""Runs the job on any Beam runner, and turns its errors into one line. Imports Beam."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    DebugOptions,
    DirectOptions,
    GoogleCloudOptions,
    PipelineOptions,
    PortableOptions,
    SetupOptions,
    StandardOptions,
    TestOptions,
    WorkerOptions,
)

from beam_pipeline import storage
from beam_pipeline.cli import dataflow
from beam_pipeline.cli.progress import ProgressLine, StatusLine
from beam_pipeline.config import Config, wrong
from beam_pipeline.conversion.versions import versions
from beam_pipeline.dataset import progress
from beam_pipeline.dataset.compare import CorruptFiles
from beam_pipeline.dataset.shard_files import finished_shards
from beam_pipeline.dataset.state import JobState
from beam_pipeline.errors import RESUMES, ImageShardsError, StorageError, UnforeseenError, UsageError, from_worker
from beam_pipeline.inputs import limits
from beam_pipeline.pipeline import graph
from beam_pipeline.schema.job import Run
from beam_pipeline.schema.manifest import Content
from beam_pipeline.text import one_line, print_line

# Seconds between two looks at a job's progress: at counts in this process, in a local folder, in a bucket.
_LOOK_EVERY_S, _LOCAL_EVERY_S, _REMOTE_EVERY_S = 0.5, 2.0, 15.0
_IN_PROCESS = "FnApiRunner"  # DirectRunner would first try to download another one
_LOCAL_RUNNERS = frozenset({"fnapi", "direct", "prism", "bundlebaseddirect", "switchingdirect"})
_RUNNERS = "DataflowRunner, FlinkRunner, SparkRunner, PrismRunner, PortableRunner"


def runs_locally(options: PipelineOptions) -> bool:
    """Whether the job runs on this machine and ends with this process."""
    return _short_name(options) in _LOCAL_RUNNERS


def is_dataflow(options: PipelineOptions) -> bool:
    """Whether the job runs on Dataflow."""
    return _short_name(options) == "dataflow"


def _short_name(options: PipelineOptions) -> str:
    """The runner's name as Beam compares it: `Direct`, `direct` and `DirectRunner` are equal."""
    runner = options.view_as(StandardOptions).runner or _IN_PROCESS
    return str(runner).rpartition(".")[2].lower().removesuffix("runner")


class Job:
    """One run of the job on one runner.

    Args:
        options: Beam's; None for FnApiRunner in this process. On Dataflow the defaults are filled in and printed, and
            credentials, buckets and versions are checked.
        config: what the job will do.

    Attributes:
        runner: its name.
        is_dataflow, is_local: whether it runs on Dataflow, or on this machine.

    Raises:
        UsageError: no such runner, or it misses options.
        StorageError: a bucket can't be written to.
    """

    def __init__(self, options: PipelineOptions | None, config: Config) -> None:
        if not isinstance(options, PipelineOptions | None):
            kind = type(options).__name__
            raise UsageError(f"beam_options is a {kind}: give PipelineOptions(['--runner=…', …]) of Beam")
        self._options = copy.deepcopy(options) or PipelineOptions([])  # the caller's don't get our defaults
        standard = self._options.view_as(StandardOptions)
        self.runner: str = standard.runner or _IN_PROCESS
        standard.runner = self.runner
        # Everything that a worker unpickles is in this package.
        self._options.view_as(SetupOptions).save_main_session = False
        self.is_local, self.is_dataflow = runs_locally(self._options), is_dataflow(self._options)
        if self.is_dataflow:
            _fill_in_and_check(self._options, config)
        _check_job_server(self._options.view_as(PortableOptions).job_endpoint)
        self._pipeline = _new_pipeline(self._options, self.runner)

    def configured(self, config: Config) -> Config:
        """The configuration with facts of this run: a local job's memory, or the versions that workers must have."""
        if not self.is_local:
            threads = config.decode_threads or (dataflow.DECODE_THREADS if self.is_dataflow else 0)
            return dataclasses.replace(config, decode_threads=threads).in_run(launcher=versions())
        one_process = not self._has_workers() and self.runner == _IN_PROCESS
        bytes_each = limits.IN_PROCESS_BYTES if one_process else limits.BETWEEN_PROCESSES_BYTES
        return config.in_run(max_references=limits.max_references(bytes_each))

    def _has_workers(self) -> bool:
        """Whether a local job's workers are other processes, which count for themselves."""
        return bool(self._options.view_as(DirectOptions).direct_running_mode == "multi_processing")

    def write(self, config: Config, command: Sequence[str] = ()) -> bool:
        """Convert the images and publish, or with `--plan_only` store the plan in the state folder.

        Args:
            command: the command line, for run.json.

        Returns:
            Whether the job is done: False with `--detach`, or if only a template was written.
        """
        run = Run(
            command=tuple(without_secrets(command)),
            runner=self.runner,
            started_unix_s=int(time.time()),
            versions=graph.software_versions(),
        )
        return self._run(config, lambda: graph.build(self._pipeline, config, run))

    def cores(self, config: Config) -> int | None:
        """CPU cores of this machine, or of the most workers that Dataflow starts; None if unknown, as on a cluster."""
        if self.is_local:
            return config.threads
        worker = self._options.view_as(WorkerOptions)
        cores = dataflow.cores_of(worker.machine_type) if self.is_dataflow else None
        return cores and cores * worker.max_num_workers

    def compare(self, config: Config, manifest: Content) -> bool:
        """Compare a published version with its input and files, and store the result in the state folder.

        Returns:
            The same as `write`.
        """
        cloud = self._pipeline.options.view_as(GoogleCloudOptions)
        config = dataclasses.replace(config, detach=False).in_run(compares=True)
        if cloud.job_name:
            cloud.job_name += "-compare"
        done = self._run(config, lambda: graph.build_comparison(self._pipeline, config, manifest.self_sha256))
        self._pipeline = _new_pipeline(self._options, self.runner)  # for the repair
        return done

    def repair(self, config: Config, manifest: Content, corrupt: CorruptFiles) -> bool:
        """Rewrite the corrupt files of a published version; returns the same as `write`."""
        return self._run(config, lambda: graph.build_repair(self._pipeline, config, manifest, corrupt))

    def _run(self, config: Config, build: Callable[[], object]) -> bool:
        if self.is_dataflow:
            return self._submit_and_watch(config, build)
        build()
        state = self._wait_until_finish(config)
        if state not in (None, "DONE", "UNKNOWN"):
            raise ImageShardsError(f"the job ended in state {state}: see the runner's log; {RESUMES}")
        return True

    def _wait_until_finish(self, config: Config) -> Any:
        """Run the job; returns its last state."""
        if self.is_local:
            with _translating_job_errors(), self._progress(config):
                return self._pipeline.run().wait_until_finish()
        from beam_pipeline.cli.watch import printing_job_states

        line = StatusLine()
        with (
            _ctrl_c_raises(),
            printing_job_states("apache_beam.runners.portability.portable_runner", line=line),
            _translating_job_errors(),
            self._progress(config, line),
        ):
            return self._pipeline.run().wait_until_finish()

    def _progress(self, config: Config, line: StatusLine | None = None) -> ProgressLine:
        if self._has_workers() or not self.is_local:
            every_s = _LOCAL_EVERY_S if storage.is_local(config.output) else _REMOTE_EVERY_S
            # Of workers nothing is known until there is a plan: after minutes, if the listing is long.
            at_first = "running: listing images, planning shards"
            return ProgressLine(partial(_finished_shards, config), every_s, at_first, line)
        before = progress.reported()
        return ProgressLine(lambda: progress.reported() - before, _LOOK_EVERY_S)

    def _submit_and_watch(self, config: Config, build: Callable[[], object]) -> bool:
        """Find this command's running job on Dataflow, or submit it, and watch it."""
        cloud = self._pipeline.options.view_as(GoogleCloudOptions)
        cloud.labels = [*(cloud.labels or ()), f"{dataflow.LABEL}={dataflow.label(config)}"]
        if cloud.template_location or self._options.view_as(TestOptions).dry_run:
            build()
            with _translating_job_errors("the job can't be written", "nothing was started"):
                self._pipeline.run()
            template = cloud.template_location
            print_line(f"template written to {template}" if template else "dry run: nothing was submitted", sys.stderr)
            return False
        from beam_pipeline.cli.service import Service
        from beam_pipeline.cli.watch import submit_and_watch

        def submit(may_run: str) -> str:
            build()
            with _translating_job_errors("the submission failed", may_run):
                return str(self._pipeline.run().job_id())

        with _ctrl_c_raises():
            service = Service(self._pipeline.options.get_all_options())
            return submit_and_watch(service, config, cloud.job_name, submit)


def _finished_shards(config: Config) -> Counter[str]:
    """Counts of what is in the state: at first maybe of an earlier job."""
    config = dataclasses.replace(config, io_deadline=min(config.io_deadline, _REMOTE_EVERY_S))
    with suppress(StorageError):
        if plan := JobState(config).planned():
            return Counter(shards=finished_shards(config), shards_planned=plan.shards)
    return Counter()


@contextmanager
def _ctrl_c_raises() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt instead of ending the command, whose last line says that the job runs on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _check_job_server(endpoint: str | None) -> None:
    """Beam would wait for minutes for one that isn't there, without a word."""
    if not endpoint or not (place := re.fullmatch(r"([\w.-]+):(\d+)", endpoint)):
        return
    try:
        socket.create_connection((place[1], int(place[2])), storage.FIRST_CONTACT_S).close()
    except (OSError, OverflowError) as error:
        fix = f"no job server answers there ({error}); start one, or correct HOST:PORT"
        raise wrong("--job_endpoint", endpoint, fix) from None


def _fill_in_and_check(options: PipelineOptions, config: Config) -> None:
    """Set and print the defaults of Dataflow's options, then check what needs no input, a line for each check."""
    explicit = options.get_all_options()
    dataflow.check_options(config, explicit)
    defaults = dataflow.defaults(config, explicit)
    for kind in (GoogleCloudOptions, WorkerOptions, SetupOptions, DebugOptions):
        view = options.view_as(kind)
        for name in defaults:
            if hasattr(view, name):
                setattr(view, name, defaults[name])
    print_line(dataflow.defaults_text(config, explicit, defaults), sys.stderr)
    if not explicit["dry_run"]:  # before Beam's own checks, which take 20 s without credentials
        from beam_pipeline.cli import preflight  # Google's clients would cost a local job half a second

        for line in preflight.check_cloud(config, options.get_all_options()):
            print_line(line, sys.stderr)


def _new_pipeline(options: PipelineOptions, runner: str) -> beam.Pipeline:
    try:
        pipeline = beam.Pipeline(options=options)
    except ValueError as error:
        if "validations errors: " in str(error):
            raise UsageError(str(error).partition("validations errors: ")[2].strip().replace("\n", " ")) from None
        is_unknown = str(error).startswith("Unexpected pipeline runner")
        fix = f"choose one of {_RUNNERS}, or leave it out" if is_unknown else one_line(error)
        raise wrong("--runner", runner, fix) from None
    except Exception as error:  # DataflowRunner validates some options online
        raise ImageShardsError(f"--runner {runner!r}: {one_line(error)}; nothing was started") from error
    with suppress(OSError):
        os.rmdir(pipeline.local_tempdir)  # for steps in other languages; a killed job would leave it
    return pipeline


@contextmanager
def _translating_job_errors(what: str = "the job failed", then: str = RESUMES) -> Iterator[None]:
    """A worker's error becomes ours again; any other is the cause of an `UnforeseenError`."""
    try:
        yield
    except Exception as error:
        if _is_interrupt(error):
            raise KeyboardInterrupt from error
        if ours := from_worker(error):
            raise ours from error
        raise UnforeseenError(f"{what}: {_cause(error)}; {then}") from error


def _cause(error: Exception) -> str:
    """The root cause in a Python traceback, a Java stack trace or a gRPC error."""
    lines = [line.strip() for line in str(error).splitlines() if any(map(str.isalpha, line))]
    for pattern in (r'details = "(.+)"', r"Caused by: (?:[\w.$]+: )?(.+)"):
        if causes := [match[1] for line in lines if (match := re.fullmatch(pattern, line))]:
            return str(causes[-1])
    is_java = any(re.match(r"at .+\(.+\)$", line) for line in lines)
    return (lines or [type(error).__name__])[0 if is_java else -1].partition(" [while running")[0]


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C ended the job; Beam raises another error if it comes during a step."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


_WORD = r"[\w-]*(?:secret|token|password|passwd|credential|signature|connection_string|access_key)[\w-]*"
_SECRET = re.compile(rf"(--{_WORD}(?:=|\0(?!--)))[^\0]+", re.IGNORECASE)
_SECRET_PARAMETER = re.compile(rf"([?&,;](?:{_WORD}|key|sig)=)[^\0&,;\s]+", re.IGNORECASE)


def without_secrets(command: Sequence[str]) -> list[str]:
    """A command line with `***` for the values of secret flags and URL parameters, for run.json."""
    line = _SECRET.sub(r"\1***", "\0".join(command))  # no argument holds a NUL
    return _SECRET_PARAMETER.sub(r"\1***", line).split("\0") if command else []
