"""What every record of a dataset has to be: an Example with the format's keys, a label, and an image that decodes."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

import numpy as np
from PIL import Image

from beam_pipeline import schema
from reader.example import Value, parse_example
from reader.info import DatasetInfo

_NO_CLASS = -1
_PILLOW_FORMATS = {"jpeg": "JPEG", "png": "PNG"}
# Pillow's texts name objects by their memory address.
_OBJECT = re.compile(r"<[^>]*>")


def check_record(info: DatasetInfo, record: bytes) -> tuple[int, list[str]]:
    """What is wrong with one record.

    Args:
        info: of its dataset.
        record: the serialized Example.

    Returns:
        Its class id (-1 where it has none), and the reasons, [] if it is right.
    """
    try:
        features = parse_example(record)
    except ValueError as error:
        return _NO_CLASS, [str(error)]
    reasons = []
    expected = [schema.IMAGE_KEY, schema.CLASS_KEY, schema.LABEL_KEY, schema.SIZE_KEY, schema.FILENAME_KEY]
    if info.manifest["configuration"].get("one_hot"):
        expected.append(schema.ONE_HOT_KEY)
    missing = [key for key in expected if not len(features.get(key, ()))]
    if missing:
        return _NO_CLASS, [f"it lacks {', '.join(missing)}"]
    label = (*_integers(features[schema.CLASS_KEY]), _NO_CLASS)[0]
    if not 0 <= label < info.num_classes:
        reasons.append(f"class {label} is out of range: there are {info.num_classes}")
    elif features[schema.LABEL_KEY] != [schema.relative_path_bytes(info.classes[label])]:
        reasons.append(f"label {features[schema.LABEL_KEY]!r} isn't the name of class {label}, {info.classes[label]!r}")
    if schema.ONE_HOT_KEY in expected and not _is_one_hot(features[schema.ONE_HOT_KEY], label, info.num_classes):
        reasons.append(f"{schema.ONE_HOT_KEY} isn't class {label}")
    return label, reasons + _check_image(info, features)


def _check_image(info: DatasetInfo, features: Mapping[str, Value]) -> list[str]:
    image_bytes = features[schema.IMAGE_KEY][0]
    if not isinstance(image_bytes, bytes):
        return [f"{schema.IMAGE_KEY} isn't bytes"]
    try:
        with Image.open(io.BytesIO(image_bytes)) as image:
            image.load()
            found = (image.height, image.width, len(image.getbands()), image.format)
    except Exception as error:  # Pillow raises a dozen types for broken images
        reason = _OBJECT.sub("it", " ".join(str(error).split()))
        return [f"the image doesn't decode: {type(error).__name__}: {reason}"]
    height, width = (*_integers(features[schema.SIZE_KEY]), 0)[:2]
    expected = (height, width, info.image.channels, _PILLOW_FORMATS[info.image.format])
    return [] if found == expected else [f"the image is {found} (height, width, channels, format), expected {expected}"]


def _integers(value: Value) -> list[int]:
    return [] if isinstance(value, list) else [int(number) for number in value]


def _is_one_hot(value: Value, label: int, classes: int) -> bool:
    return np.array_equal(np.asarray(value), np.arange(classes) == label)
