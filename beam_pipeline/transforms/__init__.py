"""The job's steps as Beam transforms: they wire; the functions they call do the work and are tested without Beam."""

from beam_pipeline.transforms.duplicates import MarkDuplicates, SaveDuplicates
from beam_pipeline.transforms.listing import ListImages
from beam_pipeline.transforms.planning import PlanShards, SampleImages
from beam_pipeline.transforms.writing import AssignShards, PublishDataset, WriteShards

__all__ = [
    "AssignShards",
    "ListImages",
    "MarkDuplicates",
    "PlanShards",
    "PublishDataset",
    "SampleImages",
    "SaveDuplicates",
    "WriteShards",
]
