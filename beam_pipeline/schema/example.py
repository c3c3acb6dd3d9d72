"""`tf.train.Example` without TensorFlow: a worker would pay 4 s and 500 MB for the import.

The message is three small ones, written here by hand so that its bytes are ours to promise: keys sorted, as
`SerializeToString(deterministic=True)` writes them. Tests compare with TensorFlow's own.
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/example.proto
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from beam_pipeline import schema
from beam_pipeline.errors import UsageError


def bytes_feature(*values: bytes) -> bytes:
    """A serialized `tf.train.Feature` holding a BytesList."""
    return _field(1, *(part for value in values for part in _parts(1, value)))


def float_feature(*values: float) -> bytes:
    """A serialized `tf.train.Feature` holding a FloatList (float32)."""
    return _field(2, _packed(struct.pack(f"<{len(values)}f", *values)))


@functools.lru_cache(maxsize=1 << 12)  # the same few class ids and sizes come with every record
def int64_feature(*values: int) -> bytes:
    """A serialized `tf.train.Feature` holding an Int64List; each value in [-2^63, 2^63)."""
    return _field(3, _packed(b"".join(_varint(value & 0xFFFFFFFFFFFFFFFF) for value in values)))


def one_hot_feature(index: int, length: int) -> bytes:
    """A serialized `tf.train.Feature` holding `length` floats, 1 at `index`."""
    values = bytearray(4 * length)
    struct.pack_into("<f", values, 4 * index, 1.0)
    return _field(2, _packed(bytes(values)))


def example(features: Mapping[str, bytes]) -> bytes:
    """A serialized `tf.train.Example` from serialized features by key."""
    entries = [_field(1, _field(1, key.encode()), *_parts(2, features[key])) for key in sorted(features)]
    return _field(1, *entries)


def image_example(
    *,
    image: bytes,
    size: tuple[int, int],
    class_id: int,
    label: str,
    path: str,
    one_hot_classes: int = 0,
    extra: Mapping[str, bytes] | None = None,
) -> bytes:
    """The serialized `tf.train.Example` of one encoded image.

    Args:
        size: (height, width) in pixels.
        path: relative to the input, as listed.
        one_hot_classes: length of `one_hot_class`, 0 for none.
        extra: serialized features of a manifest's columns by name.
    """
    features = {
        schema.IMAGE_KEY: bytes_feature(image),
        schema.CLASS_KEY: int64_feature(class_id),
        schema.LABEL_KEY: bytes_feature(schema.relative_path_bytes(label)),
        schema.SIZE_KEY: int64_feature(*size),
        schema.FILENAME_KEY: bytes_feature(schema.relative_path_bytes(path)),
    }
    if one_hot_classes:
        features[schema.ONE_HOT_KEY] = one_hot_feature(class_id, one_hot_classes)
    return example({**features, **(extra or {})})


def features_of(record: bytes) -> dict[str, bytes]:
    """The inverse of `example`: serialized features by key.

    Raises:
        ValueError: it isn't a record as `example` writes it.
    """
    try:
        ((features, end),) = _spans(record, 0, len(record))
        pairs = [tuple(_spans(record, *entry)) for entry in _spans(record, features, end)]
        return {record[slice(*key)].decode(): record[slice(*feature)] for key, feature in pairs}
    except IndexError:
        raise ValueError("it ends early") from None


def bytes_of(feature: bytes) -> bytes:
    """The value of a BytesList of one. Raises ValueError if it is another feature."""
    ((start, stop),) = _spans(feature, 0, len(feature))
    ((start, stop),) = _spans(feature, start, stop)
    return feature[start:stop]


def numbers_of(feature: bytes) -> tuple[float, ...]:
    """The values of a FloatList or an Int64List. Raises ValueError if it is another feature."""
    ((start, stop),) = _spans(feature, 0, len(feature))
    packed = b"".join(feature[slice(*span)] for span in _spans(feature, start, stop))
    if feature[:1] == b"\x12":
        return struct.unpack(f"<{len(packed) // 4}f", packed)
    numbers, position = [], 0
    while position < len(packed):
        bits, position = _read_varint(packed, position)
        numbers.append(bits - (1 << 64) if bits >> 63 else bits)
    return tuple(numbers)


def _spans(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the value of each length-delimited field."""
    while start < stop:
        if data[start] & 7 != 2:
            raise ValueError("it holds another kind of field")
        length, start = _read_varint(data, start + 1)
        yield start, start + length
        start += length
    if start > stop:
        raise ValueError("it ends early")


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A number, and the position behind it."""
    value = shift = 0
    while (byte := data[position]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift, position = shift + 7, position + 1
    return value | byte << shift, position + 1


def _field(number: int, *value: bytes) -> bytes:
    """A length-delimited field, its value given in parts: an image is copied once a message around it."""
    return b"".join((bytes((number << 3 | 2,)), _varint(sum(map(len, value))), *value))


def _parts(number: int, value: bytes) -> tuple[bytes, bytes, bytes]:
    """A length-delimited field, not joined yet."""
    return bytes((number << 3 | 2,)), _varint(len(value)), value


def _packed(values: bytes) -> bytes:
    """A packed repeated field number 1, absent when empty."""
    return _field(1, values) if values else b""


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


OWN_COLUMNS = ("path", "label", "split", "bytes", "md5")
DTYPES = ("int64", "float32", "bytes")


class Column(NamedTuple):
    """One feature column: its key in the record, one of `DTYPES`, and whether each cell is a list."""

    name: str
    dtype: str
    is_list: bool


def columns(header: Sequence[str], url: str = "") -> tuple[Column, ...]:
    """The feature columns of a header, in order of their names.

    Raises:
        UsageError: a name is reserved or repeated, or a type unknown.
    """
    found: dict[str, Column] = {}
    for written in header:
        name, dtype = name_and_type(written)
        if written in OWN_COLUMNS:
            fault = "is repeated: keep one" if header.count(written) > 1 else ""
        elif not name or name in schema.RECORD_KEYS or name in OWN_COLUMNS:
            fault = "has a reserved name: rename it"
        elif not schema.is_utf8(name):
            fault = "has a name that isn't UTF-8: rename it"
        elif name in found:
            written, fault = name, "is repeated: keep one"
        else:
            fault = "" if dtype in DTYPES else "has no type int64, float32 or bytes: declare one"
            found[name] = Column(name, dtype, written.endswith("[]"))
        if fault:
            raise UsageError(f"--manifest {url!r}: column {written!r} {fault}")
    return tuple(found[name] for name in sorted(found))


def name_and_type(written: str) -> tuple[str, str]:
    """`age:int64` → age, int64; `tags[]` → tags, bytes."""
    name, _, dtype = written.removesuffix("[]").partition(":")
    return name, dtype or "bytes"
