"""The job on one screen: what flows from step to step."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsSingleton

from beam_pipeline.config import Config
from beam_pipeline.pipeline.duplicates import MarkDuplicates, SaveDuplicates
from beam_pipeline.pipeline.listing import ListImages
from beam_pipeline.pipeline.planning import PlanShards, SampleImages, prepare_output
from beam_pipeline.pipeline.writing import AssignShards, PublishDataset, WriteShards


def build(pipeline: beam.Pipeline, config: Config, run: dict[str, Any]) -> None:
    """Add the whole job to `pipeline`.

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
    # Measurements of 64 to 512 images
    plan = images | "PlanShards" >> PlanShards(config, summary, sample)
    # one JobPlan: the cuts of every split
    plan = plan | "PrepareOutput" >> beam.Map(prepare_output, config)
    # the same plan; from here on this job alone writes the version, and nothing of another plan is left
    if config.plan_only:
        return
    shards = images | "AssignShards" >> AssignShards(plan)
    # (("train", 3), page): references are grouped by shard, never pixels
    written = shards | "WriteShards" >> WriteShards(config, plan)
    # ("train", 3): its result is in the state
    if groups is not None:
        saved = groups | "SaveDuplicates" >> SaveDuplicates(config, plan)
        # lines of duplicates.jsonl, in the state
    facts = summary | "RunFacts" >> beam.Map(lambda one: {**run, "skipped": one.skipped, "inputs": str(one.references)})
    plan | "PublishDataset" >> PublishDataset(config, written, saved, AsSingleton(facts))
