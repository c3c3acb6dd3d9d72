"""The job on one screen: what flows from step to step."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsSingleton

from beam_pipeline.config import Config
from beam_pipeline.pipeline.duplicates import MarkDuplicates, SaveDuplicates
from beam_pipeline.pipeline.listing import ListImages
from beam_pipeline.pipeline.planning import PlanShards, SampleImages
from beam_pipeline.pipeline.writing import AssignShards, PublishDataset, WriteShards


def build(pipeline: beam.Pipeline, config: Config, run: dict[str, Any]) -> None:
    """Add the whole job to `pipeline`.

    Args:
        pipeline: of any runner.
        config: what to convert and how.
        run: facts about this run for run.json.
    """
    images, survey = pipeline | "ListImages" >> ListImages(config)
    # pages of ImageRefs; one ListingSummary: 1,281,167 images, classes cat, dog, …
    saved = groups = None
    if config.duplicates != "keep":
        images, survey, groups = images | "MarkDuplicates" >> MarkDuplicates(config, survey)
        # the same pages; with --duplicates drop, all but one of equal images marked
    sample = survey | "SampleImages" >> SampleImages(config)
    # Measurement of 64 to 512 images
    plan = images | "PlanShards" >> PlanShards(config, survey, sample)
    # one JobPlan: the cuts of every split
    if config.plan_only:
        return
    shards = images | "AssignShards" >> AssignShards(plan) | "GroupByShard" >> beam.GroupByKey()
    # (("train", 3), pages): references only, never pixels
    written = shards | "WriteShards" >> WriteShards(config, plan)
    # ("train", 3): its result is in the state
    if groups is not None:
        saved = groups | "SaveDuplicates" >> SaveDuplicates(config, plan)
        # lines of duplicates.jsonl, in the state
    facts = survey | "RunFacts" >> beam.Map(lambda one: {**run, "skipped": one.skipped, "inputs": str(one.references)})
    plan | "PublishDataset" >> PublishDataset(config, written, saved, AsSingleton(facts))
