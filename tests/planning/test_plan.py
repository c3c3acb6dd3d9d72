"""The plan of a job: pure functions of the configuration, the listing and the sample."""

from __future__ import annotations

import pytest

from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.inputs.folders import ListingSummary
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.planning.cuts import SizeModel
from beam_pipeline.planning.plan import EstimatedSizes, plan_job, split_documents, split_plans, wanted_shards

REFS = [ImageRef(f"a/{number}", 10, "", "a", "test" if number % 4 else "train", number << 40) for number in range(40)]


def config(**more: object) -> Config:
    return Config(input="/in", output="/out", name="x", splits="train=0.5,test=0.5", **more)


def sizes_of(refs: list[ImageRef]) -> EstimatedSizes:
    sizes = EstimatedSizes()
    sizes.add(refs, SizeModel.learn([("a/0", 10, 1 << 20)]), len(REFS))
    return sizes


def test_a_plan_has_every_image_and_is_the_same_from_any_parts() -> None:
    summary = ListingSummary(classes=("a",))
    summary.add(REFS)
    plan = plan_job(sizes_of(REFS), config(num_shards=3), summary, [])
    found = {split: (one.images, one.shards) for split, one in plan.splits.items()}
    assert found == {"test": (30, 3), "train": (10, 3)}
    assert (plan.images, plan.shards, plan.classes) == (40, 6, ("a",))
    assert split_plans(split_documents(plan.splits)) == plan.splits
    total = EstimatedSizes()
    for part in (REFS[30:], REFS[:7], [], REFS[7:30]):
        total.merge(sizes_of(part))
    assert plan_job(total, config(num_shards=3), summary, []).sha256 == plan.sha256


def test_a_dropped_duplicate_takes_no_bytes_but_changes_the_plan() -> None:
    summary = ListingSummary()
    dropped = [REFS[0]._replace(duplicate_of=b"a/4"), *REFS[1:]]
    one, other = (plan_job(sizes_of(refs), config(num_shards=1), summary, []) for refs in (REFS, dropped))
    assert one.splits["train"].estimated_bytes - other.splits["train"].estimated_bytes == (1 << 20) - 1
    assert one.references != other.references


def test_a_job_without_an_image_in_train_ends() -> None:
    with pytest.raises(ImageShardsError, match=r"no image is in split 'train' \(found test\): see --splits and"):
        plan_job(sizes_of(REFS[1:4]), config(), ListingSummary(), [])


def test_wanted_shards_follow_the_flags() -> None:
    assert wanted_shards(config(num_shards=7), "train", 5 << 20) == 7
    assert wanted_shards(config(num_shards="train=3"), "train", 5 << 20) == 3
    assert wanted_shards(config(num_shards="train=3"), "test", 33 << 20) == 4, "by size, without a number"
    assert wanted_shards(config(target_shard_bytes="1MiB"), "train", 5 << 20) == 5
