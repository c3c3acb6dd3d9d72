"""The size that images are resized to, and how: what every decoder's arguments mean."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from beam_pipeline.errors import UsageError
from reader.info import ImageInfo

RESIZE_MODES = ("stretch", "crop", "pad")


def check_resize_mode(mode: str) -> None:
    """Raises UsageError where there is no such mode."""
    if mode not in RESIZE_MODES:
        raise UsageError(f"resize_mode={mode!r}: one of {', '.join(RESIZE_MODES)}")


def checked_size(image_size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of an `image_size` argument. Raises UsageError where it is no size."""
    try:
        height, width = image_size if isinstance(image_size, Iterable) else (image_size, image_size)
        size = operator.index(height), operator.index(width)
    except (TypeError, ValueError):
        size = 0, 0
    if min(size) < 1:
        raise UsageError(f"image_size={image_size!r}: a side or (height, width) in pixels")
    return size


def target_size(image: ImageInfo, image_size: int | tuple[int, int] | None) -> tuple[int, int]:
    """(height, width) of the decoded images.

    Raises:
        UsageError: stored sizes are mixed and `image_size` is None, or it is no size.
    """
    if image_size is not None:
        return checked_size(image_size)
    if image.min_size is None or image.max_size is None:
        raise UsageError("the dataset holds no image, so its size isn't known: give image_size")
    if image.min_size != image.max_size:
        smallest, largest = (f"{height}x{width}" for height, width in (image.min_size, image.max_size))
        raise UsageError(
            f"the stored images have mixed sizes ({smallest} to {largest}), which make no batch: give image_size"
        )
    return image.min_size
