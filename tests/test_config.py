"""The configuration: every value is checked once, and one form of it decides the bytes."""

from __future__ import annotations

import dataclasses
import json
import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_pipeline.config import REMOVED, Config, parse_bytes, parse_shards, parse_size, parse_splits
from beam_pipeline.dataset import published
from beam_pipeline.errors import UsageError
from beam_pipeline.schema import canonical_json


def config(**more: object) -> Config:
    return Config(**{"input": "/in", "output": "/out", "name": "photos"} | more)


def refused(**more: object) -> str:
    with pytest.raises(UsageError) as caught:
        config(**more)
    return str(caught.value)


# --- values


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("train=1", {"train": Fraction(1)}),
        ("train=0.9,validation=0.1", {"train": Fraction(9, 10), "validation": Fraction(1, 10)}),
        (" train = .9 , validation = rest ", {"train": Fraction(9, 10), "validation": Fraction(1, 10)}),
        ("train=rest", {"train": Fraction(1)}),
        ("a=0.1,train=0.7,b=0.2", {"a": Fraction(1, 10), "train": Fraction(7, 10), "b": Fraction(1, 5)}),
    ],
)
def test_splits_are_exact_fractions(text: str, shares: dict[str, Fraction]) -> None:
    assert parse_splits(text) == shares


@pytest.mark.parametrize(
    "text",
    [
        "",
        "train",
        "train=",
        "train=0.9",
        "train=1.1",
        "train=0.9,validation=0.2",
        "train=1,validation=rest",
        "train=1,validation=0",
        "train=-1,validation=2",
        "train=rest,validation=rest",
        "train=0.5,train=0.5",
        "Train=1",
        "train=90%,validation=10%",
        "train=1e0",
        "train=nan",
        "train=1/2,validation=1/2",
        "train=0.9,validation=0.1,",
    ],
)
def test_splits_that_make_no_sense_are_refused_with_the_form(text: str) -> None:
    assert refused(splits=text) == (
        f"--splits {text!r}: write train=0.9,validation=0.1 with shares that sum to 1, one of them may be 'rest'"
    )


def test_there_must_be_a_train_split() -> None:
    assert (
        refused(splits="test=0.5,validation=0.5") == "--splits 'test=0.5,validation=0.5': one split must be named train"
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        (1000, 1000),
        ("128MiB", 128 << 20),
        ("128 mib", 128 << 20),
        ("200MB", 200_000_000),
        ("1.5kB", 1500),
        ("0.5GiB", 1 << 29),
        ("7B", 7),
    ],
)
def test_sizes_in_bytes(text: str | int, size: int) -> None:
    assert parse_bytes("--x", text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "MB", "1XB", "1e6", "0.4B", "1 2", "1MiBs", 0, -5])
def test_sizes_that_are_none(text: str | int) -> None:
    with pytest.raises(UsageError, match=r"^--x '.*': write a size such as 128MiB, 200MB or 1000000$"):
        parse_bytes("--x", text)


@pytest.mark.parametrize(
    ("text", "size"), [("224", (224, 224)), (224, (224, 224)), ("224x320", (224, 320)), ("2X3", (2, 3)), ("none", None)]
)
def test_image_sizes_are_height_and_width(text: str | int, size: tuple[int, int] | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["0", "x", "224x", "x224", "1x2x3", "-5", "5.5", "0x5", "", "None of it"])
def test_image_sizes_that_are_none(text: str) -> None:
    assert refused(image_size=text) == f"--image_size {text!r}: write 224, 224x320 (height x width) or none"


@pytest.mark.parametrize("text", [20000, "16385", "224x16385"])
def test_an_image_size_that_is_too_large_names_the_limit(text: str | int) -> None:
    assert parse_size("16384x1") == (16384, 1)
    assert refused(image_size=text) == f"--image_size '{text}': a side has at most 16384 pixels"


@pytest.mark.parametrize(
    ("text", "shards"), [("8", 8), (8, 8), ("train=64,validation=4", {"train": 64, "validation": 4})]
)
def test_numbers_of_shards(text: str | int, shards: int | dict[str, int]) -> None:
    assert parse_shards(text) == shards


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "train=0", "train=x", "train=1,train=2", "Train=1", "train"])
def test_numbers_of_shards_that_are_none(text: str) -> None:
    assert refused(num_shards=text) == f"--num_shards {text!r}: write 8 or train=64,validation=4"


@pytest.mark.parametrize("name", ["Photos", "my-photos", "photos.v2", "2024photos", "_x", "phötos", "a b", "a\n"])
def test_names_that_tfds_cannot_read(name: str) -> None:
    assert refused(name=name) == f"--name {name!r}: use a-z, 0-9 and _, a letter first (TFDS reads no other)"


def test_a_name_that_makes_too_long_file_names() -> None:
    Config(input="in", output="out", name="a" * 100)
    assert refused(name="a" * 101) == f"--name {'a' * 101!r}: use at most 100 characters, files are named after it"


def test_an_output_that_is_not_utf8() -> None:
    assert refused(output="o\udcff") == (
        "--output 'o\\udcff': it isn't UTF-8, which a dataset's metadata is: rename the folder"
    )


@pytest.mark.parametrize("version", ["1.0", "1", "v1.0.0", "1.0.0-rc1", "01.0.0", "1.0.0\n", ""])
def test_versions_that_tfds_cannot_read(version: str) -> None:
    assert refused(version=version) == f"--version {version!r}: use N.N.N such as 1.0.0 (TFDS reads no other)"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"jpeg_quality": 101}, "--jpeg_quality '101': give a whole number from 1 to 100"),
        ({"jpeg_quality": 0.9}, "--jpeg_quality '0.9': give a whole number from 1 to 100"),
        ({"channels": 2}, "--channels '2': choose one of 1, 3"),
        ({"max_reject_fraction": -0.1}, "--max_reject_fraction '-0.1': give a number from 0 to 1"),
        ({"max_reject_fraction": float("nan")}, "--max_reject_fraction 'nan': give a number from 0 to 1"),
        ({"fetch_concurrency": 0}, "--fetch_concurrency '0': give a whole number from 1 to 1024"),
        ({"decode_threads": -1}, "--decode_threads '-1': give a whole number from 0 to 1024"),
        ({"max_pixels": 0}, "--max_pixels '0': give a whole number from 1 to 1099511627776"),
        ({"seed": 1 << 63}, f"--seed '{1 << 63}': give a whole number from {-(1 << 63)} to {(1 << 63) - 1}"),
        ({"resample": "sinc"}, "--resample 'sinc': choose one of bilinear, bicubic, lanczos, box, hamming, nearest"),
        ({"image_format": "webp"}, "--image_format 'webp': choose one of jpeg, png"),
        ({"jpeg_subsampling": "4:1:1"}, "--jpeg_subsampling '4:1:1': choose one of 4:4:4, 4:2:2, 4:2:0"),
        ({"compression": "zstd"}, "--compression 'zstd': choose one of none, gzip"),
        ({"max_image_bytes": "0"}, "--max_image_bytes '0': write a size such as 128MiB, 200MB or 1000000"),
        (
            {"split_by": "("},
            "--split_by '(': not a regular expression: missing ), unterminated subpattern at position 0",
        ),
        ({"manifest": "/m.csv"}, "--manifest '/m.csv': it goes with --layout manifest"),
        (
            {"layout": "split_class_folders", "splits": "train=1"},
            "--splits 'train=1': leave it out: the folders are the splits",
        ),
        (
            {"layout": "split_class_folders", "split_by": "(a)"},
            "--split_by '(a)': leave it out: the folders are the splits",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_other_values_are_refused_with_flag_value_and_fix(values: dict[str, object], line: str) -> None:
    assert refused(**values) == line


# --- the fingerprint


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"image_size": "224"}, {"image_size": 224}),
        ({"image_size": "224"}, {"image_size": "224x224"}),
        ({"splits": "train=0.9,validation=0.1"}, {"splits": "train=0.90, validation=rest"}),
        ({}, {"splits": "train=1"}),
        ({"target_shard_bytes": "1MiB"}, {"target_shard_bytes": 1 << 20}),
        ({"num_shards": "8"}, {"num_shards": 8}),
        (
            {"num_shards": "train=1,validation=2", "splits": "train=0.5,validation=rest"},
            {"num_shards": "validation=2, train=1", "splits": "train=0.5,validation=0.5"},
        ),
        ({"max_image_bytes": "256MiB"}, {"max_image_bytes": 256 << 20}),
        ({"input": "/in/"}, {"input": "gs://bucket/elsewhere"}),
        ({"output": "/out"}, {"output": "gs://bucket/out"}),
        ({"io_deadline": 5, "fetch_concurrency": 2, "decode_threads": 7, "max_reject_fraction": 0.5}, {}),
        ({"repair": True}, {"overwrite": True}),
        ({"labels_file": "/a.txt", "labels": ("a",)}, {"labels_file": "/b.txt", "labels": ("a",)}),
    ],
)
def test_what_does_not_decide_bytes_has_no_part_in_the_fingerprint(one: dict, other: dict) -> None:
    assert config(**one).fingerprint() == config(**other).fingerprint()


@pytest.mark.parametrize(
    "values",
    [
        {"image_size": 225},
        {"splits": "validation=0.1,train=0.9"},
        {"split_by": "(a)"},
        {"seed": 1},
        {"one_hot": True},
        {"resize_mode": "crop"},
        {"resample": "box"},
        {"image_format": "png"},
        {"jpeg_quality": 91},
        {"jpeg_subsampling": "4:4:4"},
        {"target_shard_bytes": "1MB"},
        {"num_shards": 2},
        {"compression": "gzip"},
        {"max_pixels": 5},
        {"max_image_bytes": 5},
        {"labels": ("a", "b")},
        {"layout": "split_class_folders", "splits": None},
    ],
    ids=lambda values: "-".join(values),
)
def test_what_decides_bytes_changes_the_fingerprint(values: dict[str, object]) -> None:
    assert config(**values).fingerprint() != config().fingerprint()


def test_the_order_in_which_shares_are_dealt_decides_bytes() -> None:
    assert (
        config(splits="train=0.5,validation=0.5").fingerprint()
        != config(splits="validation=0.5,train=0.5").fingerprint()
    )


def test_the_fingerprint_holds_no_place_and_no_float() -> None:
    def leaves(value: object) -> list[object]:
        if isinstance(value, dict):
            value = list(value.values())
        return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list | tuple) else [value]

    found = leaves(config(input="/secret-in", output="/secret-out", splits="train=0.7,test=0.3").fingerprint())
    assert all(leaf is None or isinstance(leaf, str | int | bool) for leaf in found)
    assert not any("secret" in str(leaf) for leaf in found)


def test_numbers_may_come_as_text_from_python_too() -> None:
    text = config(jpeg_quality="80", channels="1", max_reject_fraction="0.5", seed="-3")
    assert text == config(jpeg_quality=80, channels=1, max_reject_fraction=0.5, seed=-3)
    assert text.fingerprint()["channels"] == 1


def test_every_flag_says_whether_it_decides_bytes() -> None:
    assert all("decides_bytes" in field.metadata for field in dataclasses.fields(Config))


@pytest.mark.parametrize("flag", REMOVED)
def test_a_manifest_may_hold_a_removed_flag_at_its_old_default(flag: str) -> None:
    default, _ = REMOVED[flag]
    mine = json.loads(canonical_json(config().fingerprint()))
    assert flag not in mine
    published._check_configuration(config(), {"configuration": mine | {flag: default}})
    other = not default if isinstance(default, bool) else "keep"
    with pytest.raises(UsageError) as caught:
        published._check_configuration(config(), {"configuration": mine | {flag: other}})
    assert str(caught.value) == (
        f"--{flag} {default!r}: /out/photos/1.0.0 is published with {other!r}; choose another --version or --overwrite"
    )


# --- what the class promises


def test_a_config_is_frozen_and_travels_to_workers() -> None:
    some = config(splits="train=0.9,validation=0.1", split_by="(x)", num_shards="3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        some.seed = 3  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(some))
    assert copy == some
    assert copy.fingerprint() == some.fingerprint()


def test_replacing_a_value_checks_it() -> None:
    with pytest.raises(UsageError):
        dataclasses.replace(config(), seed=1 << 70)


def test_the_version_lies_below_root_name_version() -> None:
    assert (
        config(output="gs://b/datasets/", name="flowers", version="1.2.3").dataset_url
        == "gs://b/datasets/flowers/1.2.3"
    )


@given(st.integers(0, 1000))
def test_shares_of_any_thousandths_sum_to_one(thousandths: int) -> None:
    text = f"train={thousandths / 1000:.3f},validation=rest"
    if 0 < thousandths < 1000:
        assert sum(parse_splits(text).values()) == 1
    else:
        with pytest.raises(UsageError):
            parse_splits(text)
