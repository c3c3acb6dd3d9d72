"""What decides the bytes of an image: the job's flags as the codec takes them."""

from __future__ import annotations

from typing import NamedTuple

from beam_pipeline.images.colour import Rgb

SUBSAMPLING = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}
FORMATS = {"jpeg": "JPEG", "png": "PNG"}


class ImageOptions(NamedTuple):
    """What decides the bytes of an image.

    Attributes:
        size: (height, width) in pixels, or None to keep the image's own.
        resize_mode: one of `geometry.RESIZE_MODES`.
        resample: a key of `geometry.RESAMPLING`.
        background: sRGB behind transparent pixels and beside padded images; None is white behind, black beside.
        channels: 3 for RGB, 1 for gray.
        format: a key of `FORMATS`.
        jpeg_quality: 1–100.
        jpeg_subsampling: a key of `SUBSAMPLING`.
        optimize: search for smaller codes.
        max_pixels: larger images are rejected before they are decoded.
        max_image_bytes: larger files are rejected before they are fetched.
        allow_truncated: take what there is of a file that ends early.
    """

    size: tuple[int, int] | None
    resize_mode: str
    resample: str
    background: Rgb | None
    channels: int
    format: str
    jpeg_quality: int
    jpeg_subsampling: str
    optimize: bool
    max_pixels: int
    max_image_bytes: int
    allow_truncated: bool
