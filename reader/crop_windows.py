"""The window of a RandomResizedCrop, by a record's seed, in NumPy: that of `reader.augment.random_resized_crop`.

As Inception's and torchvision's: a random share of the area and a random aspect ratio. Ten tries, drawn at once; where
none fits into the image, the largest window in the middle whose ratio is allowed. In float32, step by step as
TensorFlow does it: 2 of 60,000 windows differed, by a pixel, since the two libraries don't round exp alike. A window
costs 60 µs.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from beam_pipeline.errors import UsageError
from reader.order import splitmix64

TRIES = 10
# Draws 0 to 7 are `then`'s: flips and shifts fall as they would without a crop.
FIRST_DRAW = 8
_DRAWS = np.arange(FIRST_DRAW, FIRST_DRAW + 2 * TRIES + 2)

Floats = npt.NDArray[np.float32]
Bounds = tuple[float, float]


def check_bounds(scale: Bounds, ratio: Bounds) -> None:
    """Raises UsageError where shares of the area, or aspect ratios, aren't in order."""
    if not _are_bounds(scale) or scale[1] > 1:
        raise UsageError(f"scale={scale!r}: shares of the area (smallest, largest), 0 < smallest <= largest <= 1")
    if not _are_bounds(ratio):
        raise UsageError(f"ratio={ratio!r}: width over height (smallest, largest), 0 < smallest <= largest")


def _are_bounds(bounds: Bounds) -> bool:
    try:
        low, high = bounds
        return bool(0 < low <= high)
    except (TypeError, ValueError):  # not two numbers
        return False


def uniforms(seed: int, draws: npt.ArrayLike) -> Floats:
    """Numbers in [0, 1): these draws (from 0) of the stream of one record's seed, as `reader.augment.uniform`."""
    values: Floats = (splitmix64(seed % (1 << 64), draws) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return values


def draw_window(scale: Bounds, ratio: Bounds, size: tuple[int, int], seed: int) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the window in an image of (height, width).

    Args:
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width over height.
        size: of the image, in pixels.
        seed: of the record.
    """
    limits = np.array(size, np.float32)
    draws = uniforms(seed, _DRAWS)
    area = limits[0] * limits[1] * _between(scale, draws[:TRIES])
    ratios = np.exp(_between((math.log(ratio[0]), math.log(ratio[1])), draws[TRIES : 2 * TRIES]))
    tried = np.round(np.sqrt(np.stack([area / ratios, area * ratios])))
    fits = (tried >= 1).all(0) & (tried <= limits[:, None]).all(0)
    if fits.any():
        found = tried[:, int(fits.argmax())]
        place = np.minimum(np.floor(draws[2 * TRIES :] * (limits - found + np.float32(1))), limits - found)
    else:
        found = _middle(limits, ratio)
        place = np.floor((limits - found) / 2)
    top, left, height, width = np.concatenate([place, found]).astype(int).tolist()
    return top, left, height, width


def _middle(limits: Floats, bounds: Bounds) -> Floats:
    """Height and width of the largest window whose ratio is allowed."""
    height, width = limits
    ratio = np.clip(width / height, np.float32(bounds[0]), np.float32(bounds[1]))
    largest: Floats = np.array([min(height, width / ratio), min(width, height * ratio)], np.float32)
    return np.round(largest)


def _between(bounds: Bounds, draws: Floats) -> Floats:
    between: Floats = np.float32(bounds[0]) + np.float32(bounds[1] - bounds[0]) * draws
    return between
