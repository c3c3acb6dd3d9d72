"""The job and its repair, each on one screen: what flows from step to step."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsIter, AsSingleton

from beam_pipeline import schema
from beam_pipeline.config import Config
from beam_pipeline.dataset import duplicates
from beam_pipeline.dataset.published import Damage, plan_of
from beam_pipeline.dataset.repair import restore
from beam_pipeline.inputs.folders import ListingSummary
from beam_pipeline.pipeline.duplicates import MarkDuplicates
from beam_pipeline.pipeline.elements import reports_errors
from beam_pipeline.pipeline.listing import ListImages
from beam_pipeline.pipeline.planning import PlanShards, SampleImages, prepare_output
from beam_pipeline.pipeline.writing import WriteShards, assign_shards, publish_dataset
from beam_pipeline.storage.usage import Usage


def build(pipeline: beam.Pipeline, config: Config, run: dict[str, Any]) -> None:
    """Add the job to `pipeline`.

    Args:
        pipeline: of any runner.
        config: what to convert and how.
        run: facts about this run for run.json.
    """
    images, summary = pipeline | "ListImages" >> ListImages(config)
    # pages of ImageRefs; one ListingSummary: 1,281,167 images, classes cat, dog, …
    saved = groups = None
    if config.duplicates != "keep":
        images, summary, groups = images | "MarkDuplicates" >> MarkDuplicates(config, summary)
        # the same pages; with --duplicates drop, all but one of exact duplicates marked
    sample = summary | "SampleImages" >> SampleImages(config)
    # 64 to 512 Measurements
    plan = images | "PlanShards" >> PlanShards(config, summary, sample)
    # one JobPlan: the cuts of every split
    plan = plan | "PrepareOutput" >> beam.Map(prepare_output, config)
    # the same plan; the write claim is held, and nothing of another plan is left
    if config.plan_only:
        return
    shards = images | "AssignShards" >> beam.FlatMap(assign_shards, AsSingleton(plan))
    # (("train", 3), page): references are grouped by shard, never pixels
    written = shards | "WriteShards" >> WriteShards(config, plan)
    # ("train", 3): its result is in the state
    if groups is not None:
        saved = AsIter(
            groups | "SaveDuplicates" >> beam.Map(reports_errors(duplicates.save), config, AsSingleton(plan))
        )
        # lines of duplicates.jsonl, in the state
    facts = summary | "RunFacts" >> beam.Map(_run_facts, run)
    plan | "PublishDataset" >> beam.Map(publish_dataset, config, AsIter(written), saved, AsSingleton(facts))


def _run_facts(summary: ListingSummary, run: dict[str, Any]) -> dict[str, Any]:
    used = Usage(**run.get("used", {}))
    used.merge(summary.used)
    return {**run, "skipped": summary.skipped, "used": vars(used)}


def build_repair(pipeline: beam.Pipeline, config: Config, manifest: dict[str, Any], damage: Damage) -> None:
    """Add the job that rewrites corrupt files."""
    plans = pipeline | "Plan" >> beam.Create([plan_of(manifest, f"repair {manifest['self_sha256']}")])
    restores_duplicates = schema.DUPLICATES_FILE in damage.files
    summaries: Any = ()
    saved: Any = ()
    if damage.shards or restores_duplicates:
        pages, summary = pipeline | "ListImages" >> ListImages(config)
        if config.duplicates == "drop" or restores_duplicates:
            marked, _, groups = pages | "MarkDuplicates" >> MarkDuplicates(config, summary)
            pages = marked if config.duplicates == "drop" else pages
        if restores_duplicates:
            saved = AsIter(
                groups | "SaveDuplicates" >> beam.Map(reports_errors(duplicates.save), config, AsSingleton(plans))
            )
    if damage.shards:
        summaries = AsIter(_rewritten(pages, config, plans, manifest, damage))  # waited for, no more
    plans | "RestoreFiles" >> beam.Map(reports_errors(restore), config, manifest, damage, summaries, saved)


def _rewritten(pages: Any, config: Config, plans: Any, manifest: dict[str, Any], damage: Damage) -> Any:
    """`ShardId`s of the corrupt shards, which are published as they were or not at all."""
    return (
        pages
        | "AssignShards" >> beam.FlatMap(assign_shards, AsSingleton(plans))
        | "OnlyCorrupt" >> beam.Filter(lambda pair, shards: pair[0] in shards, damage.shards)
        | "WriteShards" >> WriteShards(config, plans, manifest)
    )
