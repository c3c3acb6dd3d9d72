"""Features beside the image: which there are, their shapes, and that they stay with their image."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import reader
from beam_pipeline.errors import UsageError
from beam_pipeline.examples import bytes_feature, float_feature, int64_feature
from reader.features import Feature, read_features
from tests.reading.shards import make_dataset

COLUMNS = (
    ("age", "int64", False, int64_feature, lambda number: [number]),
    ("price", "float32", False, float_feature, lambda number: [number / 2]),
    ("shop", "bytes", False, bytes_feature, lambda number: [b"shop %d" % (number % 7)]),
    ("tags", "bytes", True, bytes_feature, lambda number: [b"t%d" % i for i in range(number % 3)]),
    ("scores", "float32", True, float_feature, lambda number: [float(i) for i in range(number % 4)]),
)


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    folder = tmp_path_factory.mktemp("features") / "1.0.0"
    return reader.load_info(make_dataset(folder, {"train": [90, 110]}, columns=COLUMNS, one_hot=True))


def test_values_of_one_shape_come_as_arrays(info: reader.DatasetInfo) -> None:
    names = ["price", "age", "shop", "filename", "size", "label", "one_hot_class"]
    train = reader.train_dataset(info, "train", global_batch_size=20, features=names)
    inputs, labels = train.element_spec
    assert list(inputs) == ["image", *names]
    shapes = {name: (tuple(spec.shape), spec.dtype.name) for name, spec in inputs.items()}
    assert shapes == {
        "image": ((20, 16, 24, 3), "uint8"),
        "price": ((20,), "float32"),
        "age": ((20,), "int64"),
        "shop": ((20,), "string"),
        "filename": ((20,), "string"),
        "size": ((20, 2), "int64"),
        "label": ((20,), "string"),
        "one_hot_class": ((20, 3), "float32"),
    }
    assert labels.shape == (20,)
    seen: list[int] = []
    for batch, classes in train:
        numbers = batch["age"].numpy()
        assert [int(name[-10:-4]) for name in batch["filename"].numpy()] == numbers.tolist()
        assert batch["price"].numpy().tolist() == (numbers / 2).tolist()
        assert batch["shop"].numpy().tolist() == [b"shop %d" % (number % 7) for number in numbers]
        assert (batch["size"].numpy() == (16, 24)).all()
        assert (batch["one_hot_class"].numpy().argmax(1) == classes.numpy()).all()
        assert (classes.numpy() == numbers % 3).all()
        seen += numbers.tolist()
    assert sorted(seen) == list(range(200))


@pytest.mark.parametrize("build", [reader.train_dataset, reader.eval_dataset])
def test_lists_come_ragged_in_either_dataset(info: reader.DatasetInfo, build: Any) -> None:
    dataset = build(info, "train", global_batch_size=16, features=["tags", "age", "scores"])
    assert isinstance(dataset.element_spec[0]["tags"], tf.RaggedTensorSpec)
    for inputs, *_ in dataset:
        numbers = inputs["age"].numpy()
        assert inputs["tags"].to_list() == [[b"t%d" % i for i in range(number % 3)] for number in numbers]
        assert inputs["scores"].to_list() == [[float(i) for i in range(number % 4)] for number in numbers]


def test_unknown_features_list_those_that_there_are(info: reader.DatasetInfo) -> None:
    there = "class, label, size, filename, one_hot_class, age, price, shop, tags, scores"
    with pytest.raises(UsageError, match=f"there is no 'weight'; the records have {there}$"):
        reader.train_dataset(info, "train", global_batch_size=2, features=["weight"])
    with pytest.raises(UsageError, match=r"^features='age': give a list, such as \['age'\]$"):
        reader.train_dataset(info, "train", global_batch_size=2, features="age")


def test_values_without_tensorflow_are_refused_where_tensorflow_refuses_them() -> None:
    """An empty list of another type; not a missing one, nor one of no type."""
    wanted = {"scores": Feature("float32", None), "tags": Feature("bytes", None)}
    example = tf.train.Example()
    example.features.feature["scores"].SetInParent()
    assert [list(value) for value in read_features(example.SerializeToString(), wanted)] == [[], []]
    example.features.feature["scores"].float_list.SetInParent()
    assert read_features(example.SerializeToString(), wanted)[0].dtype == np.float32
    example.features.feature["scores"].bytes_list.SetInParent()
    with pytest.raises(ValueError, match=r"^'scores' has 0 values of bytes$"):
        read_features(example.SerializeToString(), wanted)
    example.features.feature["scores"].float_list.SetInParent()
    example.features.feature["tags"].int64_list.SetInParent()
    with pytest.raises(ValueError, match=r"^'tags' has 0 values of int64$"):
        read_features(example.SerializeToString(), wanted)


def test_keras_fits_a_model_of_several_inputs(info: reader.DatasetInfo) -> None:
    import keras

    image = keras.Input((16, 24, 3), name="image")
    age = keras.Input((), dtype="int64", name="age")
    mixed = keras.layers.Concatenate()(
        [
            keras.layers.GlobalAveragePooling2D()(keras.layers.Rescaling(1 / 255)(image)),
            keras.layers.Embedding(200, 4)(age),
        ]
    )
    model = keras.Model({"image": image, "age": age}, keras.layers.Dense(3)(mixed))
    model.compile(
        keras.optimizers.Adam(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    train = reader.train_dataset(info, "train", global_batch_size=50, features=["age"])
    evals = reader.eval_dataset(info, "train", global_batch_size=64, features=["age"])
    history = model.fit(train, epochs=12, validation_data=evals, verbose=0).history
    assert history["val_accuracy"][-1] > 0.95  # an age names a record
    predicted = np.concatenate([model.predict_on_batch(batch[0]).argmax(1) for batch in evals])[:200]
    assert history["val_accuracy"][-1] == pytest.approx((predicted == np.arange(200) % 3).mean(), abs=1e-6)
