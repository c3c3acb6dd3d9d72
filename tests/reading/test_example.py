"""Examples are parsed without TensorFlow, and as protobuf parses them: the same values, or a ValueError."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from reader.example import ImageFinder, parse_example
from reader.features import Feature, read_features

IMAGE, CLASS = "image", "class"
find = ImageFinder(IMAGE, CLASS)
Values = dict[str, list[Any]]

labels = st.one_of(
    st.integers(0, 300), st.sampled_from([127, 128, 1 << 14, 1 << 21, 2**63 - 1, -1, -(2**63)]), st.integers(-9, 9)
)
# What the finder looks for, inside what it has to skip.
images = st.one_of(
    st.binary(max_size=300), st.sampled_from([b"\x0a\x05image\x12", b"\x0a\x05class\x12\x05\x1a\x03\x0a\x01\x02"])
)
values = st.one_of(
    st.lists(images, max_size=3),
    st.lists(labels, max_size=3),
    st.lists(st.floats(width=32, allow_nan=False), max_size=3),
)
keys = st.sampled_from([IMAGE, CLASS, "", "a", "imag", "image2", "clas", "é", "x" * 127, "x" * 128, "x" * 200])
others = keys.filter(lambda key: key not in (IMAGE, CLASS))


def parse(record: bytes) -> Values | None:
    """What protobuf makes of a record; None if it refuses it."""
    import tensorflow as tf

    try:
        message = tf.train.Example.FromString(record)
    except DecodeError:
        return None
    kinds = {key: feature.WhichOneof("kind") for key, feature in message.features.feature.items()}
    return {
        key: list(getattr(feature, kinds[key]).value)
        for key, feature in message.features.feature.items()
        if kinds[key] is not None
    }


def agrees(call: Callable[[], Any], expected: Any) -> bool:
    """Whether the call gives what is expected (anything, if protobuf refuses the record) or a ValueError."""
    try:
        found = call()
    except ValueError:
        return True
    return expected is REFUSED or found == expected


REFUSED, NEITHER = object(), object()


def image_and_class(parsed: Values | None) -> Any:
    if parsed is None:
        return REFUSED
    image, label = parsed.get(IMAGE, []), parsed.get(CLASS, [])
    is_there = image and isinstance(image[0], bytes) and label and isinstance(label[0], int)
    return (image[0], label[0]) if is_there else NEITHER


def found(record: bytes) -> tuple[bytes, int]:
    image, label = find(record)
    return bytes(image), label


def plain(record: bytes) -> Values:
    return {key: list(value) for key, value in parse_example(record).items()}


def check(record: bytes) -> None:
    parsed = parse(record)
    assert agrees(lambda: found(record), image_and_class(parsed))
    assert agrees(lambda: plain(record), REFUSED if parsed is None else parsed)


@given(st.dictionaries(keys, values, max_size=6), labels, images)
@example({"filename": [b"cat/1.jpg"], "label": [b"cat"], "size": [4, 5]}, 2, b"jpeg")
def test_all_that_protobuf_writes_is_read(features: Values, label: int, image: bytes) -> None:
    import tensorflow as tf

    message = tf.train.Example()
    for key, value in {**features, IMAGE: [image], CLASS: [label]}.items():
        feature = message.features.feature[key]
        if value and isinstance(value[0], bytes):
            feature.bytes_list.value.extend(value)
        elif value and isinstance(value[0], int):
            feature.int64_list.value.extend(value)
        else:
            feature.float_list.value.extend(value)
    for is_deterministic in (True, False):
        record = message.SerializeToString(deterministic=is_deterministic)
        assert found(record) == (image, label)
        assert plain(record) == parse(record)


# --- layouts that protobuf reads and seldom writes


def varint(number: int, width: int = 0) -> bytes:
    """A number; with bytes that only say that more follow, up to `width` of them."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F or len(out) + 1 < width:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def field(number: int, value: bytes, width: int = 0) -> bytes:
    return varint(number << 3 | 2) + varint(len(value), width) + value


widths = st.sampled_from([0, 0, 0, 2, 5])
unknown = st.sampled_from([b"", b"", b"\x48\x05", field(9, b"more"), b"\x4d1234", b"\x4912345678", b"\x4b\x4c"])


@st.composite
def feature(draw: st.DrawFn) -> bytes:
    """A Feature: lists one behind the other, numbers packed, one by one, or both."""
    lists = []
    for _ in range(draw(st.sampled_from([1, 1, 1, 0, 2]))):
        value = draw(values)
        kind = 1 if value and isinstance(value[0], bytes) else 3 if value and isinstance(value[0], int) else 2
        parts, numbers = [], []
        for item in value:
            if kind == 1:
                parts.append(field(1, item, draw(widths)))
                continue
            encoded = varint(item) if kind == 3 else np.float32(item).tobytes()
            if draw(st.booleans()):
                parts.append((b"\x08" if kind == 3 else b"\x0d") + encoded)
            else:
                numbers.append(encoded)
        if numbers:
            parts.append(field(1, b"".join(numbers), draw(widths)))
        lists.append(field(kind, b"".join(parts) + draw(unknown), draw(widths)) + draw(unknown))
    return b"".join(lists)


@st.composite
def laid_out(draw: st.DrawFn) -> bytes:
    """An Example of entries in any order, other keys twice, values before keys, in one message of Features or more.

    No unknown fields in an entry: protobuf's Python drops such an entry, its C++ doesn't.
    """
    features, wanted = [], [IMAGE, CLASS]
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        entries = []
        for key in [*draw(st.lists(others, max_size=4)), *wanted, *draw(st.lists(others, max_size=2))]:
            parts = [field(1, key.encode(), draw(widths))]
            parts += [field(2, draw(feature()), draw(widths)) for _ in range(draw(st.sampled_from([1, 1, 1, 0, 2])))]
            entries.append(field(1, b"".join(draw(st.permutations(parts))), draw(widths)))
        features.append(field(1, b"".join(entries) + draw(unknown), draw(widths)))
        wanted = []
    return b"".join(features) + draw(unknown)


@given(laid_out())
def test_odd_layouts_are_read_as_protobuf_reads_them_or_refused(record: bytes) -> None:
    check(record)


@given(st.data())
def test_a_record_with_a_changed_byte_is_read_as_protobuf_reads_it_or_refused(data: st.DataObject) -> None:
    record = bytearray(entries(size=[1, 2], **{IMAGE: [b"abc" * data.draw(st.sampled_from([1, 60]))], CLASS: [300]}))
    for _ in range(data.draw(st.integers(1, 2))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(record[: data.draw(st.sampled_from([len(record), len(record) - 1, 9]))])
    parsed = parse(cut) or {}  # without entries that have unknown fields, see `laid_out`
    expected = image_and_class(parsed)
    assert agrees(lambda: found(cut), REFUSED if expected is NEITHER else expected)
    assert agrees(lambda: {key: value for key, value in plain(cut).items() if key in parsed}, parsed)


def entries(**features: list[Any]) -> bytes:
    def lists() -> Iterator[bytes]:
        for key, items in features.items():
            kind = 1 if isinstance(items[0], bytes) else 2 if isinstance(items[0], float) else 3
            encode = {1: bytes, 2: lambda item: np.float32(item).tobytes(), 3: varint}[kind]
            numbers = b"".join(map(encode, items))  # type: ignore[arg-type]
            inside = b"".join(field(1, item) for item in items) if kind == 1 else field(1, numbers)
            yield field(1, field(1, key.encode()) + field(2, field(kind, inside)))

    return field(1, b"".join(lists()))


@given(st.binary(max_size=80))
def test_any_bytes_are_an_example_or_refused(data: bytes) -> None:
    for call in (find, parse_example):
        try:
            call(data)
        except ValueError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({CLASS: [1]}, "^no 'image' or no 'class' among class$"),
        ({IMAGE: [b"x"], "label": [1]}, "among image, label$"),
        ({IMAGE: [b"x"], CLASS: [1.5]}, "no 'class'"),
        ({IMAGE: [b"x"], CLASS: [float("inf")]}, "no 'class'"),
        ({IMAGE: [b"x"], CLASS: [b"cat"]}, "no 'class'"),
        ({IMAGE: [1], CLASS: [1]}, "no 'image'"),
    ],
)
def test_what_is_missing_is_named(features: Values, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(entries(**features))


def test_of_a_key_that_comes_twice_the_last_value_counts_but_the_finder_stops_at_the_first() -> None:
    record = field(1, entries(image=[b"a"], **{CLASS: [1]})[2:] + entries(image=[b"b"], **{CLASS: [2]})[2:])
    assert plain(record) == parse(record) == {IMAGE: [b"b"], CLASS: [2]}
    assert found(record) == (b"a", 1)


def test_a_list_without_a_value_is_refused_if_it_is_of_another_type() -> None:
    """As TensorFlow does it; not a missing list, nor one of no type."""
    asked = {"scores": Feature("float32", None), "tags": Feature("bytes", None)}

    def read(kind: int | None) -> list[Any]:
        scores = b"" if kind is None else field(kind, b"")
        return read_features(field(1, field(1, field(1, b"scores") + field(2, scores))), asked)

    assert [list(value) for value in read(None)] == [[], []]
    assert read(2)[0].dtype == np.float32
    for kind, name in ((1, "bytes"), (3, "int64")):
        with pytest.raises(ValueError, match=f"^'scores' has 0 values of {name}$"):
            read(kind)


@pytest.mark.parametrize("length", [1, 127, 128, 300])
def test_keys_of_any_length_are_found(length: int) -> None:
    image, label = ImageFinder("i" * length, "c" * length)(entries(**{"c" * length: [7], "i" * length: [b"jpeg"]}))
    assert (bytes(image), label) == (b"jpeg", 7)
