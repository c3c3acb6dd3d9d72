"""RandAugment (https://arxiv.org/abs/1909.13719) on whole batches, in `keras.ops`.

Each image gets its own operations. Those of colour are all computed and one is chosen, which costs little where a
compiler fuses them; the geometric ones of an image are one matrix, so each round interpolates once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from reader.augment.stateless import uniform

Tensor = Any  # Keras ships no types

ops = keras.ops

MOST_MAGNITUDE = 10
_GREY = (0.299, 0.587, 0.114)
_FILL = 128.0
_MOST_SHEAR, _MOST_SHIFT, _MOST_TURN = 0.3, 0.3, math.radians(30)  # at magnitude 10
_MOST_COLOUR = 0.9


def rand_augment(images: Tensor, step: Tensor, seed: int, operations: int = 2, magnitude: float = 9.0) -> Tensor:
    """Change each image by some operations, drawn for it.

    Args:
        images: float32 [b, h, w, c] in [0, 255].
        step, seed: decide what is drawn, with the place in the batch.
        operations: how many, one after the other.
        magnitude: 0 changes nothing that has a strength, 10 is the strongest.

    Returns:
        float32 [b, h, w, c] in [0, 255].
    """
    level = magnitude / MOST_MAGNITUDE
    count = ops.shape(images)[0]
    for number in range(operations):
        choice = ops.floor(uniform(seed, step, f"operation {number}", count) * (len(_COLOURS) + _GEOMETRIC + 1))
        sign = ops.where(uniform(seed, step, f"sign {number}", count) < 0.5, -1.0, 1.0)
        changed = images
        for place, colour in enumerate(_COLOURS):
            is_chosen = (choice == place)[:, None, None, None]
            changed = ops.where(is_chosen, colour(images, (sign * level)[:, None, None, None]), changed)
        images = _move(ops.clip(changed, 0.0, 255.0), choice - len(_COLOURS), sign * level)
    return images


def _brightness(images: Tensor, strength: Tensor) -> Tensor:
    return images * (1 + _MOST_COLOUR * strength)


def _contrast(images: Tensor, strength: Tensor) -> Tensor:
    mean = ops.mean(_grey(images), axis=(1, 2, 3), keepdims=True)
    return mean + (images - mean) * (1 + _MOST_COLOUR * strength)


def _colour(images: Tensor, strength: Tensor) -> Tensor:
    grey = _grey(images)
    return grey + (images - grey) * (1 + _MOST_COLOUR * strength)


def _sharpness(images: Tensor, strength: Tensor) -> Tensor:
    blurred = ops.average_pool(images, 3, strides=1, padding="same")
    return blurred + (images - blurred) * (1 + _MOST_COLOUR * strength)


def _solarize(images: Tensor, strength: Tensor) -> Tensor:
    return ops.where(images >= 256.0 * (1 - ops.abs(strength)), 255.0 - images, images)


def _posterize(images: Tensor, strength: Tensor) -> Tensor:
    kept = 2.0 ** ops.round(4 * ops.abs(strength))  # up to 4 of 8 bits are lost
    return ops.floor(images / kept) * kept


def _autocontrast(images: Tensor, _: Tensor) -> Tensor:
    low, high = (find(images, axis=(1, 2), keepdims=True) for find in (ops.min, ops.max))
    return ops.where(high > low, (images - low) * (255.0 / ops.maximum(high - low, 1.0)), images)


_COLOURS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    _brightness,
    _contrast,
    _colour,
    _sharpness,
    _solarize,
    _posterize,
    _autocontrast,
)
_GEOMETRIC = 5  # turn, shear and shift in two directions; the last choice is to leave the image as it is


def _grey(images: Tensor) -> Tensor:
    if images.shape[-1] != len(_GREY):
        return images
    return ops.sum(images * ops.convert_to_tensor(_GREY, "float32"), axis=-1, keepdims=True)


def _move(images: Tensor, choice: Tensor, strength: Tensor) -> Tensor:
    """Turn (0), shear (1, 2) or shift (3, 4) each image around its middle; other choices leave it."""
    height, width = images.shape[1:3]
    turn, shear_x, shear_y, shift_x, shift_y = (ops.where(choice == kind, strength, 0.0) for kind in range(_GEOMETRIC))
    cosine, sine = ops.cos(turn * _MOST_TURN), ops.sin(turn * _MOST_TURN)
    a, b = cosine, -sine + _MOST_SHEAR * shear_x
    c, d = sine + _MOST_SHEAR * shear_y, cosine
    middle_x, middle_y = (width - 1) / 2, (height - 1) / 2
    to_x = middle_x - a * middle_x - b * middle_y + _MOST_SHIFT * width * shift_x
    to_y = middle_y - c * middle_x - d * middle_y + _MOST_SHIFT * height * shift_y
    a, b, to_x, c, d, to_y = (each[:, None, None] for each in (a, b, to_x, c, d, to_y))
    x = ops.arange(width, dtype="float32")[None, None, :]
    y = ops.arange(height, dtype="float32")[None, :, None]
    is_moved = ((choice >= 0) & (choice < _GEOMETRIC))[:, None, None, None]
    return ops.where(is_moved, _sample(images, a * x + b * y + to_x, c * x + d * y + to_y), images)


def _sample(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Bilinear values of each image at its places x, y [b, h, w]; `_FILL` outside.

    Gathers, which every compiler has, each within its own image, so that a batch may be spread over devices; not
    `ops.image.affine_transform`, whose TensorFlow kernel XLA lacks.
    """
    height, width, channels = images.shape[1:]
    x, y = ops.clip(x, -1.0, width) + 1, ops.clip(y, -1.0, height) + 1  # in an image with a border of 1
    left, top = ops.minimum(ops.floor(x), width), ops.minimum(ops.floor(y), height)
    row = width + 2
    place = ops.cast(top, "int32") * row + ops.cast(left, "int32")
    place, to_right, down = (ops.reshape(each, (-1, height * width, 1)) for each in (place, x - left, y - top))
    bordered = ops.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=_FILL)
    pixels = ops.reshape(bordered, (-1, (height + 2) * row, channels))
    upper, lower = (
        _pick(pixels, place + step) * (1 - to_right) + _pick(pixels, place + step + 1) * to_right for step in (0, row)
    )
    return ops.reshape(upper * (1 - down) + lower * down, (-1, height, width, channels))


def _pick(pixels: Tensor, places: Tensor) -> Tensor:
    """Of pixels [b, n, c] those at places int32 [b, m, 1]: [b, m, c]."""
    if keras.backend.backend() == "tensorflow":  # Keras' own would gather each channel by itself, in twice the time
        return tf.gather(pixels, places[..., 0], batch_dims=1)
    return ops.take_along_axis(pixels, places, axis=1)
