"""Examples without TensorFlow: the same bytes as TensorFlow's own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_pipeline import schema
from beam_pipeline.schema import example

tf = pytest.importorskip("tensorflow", exc_type=ImportError)

bytes_lists = st.lists(st.binary(max_size=40), max_size=5)
int_lists = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=5)
float_lists = st.lists(st.floats(width=32, allow_nan=False), max_size=5)
values = st.one_of(
    st.tuples(st.just("bytes"), bytes_lists),
    st.tuples(st.just("int64"), int_lists),
    st.tuples(st.just("float"), float_lists),
)


def no_key_begins_another(content: dict) -> bool:
    """Python's protobuf (upb) writes "ab" before "a", C++ "a" before "ab", as we do: no order to agree with."""
    return not any(one != other and other.startswith(one) for one in content for other in content)


features = st.dictionaries(st.text(max_size=8), values, max_size=8).filter(no_key_begins_another)

OURS = {"bytes": example.bytes_feature, "int64": example.int64_feature, "float": example.float_feature}


def theirs(kind: str, values: list) -> tf.train.Feature:
    if kind == "bytes":
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if kind == "int64":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def tensorflows_example(content: dict) -> bytes:
    content = {key: theirs(*pair) for key, pair in content.items()}
    message = tf.train.Example(features=tf.train.Features(feature=content))
    return message.SerializeToString(deterministic=True)


@settings(max_examples=200, deadline=None)
@given(features)
def test_random_examples_have_tensorflows_bytes(content: dict) -> None:
    ours = example.example({key: OURS[kind](*values) for key, (kind, values) in content.items()})
    assert ours == tensorflows_example(content)


@given(st.dictionaries(st.text(max_size=3), values, max_size=8))
def test_random_examples_parse_back_whatever_their_keys(content: dict) -> None:
    ours = example.example({key: OURS[kind](*values) for key, (kind, values) in content.items()})
    message = tf.train.Example.FromString(ours)
    assert message == tf.train.Example.FromString(tensorflows_example(content))


@pytest.mark.parametrize("length", [127, 128, 16_383, 16_384, 70_000])
def test_long_values_have_tensorflows_bytes(length: int) -> None:
    content = {"image": ("bytes", [b"x" * length]), "n": ("int64", list(range(length // 100)))}
    ours = example.example({key: OURS[kind](*values) for key, (kind, values) in content.items()})
    assert ours == tensorflows_example(content)


@given(st.integers(1, 300), st.data())
def test_one_hot_is_a_list_of_floats(length: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, length - 1))
    assert example.one_hot_feature(index, length) == example.float_feature(*(float(n == index) for n in range(length)))


def test_an_images_example_parses_with_every_key() -> None:
    record = example.image_example(
        image=b"\xff\xd8",
        size=(24, 32),
        class_id=1,
        label="é",
        path="é/x y.jpg",
        one_hot_classes=3,
        extra={"age": example.int64_feature(7)},
    )
    parsed = tf.io.parse_single_example(
        record,
        {
            "image": tf.io.FixedLenFeature([], tf.string),
            "class": tf.io.FixedLenFeature([], tf.int64),
            "label": tf.io.FixedLenFeature([], tf.string),
            "size": tf.io.FixedLenFeature([2], tf.int64),
            "filename": tf.io.FixedLenFeature([], tf.string),
            "one_hot_class": tf.io.VarLenFeature(tf.float32),
            "age": tf.io.FixedLenFeature([], tf.int64),
        },
    )
    assert parsed["image"].numpy() == b"\xff\xd8"
    assert parsed["class"].numpy() == 1
    assert parsed["label"].numpy().decode() == "é"
    assert parsed["size"].numpy().tolist() == [24, 32]
    assert parsed["filename"].numpy().decode() == "é/x y.jpg"
    assert tf.sparse.to_dense(parsed["one_hot_class"]).numpy().tolist() == [0.0, 1.0, 0.0]
    assert parsed["age"].numpy() == 7


def test_a_record_without_one_hot_has_exactly_the_contracts_keys() -> None:
    record = example.image_example(image=b"", size=(1, 2), class_id=0, label="a", path="a/b.jpg")
    parsed = tf.train.Example.FromString(record)
    assert sorted(parsed.features.feature) == ["class", "filename", "image", "label", "size"]


def test_a_local_name_that_is_no_utf8_keeps_its_bytes() -> None:
    path = b"a/caf\xe9.jpg".decode("utf-8", "surrogateescape")
    record = example.image_example(image=b"", size=(1, 2), class_id=0, label="a", path=path)
    assert tf.train.Example.FromString(record).features.feature["filename"].bytes_list.value[0] == b"a/caf\xe9.jpg"


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
