"""The configuration: every value is checked once, and one form of it decides the bytes."""

from __future__ import annotations

import ast
import dataclasses
import pickle
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_pipeline.config import Config, splits_text
from beam_pipeline.errors import UsageError


def config(**more: object) -> Config:
    return Config(**{"input": "/in", "output": "/out", "name": "photos"} | more)


def refused(**more: object) -> str:
    with pytest.raises(UsageError) as caught:
        config(**more)
    return str(caught.value)


# --- values


TENTH = {"train": Fraction(9, 10), "validation": Fraction(1, 10)}


@pytest.mark.parametrize(
    ("flag", "kept", "given"),
    [
        ("input", "/in", [Path("/in"), "/in/"]),
        ("output", "/out", [Path("/out/")]),
        ("labels_file", "/labels.txt", [Path("/labels.txt")]),
        ("splits", {"train": Fraction(1)}, ["train=1", "train=rest"]),
        ("splits", TENTH, ["train=0.9,validation=0.1", " train = .9 , validation = rest ",
                           {"train": 0.9, "validation": 0.1}, {"train": "rest", "validation": "0.1"}]),
        ("splits", {"a": Fraction(1, 10), "train": Fraction(7, 10), "b": Fraction(1, 5)},
         [{"a": 0.1, "train": 0.7, "b": 0.2}]),
        ("splits", TENTH, ["train=90,validation=10", {"train": 90, "validation": 10}]),
        ("splits", {"train": Fraction(7, 8), "b": Fraction(1, 8)}, ["train=87.5,b=12.5"]),
        ("target_shard_bytes", 128 << 20, [134_217_728, "134217728", "128MiB", "128 mib"]),
        ("max_image_bytes", 1500, ["1.5kB", "1500B"]),
        ("max_image_bytes", 1 << 29, ["0.5GiB"]),
        ("max_image_bytes", 200_000_000, ["200MB"]),
        ("image_size", (224, 224), ["224", 224]),
        ("image_size", (224, 320), ["224x320", "224X320", (224, 320), [224, 320]]),
        ("image_size", (16384, 1), ["16384x1"]),
        ("image_size", None, ["none", None]),
        ("num_shards", 8, ["8", 8]),
        ("num_shards", {"train": 64}, ["train=64", {"train": 64}]),
        ("extensions", {"jpg", "png"}, ["jpg,.PNG", ["jpg", ".PNG"]]),
        ("background", (255, 255, 255), ["white"]),
        ("background", (255, 128, 0), ["#ff8000", (255, 128, 0)]),
        ("split_by", re.compile("(a)"), ["(a)", re.compile("(a)")]),
        ("split_by", "name", ["name"]),
        ("jpeg_quality", 80, ["80"]),
        ("channels", 1, ["1"]),
        ("max_reject_fraction", 0.5, ["0.5"]),
        ("seed", -3, ["-3"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_value_is_kept_parsed_however_it_was_given(flag: str, kept: object, given: list[object]) -> None:
    for value in given:
        assert getattr(config(**{flag: value}), flag) == kept
        assert dataclasses.replace(config(**{flag: value}), name="other") == config(**{flag: value, "name": "other"})


BAD_VALUES = Path(__file__).with_name("bad_values.txt").read_text().splitlines()


@pytest.mark.parametrize("line", BAD_VALUES)
def test_a_bad_value_is_told_with_flag_value_and_fix(line: str) -> None:
    (told,) = re.findall(r"^--(\w+) ('(?:[^'\\]|\\.)*'): ", line)
    assert refused(**{told[0]: ast.literal_eval(told[1])}) == line


@pytest.mark.parametrize(
    ("flag", "fix", "values"),
    [
        ("splits", "the shares sum to 1.1: write shares that sum to 1, or percent that sum to 100", [{"train": 1.1}]),
        ("target_shard_bytes", "write a size such as 128MiB, 200MB or 1000000", [0]),
        ("image_size", "write 224, 224x320 (height x width, at most 16384) or none", [20000, (0, 5)]),
        ("num_shards", "write 8 or train=64,validation=4", [{"train": 0}]),
        ("jpeg_quality", "give an integer from 1 to 100", [101, 0.9, None]),
        ("channels", "choose one of 1, 3", [2]),
        ("max_reject_fraction", "give a number from 0 to 1", [-0.1, float("nan")]),
        ("seed", f"give an integer from {-(1 << 63)} to {(1 << 63) - 1}", [1 << 63]),
        ("version", "give text, not int", [8]),
        ("labels_file", "give text, not list", [["a", "b"]]),
        ("split_by", "write its flags into it: '(?i)...'", [re.compile("(a)", re.I)]),
    ],
)
def test_a_bad_value_from_python_is_told_alike(flag: str, fix: str, values: list[object]) -> None:
    for value in values:
        assert refused(**{flag: value}) == f"--{flag} {str(value)!r}: {fix}"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"layout": "split_class_folders", "split_by": "(a)"},
         "--split_by: leave it out, the input says which image is in which split"),
        ({"layout": "manifest", "manifest": "/m.csv", "header": ("split",), "splits": "train=1"},
         "--splits: leave it out, the input says which image is in which split"),
        ({"layout": "split_class_folders", "stratify": True},
         "--stratify: leave it out, the input says which image is in which split"),
        ({"split_folders": {"A": "train"}}, "--split_folders: it goes with --layout split_class_folders"),
        ({"stratify": True}, "--stratify: give --splits, too: without it every image is in train"),
        ({"stratify": True, "splits": "train=80,test=20", "split_by": "(a)"},
         "--split_by '(a)': leave it or --stratify out: what it keeps together may be of several classes"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)  # fmt: skip
def test_values_that_do_not_go_together_are_told(values: dict[str, object], line: str) -> None:
    assert refused(**values) == line


# --- the fingerprint


HALVES = "train=0.5,validation=0.5"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"image_size": "224"}, {"image_size": "224x224"}),
        ({"splits": "train=0.9,validation=0.1"}, {"splits": "train=0.90, validation=rest"}),
        ({"splits": "train=0.8,validation=0.2"}, {"splits": "train=80,validation=20"}),
        ({"splits": "train=0.9,validation=0.1"}, {"splits": {"train": 0.9, "validation": 0.1}}),
        ({"extensions": "jpg,png"}, {"extensions": (".PNG", "jpg")}),
        ({"background": "white"}, {"background": (255, 255, 255)}),
        ({}, {"splits": "train=1"}),
        ({"num_shards": "train=1,validation=2", "splits": HALVES},
         {"num_shards": "validation=2, train=1", "splits": HALVES}),
        ({"max_image_bytes": "256MiB"}, {"max_image_bytes": 256 << 20}),
        ({"input": "/in/"}, {"input": "gs://bucket/elsewhere"}),
        ({"output": "/out"}, {"output": "gs://bucket/out"}),
        ({"io_deadline": 5, "fetch_concurrency": 2, "decode_threads": 7, "max_reject_fraction": 0.5}, {}),
        ({"repair": True}, {"overwrite": True}),
        ({"base": "none"}, {"base": "1.0.0"}),  # so a job that was killed is resumed with and without it
        ({"labels_file": "/a.txt", "labels": ("a",)}, {"labels_file": "/b.txt", "labels": ("a",)}),
    ],
)  # fmt: skip
def test_what_does_not_decide_bytes_has_no_part_in_the_fingerprint(one: dict, other: dict) -> None:
    assert config(**one).fingerprint() == config(**other).fingerprint()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("image_size", 225), ("splits", HALVES), ("split_by", "(a)"), ("split_by", "name"), ("seed", 1),
        ("one_hot", True),
        ("resize_mode", "crop"), ("resample", "box"), ("image_format", "png"), ("jpeg_quality", 91),
        ("jpeg_subsampling", "4:4:4"), ("target_shard_bytes", "1MB"), ("num_shards", 2), ("compression", "gzip"),
        ("max_pixels", 5), ("max_image_bytes", 5), ("labels", ("a", "b")), ("layout", "split_class_folders"),
        ("extensions", "jpg"), ("background", "red"), ("channels", 1), ("optimize", True), ("allow_truncated", True),
    ],
)  # fmt: skip
def test_what_decides_bytes_changes_the_fingerprint(flag: str, value: object) -> None:
    assert config(**{flag: value}).fingerprint() != config().fingerprint()


def test_exact_shares_and_the_order_in_which_shares_are_dealt_decide_bytes() -> None:
    others = ({}, {"stratify": True}, {"splits": "validation=0.5,train=0.5"})
    assert len({str(config(**{"splits": HALVES, **more}).fingerprint()) for more in others}) == 3


def test_the_fingerprint_holds_no_place_and_no_float() -> None:
    def leaves(value: object) -> list[object]:
        if isinstance(value, dict):
            value = list(value.values())
        return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list | tuple) else [value]

    found = leaves(config(input="/secret-in", output="/secret-out", splits="train=0.7,test=0.3").fingerprint())
    assert all(leaf is None or isinstance(leaf, str | int | bool) for leaf in found)
    assert not any("secret" in str(leaf) for leaf in found)


# --- what the class promises


def test_a_config_is_frozen_checked_when_a_value_is_replaced_and_travels_to_workers() -> None:
    some = config(splits="train=0.9,validation=0.1", split_by="(x)", num_shards="3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        some.seed = 3  # type: ignore[misc]
    with pytest.raises(UsageError):
        dataclasses.replace(some, seed=1 << 70)
    copy = pickle.loads(pickle.dumps(some))
    assert copy == some
    assert copy.fingerprint() == some.fingerprint()


@pytest.mark.parametrize(("manifest", "folder"), [("/in/m.csv", "/in"), ("/m.csv", "/"), ("gs://b/m.csv", "gs://b")])
def test_paths_of_a_manifest_are_relative_to_its_folder(manifest: str, folder: str) -> None:
    assert config(input=None, layout="manifest", manifest=manifest).input == folder
    assert config(layout="manifest", manifest=manifest).input == "/in"


@given(st.integers(1, 999))
def test_shares_of_any_thousandths_sum_to_one(thousandths: int) -> None:
    shares = config(splits=f"train={thousandths / 1000:.3f},validation=rest").splits
    assert shares is not None and sum(shares.values()) == 1
    text = splits_text(shares)
    assert config(splits=text).splits == shares
    assert "0," not in text and not text.endswith("0"), "the shortest form"
