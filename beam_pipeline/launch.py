"""Runs the job from a command line or from Python: checks the input, looks at what is published, runs, reports."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, SetupOptions, StandardOptions, TypeOptions
from apache_beam.runners.portability import fn_api_runner  # noqa: F401 - loaded with Beam, not with the first job
from apache_beam.runners.worker import statesampler

from beam_pipeline import __version__, command_line, listing, manifest_rows, pipeline, published, schema, storage
from beam_pipeline.errors import (
    EXIT_OK,
    ImageShardsError,
    NotPublishedError,
    OtherFormatError,
    UsageError,
    from_worker,
    one_line,
)
from beam_pipeline.options import Config
from beam_pipeline.progress import ProgressLine
from beam_pipeline.state import JobState
from beam_pipeline.summary import ALREADY_PUBLISHED, PUBLISHED, REPAIRED, Manifest, plan_text, published_text, warnings

_IN_PROCESS_RUNNER = "FnApiRunner"  # plain DirectRunner would first try to download another one
_FIRST_CONTACT_S = 15.0
# Beam notes every 200 ms which step a worker is in, and no stage ends before the next note: 0.1 s a stage are lost.
_STATE_SAMPLING_MS = 20
_LOCAL_RUNNERS = frozenset({"FnApiRunner", "DirectRunner", "PrismRunner", "BundleBasedDirectRunner"})


def run(config: Config, beam_options: PipelineOptions | None = None, command: Sequence[str] = ()) -> Manifest | None:
    """Convert the images of `config.input` and publish the dataset.

    Args:
        config: what to convert and how.
        beam_options: the runner and its options; FnApiRunner in this process without.
        command: the command line, for run.json.

    Returns:
        What is published; None with `--plan_only`, or where the runner doesn't wait for the job.

    Raises:
        UsageError: the configuration or the input can't be used; nothing was read but listings.
        ImageShardsError: the job failed; nothing is published, and the same call resumes.
    """
    options = beam_options or PipelineOptions([])
    standard = options.view_as(StandardOptions)
    standard.runner = standard.runner or _IN_PROCESS_RUNNER
    options.view_as(TypeOptions).pipeline_type_check = False  # our types are checked before; it costs 60 ms a start
    options.view_as(SetupOptions).save_main_session = False  # all that a worker unpickles lies in this package
    job = _new_pipeline(options)
    config = resolve(config)
    manifest = read_manifest(config)
    if manifest is not None and not config.overwrite and not config.plan_only:
        damage = published.check(config, manifest)
        if damage:
            print(f"repairing {damage}", file=sys.stderr)
            JobState(config).clear()  # what an interrupted repair left may be damaged since
            published.build_repair(job, config, manifest, damage)
            _execute(job, options)
        return Manifest(config.dataset_url, manifest, REPAIRED if damage else ALREADY_PUBLISHED)
    _check_output(config)
    pipeline.build(job, config, _run_facts(options, command))
    _execute(job, options)
    if config.plan_only:
        print(plan_text(JobState(config).take_plan_only()))
        return None
    result = read_manifest(config)
    return None if result is None else Manifest(config.dataset_url, result, PUBLISHED)


def resolve(config: Config) -> Config:
    """Check the input and read the small files that the configuration names.

    Raises:
        UsageError: as `listing.check_input` and the readers of labels and manifests say.
    """
    if config.labels_file:
        config = dataclasses.replace(config, labels=listing.read_labels(config.labels_file, _first_contact_s(config)))
    if config.manifest:
        config = dataclasses.replace(
            config, header=manifest_rows.read_header(config.manifest, _first_contact_s(config))
        )
    _check_places(config)
    listing.check_input(dataclasses.replace(config, io_deadline=_first_contact_s(config)))
    return config


def _check_places(config: Config) -> None:
    """The output must not be listed as input the next time."""
    if config.layout != "manifest" and f"{config.dataset_url}/".startswith(f"{config.input}/"):
        raise UsageError(f"--output {config.output!r}: it lies inside --input {config.input!r}; choose another place")


def _check_output(config: Config) -> None:
    """The output can be written to, and what lies there is ours to replace.

    Raises:
        UsageError: no such bucket, a folder that can't be made, or files that no job of ours left.
    """
    if config.plan_only:
        return
    try:
        if storage.is_local(config.output):
            os.makedirs(config.dataset_url, exist_ok=True)
        store = storage.open_storage(config.output, _first_contact_s(config))
        foreign = next(store.files(config.dataset_url), None)
    except FileNotFoundError as error:
        raise UsageError(f"--output {config.output!r}: no such bucket or folder ({one_line(error)})") from None
    except OSError as error:
        raise UsageError(f"--output {config.output!r}: can't be written: {one_line(error)}") from None
    ours = config.overwrite or config.repair or JobState(config).has_plan()
    if foreign is not None and not ours:
        raise UsageError(
            f"--output {config.output!r}: {config.dataset_url} holds files of another program ({foreign.path!r}); "
            "choose another --name or --version, or --overwrite deletes them"
        )


def _first_contact_s(config: Config) -> float:
    """Seconds in which a store must answer at all: a wrong URL or no network should not take ten minutes."""
    return min(config.io_deadline, _FIRST_CONTACT_S)


def read_manifest(config: Config) -> dict[str, Any] | None:
    """The manifest of the version, or None where none is published.

    Raises:
        NotPublishedError: there is one that can't be believed, and neither `--repair` nor `--overwrite` was asked for.
    """
    url = storage.join(config.dataset_url, schema.MANIFEST_FILE)
    try:
        data = storage.open_storage(config.output, _first_contact_s(config)).read(url)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return schema.open_manifest(data, url)
    except NotPublishedError as error:
        if config.overwrite or (config.repair and not isinstance(error, OtherFormatError)):
            return None  # the whole job runs anew, in place
        raise


def _execute(job: beam.Pipeline, options: PipelineOptions) -> None:
    """Run a pipeline to its end; a worker's error comes back as ours."""
    local = options.view_as(StandardOptions).runner in _LOCAL_RUNNERS
    try:
        with ProgressLine() if local else nullcontext(), _stages_that_end_at_once():
            result = job.run()
            state = result.wait_until_finish()
    except Exception as error:
        known = from_worker(error)
        if known is not None:
            raise known from error
        raise ImageShardsError(f"the job failed: {_last_line(error)}; the same command resumes") from error
    if state not in (None, "DONE", "UNKNOWN"):
        raise ImageShardsError(f"the job ended as {state}: see the runner's log; the same command resumes")


@contextmanager
def _stages_that_end_at_once() -> Iterator[None]:
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


def _new_pipeline(options: PipelineOptions) -> beam.Pipeline:
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


def _run_facts(options: PipelineOptions, command: Sequence[str]) -> dict[str, Any]:
    return {
        "command": list(command),
        "runner": options.view_as(StandardOptions).runner,
        "started_unix_s": int(time.time()),
        "versions": {
            "imageshards": __version__,
            "apache_beam": beam.__version__,
            "python": platform.python_version(),
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        config, beam_arguments = command_line.parse(given)
        options = PipelineOptions(beam_arguments)
        if options.view_as(StandardOptions).runner in (None, *_LOCAL_RUNNERS):
            logging.disable(logging.ERROR)  # a runner's tracebacks would bury our one line
        manifest = run(config, options, ["python", "-m", "beam_pipeline", *given])
        if manifest is not None:
            for warning in warnings(config, manifest):
                print(f"warning: {warning}", file=sys.stderr)
            print(published_text(manifest))
        return EXIT_OK
    except ImageShardsError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; the same command resumes", file=sys.stderr)
        return 1
