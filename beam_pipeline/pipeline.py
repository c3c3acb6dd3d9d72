"""The job on one screen: what flows from step to step."""

from __future__ import annotations

from typing import Any

import apache_beam as beam

from beam_pipeline.options import Config
from beam_pipeline.transforms import AssignShards, ListImages, PlanShards, PublishDataset, SampleImages, WriteShards


def build(pipeline: beam.Pipeline, config: Config, run: dict[str, Any]) -> None:
    """Add the whole job to `pipeline`.

    Args:
        pipeline: of any runner.
        config: what to convert and how.
        run: facts about this run for run.json.
    """
    images, survey = pipeline | "ListImages" >> ListImages(config)
    # pages of ImageRefs; one Survey: 1,281,167 images, classes cat, dog, …
    sample = survey | "SampleImages" >> SampleImages(config)
    # Measurement of 64 to 512 images
    plan = images | "PlanShards" >> PlanShards(config, survey, sample)
    # one JobPlan: the cuts of every split
    if config.plan_only:
        return
    shards = images | "AssignShards" >> AssignShards(plan) | "GroupByShard" >> beam.GroupByKey()
    # (("train", 3), pages): references only, never pixels
    summaries = shards | "WriteShards" >> WriteShards(config, plan)
    # ShardSummary
    plan | "PublishDataset" >> PublishDataset(config, summaries, run)
