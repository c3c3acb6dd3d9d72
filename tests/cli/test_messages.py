"""What a finished job tells: counts, balance, and warnings that a user should see."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from beam_pipeline.cli.messages import (
    ALREADY_PUBLISHED,
    PUBLISHED,
    REPAIRED,
    Manifest,
    plan_text,
    published_text,
    warnings,
)
from beam_pipeline.config import Config


def manifest(outcome: str = PUBLISHED, **more: object) -> Manifest:
    data = {
        "images": 1003,
        "records": 1000,
        "classes": ["a", "b"],
        "rejects": {"by_reason": {"truncated": 1, "decode_error": 2}},
        "image": {"passed_through": {"whole": 0, "without_metadata": 0}},
        "splits": {
            "validation": {"records": 100, "class_counts": [50, 50], "shards": [{"bytes": 5_000_000}]},
            "train": {
                "records": 900,
                "class_counts": [500, 400],
                "shards": [{"bytes": 99_000_000}, {"bytes": 101_000_000}],
            },
        },
    }
    return Manifest("gs://b/x/1.0.0", data | more, outcome)


def config(**more: object) -> Config:
    return Config(**{"input": "/in", "output": "/out", "name": "x", "splits": "train=0.9,validation=0.1"} | more)


def test_the_text_names_records_shards_and_balance() -> None:
    assert published_text(manifest()).splitlines() == [
        "published gs://b/x/1.0.0",
        "  train: 900 records in 2 shards of 100 MB (-1.0 % to +1.0 %)",
        "  validation: 100 records in 1 shard of 5.00 MB",
        "  1,003 images listed = 1,000 records + 3 rejects (decode_error 2, truncated 1; see rejects.jsonl)",
        "  2 classes",
    ]


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (PUBLISHED, "published gs://b/x/1.0.0"),
        (REPAIRED, "repaired gs://b/x/1.0.0"),
        (ALREADY_PUBLISHED, "already published gs://b/x/1.0.0, nothing written"),
    ],
)
def test_the_first_line_says_what_happened(outcome: str, line: str) -> None:
    assert published_text(manifest(outcome)).splitlines()[0] == line


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([0, 0], "2 shards of 0 bytes each"),
        ([9_000, 9_000], "2 shards of 9.00 kB each"),
        ([100_000, 100_010], "2 shards of 100 kB each"),  # what is shown is equal
        ([1_000, 3_000], "2 shards of 2.00 kB (-50.0 % to +50.0 %)"),
        ([9_300], "1 shard of 9.30 kB"),
    ],
)
def test_shards_of_every_size_are_told_in_their_unit(sizes: list[int], text: str) -> None:
    split = {"records": 0, "class_counts": [0, 0], "shards": [{"bytes": size} for size in sizes]}
    assert f"  train: 0 records in {text}" in published_text(manifest(splits={"train": split})).splitlines()


def test_one_of_a_kind_is_singular() -> None:
    split = {"records": 1, "class_counts": [1], "shards": [{"bytes": 1}]}
    more = {"images": 2, "records": 1, "classes": ["a"], "rejects": {"by_reason": {"truncated": 1}}}
    assert published_text(manifest(splits={"train": split}, **more)).splitlines()[1:] == [
        "  train: 1 record in 1 shard of 1 byte",
        "  2 images listed = 1 record + 1 reject (truncated 1; see rejects.jsonl)",
        "  1 class",
    ]


def test_a_plan_tells_images_shards_and_their_size() -> None:
    splits = {
        "train": {"images": 1200, "estimated_bytes": 4_000_000, "cuts": ["5"]},
        "test": {"images": 1, "estimated_bytes": 12_000, "cuts": []},
    }
    assert plan_text({"splits": splits, "classes": ["a", "b"]}).splitlines() == [
        "test: 1 image in 1 shard of about 12.0 kB",
        "train: 1,200 images in 2 shards of about 2.00 MB",
        "2 classes; nothing was written",
    ]


@pytest.mark.parametrize(
    ("suffixes", "line"),
    [
        ({".JPX": 1, ".txt": 2}, "  3 files skipped: not an image suffix (.txt 2, .JPX 1), see --extensions"),
        ({"none": 1200}, "  1,200 files skipped: not an image suffix (none 1,200), see --extensions"),
        ({".txt": 1}, "  1 file skipped: not an image suffix (.txt 1), see --extensions"),
    ],
)
def test_files_that_were_skipped_are_told(suffixes: dict[str, int], line: str) -> None:
    one = dataclasses.replace(manifest(), run={"skipped": {"hidden": 9, "suffixes": suffixes}})
    assert line in published_text(one).splitlines()


@pytest.mark.parametrize("run", [{"skipped": 3}, {"skipped": {"suffixes": [1]}}, {"skipped": {"suffixes": {"x": "y"}}}])
def test_a_run_json_that_says_nothing_sensible_is_passed_over(run: dict[str, Any]) -> None:
    one = dataclasses.replace(manifest(), run=run)
    assert published_text(one) == published_text(manifest())


def test_hidden_files_alone_are_nothing_to_tell() -> None:
    one = dataclasses.replace(manifest(), run={"skipped": {"hidden": 9, "suffixes": {}}})
    assert published_text(one) == published_text(manifest())


def test_a_manifest_answers_by_name() -> None:
    one = manifest()
    assert (one.images, one.records, one.classes) == (1003, 1000, ["a", "b"])
    assert one.splits == {"validation": 100, "train": 900}
    assert one.rejects == {"truncated": 1, "decode_error": 2}


def test_nothing_to_warn_about() -> None:
    assert warnings(config(num_shards="train=2"), manifest()) == []


@pytest.mark.parametrize(
    ("flags", "changes", "line"),
    [
        ({"splits": "train=0.8,validation=0.1,test=0.1"}, {}, "split 'test' got no images and was left out"),
        ({"num_shards": 2}, {}, "--num_shards 2: split 'validation' has only 1 image: wrote 1 shard"),
        ({"num_shards": "train=9"}, {}, "--num_shards 9: split 'train' has only 2 images: wrote 2 shards"),
        ({}, {"classes": ["a", "b"], "splits": {"train": {"class_counts": [0, 5], "shards": []},
                                               "validation": {"class_counts": [0, 5], "shards": []}}},
         "1 class has no records: 'a'"),
        ({}, {"splits": {"train": {"class_counts": [5, 5], "shards": []},
                         "validation": {"class_counts": [4, 0], "shards": []}}},
         "2 classes have fewer than 5 records in split 'validation': 'a' 4, 'b' 0"),
        ({"compression": "gzip"}, {},
         "gzip shards have no index and no TFDS metadata: read them with reader.record_dataset"),
    ],
)  # fmt: skip
def test_each_warning(flags: dict, changes: dict, line: str) -> None:
    assert warnings(config(**flags), manifest(**changes)) == [line]


def test_a_class_of_few_images_is_nothing_to_tell_if_no_split_was_asked_for() -> None:
    split = {"records": 1, "class_counts": [1, 2], "shards": [{"bytes": 1}]}
    assert warnings(config(splits=None), manifest(splits={"train": split})) == []


def test_images_that_were_not_encoded_anew_are_told() -> None:
    text = published_text(manifest(image={"passed_through": {"whole": 1200, "without_metadata": 3}}))
    assert "  1,203 images stored without re-encoding (1,200 byte for byte)" in text.splitlines()
