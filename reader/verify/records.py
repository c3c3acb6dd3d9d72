"""What every record of a dataset has to be: an Example with the format's keys, a label, and an image that decodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from beam_pipeline import schema
from reader.example import Value, parse_example
from reader.info import DatasetInfo
from reader.verify.images import check_foreign_image, check_image

_NO_CLASS = -1


class CheckedRecord(NamedTuple):
    """What was found in one record.

    Attributes:
        label: its class id, -1 where it has none.
        filename: its file name, b"" where it has none.
        reasons: what is wrong with it, [] if it is right.
    """

    label: int
    filename: bytes
    reasons: list[str]


def check_record(info: DatasetInfo, record: bytes, decode: bool = True) -> CheckedRecord:
    """What is wrong with one record.

    Args:
        info: of its dataset.
        record: the serialized Example.
        decode: whether its image is decoded.
    """
    if schema.FOREIGN_KEY in info.manifest:
        return _check_foreign(info, record, decode)
    try:
        features = parse_example(record)
    except ValueError as error:
        return CheckedRecord(_NO_CLASS, b"", [str(error)])
    one_hot = bool(info.manifest["configuration"].get("one_hot"))
    expected = schema.RECORD_KEYS if one_hot else schema.RECORD_KEYS[:-1]
    missing = [key for key in expected if not len(features.get(key, ()))]
    if missing:
        return CheckedRecord(_NO_CLASS, _first_bytes(features, schema.FILENAME_KEY), [f"it lacks {', '.join(missing)}"])
    label = (*_integers(features[schema.CLASS_KEY]), _NO_CLASS)[0]
    reasons = [*_check_label(info, features, label), *_check_columns(info, features)]
    if one_hot and not np.array_equal(np.asarray(features[schema.ONE_HOT_KEY]), np.arange(info.num_classes) == label):
        reasons.append(f"{schema.ONE_HOT_KEY} isn't class {label}")
    reasons += _check_size(info, features)
    if decode:
        size = (*_integers(features[schema.SIZE_KEY]), 0, 0)[:2]
        reasons += check_image(info, _first_bytes(features, schema.IMAGE_KEY), (size[0], size[1]))
    return CheckedRecord(label, _first_bytes(features, schema.FILENAME_KEY), reasons)


def _check_foreign(info: DatasetInfo, record: bytes, decode: bool) -> CheckedRecord:
    """The same for a record of an index of foreign files: an Example with an image and a class id."""
    try:
        features = parse_example(record)
    except ValueError as error:
        return CheckedRecord(_NO_CLASS, b"", [str(error)])
    image, label = features.get(info.image_key, []), features.get(info.class_key, [])
    if not isinstance(image, list) or len(image) != 1 or isinstance(label, list) or len(label) != 1:
        return CheckedRecord(_NO_CLASS, b"", [f"it lacks {info.image_key} or {info.class_key}, or has several"])
    number = int(label[0])
    reasons = list(_check_class(info, number))
    if decode:
        reasons += check_foreign_image(info, image[0])
    return CheckedRecord(number, b"", reasons)


def _check_class(info: DatasetInfo, label: int) -> Iterator[str]:
    if not 0 <= label < info.num_classes:
        yield f"class {label} is out of range: there are {info.num_classes}"


def _check_label(info: DatasetInfo, features: Mapping[str, Value], label: int) -> Iterator[str]:
    wrong_class = list(_check_class(info, label))
    yield from wrong_class
    if not wrong_class and features[schema.LABEL_KEY] != [schema.relative_path_bytes(info.classes[label])]:
        yield f"label {features[schema.LABEL_KEY]!r} isn't the name of class {label}, {info.classes[label]!r}"


def _check_columns(info: DatasetInfo, features: Mapping[str, Value]) -> Iterator[str]:
    """The features of a manifest's columns: each there, of its type, one value unless it is a list."""
    for column in info.manifest["features"]:
        value = features.get(column["name"])
        if value is None:
            yield f"it lacks {column['name']}"
        elif len(value) and (_kind(value) != column["dtype"] or (len(value) > 1 and not column["list"])):
            yield f"{column['name']} has {len(value)} values of {_kind(value)}, not {column['dtype']}"


def _check_size(info: DatasetInfo, features: Mapping[str, Value]) -> Iterator[str]:
    size = _integers(features[schema.SIZE_KEY])
    least, most = info.image.min_size or (0, 0), info.image.max_size or (0, 0)
    if len(size) != 2 or not all(low <= side <= high for low, side, high in zip(least, size, most, strict=True)):
        yield f"size {size} isn't within the manifest's {list(least)} to {list(most)}"


def _first_bytes(features: Mapping[str, Value], key: str) -> bytes:
    value = features.get(key, [])
    return value[0] if isinstance(value, list) and value else b""


def _integers(value: Value) -> list[int]:
    return [] if isinstance(value, list) or value.dtype != np.int64 else [int(number) for number in value]


def _kind(value: Value) -> str:
    return "bytes" if isinstance(value, list) else str(value.dtype)
