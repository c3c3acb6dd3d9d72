"""Encoded images → pixels with Pillow, for tools and trainers without TensorFlow.

At the stored size the pixels are those that `reader.decode` gives with TensorFlow, bit for bit. Resized ones aren't:
the windows are the same, the filter is Pillow's bilinear one, which doesn't alias and is what torchvision uses.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from reader.crop_windows import Bounds, check_bounds, draw_window, uniforms

Pixels = npt.NDArray[np.uint8]


def decode(encoded: bytes, channels: int) -> Image.Image:
    """A JPEG or PNG as an RGB (or grey, with `channels` 1) image; of 16 bits the high byte.

    Raises:
        OSError: the bytes hold no image, or a broken one.
    """
    image: Image.Image = Image.open(io.BytesIO(encoded))
    mode = "L" if channels == 1 else "RGB"
    if image.mode.startswith("I"):  # gray of 16 bits, which Pillow's `convert` would clip at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode != mode:
        image = image.convert(mode)
    else:
        image.load()
    return image


def resize(image: Image.Image, height: int, width: int, mode: str = "crop") -> Image.Image:
    """The image at another size.

    Args:
        mode: `stretch`, `crop` the middle after scaling the shorter side, `pad` with black after scaling the longer.
    """
    if image.size == (width, height):
        return image
    if mode == "stretch":
        return _scale(image, (width, height), None)
    ratios = height / image.height, width / image.width
    if mode == "crop":
        inner = (
            min(max(round(width / max(ratios)), 1), image.width),
            min(max(round(height / max(ratios)), 1), image.height),
        )
        left, top = (image.width - inner[0]) // 2, (image.height - inner[1]) // 2
        return _scale(image, (width, height), (left, top, left + inner[0], top + inner[1]))
    size = (
        min(max(round(image.width * min(ratios)), 1), width),
        min(max(round(image.height * min(ratios)), 1), height),
    )
    padded = Image.new(image.mode, (width, height))
    padded.paste(_scale(image, size, None), ((width - size[0]) // 2, (height - size[1]) // 2))
    return padded


def to_array(image: Image.Image) -> Pixels:
    """uint8 [height, width, channels]."""
    pixels: Pixels = np.asarray(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _scale(image: Image.Image, size: tuple[int, int], box: Any) -> Image.Image:
    return image.resize(size, Image.Resampling.BILINEAR, box=box)


def uniform(seed: int, draw: int) -> float:
    """A number in [0, 1): number `draw` (from 0) of the stream of one record's seed, as `reader.augment.uniform`."""
    return float(uniforms(seed, [draw])[0])


def flip(image: Image.Image, seed: int) -> Image.Image:
    """Mirror half of the images, left for right: those that `reader.augment.flip` mirrors."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if uniform(seed, 0) < 0.5 else image


def flip_crop(image: Image.Image, seed: int) -> Image.Image:
    """Mirror half of the images and shift each by up to 1/8 of its sides: the pixels of `reader.augment.flip_crop`."""
    most_x, most_y = image.width // 8, image.height // 8
    down = int(uniform(seed, 1) * (2 * most_y + 1)) - most_y
    right = int(uniform(seed, 2) * (2 * most_x + 1)) - most_x
    shifted = Image.new(image.mode, image.size)
    inside = image.crop((max(-right, 0), max(-down, 0), image.width - max(right, 0), image.height - max(down, 0)))
    shifted.paste(flip(inside, seed), (max(right, 0), max(down, 0)))
    return shifted


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
        cropped = _scale(image, (size[1], size[0]), (left, top, left + width, top + height))
        return cropped if self.then is None else self.then(cropped, seed)

    def window(self, size: tuple[int, int], seed: int) -> tuple[int, int, int, int]:
        """(top, left, height, width) of the window in an image of (height, width)."""
        return draw_window(self.scale, self.ratio, size, seed)


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
    check_bounds(scale, ratio)
    return RandomResizedCrop((scale[0], scale[1]), (ratio[0], ratio[1]), then)
