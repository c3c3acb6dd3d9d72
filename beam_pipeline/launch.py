"""Runs the job from a command line or from Python: checks the input, looks at what is published, runs, reports.

Beam, whose import takes seconds, is loaded once there is something to run.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from beam_pipeline import (
    command_line,
    duplicates,
    extras,
    input_checks,
    manifest_rows,
    output_checks,
    published,
    schema,
    storage,
)
from beam_pipeline.errors import (
    EXIT_FAILED,
    EXIT_OK,
    ImageShardsError,
    NotPublishedError,
    OtherFormatError,
    StorageError,
    UnforeseenError,
    one_line,
)
from beam_pipeline.identity import Identity
from beam_pipeline.options import Config
from beam_pipeline.state import JobState
from beam_pipeline.summary import ALREADY_PUBLISHED, PUBLISHED, REPAIRED, Manifest, plan_text, published_text, warnings
from beam_pipeline.wording import say

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

    from beam_pipeline.running import Job


def run(config: Config, beam_options: PipelineOptions | None = None, command: Sequence[str] = ()) -> Manifest | None:
    """Convert the images of `config.input` and publish the dataset.

    A local job decodes in this process. An image on which a decoder crashes or hangs therefore ends the process (the
    same call in a new one resumes, and decodes that image apart); where the caller must survive it, call this in a
    process of its own.

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
    extras.require()
    handlers = list(logging.root.handlers)
    try:
        return _run(config, beam_options, command)
    finally:
        logging.root.handlers[:] = handlers  # Beam's options call logging.basicConfig


def _run(config: Config, options: PipelineOptions | None, command: Sequence[str]) -> Manifest | None:
    """`run`; changes the handlers of logging."""
    job = None if options is None else _job(options)  # a runner that isn't there is told before all else
    with _nothing_begun():
        config = resolve(config)
        if config.plan_only:
            _plan(config, job or _job(None))
            return None
        if not config.overwrite:
            output_checks.check_names(config)
        manifest = None if config.overwrite else read_manifest(config)
        found = None if manifest is None else published.check(config, manifest)
        if manifest is None:
            output_checks.check_unpublished(config)
    if manifest is not None and found is not None and not found.damage:
        _tidy(config)
        return _result(config, manifest, ALREADY_PUBLISHED, found.checked, found.touched)
    job = job or _job(None)
    config = job.configured(config)
    with _sole_writer(config):
        if manifest is not None and found is not None:
            say(f"repairing {found.damage}", sys.stderr)
            job.repair(config, manifest, found.damage)
            return _result(config, manifest, REPAIRED, touched=found.touched)
        if notice := duplicates.notice(config):
            say(f"warning: {notice}", sys.stderr)
        job.write(config, command)
    manifest = read_manifest(config)
    return None if manifest is None else _result(config, manifest, PUBLISHED)


def _result(
    config: Config, manifest: dict[str, Any], outcome: str, checked: str = "", touched: bool = False
) -> Manifest:
    return Manifest(config.dataset_url, manifest, outcome, published.run_facts(config), checked, touched)


def _job(options: PipelineOptions | None) -> Job:
    from beam_pipeline.running import Job

    return Job(options)


def _plan(config: Config, job: Job) -> None:
    config = job.configured(config)
    is_new = storage.is_local(config.output) and not os.path.exists(config.output)
    try:
        job.plan(config)
        text = plan_text(JobState(config).take_plan_only())
    finally:
        if is_new:
            with suppress(OSError):  # it is empty, unless another job has begun there
                os.rmdir(config.output)
    say(text)


@contextmanager
def _nothing_begun() -> Iterator[None]:
    """A store that fails before there is a job must not speak of resuming it."""
    try:
        yield
    except StorageError as error:
        fix = error.fix or "check the URL and the network"
        raise StorageError(error.reason, f"{fix}; nothing was begun") from error


@contextmanager
def _sole_writer(config: Config) -> Iterator[None]:
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
    state = JobState(dataclasses.replace(config, identity=Identity.new(ends_with_this_process=True)))
    if state.has_leftovers():
        try:
            state.owner.acquire("")
        except ImageShardsError:
            return  # a job is at work there
        state.clear()


def resolve(config: Config) -> Config:
    """Check the input and read the small files that the configuration names.

    Raises:
        UsageError: as `input_checks.check_input`, `output_checks.check_places` and the readers of labels and manifests
            say.
    """
    seconds = config.first_contact_s
    if config.labels_file:
        config = dataclasses.replace(config, labels=input_checks.read_labels(config.labels_file, seconds))
    if config.manifest:
        config = dataclasses.replace(config, header=manifest_rows.read_header(config.manifest, seconds))
    output_checks.check_places(config)
    input_checks.check_input(dataclasses.replace(config, io_deadline=seconds))
    return config


def read_manifest(config: Config) -> dict[str, Any] | None:
    """The manifest of the version, or None where none is published.

    Raises:
        NotPublishedError: there is one that can't be believed, and neither `--repair` nor `--overwrite` was asked for.
    """
    url = storage.join(config.dataset_url, schema.MANIFEST_FILE)
    try:
        data = storage.open_storage(config.output, config.first_contact_s).read(url)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return schema.open_manifest(data, url)
    except NotPublishedError as error:
        if config.overwrite or (config.repair and not isinstance(error, OtherFormatError)):
            return None  # the whole job runs anew, in place
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stderr is None:  # closed when the process began; runners print there
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    atexit.register(gc.freeze)  # else Python looks for garbage among all of Beam once more, for 0.4 s
    level = logging.root.level
    try:
        config, beam_arguments = command_line.parse(given)
        options = None
        if beam_arguments:
            from apache_beam.options.pipeline_options import PipelineOptions

            options = PipelineOptions(beam_arguments)
        if options is None or _is_local(options):
            logging.root.setLevel(logging.CRITICAL)  # a local runner's tracebacks would bury our one line
        from beam_pipeline.images.files import hide_warnings

        hide_warnings()
        manifest = run(config, options, ["python", "-m", "beam_pipeline", *given])
        if manifest is not None:
            for warning in warnings(config, manifest):
                say(f"warning: {warning}", sys.stderr)
            say(published_text(manifest))
        return EXIT_OK
    except UnforeseenError as error:
        say(f"error: {one_line(error)}; its traceback is in {_kept_traceback(error)}", sys.stderr)
        return error.exit_code
    except ImageShardsError as error:
        say(f"error: {one_line(error)}", sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        say("error: interrupted; the same command resumes", sys.stderr)
        return EXIT_FAILED
    finally:
        logging.root.setLevel(level)


def _is_local(options: PipelineOptions) -> bool:
    from beam_pipeline.running import is_local

    return is_local(options)


def _kept_traceback(error: BaseException) -> str:
    """Write what Python would print of an error to a file that stays; returns its path."""
    with tempfile.NamedTemporaryFile("w", prefix="imageshards-", suffix=".log", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    return file.name
