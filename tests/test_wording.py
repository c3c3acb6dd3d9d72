"""Counts and sizes as a person reads them."""

from __future__ import annotations

import pytest

from beam_pipeline.wording import plural, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1_000, "1.0 kB"),
        (12_345, "12.3 kB"),
        (12_345_678, "12.3 MB"),
        (2_500_000_000, "2.50 GB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(0, "shard", "0 shards"), (1, "shard", "1 shard"), (1200, "shard", "1,200 shards"), (1, "class", "1 class"),
     (2, "class", "2 classes")],
)  # fmt: skip
def test_counts(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text
