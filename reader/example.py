"""`tf.train.Example` without TensorFlow: its wire format is three small messages.

    Example  { Features features = 1; }
    Features { map<string, Feature> feature = 1; }      an entry is a message: key = 1, value = 2
    Feature  { oneof { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; } }
    *List    { repeated value = 1; }                    numbers packed or one by one

https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto and
https://protobuf.dev/programming-guides/encoding/. For `verify` and for trainers without TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Value = list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


def parse_example(record: bytes) -> dict[str, Value]:
    """The features of one serialized Example: bytes as a list, floats as float32 [n], integers as int64 [n].

    A list without a value is empty, and has the type that it says; a feature without a list is left out, as TensorFlow
    takes it for missing.

    Raises:
        ValueError: not an Example.
    """
    features: dict[str, Value] = {}
    try:
        for field, message in _fields(record):
            if field == 1:
                for entry_field, entry in _fields(_expect(message)):
                    if entry_field == 1:
                        key, value = _parse_entry(_expect(entry))
                        if value is not None:
                            features[key] = value
    except (IndexError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"not a tf.train.Example ({error})") from None
    return features


def _parse_entry(entry: bytes) -> tuple[str, Value | None]:
    key, feature = "", b""
    for field, value in _fields(entry):
        if field == 1:
            key = _expect(value).decode("utf-8")
        elif field == 2:
            feature = _expect(value)
    values: Value | None = None
    for kind, message in _fields(feature):
        items = [item for field, item in _fields(_expect(message)) if field == 1]
        if kind == _BYTES_LIST:
            values = [_expect(item) for item in items]
        elif kind == _FLOAT_LIST:
            values = np.frombuffer(b"".join(_expect(item) for item in items), "<f4")
        elif kind == _INT64_LIST:
            values = _int64_list(items)
    return key, values


def _int64_list(items: list[int | bytes]) -> npt.NDArray[np.int64]:
    numbers: list[int] = []
    for item in items:
        if isinstance(item, int):
            numbers.append(item)
            continue
        position = 0
        while position < len(item):
            number, position = _varint(item, position)
            numbers.append(number)
    return np.array(numbers, np.uint64).view(np.int64)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message: varints as numbers, everything else as its bytes."""
    position, end = 0, len(message)
    while position < end:
        tag, position = _varint(message, position)
        wire_type = tag & 7
        if wire_type == _VARINT:
            number, position = _varint(message, position)
            yield tag >> 3, number
            continue
        if wire_type == _BYTES:
            length, position = _varint(message, position)
        elif wire_type in (_FIXED32, _FIXED64):
            length = 4 if wire_type == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire_type}")
        if position + length > end:
            raise ValueError("a field runs past the end")
        yield tag >> 3, message[position : position + length]
        position += length


def _varint(message: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & 0xFFFFFFFFFFFFFFFF, position
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _expect(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has another type")
    return value
