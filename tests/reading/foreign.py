"""TFRecord files as other tools write them, by TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from tests.reading.shards import CLASSES, draw

SIZE = (12, 20)


def example(**features: Any) -> tf.train.Example:
    """An Example of bytes, integers and floats; a keyword's `__` stands for `/`."""
    made = tf.train.Example()
    for key, value in features.items():
        feature = made.features.feature[key.replace("__", "/")]
        values = value if isinstance(value, list) else [value]
        kind = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[type(values[0]) if values else bytes]
        getattr(feature, kind).value.extend(values)
    return made


def tutorial(number: int) -> tf.train.Example:
    label = number % 3
    one_hot = [float(place == label) for place in range(3)]
    return example(
        image=draw(number, SIZE), label=CLASSES[label].encode(), size=[*SIZE], one_hot_class=one_hot, **{"class": label}
    )


def keras(number: int) -> tf.train.Example:
    return example(image=draw(number, SIZE), label=number % 3)


def tfds(number: int) -> tf.train.Example:
    return example(image=draw(number, SIZE, "png"), label=number % 3, file_name=f"{number}.png".encode())


def slim(number: int) -> tf.train.Example:
    return example(
        image__encoded=draw(number, SIZE),
        image__class__label=number % 3 + 1,
        image__class__text=CLASSES[number % 3].encode(),
        image__height=SIZE[0],
        image__object__bbox__xmin=[0.5] * (number % 3) or [0.0],
    )


KINDS = {"tutorial": tutorial, "keras": keras, "tfds": tfds, "slim": slim}


def write_examples(path: Path, *examples: tf.train.Example | bytes, compression: str = "") -> Path:
    """A file of these records, as TensorFlow writes it."""
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for one in examples:
            writer.write(one if isinstance(one, bytes) else one.SerializeToString())
    return path


def write(folder: Path, kind: str, files: dict[str, int], compression: str = "") -> Path:
    """TFRecord files as the kind's tools write them: name → records, numbered on through all files."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for name, count in files.items():
        write_examples(folder / name, *map(KINDS[kind], range(number, number + count)), compression=compression)
        number += count
    return folder
