"""The sample: channel statistics exact and in any order, and an early stop before the money is spent."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.images.codec import ChannelSums, channel_sums
from beam_pipeline.inputs.folders import all_images
from beam_pipeline.planning import sampling
from beam_pipeline.planning.sampling import Measurement, check_sample, statistics
from beam_pipeline.schema import FRAME_BYTES
from beam_pipeline.schema.manifest import Statistics
from tests import make


def of(sums: ChannelSums | None, split: str = "train", path: str = "a/b.jpg") -> Measurement:
    return Measurement(path, split, 100, 50, sums, None)


def permitting(fraction: float, output: Path = Path("unused"), plan_only: bool = False) -> Config:
    return Config(input="x", output=str(output), name="x", max_reject_fraction=fraction, plan_only=plan_only)


def bad(path: str) -> Measurement:
    return Measurement(path, "train", 100, 0, None, Reject("truncated", "JPEG of 1x1 pixels, 9 bytes"))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 99))
def test_statistics_are_numpys_over_all_pixels(sides: list[int], seed: int) -> None:
    images = [make.noise(side, side + 1, seed + number) for number, side in enumerate(sides)]
    found = statistics(of(channel_sums(image)) for image in images)
    pixels = np.concatenate([np.asarray(image).reshape(-1, 3) for image in images]) / 255
    assert [float(mean) for mean in found.mean] == pytest.approx(pixels.mean(0).tolist(), abs=1e-6)
    assert [float(std) for std in found.std] == pytest.approx(pixels.std(0).tolist(), abs=1e-6)
    assert found.sampled_images == len(images)


def test_statistics_are_decimal_strings_in_any_order() -> None:
    found = statistics([of(channel_sums(Image.new("RGB", (3, 3), (255, 0, 51))))])
    assert found == Statistics(("1.000000", "0.000000", "0.200000"), ("0.000000",) * 3, 1)
    sample = [of(channel_sums(make.noise(9, 9, seed))) for seed in range(8)]
    assert statistics(random.Random(3).sample(sample, 8)) == statistics(sample)


def test_statistics_are_of_train_if_there_is_any() -> None:
    black, white = (channel_sums(Image.new("RGB", (2, 2), color)) for color in ("black", "white"))
    assert statistics([of(black), of(white, "test")]).mean == ("0.000000",) * 3
    assert statistics([of(white, "test")]).mean == ("1.000000",) * 3
    assert statistics([]) == Statistics((), (), 0)


def test_no_digit_is_lost_on_very_many_pixels() -> None:
    # 10^14 pixels in a float would lose the last digits of the variance.
    sums = ChannelSums(10**14, (255 * 10**14 // 2,), (255 * 255 * 10**14 // 2,))
    assert statistics([of(sums)]) == Statistics(("0.500000",), ("0.500000",), 1)


@pytest.mark.parametrize("plan_only", [False, True])
def test_only_clearly_more_rejects_of_a_part_stop_and_stay_in_the_state(tmp_path: Path, plan_only: bool) -> None:
    sample = [bad(f"{number}") for number in range(7)] + [of(None)] * 93
    config = permitting(0.01, tmp_path, plan_only)
    check_sample(config, [*sample[1:], of(None)], 10_000)  # 3 + 3 × 1
    with pytest.raises(ImageShardsError) as caught:
        check_sample(config, sample, 10_000)
    see = "" if plan_only else f"see imageshards rejects {tmp_path}/x/1.0.0, "
    assert str(caught.value) == (
        "7 of 100 sampled images rejected, --max_reject_fraction is 0.01: "
        f"the first is '0' (truncated: JPEG of 1x1 pixels, 9 bytes); {see}remove them or raise --max_reject_fraction"
    )
    lines = make.files(tmp_path).get("x/_state/1.0.0/rejects.jsonl", b"").splitlines()
    assert [json.loads(line)["path"] for line in lines] == ([] if plan_only else list("0123456"))


def test_where_all_were_sampled_the_limit_itself_counts(tmp_path: Path) -> None:
    sample = [of(None)] * 98 + [bad("a"), bad("b")]
    check_sample(permitting(0.02), sample, 100)
    with pytest.raises(ImageShardsError, match=r"^2 of 100 images rejected"):
        check_sample(permitting(0.019, tmp_path), sample, 100)


def test_exactly_the_limit_is_not_over_it() -> None:
    for percent in range(1, 100):  # in floats 0.29 × 100 is 28.999999999999996
        check_sample(permitting(float(f"0.{percent:02d}")), [bad("x")] * percent + [of(None)] * (100 - percent), 100)


def test_a_measurement_is_of_the_record_that_will_be_written(photos: Path, tmp_path: Path) -> None:
    config = Config(input=str(photos), output=str(tmp_path), name="photos", image_size=24, one_hot=True)
    refs = list(all_images(config))
    measured = {one.path: one for one in sampling.measure(config, 3, refs)}
    version = make.published(photos, tmp_path, "--one_hot")
    lengths = [int(line.split()[1]) for line in next(version.glob("index/*.idx")).read_text().splitlines()]
    ordered = sorted(refs, key=lambda ref: (ref.order_key, ref.path))
    assert [measured[ref.path].record_bytes for ref in ordered] == lengths
    assert lengths[0] > FRAME_BYTES
    plan = make.manifest(version)["plan"]["splits"]["train"]
    assert plan["estimated_bytes"] == sum(lengths) == make.manifest(version)["splits"]["train"]["bytes"]
