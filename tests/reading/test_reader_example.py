"""The Example parser that needs no TensorFlow, against TensorFlow's own messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reader.example import parse_example

int64s = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5)
floats = st.lists(st.floats(width=32, allow_nan=False), max_size=5)
features = st.dictionaries(
    st.text(max_size=8), st.one_of(st.lists(st.binary(max_size=300), max_size=3), int64s, floats)
)


@given(features)
def test_it_reads_what_tensorflow_writes(values: dict[str, list[bytes] | list[int] | list[float]]) -> None:
    import tensorflow as tf

    example = tf.train.Example()
    for key, value in values.items():
        feature = example.features.feature[key]
        if value and isinstance(value[0], bytes):
            feature.bytes_list.value.extend(value)
        elif value and isinstance(value[0], int):
            feature.int64_list.value.extend(value)
        else:
            feature.float_list.value.extend(value)
    parsed = parse_example(example.SerializeToString())
    assert parsed.keys() == values.keys()
    for key, value in values.items():
        if value and isinstance(value[0], float):
            assert np.array_equal(parsed[key], np.array(value, np.float32))
        else:
            assert list(parsed[key]) == value


def test_numbers_that_are_not_packed_are_read_too() -> None:
    # key "n", Int64List with two values of their own: what some other languages' writers produce.
    int64_list = b"\x08\x05\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"
    feature = b"\x1a" + bytes([len(int64_list)]) + int64_list
    entry = b"\x0a\x01n\x12" + bytes([len(feature)]) + feature
    record = b"\x0a" + bytes([len(entry) + 2]) + b"\x0a" + bytes([len(entry)]) + entry
    assert parse_example(record)["n"].tolist() == [5, -1]


@given(st.binary(max_size=60))
def test_other_bytes_are_no_example_or_an_empty_one(data: bytes) -> None:
    try:
        parse_example(data)
    except ValueError as error:
        assert str(error).startswith("not a tf.train.Example (")


def test_a_cut_example_is_none() -> None:
    with pytest.raises(ValueError, match="runs past the end"):
        parse_example(b"\x0a\x05\x0a")
