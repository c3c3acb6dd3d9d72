"""Examples without TensorFlow: the same bytes as TensorFlow's own."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_pipeline import schema
from beam_pipeline.schema import example

tf = pytest.importorskip("tensorflow", exc_type=ImportError)

values = st.one_of(
    st.tuples(st.just("bytes"), st.lists(st.binary(max_size=40), max_size=5)),
    st.tuples(st.just("int64"), st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=5)),
    st.tuples(st.just("float"), st.lists(st.floats(width=32, allow_nan=False), max_size=5)),
)


def no_key_begins_another(content: dict) -> bool:
    """Python's protobuf (upb) writes "ab" before "a", C++ "a" before "ab", as we do: no order to agree with."""
    return not any(one != other and other.startswith(one) for one in content for other in content)


features = st.dictionaries(st.text(max_size=8), values, max_size=8).filter(no_key_begins_another)

OURS = {"bytes": example.bytes_feature, "int64": example.int64_feature, "float": example.float_feature}


def ours(content: dict) -> bytes:
    return example.example({key: OURS[kind](*values) for key, (kind, values) in content.items()})


def tensorflows(content: dict) -> bytes:
    types = {"bytes": tf.train.BytesList, "int64": tf.train.Int64List, "float": tf.train.FloatList}
    feature = {
        key: tf.train.Feature(**{f"{kind}_list": types[kind](value=values)}) for key, (kind, values) in content.items()
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString(deterministic=True)


@given(features)
def test_random_examples_have_tensorflows_bytes(content: dict) -> None:
    assert ours(content) == tensorflows(content)


@given(st.dictionaries(st.text(max_size=3), values, max_size=8))
def test_random_examples_parse_back_whatever_their_keys(content: dict) -> None:
    assert tf.train.Example.FromString(ours(content)) == tf.train.Example.FromString(tensorflows(content))


@pytest.mark.parametrize("length", [127, 128, 16_383, 16_384, 70_000])
def test_long_values_have_tensorflows_bytes(length: int) -> None:
    content = {"image": ("bytes", [b"x" * length]), "n": ("int64", list(range(length // 100)))}
    assert ours(content) == tensorflows(content)


@given(st.integers(1, 300), st.data())
def test_one_hot_is_a_list_of_floats(length: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, length - 1))
    assert example.one_hot_feature(index, length) == example.float_feature(*(float(n == index) for n in range(length)))


def test_an_images_example_has_exactly_the_contracts_keys_and_values() -> None:
    path = "é/".encode() + b"caf\xe9 1.jpg"  # the name is no UTF-8
    given = {"image": b"\xff\xd8", "size": (24, 32), "class_id": 1, "label": "é", "path": os.fsdecode(path)}
    content = {
        "image": ("bytes", [b"\xff\xd8"]),
        "class": ("int64", [1]),
        "label": ("bytes", ["é".encode()]),
        "size": ("int64", [24, 32]),
        "filename": ("bytes", [path]),
    }
    assert example.image_example(**given) == tensorflows(content)
    content |= {"one_hot_class": ("float", [0.0, 1.0, 0.0]), "age": ("int64", [7])}
    more = {"one_hot_classes": 3, "extra": {"age": example.int64_feature(7)}}
    assert example.image_example(**given, **more) == tensorflows(content)


GOLDEN_SHARD = (
    "6100000000000000008f90640a5f0a0e0a05636c61737312051a030a01000a190a0866696c656e616d65120d0a0b0a09"
    "6361742f612e6a70670a100a05696d61676512070a050a030102030a100a056c6162656c12070a050a036361740a0e0a"
    "0473697a6512061a040a0202036878c7d57e00000000000000d8c65c750a7c0a0e0a05636c61737312051a030a01010a"
    "190a0866696c656e616d65120d0a0b0a09646f672f622e706e670a0d0a05696d61676512040a020a000a100a056c6162"
    "656c12070a050a03646f670a1d0a0d6f6e655f686f745f636c617373120c120a0a08000000000000803f0a0f0a047369"
    "7a6512071a050a03ac0201eb55d6a6"
)


def test_a_small_shard_has_known_bytes() -> None:
    # Held as text: a change of these bytes is a change of the format (docs/format.md, format_version).
    records = [
        example.image_example(image=b"\x01\x02\x03", size=(2, 3), class_id=0, label="cat", path="cat/a.jpg"),
        example.image_example(image=b"", size=(300, 1), class_id=1, label="dog", path="dog/b.png", one_hot_classes=2),
    ]
    assert b"".join(map(schema.frame, records)).hex() == GOLDEN_SHARD
