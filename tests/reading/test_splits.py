"""Split strings: the same records as TFDS would give."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_pipeline.errors import UsageError
from reader.splits import RecordRange, first_records, parse_split

RECORDS = {"train": 1000, "validation": 37}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train", [("train", 0, 1000)]),
        ("train[:10%]", [("train", 0, 100)]),
        ("train[-10%:]", [("train", 900, 1000)]),
        ("train[10%:20%]", [("train", 100, 200)]),
        ("train[:33.3%]", [("train", 0, 333)]),
        ("train[100:-100]", [("train", 100, 900)]),
        ("train + validation[:50%]", [("train", 0, 1000), ("validation", 0, 18)]),
        ("train[:1_00]", [("train", 0, 100)]),
        ("train[:1]+train[:1]", [("train", 0, 1), ("train", 0, 1)]),
        ("all", [("train", 0, 1000), ("validation", 0, 37)]),
    ],
)
def test_split_strings(text: str, expected: list[tuple[str, int, int]]) -> None:
    assert parse_split(text, RECORDS) == tuple(RecordRange(*part) for part in expected)


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("train", 16, "train[:16]"),
        ("train[:40]", 99, "train[:40]"),
        ("train[50:60]+train[2:]", 16, "train[50:60]+train[2:8]"),
    ],
)
def test_the_first_records_of_a_split_string(text: str, count: int, expected: str) -> None:
    assert first_records(parse_split(text, RECORDS), count) == expected


@settings(deadline=None)  # the first case imports TFDS
@given(st.integers(0, 500), st.integers(-100, 100), st.integers(-100, 100))
def test_percentages_round_as_in_tfds(records: int, start: int, stop: int) -> None:
    from tensorflow_datasets.core import splits as tfds

    text = f"train[{start}%:{stop}%]"
    shards = tfds.SplitInfo(name="train", shard_lengths=[records], num_bytes=1, filename_template=None)
    (theirs,) = tfds.AbstractSplit.from_spec(text).to_absolute({"train": shards})
    begin, end = theirs.from_ or 0, records if theirs.to is None else theirs.to
    if end <= begin:
        with pytest.raises(UsageError, match="holds no record"):
            parse_split(text, {"train": records})
    else:
        assert parse_split(text, {"train": records}) == (RecordRange("train", begin, end),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("test", r"there is no split 'test': there are train \(1000 records\), validation \(37 records\)$"),
        ("val", r"there is no split 'val' \(did you mean 'validation'\?\): there are train \(1000 records\), val"),
        ("train+validaton", r"no split 'validaton' \(did you mean 'validation'\?\)"),
        ("x" * 5000, "there is no split 'xxx"),
        ("train[:10", "isn't understood"),
        ("train[:x]", "'x' in split 'train"),
        ("train[:٣]", "in split 'train"),  # Arabic digits
        ("train[:" + "9" * 5000 + "]", "in split 'train"),
        ("train[:" + "9" * 5000 + "%]", "in split 'train"),
        ("train[10%]", "isn't understood"),
        ("train[:2000]", "outside the split's 1000 records"),
        ("train[20:10]", "holds no record"),
        ("", "isn't understood"),
        (None, "split=None: write train"),
        (b"train", "write train"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_wrong_split_strings_say_what_is_there_in_one_line(text: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_split(text, RECORDS)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300


def test_a_dataset_without_splits_says_so() -> None:
    for text in ("train", "all"):
        with pytest.raises(UsageError, match="there are no splits"):
            parse_split(text, {})


@given(st.text() | st.text("train[]:%+-_. 0123456789"))
def test_any_text_is_a_split_string_or_one_line(text: str) -> None:
    try:
        ranges = parse_split(text, RECORDS)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert all(0 <= part.start <= part.stop <= RECORDS[part.split] for part in ranges)
