"""Resizing and augmentation: geometry, determinism, and that nothing but the seed decides."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import reader
from beam_pipeline.errors import UsageError
from reader import augment, decode, sizes
from reader.info import ImageInfo
from reader.order import augment_seeds, splitmix64

IMAGE = ImageInfo("jpeg", 3, (10, 20), (30, 20), (0.5,) * 3, (0.2,) * 3)


def ramp(height: int, width: int) -> np.ndarray:
    """Rises to the right in the first channel and downwards in the second."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 255 // width, y * 255 // height, np.full_like(x, 200)], -1).astype(np.uint8)


def test_stretch_shrinks_like_pillows_box_filter() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    expected = np.asarray(Image.fromarray(pixels).resize((30, 20), Image.Resampling.BOX)).astype(int)
    found = decode.resize(tf.constant(pixels), 20, 30, "stretch").numpy().astype(int)
    assert np.abs(found - expected).max() <= 1


@pytest.mark.parametrize("shape", [(40, 80), (80, 40), (7, 9), (33, 33)])
def test_crop_keeps_the_middle_and_the_aspect(shape: tuple[int, int]) -> None:
    found = decode.resize(tf.constant(ramp(*shape)), 20, 20, "crop").numpy().astype(int)
    assert found.shape == (20, 20, 3)
    side = min(shape)
    for channel, axis_length, axis in ((0, shape[1], 0), (1, shape[0], 1)):
        line = found[:, :, channel].mean(axis=axis)
        low, high = ((axis_length - side) / 2 / axis_length, (axis_length + side) / 2 / axis_length)
        assert line[0] == pytest.approx(255 * low, abs=255 / side)
        assert line[-1] == pytest.approx(255 * high, abs=2 * 255 / side + 1)
    assert (found[:, :, 2] == 200).all()


@pytest.mark.parametrize(("shape", "inner"), [((40, 80), (10, 20)), ((80, 40), (20, 10)), ((5, 5), (20, 20))])
def test_pad_keeps_everything_between_black_bars(shape: tuple[int, int], inner: tuple[int, int]) -> None:
    found = decode.resize(tf.constant(ramp(*shape)), 20, 20, "pad").numpy()
    rows, columns = np.flatnonzero(found[:, 10, 2]), np.flatnonzero(found[10, :, 2])
    assert (len(rows), len(columns)) == inner
    assert abs(rows[0] - (19 - rows[-1])) <= 1
    assert abs(columns[0] - (19 - columns[-1])) <= 1


def test_the_target_size_is_checked() -> None:
    assert sizes.target_size(IMAGE, 12) == (12, 12)
    assert sizes.target_size(IMAGE, (12, 18)) == (12, 18)
    with pytest.raises(UsageError, match=r"mixed sizes \(10x20 to 30x20\)"):
        sizes.target_size(IMAGE, None)
    with pytest.raises(UsageError, match="holds no image"):
        sizes.target_size(ImageInfo("jpeg", 3, None, None, (), ()), None)
    assert sizes.target_size(IMAGE, np.array((12, 18))) == (12, 18)  # type: ignore[arg-type]
    for wrong in (0, 2.5, (12, 0), (12, 12, 3), "12"):
        with pytest.raises(UsageError, match=r"^image_size=.*: a side or \(height, width\) in pixels$"):
            sizes.target_size(IMAGE, wrong)  # type: ignore[arg-type]


def test_what_is_no_augment_says_so() -> None:
    for wrong, message in (
        (augment.random_resized_crop, "random_resized_crop: call it, augment=reader.augment.random_resized_crop"),
        (augment.RandomResizedCrop, "RandomResizedCrop: call it, augment=reader.augment.random_resized_crop"),
        (reader.pillow.flip_crop, "flip_crop: that is reader.pillow's, for ShardDataset; take reader.augment's"),
        (reader.pillow.random_resized_crop(), "RandomResizedCrop.*: that is reader.pillow's, for ShardDataset"),
    ):
        with pytest.raises(UsageError, match=f"^augment={message}"):
            decode.batch_decoder(IMAGE, 12, augment=wrong)
        with pytest.raises(UsageError, match=f"^then={message.replace('augment=', 'then=')}"):
            decode.batch_decoder(IMAGE, 12, augment=augment.random_resized_crop(then=wrong))
    for bounds in (0.5, (0.5, 1.5), (0.5, 0.2), ("a", "b"), (0.1, 0.2, 0.3)):
        with pytest.raises(UsageError, match=r"^scale=.*: shares of the area \(smallest, largest\)"):
            augment.random_resized_crop(scale=bounds)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^ratio=2: width over height \(smallest, largest\)"):
        augment.random_resized_crop(ratio=2)  # type: ignore[arg-type]


def test_uniform_draws_are_splitmix64() -> None:
    keys = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    seeds = tf.constant(keys.astype("<u8").view("<i4").reshape(-1, 2))
    for draw in (0, 5):
        expected = [int(splitmix64(int(key), np.array([draw]))[0]) >> 40 for key in keys]
        assert augment.uniform(seeds, draw).numpy().tolist() == [value / 2**24 for value in expected]


def test_draws_of_records_and_epochs_are_uniform_and_independent() -> None:
    epochs = [tf.constant(augment_seeds(np.arange(20_000), 0, epoch)) for epoch in range(2)]
    draws = np.stack([augment.uniform(seeds, draw) for seeds in epochs for draw in range(2)])
    assert np.abs(draws.mean(1) - 0.5).max() < 0.01
    assert np.abs(np.corrcoef(draws) - np.eye(4)).max() < 0.03


def test_flip_mirrors_half_of_the_images() -> None:
    images = tf.constant(np.stack([ramp(8, 10)] * 400))
    found = augment.flip(images, tf.constant(augment_seeds(np.arange(400), 0, 0))).numpy()
    mirrored = (found == ramp(8, 10)[:, ::-1]).all((1, 2, 3))
    assert ((found == ramp(8, 10)).all((1, 2, 3)) != mirrored).all()
    assert 150 < mirrored.sum() < 250


def test_flip_crop_shifts_by_an_eighth_at_most_and_fills_with_black() -> None:
    images = tf.constant(np.stack([np.full((16, 24, 3), 9, np.uint8)] * 400))
    found = augment.flip_crop(images, tf.constant(augment_seeds(np.arange(400), 0, 0))).numpy()
    assert found.shape == (400, 16, 24, 3)
    assert set(np.unique(found)) == {0, 9}
    rows, columns = (found[:, :, :, 0] > 0).any(2), (found[:, :, :, 0] > 0).any(1)
    assert set(rows.sum(1)) == {14, 15, 16}
    assert set(columns.sum(1)) == {21, 22, 23, 24}
    tops = np.where(rows[:, 0], np.where(rows[:, -1], 0, 1), -1)
    assert set(tops) == {-1, 0, 1}  # up, not at all, down


@pytest.mark.parametrize("name", ["flip", "flip_crop"])
def test_the_seed_alone_decides(name: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), np.uint8)
    seeds = augment_seeds(np.arange(40), 3, 1)
    whole = getattr(augment, name)(tf.constant(images), tf.constant(seeds)).numpy()
    order = np.random.default_rng(1).permutation(40)
    for part in np.array_split(order, 7):
        assert np.array_equal(getattr(augment, name)(tf.constant(images[part]), tf.constant(seeds[part])), whole[part])
