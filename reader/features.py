"""The values of a record's features beside its image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reader.example import parse_example
from reader.info import Feature


def read_features(record: bytes, wanted: Mapping[str, Feature]) -> tuple[Any, ...]:
    """The values of these features in one record, in their order: some 50 µs of Python a record.

    Returns:
        For each an array [] or [n] of the feature's type; for `bytes` the bytes, or a list of them.

    Raises:
        ValueError: it is no Example, or it lacks a feature or has it in another type or length.
    """
    if not wanted:
        return ()
    parsed = parse_example(record)
    return tuple(_value(name, parsed.get(name), feature) for name, feature in wanted.items())


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
