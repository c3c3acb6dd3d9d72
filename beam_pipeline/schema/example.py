"""`tf.train.Example` without TensorFlow: a worker would pay 4 s and 500 MB for the import.

The message is three small ones, written here by hand so that its bytes are ours to promise: keys sorted, as
`SerializeToString(deterministic=True)` writes them. Tests compare with TensorFlow's own.
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/example.proto
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress

from beam_pipeline import schema


def bytes_feature(*values: bytes) -> bytes:
    """A serialized `tf.train.Feature` holding a BytesList."""
    parts, size = [b""], 0
    for value in values:
        length = _varint(len(value))
        parts += (b"\x0a", length, value)
        size += 1 + len(length) + len(value)
    parts[0] = b"\x0a" + _varint(size)
    return b"".join(parts)


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
    parts, size = [b""], 0
    for key in sorted(features):
        head, value = _key(key), features[key]
        length = _varint(len(value))
        entry_bytes = len(head) + len(length) + len(value)
        entry = _varint(entry_bytes)
        parts += (b"\x0a", entry, head, length, value)
        size += 1 + len(entry) + entry_bytes
    parts[0] = b"\x0a" + _varint(size)
    return b"".join(parts)


@functools.lru_cache(maxsize=1 << 12)
def _key(key: str) -> bytes:
    """An entry of `Features` up to the length of its feature."""
    return _field(1, key.encode()) + b"\x12"


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
    features, end = {}, 0
    try:
        for key, start, end in _features(record):
            features[key] = record[start:end]
    except IndexError:
        raise ValueError("it ends early") from None
    if end != len(record):
        raise ValueError("it ends early")
    return features


def bytes_in_head(head: bytes, key: str) -> bytes | None:
    """The value of a feature, a BytesList of one, in the first bytes of a record; None if it isn't all in them."""
    with suppress(IndexError, ValueError):
        for name, start, end in _features(head):
            if name == key:
                return bytes_of(head[start:end])
    return None


def _features(record: bytes) -> Iterator[tuple[str, int, int]]:
    """Key, start and end of each serialized feature. Raises ValueError, or IndexError at the end of the bytes."""
    start, stop = _value(record, 0, 1)
    while start < stop:
        start, end = _value(record, start, 1)
        key, key_end = _value(record, start, 1)
        feature, start = _value(record, key_end, 2)
        if start != end:
            raise ValueError("an entry has more than a key and a value")
        yield record[key:key_end].decode(), feature, start


def bytes_of(feature: bytes) -> bytes:
    """The value of a BytesList of one. Raises ValueError or IndexError if it is another feature."""
    start, end = _value(feature, _value(feature, 0, 1)[0], 1)
    if end != len(feature):
        raise ValueError("it has another number of values than one")
    return feature[start:end]


@functools.lru_cache(maxsize=1 << 12)  # as `int64_feature`
def numbers_of(feature: bytes) -> tuple[float, ...]:
    """The values of a FloatList or an Int64List. Raises ValueError or IndexError if it is another feature."""
    is_float = feature[:1] == b"\x12"
    start, stop = _value(feature, 0, 2 if is_float else 3)
    if start == stop:
        return ()
    position, stop = _value(feature, start, 1)
    if is_float:
        return struct.unpack(f"<{(stop - position) // 4}f", feature[position:stop])
    numbers = []
    while position < stop:
        bits, position = _read_varint(feature, position)
        numbers.append(bits - (1 << 64) if bits >> 63 else bits)
    return tuple(numbers)


def _value(data: bytes, start: int, number: int) -> tuple[int, int]:
    """(start, stop) of the value of the length-delimited field of this number that starts here."""
    if data[start] != number << 3 | 2:
        raise ValueError("it holds another field")
    length, start = _read_varint(data, start + 1)
    return start, start + length


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A number, and the position behind it."""
    value = data[position]
    if value < 0x80:
        return value, position + 1
    value, shift = value & 0x7F, 7
    while (byte := data[position := position + 1]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
    return value | byte << shift, position + 1


def _field(number: int, *value: bytes) -> bytes:
    """A length-delimited field, its value given in parts: an image is copied once per message around it."""
    return b"".join((bytes((number << 3 | 2,)), _varint(sum(map(len, value))), *value))


def _packed(values: bytes) -> bytes:
    """A packed repeated field number 1, absent when empty."""
    return _field(1, values) if values else b""


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
