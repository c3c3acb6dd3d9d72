"""RandomResizedCrop before decoding: a JPEG is decoded only where its crop lies.

As Inception's and torchvision's: a window of a random share of the area and a random aspect ratio, resized. Ten tries,
drawn at once; where none fits into the image, the largest window in the middle whose ratio is allowed.
https://pytorch.org/vision/stable/generated/torchvision.transforms.RandomResizedCrop.html
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from reader.augment.per_image import PerImage, uniforms
from reader.crop_windows import FIRST_DRAW, TRIES, check_bounds

Tensor = Any  # TensorFlow ships no types


@dataclass(frozen=True)
class RandomResizedCrop:
    """Chooses crop windows by the records' seeds; `train_dataset` decodes and resizes them.

    Attributes:
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width over height.
        then: an augment for the resized images, such as `reader.augment.flip`.
    """

    scale: tuple[float, float]
    ratio: tuple[float, float]
    then: PerImage | Any = None

    def windows(self, sizes: Tensor, seeds: Tensor) -> Tensor:
        """A window in each image.

        Args:
            sizes: int64 [b, 2], height and width of each image.
            seeds: int32 [b, 2].

        Returns:
            int32 [b, 4]: y, x, height, width.
        """
        limits = tf.cast(sizes, tf.float32)
        height, width = limits[:, 0:1], limits[:, 1:2]
        draws = uniforms(seeds, range(FIRST_DRAW, FIRST_DRAW + 2 * TRIES + 2))
        area = height * width * _between(self.scale, draws[:, :TRIES])
        ratio = tf.exp(_between((math.log(self.ratio[0]), math.log(self.ratio[1])), draws[:, TRIES : 2 * TRIES]))
        tried_height, tried_width = tf.round(tf.sqrt(area / ratio)), tf.round(tf.sqrt(area * ratio))
        fits = (tried_height >= 1) & (tried_width >= 1) & (tried_height <= height) & (tried_width <= width)
        first = tf.argmax(fits, 1)[:, None]
        window = tf.concat([tf.gather(side, first, batch_dims=1) for side in (tried_height, tried_width)], 1)
        window = tf.where(tf.reduce_any(fits, 1, keepdims=True), window, self._middle(limits))
        free = limits - window
        place = tf.where(
            tf.reduce_any(fits, 1, keepdims=True), tf.floor(draws[:, 2 * TRIES :] * (free + 1)), tf.floor(free / 2)
        )
        return tf.cast(tf.concat([tf.minimum(place, free), window], 1), tf.int32)

    def _middle(self, limits: Tensor) -> Tensor:
        """Height and width of the largest window whose ratio is allowed, float32 [b, 2]."""
        height, width = limits[:, 0], limits[:, 1]
        ratio = tf.clip_by_value(width / height, *self.ratio)
        return tf.round(tf.stack([tf.minimum(height, width / ratio), tf.minimum(width, height * ratio)], 1))


def random_resized_crop(
    scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3), then: Any = None
) -> RandomResizedCrop:
    """An augment for `train_dataset` that resizes a random window of each image to `image_size`.

    Args:
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width over height.
        then: another augment, for the resized images, such as `reader.augment.flip`.

    Raises:
        UsageError: the bounds aren't in order.
    """
    check_bounds(scale, ratio)
    return RandomResizedCrop((scale[0], scale[1]), (ratio[0], ratio[1]), then)


def _between(bounds: tuple[float, float], draws: Tensor) -> Tensor:
    return bounds[0] + (bounds[1] - bounds[0]) * draws
