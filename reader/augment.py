"""Augmentation on the host: `f(images, seeds)`, stateless, after decode and resize.

    train = reader.train_dataset(info, "train", global_batch_size=256, augment=reader.augment.flip_crop)

`images` is uint8 [b, height, width, c]; `seeds` is int32 [b, 2], one seed a record, which follows from (seed, epoch,
record number): the same record is augmented in the same way on any thread, batch size or host, and after any resume.
Write others with `uniform`, or with TensorFlow's `stateless_*` functions and one row of `seeds` an image.
"""

from __future__ import annotations

from typing import Any

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
    key = tf.bitcast(seeds, tf.uint64)
    state = key + tf.constant((draw + 1) * 0x9E3779B97F4A7C15 % 2**64, tf.uint64)
    state = _mix(state, 30) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
    state = _mix(state, 27) * tf.constant(0x94D049BB133111EB, tf.uint64)
    state = _mix(state, 31)
    return tf.cast(tf.bitwise.right_shift(state, tf.constant(40, tf.uint64)), tf.float32) * 2.0**-24


def _mix(state: Tensor, shift: int) -> Tensor:
    return tf.bitwise.bitwise_xor(state, tf.bitwise.right_shift(state, tf.constant(shift, tf.uint64)))


def flip(images: Tensor, seeds: Tensor) -> Tensor:
    """Mirror half of the images, left for right."""
    # An image at a time: reversing whole batches and choosing costs seven times as much.
    return tf.map_fn(
        lambda item: _flip_if(*item),
        (images, uniform(seeds, _FLIP) < 0.5),
        fn_output_signature=tf.TensorSpec(images.shape[1:], images.dtype),
        parallel_iterations=1,
    )


def flip_crop(images: Tensor, seeds: Tensor) -> Tensor:
    """Mirror half of the images, and shift each by up to 1/8 of its height and width; what comes in is black.

    The same as padding by 1/8 on every side and cropping the old size at random.
    """
    height, width = images.shape[1:3]
    most_y, most_x = height // _CROP_DIVISOR, width // _CROP_DIVISOR
    shifts_y = tf.cast(uniform(seeds, _SHIFT_Y) * (2 * most_y + 1), tf.int32) - most_y
    shifts_x = tf.cast(uniform(seeds, _SHIFT_X) * (2 * most_x + 1), tf.int32) - most_x

    def augment(item: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        image, mirrored, down, right = item
        top, left = tf.maximum(down, 0), tf.maximum(right, 0)
        bottom, end = tf.maximum(-down, 0), tf.maximum(-right, 0)
        image = image[bottom : height - top, end : width - left]
        image = tf.pad(_flip_if(image, mirrored), [[top, bottom], [left, end], [0, 0]])
        return tf.ensure_shape(image, images.shape[1:])

    return tf.map_fn(
        augment,
        (images, uniform(seeds, _FLIP) < 0.5, shifts_y, shifts_x),
        fn_output_signature=tf.TensorSpec(images.shape[1:], images.dtype),
        parallel_iterations=1,
    )


def _flip_if(image: Tensor, mirrored: Tensor) -> Tensor:
    return tf.cond(mirrored, lambda: tf.reverse(image, [1]), lambda: image)
