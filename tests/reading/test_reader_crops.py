"""RandomResizedCrop: where windows lie, what they hold, and that only the seed decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import reader
from beam_pipeline.errors import UsageError
from reader.decode import batch_decoder, resize
from reader.info import ImageInfo
from reader.order import augment_seeds
from tests.reading.shards import draw, make_dataset

SEEDS = augment_seeds(np.arange(3000), 5, 2)  # no tensor: that would start TensorFlow while tests are collected


def windows(size: tuple[int, int], **bounds: Any) -> np.ndarray:
    sizes = tf.constant(np.tile(size, (3000, 1)))
    return reader.augment.random_resized_crop(**bounds).windows(sizes, SEEDS).numpy()


@pytest.mark.parametrize("size", [(224, 224), (300, 200), (50, 400), (2, 3), (1, 1)])
def test_windows_lie_inside(size: tuple[int, int]) -> None:
    found = windows(size)
    assert found.shape == (3000, 4)
    assert (found >= [0, 0, 1, 1]).all()
    assert (found[:, :2] + found[:, 2:] <= size).all()


def test_area_and_ratio_are_drawn_as_asked() -> None:
    found = windows((1000, 1000))
    area, ratio = found[:, 2] * found[:, 3] / 1e6, found[:, 3] / found[:, 2]
    assert 0.079 < area.min() < 0.1
    assert 0.9 < area.max() <= 1
    assert 0.45 < area.mean() < 0.52  # those near 1 rarely fit with another ratio
    assert 0.749 < ratio.min() < 0.76
    assert 1.32 < ratio.max() < 1.335
    assert np.log(ratio).mean() == pytest.approx(0, abs=0.01)
    free = 1000 - found[:, 2:]
    places = found[:, :2] / np.maximum(free, 1)
    assert places.mean() == pytest.approx(0.5, abs=0.02)
    assert abs(np.corrcoef(places.T)[0, 1]) < 0.05


def test_what_never_fits_is_the_middle_with_an_allowed_ratio() -> None:
    found = windows((30, 1000), scale=(0.9, 1.0))
    assert np.unique(found, axis=0).tolist() == [[0, 480, 30, 40]]


def test_bounds_are_checked() -> None:
    with pytest.raises(UsageError, match=r"scale=\(0.5, 1.5\)"):
        reader.augment.random_resized_crop(scale=(0.5, 1.5))
    with pytest.raises(UsageError, match=r"ratio=\(2, 1\)"):
        reader.augment.random_resized_crop(ratio=(2, 1))


@pytest.mark.parametrize("image_format", ["jpeg", "png", "mixed"])
@pytest.mark.parametrize("is_fixed_size", [True, False])
def test_only_the_window_is_decoded_and_resized(image_format: str, is_fixed_size: bool) -> None:
    size = (48, 64)
    formats = ["jpeg", "png"] if image_format == "mixed" else [image_format]
    encoded = [draw(number, size, formats[number % len(formats)]) for number in range(12)]
    image = ImageInfo(image_format, 3, size if is_fixed_size else (1, 1), size, (), ())
    crop = reader.augment.random_resized_crop(scale=(0.3, 0.8))
    found = batch_decoder(image, 20, "crop", crop)(tf.constant(encoded), SEEDS[:12]).numpy()
    chosen = crop.windows(tf.constant(np.tile(size, (12, 1))), SEEDS[:12]).numpy()
    for one, (y, x, height, width), pixels in zip(encoded, chosen, found, strict=True):
        whole = tf.io.decode_image(one).numpy()
        expected = resize(tf.constant(whole[y : y + height, x : x + width]), 20, 20, "stretch").numpy()
        # Where a JPEG is cut, its colours are interpolated without their neighbours outside.
        assert np.abs(pixels.astype(int) - expected).mean() < 2.5


def test_the_record_alone_decides_on_any_batch_and_host(tmp_path: Path) -> None:
    sizes = [(40, 60), (60, 40)]
    folder = make_dataset(tmp_path / "1.0.0", {"train": [70, 50]}, size_of=lambda number: sizes[number % 2])
    info = reader.load_info(folder)
    crop = reader.augment.random_resized_crop(then=reader.augment.flip_crop)

    def images(batch: int, hosts: int) -> dict[bytes, bytes]:
        found = {}
        for host in range(hosts):
            for inputs, _ in reader.train_dataset(
                info,
                "train",
                global_batch_size=batch,
                host=(host, hosts),
                image_size=16,
                augment=crop,
                features=["filename"],
            ):
                pairs = zip(inputs["filename"].numpy(), inputs["image"].numpy(), strict=True)
                found |= {name: image.tobytes() for name, image in pairs}
        return found

    one = images(12, 1)
    assert len(one) == 120
    assert images(40, 2) == one
    plain = {
        name: image.tobytes()
        for inputs, _ in reader.train_dataset(
            info,
            "train",
            global_batch_size=12,
            image_size=16,
            augment=reader.augment.random_resized_crop(),
            features=["filename"],
        )
        for name, image in zip(inputs["filename"].numpy(), inputs["image"].numpy(), strict=True)
    }
    assert sum(plain[name] != one[name] for name in one) > 60


def test_a_crop_needs_an_image_size(tmp_path: Path) -> None:
    info = reader.load_info(make_dataset(tmp_path / "1.0.0", {"train": [8]}))
    with pytest.raises(UsageError, match="random_resized_crop resizes its crops: give image_size"):
        reader.train_dataset(info, "train", global_batch_size=2, augment=reader.augment.random_resized_crop())
