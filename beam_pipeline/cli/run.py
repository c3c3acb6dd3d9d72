"""`run`: checks input and output, then runs the job. Beam is imported only for that."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import beam_pipeline
from beam_pipeline import storage
from beam_pipeline.cli import cost, notebook
from beam_pipeline.cli.messages import plan_text
from beam_pipeline.config import Config
from beam_pipeline.dataset.base import choose_base
from beam_pipeline.dataset.claim import open_claim
from beam_pipeline.dataset.compare import Comparison, check_same, compare, is_job, read_run
from beam_pipeline.dataset.preconditions import check_unpublished, read_manifest, resolve
from beam_pipeline.dataset.state import JobState, run_concurrently
from beam_pipeline.errors import ImageShardsError, StorageError, UsageError
from beam_pipeline.images import resize
from beam_pipeline.inputs import manifest_rows
from beam_pipeline.planning import duplicates
from beam_pipeline.schema.job import ComparedInputs, PlannedJob
from beam_pipeline.schema.manifest import ALREADY_PUBLISHED, PUBLISHED, REPAIRED, Manifest
from beam_pipeline.storage import usage
from beam_pipeline.storage.prices import load_prices
from beam_pipeline.text import plural, print_line

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

    from beam_pipeline.cli.job import Job


def run(config: Config, beam_options: PipelineOptions | None = None, command: Sequence[str] = ()) -> Manifest | None:
    """Convert the images of `config.input` and publish the dataset.

    If IPython is active (Jupyter, Colab) all of it happens in a process of its own, whose output is printed here.
    Elsewhere a local job decodes in this process. An image on which a decoder crashes or hangs therefore ends the
    process (the same call in a new one resumes, and decodes that image in isolation); if the caller must survive that,
    call this in a process of its own. Ctrl-C raises KeyboardInterrupt at once; with
    `--direct_running_mode=multi_processing` Beam first waits for its workers, which may take minutes. The command ends
    at once. On Dataflow the job runs on, which the exception's text says.

    Args:
        config: what to convert and how.
        beam_options: the runner and its options; FnApiRunner in this process without.
        command: the command line, for run.json.

    Returns:
        What is published; None with `--plan_only`, `--preflight` or `--detach`, or if only a template was written.

    Raises:
        UsageError: the configuration or the input can't be used; only listings were read.
        ImageShardsError: the job failed; nothing is published, and the same call resumes.
    """
    beam_pipeline.require_pipeline()
    if notebook.is_active():
        return cast(Manifest | None, notebook.run_elsewhere(config, beam_options, command))
    config = dataclasses.replace(config, run_id=uuid.uuid4().hex, is_locked=True)
    usage.take()  # what this process did before is no part of the job
    handlers = list(logging.root.handlers)
    try:
        with _no_empty_folders(config):
            return _run(config, beam_options, command)
    finally:
        logging.root.handlers[:] = handlers  # Beam's options call logging.basicConfig


def _run(config: Config, options: PipelineOptions | None, command: Sequence[str]) -> Manifest | None:
    """`run`; changes the handlers of logging."""
    load_prices(config.prices)  # a bad file fails first, then an unknown runner
    job = None if options is None else _job(options, config)
    if config.detach and not (job and job.is_dataflow):
        raise UsageError("--detach works only with --runner DataflowRunner; leave it out")
    if config.plan_only and not config.preflight:
        with _translating_early_errors():
            config = resolve(config)
        _plan(config, job or _job(None, config))
        return None
    with _translating_early_errors():
        manifest: Manifest | None
        config, manifest = run_concurrently(partial(resolve, config), partial(read_manifest, config))
        if config.overwrite:
            manifest = None
        in_job = manifest is not None and job is not None and not job.is_local and is_job(config, manifest.content)
        comparison = None if manifest is None or in_job else compare(config, manifest.content)
        if manifest is None:
            check_unpublished(config)
            if config.preflight or (job and job.is_dataflow):
                from beam_pipeline.cli import preflight

                for line in preflight.check_dataset(config):
                    print_line(line, sys.stderr)
    if in_job and job is not None and manifest is not None and not config.preflight:
        comparison = _compare_in_job(job, config, manifest)
        if comparison is None:
            return None
    if manifest is not None and comparison is not None and not comparison.damage:
        if not config.preflight and JobState(config).has_leftovers():
            JobState(config).clear_leftovers()
        return _already_published(manifest, comparison)
    if config.preflight:
        if not comparison:
            print_line(f"cost: {cost.HOW_TO_KNOW}", sys.stderr)
        what = f"{comparison.damage} would be repaired" if comparison else "checked"
        print_line(f"{what}; nothing was started", sys.stderr)
        return None
    job = job or _job(None, config)
    config = job.configured(config)
    if comparison is None:
        config = _with_base(config)
    with _sole_writer(config):
        if manifest is not None and comparison is not None:
            print_line(f"repairing {comparison.damage}", sys.stderr)
            if not job.repair(config, manifest.content, comparison.damage):
                return None
            return dataclasses.replace(
                manifest, outcome=REPAIRED, run=comparison.run, etags_differ=comparison.etags_differ
            )
        # In an object store the job itself finds that another one has published meanwhile.
        if storage.is_local(config.output) and not config.overwrite and (manifest := read_manifest(config)) is not None:
            return _already_published(manifest, compare(config, manifest.content))
        for notice in filter(None, (duplicates.reads_twice_notice(config), manifest_rows.box_notice(config))):
            print_line(f"warning: {notice}", sys.stderr)
        if not job.write(config, command):
            return None
        manifest, run = run_concurrently(partial(read_manifest, config), partial(read_run, config))
        if manifest is None:
            raise ImageShardsError(f"the job has ended, but {config.dataset_url} isn't published: see its log")
        return dataclasses.replace(manifest, outcome=PUBLISHED, run=run)


def _compare_in_job(job: Job, config: Config, manifest: Manifest) -> Comparison | None:
    """The comparison by workers, near the data; None if the job was only written as a template."""
    published = manifest.content
    check_same(config, published)
    shards, what = plural(len(published.shards), "shard"), "reads" if config.repair else "lists"
    print_line(f"comparing: a job on {job.runner} {what} {plural(published.images, 'image')} and {shards}", sys.stderr)
    if not job.compare(job.configured(config), published):
        return None
    return compare(config, published, JobState(config).take(ComparedInputs))


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


def _plan(config: Config, job: Job) -> None:
    config = _with_base(job.configured(config))
    if job.write(config):
        planned = JobState(config).take(PlannedJob)
        estimate = cost.estimate_text(config, planned, job.fleet(config))
        print_line(f"{plan_text(planned.plan)}\nresize: {resize.described()}\n{estimate}")


def _with_base(config: Config) -> Config:
    """The configuration with its base, which is told."""
    with _translating_early_errors():
        config, line = choose_base(config)
    if line:
        print_line(line, sys.stderr)
    return config


@contextmanager
def _no_empty_folders(config: Config) -> Iterator[None]:
    """Delete the folders of a local output that are new and empty at the end."""
    folders = [config.dataset_url, os.path.dirname(config.dataset_url), config.output]
    new = [folder for folder in folders if storage.is_local(folder) and not os.path.exists(folder)]
    try:
        yield
    finally:
        if new:
            storage.open_storage(config.output).delete_empty_folders(*new)


@contextmanager
def _translating_early_errors() -> Iterator[None]:
    """Errors of a store before there is a job must not say that it resumes."""
    try:
        yield
    except StorageError as error:
        fix = error.fix or "check the URL and the network"
        raise StorageError(error.reason, f"{fix}; nothing was started") from error


@contextmanager
def _sole_writer(config: Config) -> Iterator[None]:
    """The right to write a local version; elsewhere the job takes it when it first writes.

    Raises:
        ImageShardsError: another job has it.
    """
    claim = open_claim(config)
    claim.acquire()
    try:
        yield
    finally:
        claim.release()
