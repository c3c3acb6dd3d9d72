"""`run`: checks input and output, then runs the job, for which alone it imports Beam."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import beam_pipeline
from beam_pipeline import storage
from beam_pipeline.cli import notebook
from beam_pipeline.cli.messages import estimate_text, plan_text, warnings
from beam_pipeline.config import Config
from beam_pipeline.dataset import answers
from beam_pipeline.dataset.base import choose_base, moved_ids
from beam_pipeline.dataset.claim import ClaimedError, VersionLock
from beam_pipeline.dataset.compare import Comparison, compare, compare_listing, needs_job
from beam_pipeline.dataset.preconditions import check_same, check_unpublished, no_empty_folders, read_manifest, resolve
from beam_pipeline.dataset.state import JobState, read_run, run_concurrently
from beam_pipeline.errors import ImageShardsError, StorageError, UsageError
from beam_pipeline.images import resize
from beam_pipeline.inputs import exclude, manifest_rows
from beam_pipeline.schema import MANIFEST_FILE
from beam_pipeline.schema.job import ComparedInputs, PlannedJob
from beam_pipeline.schema.manifest import ALREADY_PUBLISHED, PUBLISHED, REPAIRED, Manifest
from beam_pipeline.text import plural, print_line

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

    from beam_pipeline.cli.job import Job

_CHECKED = "checked; nothing was started; --plan_only estimates the job's CPU time, files and bytes"


def run(config: Config, beam_options: PipelineOptions | None = None, command: Sequence[str] = ()) -> Manifest | None:
    """Convert the images of `config.input` and publish the dataset; warnings are printed to stderr.

    If IPython is active (Jupyter, Colab), this happens in a new process, whose output is printed here. Elsewhere a
    local job decodes in this process. An image on which a decoder crashes or hangs therefore ends the process: the same
    call in a new one resumes, and decodes that image in a child process. A caller that must survive that starts a
    process for this. Ctrl-C raises KeyboardInterrupt at once; with `--direct_running_mode=multi_processing` Beam first
    waits for its workers, which may take minutes (the command ends at once). On Dataflow the job runs on, as the
    exception's text says.

    Args:
        config: what to convert and how.
        beam_options: the runner and its options; None for FnApiRunner in this process.
        command: the command line, for run.json.

    Returns:
        The published version; None with `--plan_only`, `--preflight` or `--detach`, or if only a template was written.

    Raises:
        UsageError: the configuration or the input can't be used; only listings were read.
        ImageShardsError: the job failed; nothing is published, and the same call resumes.
    """
    with launched(config) as launch:
        return launch(beam_options, command)


@contextmanager
def launched(config: Config) -> Iterator[Callable[[PipelineOptions | None, Sequence[str]], Manifest | None]]:
    """Lock a local version before Beam is imported, which takes seconds; yields what then does the rest of `run`.

    Raises:
        ImageShardsError: another command is writing the version.
    """
    beam_pipeline.require_pipeline()
    if not isinstance(config, Config):
        raise UsageError(f"imageshards.write({config!r}): give an imageshards.Config")
    if notebook.is_active():
        yield partial(notebook.run_elsewhere, config)
        return
    config = config.in_run(id=uuid.uuid4().hex)
    lock = VersionLock(config)
    with no_empty_folders(config):
        try:
            _lock_early(config, lock)
            yield partial(_launch, config, lock)
        finally:
            lock.release()


def _lock_early(config: Config, lock: VersionLock) -> None:
    """Lock a version that is to be written; one that is published is only compared at first."""
    if config.plan_only or config.preflight or not storage.is_local(config.output):
        return
    if os.path.exists(storage.join(config.dataset_url, MANIFEST_FILE)) and not config.overwrite:
        lock.check()
        return
    with suppress(StorageError):  # the check of the output says what is wrong
        lock.acquire()


def _launch(
    config: Config, lock: VersionLock, beam_options: PipelineOptions | None, command: Sequence[str]
) -> Manifest | None:
    handlers = list(logging.root.handlers)
    try:
        manifest = _run(config, lock, beam_options, command)
        for warning in warnings(config, manifest) if manifest else ():
            print_line(f"warning: {warning}", sys.stderr)
        return manifest
    finally:
        logging.root.handlers[:] = handlers  # Beam's options call logging.basicConfig


def _run(config: Config, lock: VersionLock, options: PipelineOptions | None, command: Sequence[str]) -> Manifest | None:
    """`run`; changes the handlers of logging."""
    with _translating_early_errors():
        config = exclude.checked(config)  # its hash tells the jobs on Dataflow apart
    job = None if options is None else _job(options, config)
    if config.detach and not (job and job.is_dataflow):
        raise UsageError("--detach works only with --runner DataflowRunner; leave it out")
    if config.plan_only and not config.preflight:
        with _translating_early_errors():
            config = resolve(config)
        job = job or _job(None, config)
        config = _with_base(job.configured(config))
        if job.write(config):
            planned = answers.take(config, PlannedJob)
            estimate = estimate_text(planned, job.cores(config), config.base)
            print_line(f"{plan_text(planned.plan, planned.excluded)}\nresize: {resize.described()}\n{estimate}")
        return None
    with _translating_early_errors():
        config, manifest = run_concurrently(partial(resolve, config), partial(read_manifest, config))
    if manifest is None or config.overwrite:
        return _write(config, lock, job, command)
    return _compare_and_repair(config, lock, job, manifest)


def _write(config: Config, lock: VersionLock, job: Job | None, command: Sequence[str]) -> Manifest | None:
    """Check, convert and publish."""
    manifest: Manifest | None
    with _translating_early_errors():
        check_unpublished(config)
        if config.preflight or (job and job.is_dataflow):
            from beam_pipeline.cli import preflight

            for line in preflight.check_dataset(config):
                print_line(line, sys.stderr)
    if config.preflight:
        print_line(_CHECKED, sys.stderr)
        return None
    lock.acquire()
    # In an object store the job itself finds that another job has published meanwhile.
    if storage.is_local(config.output) and not config.overwrite and (manifest := read_manifest(config)) is not None:
        listed = dataclasses.replace(config, repair=False)  # it was published just now
        return _already_published(manifest, compare_listing(listed, manifest.content))
    job = job or _job(None, config)
    config = _with_base(job.configured(config))
    if notice := manifest_rows.box_notice(config):
        print_line(f"warning: {notice}", sys.stderr)
    if not job.write(config, command):
        return None
    manifest, run = run_concurrently(partial(read_manifest, config), partial(read_run, config))
    if manifest is None:
        raise ImageShardsError(f"the job has ended, but {config.dataset_url} isn't published: see its log")
    ids = moved_ids(config, manifest.classes)
    return dataclasses.replace(manifest, outcome=PUBLISHED, run=run, moved_ids=ids)


def _compare_and_repair(config: Config, lock: VersionLock, job: Job | None, manifest: Manifest) -> Manifest | None:
    """Compare a published version with its input and files, here or in a job, and rewrite corrupt files."""
    if needs_job(config, manifest.content, is_local=job is None or job.is_local):
        if config.preflight:
            print_line(_CHECKED, sys.stderr)
            return None
        job = job or _job(None, config)
        comparison = _compare_in_job(job, config, manifest)
        if comparison is None:
            return None
    else:
        with _translating_early_errors():
            comparison = compare_listing(config, manifest.content)
    if not comparison.corrupt:
        if not config.preflight and JobState(config).has_leftovers():
            with suppress(ClaimedError):
                lock.acquire()
                JobState(config).clear()
        return _already_published(manifest, comparison)
    if config.preflight:
        print_line(f"{comparison.corrupt} would be repaired; nothing was started", sys.stderr)
        return None
    job = job or _job(None, config)
    config = job.configured(config)
    lock.acquire()
    print_line(f"repairing {comparison.corrupt}", sys.stderr)
    if not job.repair(config, manifest.content, comparison.corrupt):
        return None
    return dataclasses.replace(manifest, outcome=REPAIRED, run=comparison.run, etags_differ=comparison.etags_differ)


def _compare_in_job(job: Job, config: Config, manifest: Manifest) -> Comparison | None:
    """The comparison by workers, near the data; None if only a template of the job was written."""
    published = manifest.content
    check_same(config, published)
    if not job.is_local:
        shards, verb = plural(len(published.shards), "shard"), "reads" if config.repair else "lists"
        line = f"comparing: a job on {job.runner} {verb} {plural(published.images, 'image')} and {shards}"
        print_line(line, sys.stderr)
    if not job.compare(job.configured(config), published):
        return None
    return compare(config, published, answers.take(config, ComparedInputs))


def _already_published(manifest: Manifest, comparison: Comparison) -> Manifest:
    return dataclasses.replace(
        manifest,
        outcome=ALREADY_PUBLISHED,
        run=comparison.run,
        checked=comparison.checked,
        etags_differ=comparison.etags_differ,
    )


def _job(options: PipelineOptions | None, config: Config) -> Job:
    from beam_pipeline.cli.job import Job

    return Job(options, config)


def _with_base(config: Config) -> Config:
    """The configuration with its base version, which is printed."""
    with _translating_early_errors():
        config, line = choose_base(config)
    if line:
        print_line(line, sys.stderr)
    return config


@contextmanager
def _translating_early_errors() -> Iterator[None]:
    """Errors of a store before a job was started must not say that it resumes."""
    try:
        yield
    except StorageError as error:
        fix = error.fix or "check the URL and the network"
        raise StorageError(error.reason, f"{fix}; nothing was started") from error
