"""Pillow's resize; bilinear, the default, by the compiled kernel (resample.c): same pixels, several times as fast."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import warnings
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    "nearest": Image.Resampling.NEAREST,
}

# How many source pixels to each side the filter reads, if nothing shrinks.
SUPPORT = {"box": 0.5, "bilinear": 1.0, "hamming": 1.0, "bicubic": 2.0, "lanczos": 3.0}

Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]

# Pillow keeps up to 16 MiB in one block of memory; larger images would have to be copied.
_MAX_PIXELS = 4 << 20
_MAX_SCALE = 4000  # as in resample.c
# (height, width) of source and target, and a box.
_CHECKED = (
    ((37, 29), (13, 17), (0.3, 0.0, 28.8, 36.4)),
    ((7, 5), (19, 23), (0.0, 0.7, 4.1, 7.0)),
    ((299, 3), (11, 3), (0.0, 0.0, 3.0, 299.0)),
)


def kernel() -> Any:
    """The compiled module; None if it isn't installed or its pixels differ from those of this Pillow."""
    return _kernel()[0]


def described() -> str:
    """What resizes images: `compiled`, or Pillow and why."""
    compiled, why = _kernel()
    return "compiled" if compiled else f"Pillow, which is slower ({why})"


@cache
def _kernel() -> tuple[Any, str]:
    """The module, or None and why."""
    try:
        compiled = importlib.import_module("beam_pipeline.images._resample")
    except ModuleNotFoundError:
        return None, "for the compiled one, install with a C compiler"
    except ImportError as error:
        return None, str(error)
    if _equals_pillow(compiled):
        return compiled, ""
    why = f"the compiled one's pixels differ from those of Pillow {PIL.__version__}"
    warnings.warn(f"images are resized by Pillow, which is slower: {why}", stacklevel=3)
    return None, why


def _equals_pillow(compiled: Any) -> bool:
    """Whether the kernel equals Pillow on every kind of pixel and direction: 1 ms."""
    numbers = np.arange(299 * 37 * 3)
    noise = (numbers * numbers * 31 >> 4 & 255).astype(np.uint8).reshape(299, 37, 3)
    for mode, (source, target, box) in itertools.product(("L", "RGB"), _CHECKED):
        height, width = source
        pixels = np.ascontiguousarray(noise[:height, :width, : len(mode)])
        image = Image.fromarray(pixels[:, :, 0] if mode == "L" else pixels)
        expected = np.asarray(image.resize((target[1], target[0]), RESAMPLING["bilinear"], box)).reshape(*target, -1)
        for memory in (pixels, _source(image)):
            out = np.empty_like(expected)
            compiled.resize(memory, out, box, source)
            if not np.array_equal(out, expected):
                return False
    return True


def resize_image(image: Image.Image, size: tuple[int, int], resample: str, box: Box) -> Image.Image:
    """`image.resize(size, resample, box)`.

    Args:
        image: of any mode; `L` and `RGB` are the fast ones, by `bilinear`.
        size: (width, height) in pixels.
        resample: a key of `RESAMPLING`.
        box: (left, top, right, bottom) in the image's pixels.
    """
    compiled = kernel()
    is_fast = image.mode in ("L", "RGB") and image.width * image.height <= _MAX_PIXELS
    if compiled and is_fast and resample == "bilinear" and _is_supported((image.height, image.width), box, size[::-1]):
        out = np.empty((size[1], size[0], len(image.mode)), np.uint8)
        compiled.resize(_source(image), out, box, (image.height, image.width))
        return Image.fromarray(out[:, :, 0] if image.mode == "L" else out)
    return image.resize(size, RESAMPLING[resample], box)


def _is_supported(source: tuple[int, int], box: Box, target: tuple[int, int]) -> bool:
    """Whether the kernel can resize `box` of a (height, width) to another one.

    Of very tall images Pillow resizes columns before rows, which gives other pixels. In a pixel made of more than
    `_MAX_SCALE` the rounding of the weights would count.
    """
    left, top, right, bottom = box
    is_small = right - left <= _MAX_SCALE * target[1] and bottom - top <= _MAX_SCALE * target[0]
    return is_small and (source[0] <= 100 * source[1] or target[0] >= source[0])


def _source(image: Image.Image) -> Any:
    """The pixels of `L` or `RGB` for the kernel: if possible the image's own memory, of 4 bytes per pixel."""
    if image.mode == "RGB":  # of an `L` image on foreign memory Pillow 12.3 exports a null pointer
        with contextlib.suppress(ValueError):  # in more than one block of memory: over 16 MiB
            return image.__arrow_c_array__()[1]
    return np.asarray(image).reshape(image.height, image.width, -1)


def resize_into(pixels: Pixels, box: Box, out: Pixels) -> None:
    """Resize the part in `box` to `out`, bilinear with antialiasing, as `Image.resize` does.

    Args:
        pixels: uint8 [height, width, 1 or 3], each row contiguous.
        box: (left, top, right, bottom) in pixels.
        out: uint8 [height, width, 1 or 3], each row contiguous.
    """
    height, width = pixels.shape[:2]
    left, top, right, bottom = map(int, box)
    if box == (left, top, right, bottom) and out.shape[:2] == (bottom - top, right - left):
        out[:] = pixels[top:bottom, left:right]
        return
    compiled = kernel()
    if compiled and _is_supported((height, width), box, out.shape[:2]):
        compiled.resize(pixels, out, box, (height, width))
        return
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    resized = image.resize((out.shape[1], out.shape[0]), RESAMPLING["bilinear"], box)
    out[:] = np.asarray(resized).reshape(out.shape)


def mirror(pixels: Pixels) -> None:
    """Reverse each row of uint8 [height, width, channels], in place."""
    compiled, channels = kernel(), pixels.shape[2]
    if compiled and channels in (1, 3) and pixels.strides[1:] == (channels, 1):
        compiled.mirror(pixels)
        return
    for channel in range(channels):  # 3 times as fast as all channels at once
        pixels[:, :, channel] = pixels[:, ::-1, channel].copy()
