"""`--stratify`: the exact shares in each class, the same in any order, and few images that another one moves."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from beam_pipeline.config import Config
from beam_pipeline.inputs.folders import all_images
from beam_pipeline.inputs.references import ImageRef, split_hash
from beam_pipeline.inputs.stratify import class_hashes, limits, split_stratified
from tests.inputs.test_folders import touch

SHARES = (
    {"train": Fraction(4, 5), "test": Fraction(1, 5)},
    {"a": Fraction(1, 3), "b": Fraction(1, 2), "train": Fraction(1, 6)},
)
numbers = st.sets(st.integers(0, 400), min_size=1, max_size=60)


def config(**more: object) -> Config:
    return Config(
        **{"input": "/in", "output": "/out", "name": "x", "splits": "train=80,test=20", "stratify": True} | more
    )


def splits(paths: list[str], some: Config) -> dict[str, str]:
    refs = [ImageRef(path, 1, "", path.partition("/")[0], "", 0) for path in paths]
    cuts = {label: limits(hashes, some) for label, hashes in class_hashes(refs, some).items()}
    return {ref.path: ref.split for ref in split_stratified(refs, cuts, some)}


@given(numbers, st.sampled_from(SHARES))
def test_each_class_has_its_exact_shares(some: set[int], shares: dict[str, Fraction]) -> None:
    paths = [f"cat/{number}.jpg" for number in some]
    counts = Counter(splits(paths, config(splits=shares)).values())
    assert sum(counts.values()) == len(paths)
    assert all(abs(counts[split] - len(paths) * share) < 1 for split, share in shares.items())


def test_shares_of_round_numbers_are_met_to_the_image(tmp_path: Path) -> None:
    touch(
        tmp_path,
        *(f"{label}/{number}.jpg" for label, count in (("a", 10), ("b", 45), ("c", 3)) for number in range(count)),
    )
    refs = list(all_images(config(input=tmp_path, splits="train=80,test=20")))
    counts = Counter((ref.label, ref.split) for ref in refs)
    assert counts == {
        ("a", "train"): 8,
        ("a", "test"): 2,
        ("b", "train"): 36,
        ("b", "test"): 9,
        ("c", "train"): 2,
        ("c", "test"): 1,
    }


@given(numbers, numbers, st.sampled_from(SHARES), st.randoms(use_true_random=False))
def test_another_image_moves_at_most_one_for_each_border_of_splits_and_none_of_another_class(
    some: set[int], dogs: set[int], shares: dict[str, Fraction], order: object
) -> None:
    paths = [f"cat/{number}.jpg" for number in some] + [f"dog/{number}.jpg" for number in dogs]
    before = splits(paths, config(splits=shares))
    order.shuffle(paths)  # type: ignore[attr-defined]
    assert splits(paths, config(splits=shares)) == before
    after = splits([*paths, "cat/new.jpg"], config(splits=shares))
    moved = [path for path in paths if before[path] != after[path]]
    assert len(moved) <= len(shares) - 1
    assert all(path.startswith("cat/") for path in moved)


def test_images_of_a_class_with_the_same_hash_stay_together() -> None:
    paths = [f"cat/{number}.jpg" for number in range(50)]
    paths = sorted(paths, key=split_hash)
    twin = "cat/\u00e9.jpg", "cat/e\u0301.jpg"
    for count in range(1, 50):
        of = splits([*paths[:count], *twin], config())
        assert of[twin[0]] == of[twin[1]]


def test_a_row_of_a_class_that_the_first_listing_did_not_have_gets_a_split() -> None:
    ref = ImageRef("new/1.jpg", 1, "", "new", "", 0)
    assert [one.split for one in split_stratified([ref], {}, config())] == ["train"]


def test_with_the_name_the_same_names_have_the_same_splits_in_every_class() -> None:
    by_name = config(split_by="name", splits="train=50,test=50")
    cats, dogs = (splits([f"{label}/{number}.jpg" for number in range(100)], by_name) for label in ("cat", "dog"))
    assert list(cats.values()) == list(dogs.values())
