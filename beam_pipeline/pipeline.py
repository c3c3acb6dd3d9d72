"""The job on one screen: what flows from step to step."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsSingleton

from beam_pipeline.options import Config
from beam_pipeline.transforms import (
    AssignShards,
    GroupDigests,
    ListImages,
    MarkDuplicates,
    PlanShards,
    PublishDataset,
    SampleImages,
    SaveDuplicates,
    WriteShards,
)


def build(pipeline: beam.Pipeline, config: Config, run: dict[str, Any]) -> None:
    """Add the whole job to `pipeline`.

    Args:
        pipeline: of any runner.
        config: what to convert and how.
        run: facts about this run for run.json.
    """
    images, survey = pipeline | "ListImages" >> ListImages(config)
    # pages of ImageRefs; one ListingSummary: 1,281,167 images, classes cat, dog, …
    groups = None
    if config.duplicates in ("drop", "fail"):
        images, survey, groups = images | "MarkDuplicates" >> MarkDuplicates(config, survey)
        # the same pages, all but one of equal images marked
    sample = survey | "SampleImages" >> SampleImages(config)
    # Measurement of 64 to 512 images
    plan = images | "PlanShards" >> PlanShards(config, survey, sample)
    # one JobPlan: the cuts of every split
    if config.plan_only:
        return
    shards = images | "AssignShards" >> AssignShards(config, plan) | "GroupByShard" >> beam.GroupByKey()
    # (("train", 3), pages): references only, never pixels
    summaries, digests = shards | "WriteShards" >> WriteShards(config, plan)
    # ShardSummary; with --duplicates report the MD5 of every image
    if digests is not None:
        groups = digests | "GroupDuplicates" >> GroupDigests()
    saved = None if groups is None else groups | "SaveDuplicates" >> SaveDuplicates(config, plan)
    # lines of duplicates.jsonl, in the state
    facts = survey | "RunFacts" >> beam.Map(lambda one: {**run, "skipped": one.skipped, "inputs": str(one.references)})
    plan | "PublishDataset" >> PublishDataset(config, summaries, saved, AsSingleton(facts))
