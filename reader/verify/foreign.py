"""What every record of an index of foreign files has to be: an Example with an image that decodes and a class id."""

from __future__ import annotations

from typing import NamedTuple

from reader.example import parse_example
from reader.info import DatasetInfo
from reader.verify.images import check_foreign_image


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
        reasons += check_foreign_image(info, image[0])
    return CheckedForeign(number, reasons)
