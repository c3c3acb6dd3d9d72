"""What records hold besides their images: names, types and values."""

from __future__ import annotations

import functools
import logging
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import UsageError
from reader.example import parse_example
from reader.info import DatasetInfo

warn_once = functools.cache(logging.getLogger("reader").warning)


class Feature(NamedTuple):
    """A feature of a record besides its image.

    Attributes:
        dtype: `int64`, `float32` or `bytes`.
        shape: (n,) for lists that have n values in each record, () for one value; None for lists of any length.
    """

    dtype: str
    shape: tuple[int, ...] | None


def features_of(info: DatasetInfo) -> dict[str, Feature]:
    """What a record holds besides its image, by name."""
    features = {}
    if not info.is_index:
        features = {
            schema.CLASS_KEY: Feature("int64", ()),
            schema.LABEL_KEY: Feature("bytes", ()),
            schema.SIZE_KEY: Feature("int64", (2,)),
            schema.FILENAME_KEY: Feature("bytes", ()),
        }
    if info.manifest["configuration"]["one_hot"]:
        features[schema.ONE_HOT_KEY] = Feature("float32", (info.num_classes,))
    for column in info.manifest["features"]:
        features[column["name"]] = Feature(column["dtype"], None if column["list"] else ())
    return features


def pick_features(info: DatasetInfo, names: Sequence[str]) -> dict[str, Feature]:
    """The features with these names.

    Raises:
        UsageError: there is no such feature; lists those that there are.
    """
    if isinstance(names, str):
        raise UsageError(f"features={names!r}: give a list, such as [{names!r}]")
    if not isinstance(names, Iterable):
        raise UsageError(f"features={reprlib.repr(names)}: give a list of names")
    there, names = features_of(info), list(names)  # which may be a generator
    for name in names:
        if not isinstance(name, str) or name not in there:
            raise UsageError(f"features={names}: there is no {name!r}; the records have {', '.join(there)}")
    return {name: there[name] for name in names}


def read_features(record: bytes, features: Mapping[str, Feature]) -> tuple[Any, ...]:
    """The values of these features in one record, in their order: some 50 µs of Python a record.

    Returns:
        For each an array [] or [n] of the feature's type; for `bytes` the bytes, or a list of them.

    Raises:
        ValueError: it is no Example, or it lacks a feature or has it in another type or length.
    """
    parsed = parse_example(record)
    return tuple(_value(name, parsed.get(name), feature) for name, feature in features.items())


def _value(name: str, value: Any, feature: Feature) -> Any:
    if value is None:
        value = [] if feature.dtype == "bytes" else np.empty(0, feature.dtype)
    kind = "bytes" if isinstance(value, list) else str(value.dtype)
    length = len(value) if feature.shape is None else (*feature.shape, 1)[0]
    if kind != feature.dtype or len(value) != length:  # an empty list of another type too: TensorFlow refuses it
        raise ValueError(f"{name!r} has {len(value)} values of {kind}")
    if feature.dtype != "bytes":
        return np.array(value, feature.dtype)[0 if feature.shape == () else slice(None)]
    return value[0] if feature.shape == () else value


def stacked(column: Sequence[Any], feature: Feature) -> npt.NDArray[Any]:
    """The values of one feature in a batch: [b] or [b, n]; objects [b] for bytes and for lists of any length."""
    if feature.dtype != "bytes" and feature.shape is not None:
        return np.stack(column)
    values = np.empty(len(column), object)
    values[:] = column
    return values


def note_boxes(features: Mapping[str, Feature], columns: Mapping[str, Iterable[Any]]) -> None:
    """Warn of features that look like boxes, by name or by four floats in each record: the pixels were moved alone."""
    for name, feature in features.items():
        is_list = feature.dtype == "float32" and feature.shape is None
        if schema.BOX_NAME.search(name) or (is_list and {len(values) for values in columns[name]} - {0} == {4}):
            warn_once(
                "%r looks like a box, but image_size= or augment= moves the pixels and no box: in pixels it is wrong "
                "now; as fractions of width and height it is valid with resize_mode='stretch' and no augment",
                name,
            )
