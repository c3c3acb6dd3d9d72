"""Augmentation on the host: `f(image, seed)` for one decoded image, the same for a record wherever it is read.

    train = imageshards.train_dataset(info, "train", global_batch_size=256, augment=imageshards.augment.flip_crop)
    crop = imageshards.augment.random_resized_crop(then=imageshards.augment.flip)
    train = imageshards.train_dataset(info, "train", global_batch_size=256, image_size=224, augment=crop)

An augment gets a uint8 array [height, width, channels], which it may change, and the record's seed: an integer in
[0, 2^64) that follows from (seed, epoch, record number), so it is the same for any thread, batch size or host and
after any resume. It returns a uint8 array of the same shape. Draw random numbers with `uniform`, or seed a generator.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from beam_pipeline.errors import UsageError
from beam_pipeline.images.resize import mirror, resize_into

__all__ = ["Augment", "RandomResizedCrop", "flip", "flip_crop", "random_resized_crop", "uniform"]

Pixels = npt.NDArray[np.uint8]
Augment = Callable[[Pixels, int], Pixels]
Window = tuple[int, int, int, int]  # top, left, height, width

_FLIP, _SHIFT_Y, _SHIFT_X = range(3)  # number of the draw
_FIRST_CROP_DRAW = 8  # earlier ones are left to `then`
_TRIES = 10
_SHIFT_DIVISOR = 8  # flip_crop shifts by up to 1/8 of each side

_MASK = (1 << 64) - 1


def uniform(seed: int, draw: int) -> float:
    """A random number in [0, 1): number `draw` (from 0) of the record's own stream.

    SplitMix64 (https://prng.di.unimi.it/splitmix64.c) in integers: 0.5 µs, where making a NumPy generator takes 10.
    """
    state = (seed + (draw + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((state ^ (state >> 31)) >> 40) * 2.0**-24


def flip(image: Pixels, seed: int) -> Pixels:
    """Mirror half of the images, left for right."""
    if uniform(seed, _FLIP) < 0.5:
        mirror(image)
    return image


def flip_crop(image: Pixels, seed: int) -> Pixels:
    """Mirror half of the images, and shift each by up to 1/8 of its height and width; uncovered pixels are black.

    The same as padding by 1/8 on every side and cropping the old size at random.
    """
    height, width = image.shape[:2]
    max_y, max_x = height // _SHIFT_DIVISOR, width // _SHIFT_DIVISOR
    down = int(uniform(seed, _SHIFT_Y) * (2 * max_y + 1)) - max_y
    right = int(uniform(seed, _SHIFT_X) * (2 * max_x + 1)) - max_x
    kept = image[max(-down, 0) : height - max(down, 0), max(-right, 0) : width - max(right, 0)].copy()
    image[:] = 0
    inside = image[max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)]
    inside[:] = kept
    if uniform(seed, _FLIP) < 0.5:
        mirror(inside)
    return image


def random_resized_crop(
    scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3), then: Augment | None = None
) -> RandomResizedCrop:
    """An augment that resizes a random window of each image; `train_batches` applies it at the stored size.

    As Inception's and torchvision's: ten tries, and if none fits into the image, the largest window in the middle whose
    aspect ratio is allowed. https://pytorch.org/vision/stable/generated/torchvision.transforms.RandomResizedCrop.html

    Args:
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width over height.
        then: another augment, for the resized images, such as `imageshards.augment.flip`.

    Raises:
        UsageError: the bounds aren't in order.
    """
    if not _are_bounds(scale) or scale[1] > 1:
        raise UsageError(
            f"scale must be the smallest and largest share of the area, 0 < smallest <= largest <= 1, got {scale!r}"
        )
    if not _are_bounds(ratio):
        raise UsageError(
            f"ratio must be the smallest and largest width over height, 0 < smallest <= largest, got {ratio!r}"
        )
    check_augment(then, "then")
    return RandomResizedCrop(scale, ratio, then)


@dataclass(frozen=True)
class RandomResizedCrop:
    """What `random_resized_crop` returns, with its arguments."""

    scale: tuple[float, float]
    ratio: tuple[float, float]
    then: Augment | None

    def window(self, height: int, width: int, seed: int) -> Window:
        """The window (top, left, height, width) in an image of this size, by the record's seed."""
        for draw in range(_FIRST_CROP_DRAW, _FIRST_CROP_DRAW + _TRIES):
            area = height * width * _between(self.scale, uniform(seed, draw))
            ratio = math.exp(_between((math.log(self.ratio[0]), math.log(self.ratio[1])), uniform(seed, draw + _TRIES)))
            tried_height, tried_width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 1 <= tried_height <= height and 1 <= tried_width <= width:
                last = _FIRST_CROP_DRAW + 2 * _TRIES
                top = int(uniform(seed, last) * (height - tried_height + 1))
                left = int(uniform(seed, last + 1) * (width - tried_width + 1))
                return top, left, tried_height, tried_width
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        new_height, new_width = round(min(height, width / ratio)), round(min(width, height * ratio))
        return (height - new_height) // 2, (width - new_width) // 2, new_height, new_width

    def __call__(self, image: Pixels, seed: int) -> Pixels:
        """A window of a decoded image, resized to the image's own size."""
        cropped = np.empty(image.shape, np.uint8)
        top, left, height, width = self.window(image.shape[0], image.shape[1], seed)
        resize_into(np.ascontiguousarray(image), (left, top, left + width, top + height), cropped)
        return cropped if self.then is None else self.then(cropped, seed)


def check_augment(augment: object, name: str = "augment") -> None:
    """Raise UsageError, with what to give, if this is neither None nor callable as f(image, seed)."""
    if augment is None:
        return
    if augment is random_resized_crop:
        raise UsageError(f"{name}=random_resized_crop: call it, {name}=imageshards.augment.random_resized_crop()")
    given = getattr(augment, "__name__", None) or repr(augment)[:80]
    needed = "a function f(image, seed) of a uint8 array [height, width, channels], such as imageshards.augment.flip"
    if not callable(augment):
        raise UsageError(f"{name}={given}: give {needed}")
    try:
        inspect.signature(augment).bind(None, 0)
    except TypeError:
        raise UsageError(f"{name}={given} doesn't take two arguments: give {needed}") from None
    except ValueError:  # a builtin without a signature
        return


def _between(bounds: tuple[float, float], share: float) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * share


def _are_bounds(bounds: Any) -> bool:
    try:
        low, high = bounds
        return bool(0 < low <= high)
    except (TypeError, ValueError):  # not two numbers
        return False


# As `--augment` of the commands names them.
BY_NAME: dict[str, Augment] = {
    "flip": flip,
    "flip_crop": flip_crop,
    "random_resized_crop": random_resized_crop(then=flip),
}
