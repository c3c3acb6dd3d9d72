"""What a finished job tells: counts, balance, and warnings that a user should see."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from beam_pipeline.cli.messages import estimate_text, plan_text, published_text, warnings
from beam_pipeline.config import Config
from beam_pipeline.schema.job import PlannedJob
from beam_pipeline.schema.manifest import ALREADY_PUBLISHED, REPAIRED, Manifest, PlannedSplit
from tests import make


def split(counts: list[int], *shard_bytes: int) -> dict[str, Any]:
    return {"records": sum(counts), "class_counts": counts, "shards": [{"bytes": size} for size in shard_bytes]}


def manifest(outcome: str = "published", run: dict[str, Any] | None = None, **more: object) -> Manifest:
    data = {
        "images": 1003,
        "records": 1000,
        "classes": ["a", "b"],
        "rejects": {"by_reason": {"truncated": 1, "decode_error": 2}},
        "image": {"passed_through": {"whole": 0, "without_metadata": 0}},
        "splits": {"validation": split([50, 50], 5_000_000), "train": split([500, 400], 99_000_000, 101_000_000)},
    }
    return dataclasses.replace(Manifest("gs://b/x/1.0.0", data | more, outcome), **({"run": run} if run else {}))


def lines(one: Manifest) -> list[str]:
    return published_text(one).splitlines()


def config(**more: object) -> Config:
    return Config(**{"input": "/in", "output": "/out", "name": "x", "splits": "train=0.9,validation=0.1"} | more)


def test_the_text_names_records_shards_and_balance() -> None:
    assert lines(manifest()) == [
        "published gs://b/x/1.0.0",
        "  train: 900 records in 2 shards of 100 MB (-1.0 % to +1.0 %)",
        "  validation: 100 records in 1 shard of 5.00 MB",
        "  1,003 images listed = 1,000 records + 3 rejects (decode_error 2, truncated 1; see rejects.jsonl)",
        "  2 classes",
        "  look at it: imageshards report gs://b/x/1.0.0",
    ]
    assert lines(manifest(REPAIRED))[0] == "repaired gs://b/x/1.0.0"
    assert lines(manifest(ALREADY_PUBLISHED))[0] == "already published gs://b/x/1.0.0, nothing written"


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([0, 0], "2 shards of 0 bytes each"),
        ([100_000, 100_010], "2 shards of 100 kB each"),  # what is shown is equal
        ([1_000, 3_000], "2 shards of 2.00 kB (-50.0 % to +50.0 %)"),
        ([9_300], "1 shard of 9.30 kB"),
    ],
)
def test_shards_of_every_size_are_told_in_their_unit(sizes: list[int], text: str) -> None:
    assert f"  train: 0 records in {text}" in lines(manifest(splits={"train": split([0, 0], *sizes)}))


def test_one_of_a_kind_is_singular() -> None:
    more = {"images": 2, "records": 1, "classes": ["a"], "rejects": {"by_reason": {"truncated": 1}}}
    assert lines(manifest(splits={"train": split([1], 1)}, **more))[1:] == [
        "  train: 1 record in 1 shard of 1 byte",
        "  2 images listed = 1 record + 1 reject (truncated 1; see rejects.jsonl)",
        "  1 class",
        "  look at it: imageshards report gs://b/x/1.0.0",
    ]


def test_a_plan_tells_images_shards_and_their_size() -> None:
    splits = {
        "train": PlannedSplit(1200, 4_000_000, ("5",)),
        "test": PlannedSplit(1, 12_000, ()),
    }
    assert plan_text(make.plan_of(splits=splits, classes=("a", "b"))).splitlines() == [
        "test: 1 image in 1 shard of about 12.0 kB",
        "train: 1,200 images in 2 shards of about 2.00 MB",
        "2 classes; nothing was written",
    ]


def test_a_plan_s_work_is_its_sample_s_times_the_images_and_less_with_a_base() -> None:
    splits = {"train": PlannedSplit(900_000, 4_000_000_000, ("5",)), "test": PlannedSplit(100_000, 500_000_000, ())}
    planned = PlannedJob(make.plan_of(splits=splits), 110_000_000_000, 500, 0, 0, 0.0018)
    assert estimate_text(planned, 8, "").splitlines() == [
        "estimated from 500 sampled images:",
        "  1,800.0 CPU-seconds to convert 1,000,000 images: 3 min 45 s on 8 cores if none is idle",
        "  reads 1,000,000 files (110 GB), writes 3 shards (4.50 GB)",
    ]
    slow = msgspec.structs.replace(planned, cpu_s=0.036, unchanged=400, unread=375)
    assert estimate_text(slow, None, "1.0.0").splitlines() == [
        "estimated from 500 sampled images:",
        "  2.0 CPU-hours to convert 200,000 images",
        "  reads 250,000 files (27.5 GB), writes 3 shards (4.50 GB)",
        "  800,000 images reused from 1.0.0: 400 of the 500 sampled are unchanged",
    ]


def test_files_that_are_skipped_are_told_by_kind_but_not_hidden_ones_that_are_no_images() -> None:
    assert lines(manifest(run={"skipped": {"hidden": 9, "suffixes": {}}})) == lines(manifest())
    kinds = dict.fromkeys(("hidden", "hidden_images", "hidden_folders", "outside_classes"), 1)
    told = lines(manifest(run={"skipped": {**kinds, "suffixes": {".txt": 1, ".JPX": 2}}}))
    assert {line for line in told if "skipped" in line} == {
        "  3 files skipped: not an image suffix (.JPX 2, .txt 1), see --extensions",
        "  1 image skipped: not inside a class folder",
        *(f"  1 {what} skipped: hidden, or in a system's folder" for what in ("image", "folder")),
    }


def test_images_that_were_not_encoded_again_are_told() -> None:
    text = lines(manifest(image={"passed_through": {"whole": 1200, "without_metadata": 3}}))
    assert "  1,203 images stored without re-encoding (1,200 byte for byte)" in text


def test_warnings_are_of_few_shards_and_of_classes_with_few_images_in_a_split_that_was_asked_for() -> None:
    assert warnings(config(num_shards="train=2"), manifest()) == []
    assert warnings(config(num_shards=2), manifest()) == [
        "--num_shards 2: split 'validation' has only 1 image: wrote 1 shard"
    ]
    assert warnings(config(compression="gzip"), manifest()) == [
        "gzip shards have no index and no TFDS metadata: read them with imageshards.record_dataset"
    ]
    few = {"train": split([5, 5]), "validation": split([4, 0])}
    assert warnings(config(), manifest(splits=few)) == [
        "fewer than 5 records of 2 classes in split 'validation': 'a' 4, 'b' 0; --stratify gives each class its share"
    ]
    assert warnings(config(splits=None), manifest(splits={"train": split([1, 2])})) == []


@pytest.mark.parametrize("more", [{"splits": None}, {"split_by": "(.*)_"}, {"stratify": True}])
def test_classes_with_few_images_are_not_told_of_a_stratify_that_would_be_refused(more: dict[str, object]) -> None:
    few = {"train": split([5, 5]), "validation": split([4, 9])}  # without `--splits` it is the table that names them
    assert warnings(config(**more), manifest(splits=few)) == [
        "fewer than 5 records of 1 class in split 'validation': 'a' 4"
    ]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("Dog dog eel", "classes 'Dog' and 'dog' differ only in how a name is written: merge them if they are one"),
        ("1 01 1.0 2", "classes '1' and '01' and '1.0' differ only in how"),
        ("\uff41 a", "classes '\uff41' and 'a' differ only in how"),
        ("Straße strasse", "classes 'Straße' and 'strasse' differ only in how"),
        ("0 1 10 11 2", "classes are numbers, sorted as text: '11' is class 3; --labels_file sets their order"),
        ("10 9 other", "classes are numbers, sorted as text: '10' is class 0; "),
        ("0 1 2 9", ""),
        ("00 01 02 10", ""),
        ("v1.0 v2 1.1 1.10", ""),
        ("n01 n10 n2", ""),
    ],
)
def test_names_that_may_be_one_class_and_numbers_out_of_order_are_a_warning(names: str, told: str) -> None:
    classes = names.split()
    one = manifest(classes=classes, splits={"train": split([9] * len(classes), 1)})
    lines = warnings(config(splits=None), one)
    assert [line[: len(told)] for line in lines] == [told] * bool(told)
    labels = warnings(dataclasses.replace(config(splits=None), labels=tuple(classes)), one)
    assert labels == [line for line in lines if "sorted as text" not in line], "the user gave this order"


@pytest.mark.parametrize(
    ("names", "told"),
    [("train", "class is 'train'"), ("test train", "classes are 'test', 'train'"), ("train car", ""), ("car", "")],
)
def test_classes_that_are_called_as_splits_are_a_warning_unless_that_was_meant(names: str, told: str) -> None:
    classes = names.split()
    one = manifest(classes=classes, splits={"train": split([9] * len(classes), 1)})
    what = f"the only {told}, a name of splits: if the labels are in a table, give it by --layout manifest"
    assert warnings(config(splits=None), one) == [what] * bool(told)
    assert warnings(config(splits=None, folders_are_classes=True), one) == []
    assert warnings(config(splits=None, layout="manifest", manifest="m.csv"), one) == []


def test_a_split_folder_without_images_and_ids_that_moved_are_a_warning() -> None:
    of_splits = config(splits=None, layout="split_class_folders", split_folders="A=train,B=validation,C=test")
    moved = dataclasses.replace(manifest(), moved_ids="class ids changed")
    assert warnings(of_splits, moved) == ["class ids changed", "split 'test' got no images"]
