"""Runs the job from a command line or from Python: checks the input, looks at what is published, runs, reports."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    DirectOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
    TypeOptions,
)

from beam_pipeline import (
    __version__,
    command_line,
    duplicates,
    limits,
    listing,
    manifest_rows,
    pipeline,
    published,
    repair,
    schema,
    secrets,
    storage,
)
from beam_pipeline.errors import (
    EXIT_OK,
    ImageShardsError,
    NotPublishedError,
    OtherFormatError,
    StorageError,
    UsageError,
    one_line,
)
from beam_pipeline.identity import Identity
from beam_pipeline.options import Config
from beam_pipeline.running import (
    IN_PROCESS_RUNNER,
    LOCAL_RUNNERS,
    execute,
    first_contact_s,
    is_local,
    new_pipeline,
    runner_of,
)
from beam_pipeline.state import JobState
from beam_pipeline.summary import ALREADY_PUBLISHED, PUBLISHED, REPAIRED, Manifest, plan_text, published_text, warnings


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
    return _run(config, beam_options or PipelineOptions([]), command, quiet=False)


def _run(config: Config, options: PipelineOptions, command: Sequence[str], quiet: bool) -> Manifest | None:
    """`run`; `quiet` keeps what runners print out of stderr."""
    standard = options.view_as(StandardOptions)
    standard.runner = standard.runner or IN_PROCESS_RUNNER
    options.view_as(TypeOptions).pipeline_type_check = False  # our types are checked before; it costs 60 ms a start
    options.view_as(SetupOptions).save_main_session = False  # all that a worker unpickles lies in this package
    job = new_pipeline(options)
    config = _of_this_run(resolve(config), options)
    if config.plan_only:
        pipeline.build(job, config, {})
        execute(job, config, options, quiet)
        print(plan_text(JobState(config).take_plan_only()))
        return None
    manifest = None if config.overwrite else read_manifest(config)
    if manifest is None:
        _check_output(config)
        with _owned(config):
            if notice := duplicates.notice(config):
                print(f"warning: {notice}", file=sys.stderr)
            pipeline.build(job, config, _run_facts(options, command))
            execute(job, config, options, quiet)
        result = read_manifest(config)
        return None if result is None else Manifest(config.dataset_url, result, PUBLISHED)
    damage = published.check(config, manifest)
    if not damage:
        _tidy(config)
        return Manifest(config.dataset_url, manifest, ALREADY_PUBLISHED)
    with _owned(config):
        print(f"repairing {damage}", file=sys.stderr)
        repair.build_repair(job, config, manifest, damage)
        execute(job, config, options, quiet)
    return Manifest(config.dataset_url, manifest, REPAIRED)


def _of_this_run(config: Config, options: PipelineOptions) -> Config:
    """The configuration with what only this run knows: which job it is, and what memory a local one has."""
    if not is_local(options):
        return dataclasses.replace(config, identity=Identity.new())
    direct = options.view_as(DirectOptions)
    one_process = direct.direct_running_mode != "multi_processing" and runner_of(options) == IN_PROCESS_RUNNER
    return dataclasses.replace(
        config,
        identity=Identity.new(ends_with_this_process=True),
        most_references=limits.most_references(
            limits.IN_PROCESS_BYTES if one_process else limits.BETWEEN_PROCESSES_BYTES
        ),
    )


@contextmanager
def _owned(config: Config) -> Iterator[None]:
    """The right to write the version: held here for a local output; elsewhere the job takes it when it first writes.

    Raises:
        ImageShardsError: another job has it.
    """
    owner = JobState(config).owner
    with config.identity.runs():
        if not storage.is_local(config.output):
            owner.refuse_if_taken()
            yield
            return
        owner.acquire("")
        try:
            yield
        finally:
            owner.release()


def _tidy(config: Config) -> None:
    """Delete the state that a job left which was killed between publishing and deleting it."""
    state = JobState(config)
    if state.exists():
        try:
            state.owner.acquire("")
        except ImageShardsError:
            return  # a job is at work there
        state.clear()


def resolve(config: Config) -> Config:
    """Check the input and read the small files that the configuration names.

    Raises:
        UsageError: as `listing.check_input` and the readers of labels and manifests say.
    """
    if config.labels_file:
        config = dataclasses.replace(config, labels=listing.read_labels(config.labels_file, first_contact_s(config)))
    if config.manifest:
        config = dataclasses.replace(config, header=manifest_rows.read_header(config.manifest, first_contact_s(config)))
    _check_places(config)
    listing.check_input(dataclasses.replace(config, io_deadline=first_contact_s(config)))
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
    try:
        if storage.is_local(config.output):
            os.makedirs(config.dataset_url, exist_ok=True)
        store = storage.open_storage(config.output, first_contact_s(config))
        foreign = next(store.files(config.dataset_url), None)
    except FileNotFoundError as error:
        raise UsageError(f"--output {config.output!r}: no such bucket or folder ({one_line(error)})") from None
    except (OSError, StorageError) as error:
        if not storage.is_local(config.output):
            raise
        raise UsageError(f"--output {config.output!r}: can't be written: {one_line(error)}") from None
    ours = config.overwrite or config.repair or JobState(config).exists()
    if foreign is not None and not ours:
        raise UsageError(
            f"--output {config.output!r}: {config.dataset_url} holds files of another program ({foreign.path!r}); "
            "choose another --name or --version, or --overwrite deletes them"
        )


def read_manifest(config: Config) -> dict[str, Any] | None:
    """The manifest of the version, or None where none is published.

    Raises:
        NotPublishedError: there is one that can't be believed, and neither `--repair` nor `--overwrite` was asked for.
    """
    url = storage.join(config.dataset_url, schema.MANIFEST_FILE)
    try:
        data = storage.open_storage(config.output, first_contact_s(config)).read(url)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return schema.open_manifest(data, url)
    except NotPublishedError as error:
        if config.overwrite or (config.repair and not isinstance(error, OtherFormatError)):
            return None  # the whole job runs anew, in place
        raise


def _run_facts(options: PipelineOptions, command: Sequence[str]) -> dict[str, Any]:
    return {
        "command": secrets.without_secrets(command),
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
    silenced_before = logging.root.manager.disable
    try:
        config, beam_arguments = command_line.parse(given)
        options = PipelineOptions(beam_arguments)
        if options.view_as(StandardOptions).runner in (None, *LOCAL_RUNNERS):
            logging.disable(logging.ERROR)  # a runner's tracebacks would bury our one line
        manifest = _run(config, options, ["python", "-m", "beam_pipeline", *given], quiet=True)
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
    finally:
        logging.disable(silenced_before)
