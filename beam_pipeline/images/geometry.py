"""Where an image's pixels go: the part that is scaled, its new size, the canvas around it, the turn to upright."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from PIL import Image, ImageFile

from beam_pipeline.images.resize import SUPPORT, Box, resize_image

RESIZE_MODES = ("stretch", "crop", "pad", "shorter", "longer")

# How many times larger than its target an image may stay after the cheap reductions (DCT-scaled decoding, box
# averaging by integer factors) that come before the filter. Chosen by benchmarks/codec.py, docs/decisions/005.
REDUCING_GAP = 2.0

# EXIF orientation → what turns the image upright, https://www.cipa.jp/std/documents/e/DC-008-2012_E.pdf (4.6.4 A)
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = frozenset({5, 6, 7, 8})

_PREMULTIPLIED = {"RGBA": "RGBa", "LA": "La"}
_BAND_PIXELS = 1 << 18

Size = tuple[int, int]


class Fit(NamedTuple):
    """How an image, not yet upright, becomes the stored one: sizes and positions.

    Attributes:
        box: (left, top, right, bottom) of the part that is scaled, in source pixels.
        size: (width, height) after scaling.
        canvas: (width, height) of the result before it is turned upright.
    """

    box: Box
    size: Size
    canvas: Size

    def changes_nothing(self, source: Size) -> bool:
        """Whether every pixel is kept unchanged."""
        return self.size == self.canvas == source and self.box == (0, 0, *source)


def fit(source: Size, target: tuple[int, int] | None, mode: str, orientation: int = 1) -> Fit:
    """Compute crop, scaled size and canvas for one image.

    Args:
        source: (width, height) in its file, where it may lie on its side.
        target: (height, width) of the upright result; None to keep the image's own.
        mode: one of `RESIZE_MODES`.
        orientation: EXIF's; images are resized before they are turned, since turning a small one is cheaper.
    """
    width, height = source
    full_box = (0.0, 0.0, float(width), float(height))
    if target is None:
        return Fit(full_box, source, source)
    target_width, target_height = target if orientation in _SIDEWAYS else (target[1], target[0])
    fixed = (target_width, target_height)
    if mode == "stretch":
        return Fit(full_box, fixed, fixed)
    if mode == "crop":
        # The largest centred box with the target's proportions.
        crop_width = min(float(width), height * target_width / target_height)
        crop_height = min(float(height), width * target_height / target_width)
        left, top = (width - crop_width) / 2, (height - crop_height) / 2
        return Fit((left, top, left + crop_width, top + crop_height), fixed, fixed)
    ratios = (target_width / width, target_height / height)
    ratio = min(1.0, max(ratios) if mode == "shorter" else min(ratios))  # these modes never enlarge
    size = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    return Fit(full_box, size, fixed if mode == "pad" else size)


def shrink_on_load(image: ImageFile.ImageFile, plan: Fit, mode: str) -> float:
    """Let the JPEG decoder skip frequencies that the resize would throw away.

    Args:
        image: opened, not yet decoded.
        plan: of the image in its file.
        mode: `L` decodes the luma only, any other mode all channels of the file.

    Returns:
        The scale at which it will be decoded: 1, 1/2, 1/4 or 1/8.
    """
    width, height = image.size
    left, top, right, bottom = plan.box
    across, down = plan.size[0] * width / (right - left), plan.size[1] * height / (bottom - top)
    decoded: Any = image.draft(mode, (int(across * REDUCING_GAP), int(down * REDUCING_GAP)))
    # The decoded size is rounded up; the box that Pillow returns is the exact one.
    return 1.0 if decoded is None else decoded[1][2] / width


def resize(pixels: Image.Image, plan: Fit, scale: float, resample: str) -> Image.Image:
    """Scale the planned part of an image that was decoded at `scale`, which `shrink_on_load` returned."""
    left, top, right, bottom = plan.box
    box = (left * scale, top * scale, right * scale, bottom * scale)
    if pixels.size == plan.size and box == (0, 0, *plan.size):
        return pixels
    if pixels.mode in _PREMULTIPLIED:
        # Colours of transparent pixels must not bleed into visible ones. Pillow does this, too, but without the gap.
        small, box = _premultiplied(pixels, box, plan.size)
        return resize_image(small, plan.size, resample, box).convert(pixels.mode)
    small, box = _reduced(pixels, box, plan.size, resample)
    return resize_image(small, plan.size, resample, box)


def _factors(box: Box, size: Size) -> Size:
    """Integer factors, across and down, by which pixels may be averaged before the filter."""
    left, top, right, bottom = box
    across, down = (right - left) / size[0] / REDUCING_GAP, (bottom - top) / size[1] / REDUCING_GAP
    return int(across) or 1, int(down) or 1


def _reduced(pixels: Image.Image, box: Box, size: Size, resample: str) -> tuple[Image.Image, Box]:
    """An image averaged by integer factors down to the gap, and the box in it: `reducing_gap` of Pillow's `resize`."""
    across, down = _factors(box, size)
    if resample == "nearest" or across == down == 1:
        return pixels, box
    left, top, right, bottom = box
    beyond = SUPPORT[resample] - 0.5  # how far the filter reaches, in source pixels times the scale
    reach_x, reach_y = beyond * ((right - left) / size[0]), beyond * ((bottom - top) / size[1])
    first_x, first_y = max(0, int(left - reach_x)), max(0, int(top - reach_y))
    last_x, last_y = min(pixels.width, math.ceil(right + reach_x)), min(pixels.height, math.ceil(bottom + reach_y))
    small = pixels.reduce((across, down), (first_x, first_y, last_x, last_y))
    moved = (left - first_x) / across, (top - first_y) / down, (right - first_x) / across, (bottom - first_y) / down
    return small, moved


def _premultiplied(pixels: Image.Image, box: Box, size: Size) -> tuple[Image.Image, Box]:
    """An image times its alpha, averaged by integer factors down to the gap, and the box in it.

    In bands of rows, or a large image would be in memory twice.
    """
    mode, (left, top, right, bottom) = _PREMULTIPLIED[pixels.mode], box
    across, down = _factors(box, size)
    width, height = pixels.size
    small = Image.new(mode, (-(-width // across), -(-height // down)))
    rows = down * max(1, _BAND_PIXELS // (width * down))
    for row in range(0, height, rows):
        band = pixels.crop((0, row, width, min(row + rows, height))).convert(mode)
        small.paste(band.reduce((across, down)), (0, row // down))
    return small, (left / across, top / down, right / across, bottom / down)


def upright(pixels: Image.Image, orientation: int) -> Image.Image:
    """An image turned as its EXIF orientation says; an invalid one is ignored."""
    return pixels.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else pixels


def upright_size(size: Size, orientation: int) -> Size:
    """(width, height) once it is turned."""
    return (size[1], size[0]) if orientation in _SIDEWAYS else size


def pad(pixels: Image.Image, canvas: Size, colour: int | tuple[int, ...]) -> Image.Image:
    """An image in the middle of a canvas, half a pixel further to the top left if it can't be centred."""
    if pixels.size == canvas:
        return pixels
    padded = Image.new(pixels.mode, canvas, colour)
    padded.paste(pixels, ((canvas[0] - pixels.width) // 2, (canvas[1] - pixels.height) // 2))
    return padded
