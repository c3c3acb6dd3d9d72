"""Serialized Examples → tensors, many at a time, inside tf.data.

A parse of 256 records at once costs 5 µs a record, of 64 at once 13, one at a time more still (2 cores, 224×224).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from beam_pipeline import schema
from beam_pipeline.errors import UsageError
from reader.info import DatasetInfo

Tensor = Any  # TensorFlow ships no types


class Feature(NamedTuple):
    """A feature of a record beside its image.

    Attributes:
        dtype: `int64`, `float32` or `bytes`.
        shape: (n,) for lists that have n values in each record, () for one value; None for lists of any length.
    """

    dtype: str
    shape: tuple[int, ...] | None


def features_of(info: DatasetInfo) -> dict[str, Feature]:
    """What a record holds beside its image, by name."""
    features = {}
    if schema.FOREIGN_KEY not in info.manifest:
        features = {
            schema.CLASS_KEY: Feature("int64", ()),
            schema.LABEL_KEY: Feature("bytes", ()),
            schema.SIZE_KEY: Feature("int64", (2,)),
            schema.FILENAME_KEY: Feature("bytes", ()),
        }
    if info.manifest["configuration"].get("one_hot"):
        features[schema.ONE_HOT_KEY] = Feature("float32", (info.num_classes,))
    for column in info.manifest.get("features", ()):
        features[column["name"]] = Feature(column["dtype"], None if column["list"] else ())
    return features


def pick_features(info: DatasetInfo, names: Sequence[str]) -> dict[str, Feature]:
    """The features with these names.

    Raises:
        UsageError: there is no such feature; lists those that there are.
    """
    there = features_of(info)
    for name in names:
        if name not in there:
            raise UsageError(f"features={list(names)}: there is no {name!r}; the records have {', '.join(there)}")
    return {name: there[name] for name in names}


class RecordParser:
    """Parses image, class id and further features of one shape. Lists of any length are left to `parse_lists`.

    Args:
        image_key, class_key: features that hold the encoded image and the class id.
        features: what else is wanted.
    """

    def __init__(self, image_key: str, class_key: str, features: Mapping[str, Feature]) -> None:
        self._keys = [image_key, class_key, *(name for name, feature in features.items() if feature.shape is not None)]
        self._specs = {
            image_key: tf.io.FixedLenFeature([], tf.string),
            class_key: tf.io.FixedLenFeature([], tf.int64),
        }
        for name, feature in features.items():
            if feature.shape is not None and name not in self._specs:
                self._specs[name] = tf.io.FixedLenFeature(feature.shape, _dtype(feature))

    def __call__(self, records: Tensor) -> tuple[Tensor, ...]:
        """Serialized records string [n] → encoded images string [n], class ids int64 [n], further features [n, …]."""
        parsed = tf.io.parse_example(records, self._specs)
        return tuple(parsed[key] for key in self._keys)


def parse(records: Tensor) -> tuple[Tensor, Tensor]:
    """Our records' images string [n] and class ids int64 [n]."""
    images, classes = RecordParser(schema.IMAGE_KEY, schema.CLASS_KEY, {})(records)
    return images, classes


def parse_lists(records: Tensor, features: Mapping[str, Feature]) -> dict[str, Tensor]:
    """Serialized records string [n] → the features that are lists of any length, as ragged tensors [n, None]."""
    specs = {
        name: tf.io.RaggedFeature(_dtype(feature), row_splits_dtype=tf.int64)
        for name, feature in features.items()
        if feature.shape is None
    }
    parsed: dict[str, Tensor] = tf.io.parse_example(records, specs)
    return parsed


def _dtype(feature: Feature) -> Any:
    return tf.string if feature.dtype == "bytes" else tf.dtypes.as_dtype(feature.dtype)
