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
    images, classes = pipeline | "ListImages" >> ListImages(config)
    # ImageRef; ("cat", "dog", …)
    sample = images | "SampleImages" >> SampleImages(config, classes)
    # [Measurement]
    plan = images | "PlanShards" >> PlanShards(config, classes, sample)
    # JobPlan: cuts of every split
    if config.plan_only:
        return
    shards = images | "AssignShards" >> AssignShards(plan) | "GroupByShard" >> beam.GroupByKey()
    # (("train", 3), [ImageRef]): references only, never pixels
    summaries = shards | "WriteShards" >> WriteShards(config, plan)
    # ShardSummary
    summaries | "PublishDataset" >> PublishDataset(config, plan, run)
