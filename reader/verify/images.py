"""What an image of a record has to be. Pillow is loaded by the first one: `verify --decode none` works without it."""

from __future__ import annotations

import io
import re
from functools import cache
from types import ModuleType

from reader.info import DatasetInfo

_FORMATS = {"JPEG": "jpeg", "PNG": "png"}
# Pillow's texts name objects by their memory address.
_OBJECT = re.compile(r"<[^>]*>")


@cache
def load_pillow() -> ModuleType:
    """`PIL.Image` with its decoders: threads that load these at once find none."""
    from PIL import Image

    Image.preinit()
    return Image


def check_image(info: DatasetInfo, encoded: bytes, size: tuple[int, int]) -> list[str]:
    """What is wrong with an image whose record says that its (height, width) is `size`; [] if nothing is."""
    try:
        found = _decoded(encoded)
    except Exception as error:  # Pillow raises a dozen types for broken images
        reason = _OBJECT.sub("it", " ".join(str(error).split()))
        return [f"the image doesn't decode: {type(error).__name__}: {reason}"]
    expected = (*size, info.image.channels, info.image.format)
    return [] if found == expected else [f"the image is {found} (height, width, channels, format), expected {expected}"]


def check_foreign_image(info: DatasetInfo, encoded: bytes) -> list[str]:
    """The same for an index of foreign files, whose records needn't say a size."""
    try:
        height, width, _, found = _decoded(encoded)
    except Exception as error:  # as above
        return [f"the image doesn't decode: {type(error).__name__}"]
    least, most = info.image.min_size or (0, 0), info.image.max_size or (0, 0)
    if not (least[0] <= height <= most[0] and least[1] <= width <= most[1]):
        return [f"the image is {height}x{width}, the manifest says {least} to {most}"]
    if info.image.format not in (found, "mixed"):
        return [f"the image is {found}, the manifest says {info.image.format}"]
    return []


def _decoded(encoded: bytes) -> tuple[int, int, int, str]:
    """Height, width, channels and format of an image that decodes."""
    with load_pillow().open(io.BytesIO(encoded)) as image:
        image.load()
        return image.height, image.width, len(image.getbands()), _FORMATS.get(image.format or "", str(image.format))
