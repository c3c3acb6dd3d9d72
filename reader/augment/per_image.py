"""Augmentation of one decoded image at a time, on the host: flips and shifts.

A `PerImage` is applied where the image was just decoded and lies in the CPU's cache: a second pass over the batch, in
which TensorFlow copies every image twice more, cost 30 µs an image at 224×224.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

Tensor = Any  # TensorFlow ships no types

_FLIP, _SHIFT_Y, _SHIFT_X = range(3)  # which draw decides what
_CROP_DIVISOR = 8  # flip_crop pads each side by 1/8 of it


def uniform(seeds: Tensor, draw: int) -> Tensor:
    """Random numbers in [0, 1), one a record: number `draw` (from 0) of each record's own stream.

    SplitMix64 (https://prng.di.unimi.it/splitmix64.c) in integer arithmetic: equal on every CPU and TensorFlow version.

    Args:
        seeds: int32 [b, 2].

    Returns:
        float32 [b].
    """
    return uniforms(seeds, [draw])[:, 0]


def uniforms(seeds: Tensor, draws: Iterable[int]) -> Tensor:
    """Several draws at once, as `uniform`: float32 [b, len(draws)]."""
    steps = np.array([(draw + 1) * 0x9E3779B97F4A7C15 % 2**64 for draw in draws], np.uint64)
    state = tf.bitcast(seeds, tf.uint64)[:, None] + steps
    state = _mix(state, 30) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
    state = _mix(state, 27) * tf.constant(0x94D049BB133111EB, tf.uint64)
    state = _mix(state, 31)
    return tf.cast(tf.bitwise.right_shift(state, tf.constant(40, tf.uint64)), tf.float32) * 2.0**-24


def _mix(state: Tensor, shift: int) -> Tensor:
    return tf.bitwise.bitwise_xor(state, tf.bitwise.right_shift(state, tf.constant(shift, tf.uint64)))


class PerImage:
    """An augment `f(images, seeds)` that treats every image by itself.

    Args:
        draw: seeds int32 [b, 2] → tensors [b, …] that decide what happens to each image.
        apply: (image uint8 [h, w, c], *what was drawn for it) → image of the same shape.
        doc: what it does.
    """

    def __init__(self, draw: Callable[[Tensor], tuple[Tensor, ...]], apply: Callable[..., Tensor], doc: str) -> None:
        self.draw = draw
        self.apply = apply
        self.__doc__ = doc

    def __call__(self, images: Tensor, seeds: Tensor) -> Tensor:
        """Apply it to uint8 [b, h, w, c] with seeds int32 [b, 2]."""
        images = tf.convert_to_tensor(images)
        spec = tf.TensorSpec(images.shape[1:], images.dtype)
        return tf.map_fn(
            lambda item: tf.ensure_shape(self.apply(*item), spec.shape),
            (images, *self.draw(tf.convert_to_tensor(seeds))),
            fn_output_signature=spec,
            parallel_iterations=1,
        )


def _flip_if(image: Tensor, is_mirrored: Tensor) -> Tensor:
    return tf.cond(is_mirrored, lambda: tf.reverse(image, [1]), lambda: image)


def _draw_flip(seeds: Tensor) -> tuple[Tensor, ...]:
    return (uniform(seeds, _FLIP) < 0.5,)


def _draw_flip_crop(seeds: Tensor) -> tuple[Tensor, ...]:
    return uniform(seeds, _FLIP) < 0.5, uniform(seeds, _SHIFT_Y), uniform(seeds, _SHIFT_X)


def _flip_crop(image: Tensor, is_mirrored: Tensor, draw_y: Tensor, draw_x: Tensor) -> Tensor:
    height, width = image.shape[:2]
    most_y, most_x = height // _CROP_DIVISOR, width // _CROP_DIVISOR
    down = tf.cast(draw_y * (2 * most_y + 1), tf.int32) - most_y
    right = tf.cast(draw_x * (2 * most_x + 1), tf.int32) - most_x
    top, left = tf.maximum(down, 0), tf.maximum(right, 0)
    bottom, end = tf.maximum(-down, 0), tf.maximum(-right, 0)
    inside = _flip_if(image[bottom : height - top, end : width - left], is_mirrored)
    return tf.ensure_shape(tf.pad(inside, [[top, bottom], [left, end], [0, 0]]), image.shape)


flip = PerImage(_draw_flip, _flip_if, "Mirror half of the images, left for right.")
flip_crop = PerImage(
    _draw_flip_crop,
    _flip_crop,
    "Mirror half of the images, and shift each by up to 1/8 of its height and width; what comes in is black: the same\n"
    "as padding by 1/8 on every side and cropping the old size at random.",
)
