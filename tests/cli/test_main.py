"""Arguments: ours become a Config, Beam's are passed on, nothing is guessed and nothing is dropped."""

from __future__ import annotations

import difflib
import re

import pytest

from beam_pipeline.cli.main import _SURELY_OURS, beams_parser, parse
from beam_pipeline.config import FLAGS, Config
from beam_pipeline.errors import UsageError

GOOD = ["--input", "/in", "--output", "/out", "--name", "photos"]


def refused(*more: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse([*GOOD, *more])
    return str(caught.value)


def test_without_more_flags_every_default_is_the_configs() -> None:
    assert parse(GOOD) == (Config(input="/in", output="/out", name="photos"), [])


def test_every_flag_is_read_as_python_would_give_it() -> None:
    special = {
        "input": "/a", "output": "/b", "name": "n", "version": "2.0.0", "layout": "class_folders", "splits": "train=1",
        "split_by": "name", "image_size": "64", "resize_mode": "crop", "resample": "box", "image_format": "png",
        "jpeg_subsampling": "4:4:4", "max_image_bytes": "5MB", "num_shards": "3", "compression": "gzip",
        "labels_file": "/l", "background": "red", "channels": "1", "extensions": "png", "duplicates": "report",
        "base": "1.0.0",
    }  # fmt: skip
    arguments: list[str] = []
    expected: dict[str, object] = {}
    for name in FLAGS.keys() - {"manifest", "target_shard_bytes", "overwrite", "restart"}:  # which exclude others
        switch = FLAGS[name].default is False
        expected[name] = True if switch else special.get(name, "1")
        arguments += [f"--{name}"] if switch else [f"--{name}", str(expected[name])]
    config, rest = parse(arguments)
    assert rest == []
    assert config == Config(**expected)


def test_beam_options_are_passed_on() -> None:
    beam = ["--runner=DataflowRunner", "--project", "p", "--temp_location=gs://t", "--experiments=a", "--experiments=b"]
    config, rest = parse([*beam[:2], *GOOD, *beam[2:], "--streaming"])
    assert config == parse(GOOD)[0]
    assert sorted(rest) == sorted([*beam, "--streaming"])


@pytest.mark.parametrize("flag", ["--inpu", "--targ", "--image", "--run", "--direct_num", "--proj"])
def test_no_flag_can_be_abbreviated(flag: str) -> None:
    assert refused(flag, "x").startswith(f"unknown flag {flag!r}: ")


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("--imagesize=3", "did you mean --image_size?"),
        ("--split", "did you mean --splits?"),
        ("--max_reject", "did you mean --max_reject_fraction?"),
        ("-imagesize", "did you mean --image_size?"),
        ("-n=x", "did you mean --name?"),
        ("--runer=x", "did you mean --runner?"),
        ("--temp-locatio=x", "did you mean --temp_location?"),
        ("--qqqq", "see --help"),
    ],
)
def test_an_unknown_flag_names_the_nearest(flag: str, advice: str) -> None:
    assert refused(flag) == f"unknown flag {flag.partition('=')[0]!r}: {advice}"


def test_short_flags_are_told_before_what_is_missing() -> None:
    with pytest.raises(UsageError, match=r"^unknown flag '-i': did you mean --input\?$"):
        parse(["-i", "a", "-o", "b", "-n", "c"])


def test_dashes_in_a_flag_are_underscores() -> None:
    config, beams = parse([*GOOD, "--image-size", "64", "--split-by=(a-b)", "--one-hot", "--temp-location=gs://a-b"])
    assert (config.image_size, config.split_by, config.one_hot) == ((64, 64), re.compile("(a-b)"), True)
    assert beams == ["--temp_location=gs://a-b"]


def test_no_flag_of_beams_is_as_like_ours_as_a_slip_is() -> None:
    # So a slip is told at once, without the seconds that Beam's import takes.
    ours = [f"--{name}" for name in FLAGS]
    beams = beams_parser()[1]
    assert {"--runner", "--experiments", "--experiment", "--no_use_public_ips"} <= set(beams)
    assert not [flag for flag in beams if difflib.get_close_matches(flag, ours, cutoff=_SURELY_OURS)]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--layout --one_hot", "--layout: it has no value: write --layout VALUE"),
        ("--seed x", f"--seed 'x': give a whole number from {-(1 << 63)} to {(1 << 63) - 1}"),
        ("--max_reject_fraction a", "--max_reject_fraction 'a': give a number from 0 to 1"),
    ],
)
def test_values_that_are_missing_or_wrong_are_told(arguments: str, line: str) -> None:
    assert refused(*arguments.split()) == line


def test_a_negative_seed_is_a_value() -> None:
    assert parse([*GOOD, "--seed", "-5"])[0].seed == -5
