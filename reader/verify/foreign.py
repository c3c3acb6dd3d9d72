"""What every record of an index of foreign files has to be: an Example with an image that decodes and a class id."""

from __future__ import annotations

import io
from typing import NamedTuple

from PIL import Image

from reader.example import parse_example
from reader.info import DatasetInfo

_FORMATS = {"JPEG": "jpeg", "PNG": "png"}


class CheckedForeign(NamedTuple):
    """What was found in one record: its class id (-1 where it has none), and what is wrong with it."""

    label: int
    reasons: list[str]


def check_foreign(info: DatasetInfo, record: bytes, decode: bool = True) -> CheckedForeign:
    """What is wrong with one record.

    Args:
        info: of its index.
        record: the serialized Example.
        decode: whether its image is decoded.
    """
    try:
        features = parse_example(record)
    except ValueError as error:
        return CheckedForeign(-1, [str(error)])
    image, label = features.get(info.image_key, []), features.get(info.class_key, [])
    if not isinstance(image, list) or len(image) != 1 or isinstance(label, list) or len(label) != 1:
        return CheckedForeign(-1, [f"it lacks {info.image_key} or {info.class_key}, or has several"])
    reasons = []
    number = int(label[0])
    if not 0 <= number < info.num_classes:
        reasons.append(f"class {number} is out of range: there are {info.num_classes}")
    if decode:
        reasons += _check_image(info, image[0])
    return CheckedForeign(number, reasons)


def _check_image(info: DatasetInfo, encoded: bytes) -> list[str]:
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            image.load()
            height, width, found = image.height, image.width, _FORMATS.get(image.format or "", image.format)
    except Exception as error:  # Pillow raises a dozen types for broken images, and names objects by their address
        return [f"the image doesn't decode: {type(error).__name__}"]
    least, most = info.image.min_size or (0, 0), info.image.max_size or (0, 0)
    if not (least[0] <= height <= most[0] and least[1] <= width <= most[1]):
        return [f"the image is {height}x{width}, the manifest says {least} to {most}"]
    return (
        []
        if info.image.format in (found, "mixed")
        else [f"the image is {found}, the manifest says {info.image.format}"]
    )
