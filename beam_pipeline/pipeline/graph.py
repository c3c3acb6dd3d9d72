"""The job and its repair, each on one screen: what flows from step to step."""

from platform import python_version
from typing import Any

import apache_beam as beam
import msgspec
from apache_beam.pvalue import AsIter, AsList, AsSingleton

from beam_pipeline import __version__
from beam_pipeline.config import Config
from beam_pipeline.dataset.compare import CorruptFiles
from beam_pipeline.dataset.publish import restore
from beam_pipeline.dataset.writer import ClaimedPlan
from beam_pipeline.inputs.folders import ListingSummary
from beam_pipeline.pipeline.elements import reports_errors
from beam_pipeline.pipeline.listing import ListPages
from beam_pipeline.pipeline.planning import PlanShards, SampleImages, prepare_output, save_plan
from beam_pipeline.pipeline.shards import CompareShards, WriteShards, assign_shards, publish_dataset, save_comparison
from beam_pipeline.schema.job import Plan, Run
from beam_pipeline.schema.manifest import Content


def build(pipeline: beam.Pipeline | beam.pvalue.PBegin, config: Config, run: Run) -> beam.PCollection[str] | None:
    """Add the job to `pipeline`.

    Args:
        pipeline: of any runner.
        config: what to convert and how.
        run: what is known of this run, for run.json.

    Returns:
        The version's URL, once it is published; None with `--plan_only`.
    """
    images, summary = pipeline | "ListImages" >> ListPages(config)
    # pages of ImageRefs; one ListingSummary: 1,281,167 images, classes cat, dog, …
    sample = summary | "SampleImages" >> SampleImages(config)
    # 64 to 512 Measurements
    plan = images | "PlanShards" >> PlanShards(config, summary, sample)
    # one Plan: the cuts of every split
    if config.plan_only:
        plan | "SavePlan" >> beam.Map(save_plan, config, AsSingleton(summary), AsList(sample))
        return None
    plan = plan | "PrepareOutput" >> beam.Map(prepare_output, config)
    # one ClaimedPlan: the write claim is held, and nothing of another plan is left
    shards = images | "AssignShards" >> beam.FlatMap(assign_shards, AsSingleton(plan))
    # (("train", 3), page): references are grouped by shard, never pixels
    written = shards | "WriteShards" >> WriteShards(config, plan)
    # ("train", 3): its result is in the state
    facts = summary | "RunFacts" >> beam.Map(_run_facts, run)
    return plan | "PublishDataset" >> beam.Map(publish_dataset, config, AsIter(written), AsSingleton(facts))


def software_versions() -> dict[str, str]:
    """Versions of this package, Beam and Python, for run.json."""
    return {"imageshards": __version__, "apache_beam": beam.__version__, "python": python_version()}


def _run_facts(summary: ListingSummary, run: Run) -> Run:
    return msgspec.structs.replace(run, skipped=summary.skipped, excluded=summary.exclusion)


def build_comparison(pipeline: beam.Pipeline, config: Config, published: str) -> None:
    """Add the job that compares a published version, by its manifest's `self_sha256`, with its input and its shards."""
    pages, summary = pipeline | "ListImages" >> ListPages(config)
    compared = pages | "CompareShards" >> CompareShards(config, published)
    # one ComparedInputs
    compared | "SaveComparison" >> beam.Map(save_comparison, config, AsSingleton(summary))


def build_repair(pipeline: beam.Pipeline, config: Config, manifest: Content, corrupt: CorruptFiles) -> None:
    """Add the job that rewrites corrupt files."""
    plans = pipeline | "Plan" >> beam.Create([ClaimedPlan(Plan.published(manifest, f"repair {manifest.self_sha256}"))])
    written: Any = ()
    if corrupt.shards:
        pages, _ = pipeline | "ListImages" >> ListPages(config)
        shards = pages | "AssignShards" >> beam.FlatMap(assign_shards, AsSingleton(plans))
        some = shards | "OnlyCorrupt" >> beam.Filter(lambda pair, corrupt: pair[0] in corrupt, corrupt.shards)
        # published as they were, or not at all
        written = AsIter(some | "WriteShards" >> WriteShards(config, plans, manifest))  # only so that it waits for them
    plans | "RestoreFiles" >> beam.Map(reports_errors(restore), config, manifest, corrupt, written)
