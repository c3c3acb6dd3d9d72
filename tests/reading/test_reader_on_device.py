"""Augmentation in the training step: distributions, geometry, determinism, and that models learn with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import reader
from beam_pipeline.errors import UsageError
from reader.augment import on_device
from reader.augment.rand_augment import _move, _sample, rand_augment
from reader.augment.stateless import beta, uniform
from tests.reading.shards import make_dataset


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    return reader.load_info(make_dataset(tmp_path_factory.mktemp("device") / "1.0.0", {"train": [96]}))


IMAGES = np.random.default_rng(0).integers(0, 256, (64, 24, 32, 3), np.uint8)
LABELS = np.arange(64) % 3


def array(tensor: object) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(tensor))


def test_numbers_are_uniform_and_depend_on_everything() -> None:
    draws = np.stack([array(uniform(seed, step, name, 20_000)) for seed in (0, 1) for step in (0, 1) for name in "ab"])
    assert np.abs(draws.mean(1) - 0.5).max() < 0.01
    assert np.abs(draws.std(1) - 12**-0.5).max() < 0.01
    assert np.abs(np.corrcoef(draws) - np.eye(8)).max() < 0.03
    assert np.array_equal(draws[0], array(uniform(0, keras.ops.convert_to_tensor(0), "a", 20_000)))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 2.0])
def test_beta_has_its_moments(alpha: float) -> None:
    draws = array(beta(alpha, uniform(0, 0, "beta", 50_000)))
    assert draws.mean() == pytest.approx(0.5, abs=0.01)
    assert draws.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), abs=0.004)


def test_normalize_is_mean_0_and_std_1(info: reader.DatasetInfo) -> None:
    expected = (IMAGES / 255.0 - 0.5) / 0.25
    assert np.abs(array(on_device.normalize(IMAGES, info)) - expected).max() < 1e-5
    layer = on_device.Normalize(info)
    assert np.abs(array(layer(IMAGES)) - expected).max() < 1e-5
    again = on_device.Normalize.from_config(layer.get_config())
    assert np.array_equal(array(again(IMAGES)), array(layer(IMAGES)))
    unknown = replace(info, image=replace(info.image, mean=(), std=()))
    for build in (lambda: on_device.Normalize(unknown), lambda: on_device.normalize(IMAGES, unknown)):
        with pytest.raises(UsageError, match="mean and std aren't known"):
            build()


def test_mixup_mixes_pixels_and_labels_alike(info: reader.DatasetInfo) -> None:
    augment = on_device.Augment(info, mixup=1.0)
    images, labels = map(array, augment.pair(IMAGES, LABELS, 3))
    share = array(beta(1.0, uniform(0, 3, "mixup", 64)))
    pixels = share[:, None, None, None]
    assert np.abs(images - (IMAGES * pixels + IMAGES[::-1] * (1 - pixels))).max() <= 0.51
    one_hot = np.eye(3)[LABELS]
    assert np.abs(labels - (one_hot * share[:, None] + one_hot[::-1] * (1 - share[:, None]))).max() < 1e-6


def test_cutmix_pastes_a_box_and_labels_by_its_area(info: reader.DatasetInfo) -> None:
    images, labels = map(array, on_device.Augment(info, cutmix=1.0).pair(IMAGES, LABELS, 3))
    is_own = (images == IMAGES).all(-1)
    assert ((images == IMAGES) | (images == IMAGES[::-1])).all()
    own = is_own.mean((1, 2))
    assert 0.55 < own.mean() < 0.75  # boxes at the border are cut
    for number, box in enumerate(~is_own):
        rows, columns = np.flatnonzero(box.any(1)), np.flatnonzero(box.any(0))
        if len(rows):
            assert box[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].mean() > 0.99
        expected = np.eye(3)[LABELS[number]] * own[number] + np.eye(3)[LABELS[-1 - number]] * (1 - own[number])
        assert np.abs(labels[number] - expected).max() < 0.02


def test_label_smoothing_and_nothing_else(info: reader.DatasetInfo) -> None:
    images, labels = map(array, on_device.Augment(info, label_smoothing=0.3).pair(IMAGES, LABELS, 0))
    assert np.array_equal(images, IMAGES)
    assert np.abs(labels - (np.eye(3)[LABELS] * 0.7 + 0.1)).max() < 1e-6


def test_rand_augment_follows_seed_and_step_and_changes_more_with_magnitude() -> None:
    images = IMAGES.astype(np.float32)
    found = array(rand_augment(images, 4, 0))
    assert np.array_equal(found, array(rand_augment(images, 4, 0)))
    assert not np.array_equal(found, array(rand_augment(images, 5, 0)))
    assert 0 <= found.min() <= found.max() <= 255
    changed = [
        np.abs(array(rand_augment(images, 4, 0, 1, magnitude)) - images).mean((1, 2, 3)) for magnitude in (1, 5, 10)
    ]
    assert changed[0].mean() < changed[1].mean() < changed[2].mean()
    assert 0 < (changed[2] == 0).sum() < 20  # some are left alone


def test_shifts_turns_and_shears_move_the_right_way() -> None:
    image = np.zeros((1, 21, 31, 1), np.float32)
    image[0, 10, 15] = 255
    places = {}
    for kind in range(5):
        moved = array(_move(image, np.array([float(kind)]), np.array([1.0], np.float32)))[0, :, :, 0]
        places[kind] = np.unravel_index(moved.argmax(), moved.shape)
    assert places[0] == places[1] == places[2] == (10, 15)  # around the middle
    assert places[3] == (10, 6)
    assert places[4] == (4, 15)
    assert np.array_equal(array(_move(image, np.array([7.0]), np.array([1.0], np.float32))), image)


@pytest.mark.parametrize("size", [(21, 31), (32, 20)])
def test_moved_pixels_are_bilinear_and_grey_outside(size: tuple[int, int]) -> None:
    image = np.random.default_rng(1).uniform(0, 255, (*size, 3)).astype(np.float32)
    y, x = (place.astype(np.float32) for place in np.indices(size))
    a, b, to_x, c, d, to_y = 0.9, -0.3, 1.7, 0.2, 0.9, -3.2
    sampled = array(_sample(image[None], (a * x + b * y + to_x)[None], (c * x + d * y + to_y)[None]))
    expected = keras.ops.image.affine_transform(
        image[None], np.array([[a, b, to_x, c, d, to_y, 0, 0]], np.float32), "bilinear", "constant", 128.0
    )
    assert np.abs(sampled - array(expected)).max() < 0.01


def test_xla_compiles_all_of_it_and_does_the_same(info: reader.DatasetInfo) -> None:
    """Keras compiles with XLA wherever it sees a GPU, and TPUs have nothing else."""
    augment = on_device.Augment(info, (1, 9), mixup=0.2, cutmix=1.0, label_smoothing=0.1)
    images, labels = augment.pair(IMAGES, LABELS, 3)
    compiled = tf.function(augment.pair, jit_compile=True)
    xla_images, xla_labels = compiled(tf.constant(IMAGES), tf.constant(LABELS), tf.constant(3))
    difference = np.abs(array(images).astype(int) - array(xla_images).astype(int))
    assert difference.mean() < 0.1  # its mathematical functions round otherwise
    assert np.abs(array(labels) - array(xla_labels)).max() < 1e-5


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"label_smoothing": 2.0}, r"label_smoothing=2\.0: a share, 0 to 1"),
        ({"mixup": -1}, "mixup=-1: alpha of a Beta distribution, 0 for none"),
        ({"cutmix": "1"}, "cutmix='1': alpha of a Beta distribution"),
        ({"rand_augment": (-1, 9)}, r"rand_augment=\(-1, 9\): \(operations an image, magnitude 0 to 10\)"),
        ({"rand_augment": (2, 99)}, r"rand_augment=\(2, 99\): "),
        ({"rand_augment": (2, None)}, r"rand_augment=\(2, None\): "),
        ({"rand_augment": 2}, r"rand_augment=2: .* such as \(2, 9\)"),
    ],
)
def test_an_argument_outside_its_range_is_named(
    info: reader.DatasetInfo, argument: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        on_device.Augment(info, **argument)


def test_fit_learns_on_mixed_batches_and_serves_without(info: reader.DatasetInfo, tmp_path: Path) -> None:
    inputs = keras.Input((16, 24, 3), dtype="uint8")
    x = keras.layers.Flatten()(on_device.Normalize(info)(inputs))
    model = on_device.AugmentedModel(inputs, keras.layers.Dense(3)(x))
    model.augment = on_device.Augment(info, (1, 3), mixup=0.2, cutmix=1.0, label_smoothing=0.1)
    model.compile(keras.optimizers.Adam(0.003), keras.losses.CategoricalCrossentropy(from_logits=True))
    train = reader.train_dataset(info, "train", global_batch_size=32)
    losses = model.fit(train, epochs=15, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(
        tmp_path / "model.keras", custom_objects={"AugmentedModel": on_device.AugmentedModel}
    )
    assert np.allclose(loaded.predict(IMAGES[:4, :16, :24], verbose=0), model.predict(IMAGES[:4, :16, :24], verbose=0))
