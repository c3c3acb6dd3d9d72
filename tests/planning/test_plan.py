"""split_chooser, order and the planner: pure arithmetic, the same under any order of the same images."""

from __future__ import annotations

import hashlib
import itertools
import unicodedata
from fractions import Fraction

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from beam_pipeline.config import Config
from beam_pipeline.inputs import references
from beam_pipeline.inputs.folders import ListingSummary
from beam_pipeline.inputs.references import KEY_BITS, ImageRef, order_key, split_chooser, split_hash
from beam_pipeline.planning.plan import (
    EstimatedSizes,
    Histogram,
    SizeModel,
    plan_job,
    plan_split,
    shards_of,
)
from beam_pipeline.schema.job import Plan, ReferenceSum, document_bytes, read_document
from beam_pipeline.schema.manifest import PlannedSplit
from beam_pipeline.storage import Etag

keys = st.integers(0, (1 << KEY_BITS) - 1)
paths = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
# Bins of one key each (up to 65,536 images), of 2^60 keys (16 bins) and the real ones of larger inputs.
shifts = st.sampled_from([0, 48, 60, 63])
images = st.lists(st.tuples(keys, st.integers(1, 10**6)), min_size=1, max_size=60)


THREE = split_chooser({"train": Fraction(8, 10), "validation": Fraction(1, 10), "test": Fraction(1, 10)})


def config(**more: object) -> Config:
    return Config(input="/in", output="/out", name="x", **{"splits": "train=0.5,test=0.5"} | more)


def histogram(shift: int, some: list[tuple[int, int]]) -> Histogram:
    made = Histogram(shift)
    for key, size in some:
        made.add(key, size)
    return made


def dealt(plan: PlannedSplit, some: list[tuple[int, int]]) -> list[list[int]]:
    """Sizes of the images of each shard."""
    shards: list[list[int]] = [[] for _ in range(plan.shards)]
    for key, size in some:
        shards[plan.shard_of(key)].append(size)
    return shards


def test_order_keys_are_pinned() -> None:
    # A change of these is a change of the format: published versions could no longer be compared or repaired.
    assert order_key("cat/a.jpg", 0) == 1261326439714749828
    assert order_key("cat/a.jpg", -1) == int.from_bytes(
        hashlib.blake2b(b"cat/a.jpg", digest_size=8, key=b"-1").digest(), "big"
    )
    assert order_key("hund/größe 1.jpg", 42) == 11223798172951222405


@given(paths)
def test_both_normal_forms_of_a_name_have_one_key_and_one_split(path: str) -> None:
    composed, decomposed = (unicodedata.normalize(form, f"é{path}") for form in ("NFC", "NFD"))
    assert composed != decomposed
    assert order_key(composed, 3) == order_key(decomposed, 3)
    assert split_hash(composed) == split_hash(decomposed)


def test_a_name_that_is_no_utf8_has_a_key_of_its_bytes() -> None:
    path = b"a/caf\xe9.jpg".decode("utf-8", "surrogateescape")
    expected = hashlib.blake2b(b"a/caf\xe9.jpg", digest_size=8, key=b"0").digest()
    assert order_key(path, 0) == int.from_bytes(expected, "big")


def test_splits_are_pinned() -> None:
    signs = {"train": ".", "validation": "v", "test": "t"}
    found = "".join(signs[THREE(split_hash(f"cat/{number:04d}.jpg"))] for number in range(40))
    assert found == "t..t.....t.t.t......v.....v...v....t...."


@given(paths, st.integers(1, 98))
def test_a_larger_first_share_only_adds_images_to_it(path: str, percent: int) -> None:
    shares = Fraction(percent, 100), Fraction(percent + 1, 100)
    small, large = (split_chooser({"train": share, "validation": 1 - share}) for share in shares)
    assert not (small(split_hash(path)) == "train" and large(split_hash(path)) == "validation")


fields = st.lists(st.lists(st.binary(max_size=8), max_size=4), max_size=12)


@given(fields, st.randoms(use_true_random=False), st.integers(0, 12))
def test_a_sum_is_the_same_in_any_order_and_partition(some: list[list[bytes]], random, cut: int) -> None:
    whole = ReferenceSum()
    for one in some:
        whole.add(one)
    shuffled = random.sample(some, len(some))
    parts = [ReferenceSum(), ReferenceSum()]
    for number, one in enumerate(shuffled):
        parts[number >= cut].add(one)
    parts[1].merge(parts[0])
    assert (parts[1].count, parts[1].hex) == (whole.count, whole.hex)


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_different_images_have_different_sums(one: list[bytes], other: list[bytes]) -> None:
    assume(one != other)
    sums = [ReferenceSum(), ReferenceSum()]
    sums[0].add(one)
    sums[1].add(other)
    assert sums[0].hex != sums[1].hex


def test_the_listing_fingerprint_sees_path_size_label_split_and_features_but_no_etag() -> None:
    ref = ImageRef("a/b.jpg", 10, b"1", "a", "train", 5, (b"f",))
    fields = references.listing_fields
    assert fields(ref._replace(etag="mtime_ns:7", order_key=6)) == fields(ref)
    changes = {"path": "a/c.jpg", "source_bytes": 11, "label": "b", "split": "test", "features": (b"g",)}
    assert all(fields(ref._replace(**{name: value})) != fields(ref) for name, value in changes.items())


@pytest.mark.parametrize(
    ("etag", "text"), [(b"\1" * 16, b"md5:" + b"01" * 16), (255, b"crc32c:000000ff"), ("etag:x", b"etag:x"), ("", b"")]
)
def test_an_etag_stands_as_text_in_the_sum_of_references(etag: Etag, text: bytes) -> None:
    ref = ImageRef("a", 1, etag, "a", "train", 5)
    assert references.reference_fields(ref) == [*references.listing_fields(ref), text]


def test_a_sampled_image_counts_its_own_bytes_and_others_the_mean_of_their_size_class() -> None:
    sizes = SizeModel.learn([("a", 1000, 100), ("b", 1001, 201), ("c", 70_000, 900)])
    assert sizes.estimate("a", 1000) == 100
    assert sizes.estimate("new", 1010) == 150
    assert sizes.estimate("new", 69_000) == 900
    assert sizes.estimate("new", 1 << 30) == 900, "the nearest class that was sampled"
    assert SizeModel.learn([("reject", 10, 0)]).estimate("reject", 10) == SizeModel.learn([]).estimate("any", 10) == 1


sample = st.lists(
    st.tuples(paths, st.integers(0, 1 << 40), st.integers(0, 1 << 30)), unique_by=lambda one: one[0], max_size=20
)


@given(sample, st.randoms(use_true_random=False), paths, st.integers(0, 1 << 41))
def test_the_size_model_does_not_depend_on_the_samples_order(some, random, path: str, size: int) -> None:
    shuffled = random.sample(some, len(some))
    assert SizeModel.learn(shuffled).estimate(path, size) == SizeModel.learn(some).estimate(path, size)


LISTED_AND_SAMPLED = [(1, 1), (512, 512), (513, 64), (5_000, 100), (25_600, 512), (10**9, 512)]


@pytest.mark.parametrize(("listed", "sampled"), LISTED_AND_SAMPLED)
def test_sample_size(listed: int, sampled: int) -> None:
    assert references.sample_size(listed) == sampled


MIB = 1 << 20
SHARDS_OF = [
    *((0, {}, 1), (1, {}, 1)),
    *((15 * MIB, {}, 1), (17 * MIB, {}, 2)),  # two of 8 MiB
    *((100 * MIB, {}, 12), (128 * MIB, {}, 16)),  # at least 16 while each keeps 8 MiB
    *((2047 * MIB, {}, 16), (10_000 * MIB, {}, 78), (1 << 50, {}, 1 << 23)),
    *((1, {"target_shard_bytes": 1 << 40}, 1), (10 * MIB, {"target_shard_bytes": "1MiB"}, 10)),  # taken as given
    *((int(10.4 * MIB), {"target_shard_bytes": MIB}, 10), (int(10.6 * MIB), {"target_shard_bytes": MIB}, 11)),
    *((5 * MIB, {"num_shards": 7}, 7), (5 * MIB, {"num_shards": "train=3"}, 3)),
    (33 * MIB, {"num_shards": "test=3"}, 4),  # by size, without a number
]


@pytest.mark.parametrize(("total", "flags", "shards"), SHARDS_OF)
def test_how_many_shards_a_split_gets(total: int, flags: dict[str, object], shards: int) -> None:
    assert shards_of(config(**flags), "train", total) == shards


# Two cuts want to be inside the second bin, whose only image comes before both.
@example(60, [(0, 1), (1 << 60, 100), (2 << 60, 1), (3 << 60, 1)], 3)
@settings(max_examples=300)
@given(shifts, images, st.integers(1, 70))
def test_cuts_increase_and_shards_are_as_many_as_wanted_or_as_bins_none_empty(shift: int, some, wanted: int) -> None:
    made = histogram(shift, some)
    plan = plan_split(made, wanted)
    assert all(first < second for first, second in itertools.pairwise(plan.keys))
    assert plan.shards == min(wanted, len(made.bins))
    assert plan.images == len(some)
    assert plan.estimated_bytes == sum(size for _, size in some)
    assert all(dealt(plan, some))


@given(shifts, images, st.integers(1, 30), st.randoms(use_true_random=False), st.lists(st.integers(0, 59), max_size=5))
def test_a_plan_is_the_same_in_any_order_and_partition(shift: int, some, wanted: int, random, cuts: list[int]) -> None:
    shuffled = random.sample(some, len(some))
    bounds = [0, *sorted(min(cut, len(some)) for cut in cuts), len(some)]
    parts = [histogram(shift, shuffled[start:end]) for start, end in itertools.pairwise(bounds)]
    random.shuffle(parts)
    total = Histogram(shift)
    for part in parts:
        total.merge(part)
    assert plan_split(total, wanted) == plan_split(histogram(shift, some), wanted)


@given(
    st.lists(st.tuples(keys, st.integers(50, 100)), min_size=2, max_size=80, unique_by=lambda one: one[0]), st.data()
)
def test_shards_differ_from_the_mean_by_less_than_an_image(some, data: st.DataObject) -> None:
    # Exact bins, no image larger than half a shard: each cut is the nearest place between two images.
    wanted = data.draw(st.integers(1, max(1, len(some) // 4)))
    plan = plan_split(histogram(0, some), wanted)
    sizes = [sum(shard) for shard in dealt(plan, some)]
    mean = sum(sizes) / len(sizes)
    assert all(abs(size - mean) <= 101 for size in sizes), sizes


@pytest.mark.parametrize("shards", [10, 997])
def test_interpolated_cuts_balance_a_large_input(shards: int) -> None:
    count = 200_000  # more than one a bin, so cuts fall inside bins
    some = [(order_key(str(number), 0), 1000) for number in range(count)]
    plan = plan_split(histogram(Histogram.shift_for(count), some), shards)
    sizes = [sum(shard) for shard in dealt(plan, some)]
    mean = sum(sizes) / len(sizes)
    assert max(abs(size - mean) for size in sizes) / 1000 < 8, "a bin holds 3 images: a cut is off by a few of them"


def test_twins_of_one_key_are_never_parted() -> None:
    twins = [(5, 10), (5, 10), (9, 10)]
    plan = plan_split(histogram(0, twins), 3)
    assert sorted(map(len, dealt(plan, twins))) == [1, 2]


# --- the plan of a job


REFS = [ImageRef(f"a/{number}", 10, "", "a", "test" if number % 4 else "train", number << 40) for number in range(40)]


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
    assert read_document(document_bytes(plan), Plan) == plan, "with every bit of its keys, which are text in JSON"
    total = EstimatedSizes()
    for part in (REFS[30:], REFS[:7], [], REFS[7:30]):
        total.merge(sizes_of(part))
    assert plan_job(total, config(num_shards=3), summary, []).sha256 == plan.sha256
