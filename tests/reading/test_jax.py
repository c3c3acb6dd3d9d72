"""`as_jax` and `as_numpy`; and Keras on JAX and PyTorch, for users who have no TensorFlow."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline.errors import UsageError
from beam_pipeline.schema.example import float_feature, int64_feature
from tests.reading.shards import flipped, make_dataset
from tests.reading.without import run_without

needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed: pip install '.[jax]'")

COLUMNS: Any = [
    ("scores", "float32", True, float_feature, lambda number: [1.0] * (number % 3)),
    ("number", "int64", False, int64_feature, lambda number: (number,)),
]


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    folder = tmp_path_factory.mktemp("jax") / "1.0.0"
    return reader.load_info(make_dataset(folder, {"train": [60, 40]}, columns=COLUMNS))


MESH_PROGRAM = """
import itertools, sys
import jax, numpy as np, reader
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.make_mesh((2, 2), ("data", "model"))
url = sys.argv[1]

def train(**options):
    return reader.train_batches(url, "train", global_batch_size=20, seed=3, **options)

batches = reader.as_jax(train(features=["number"]), mesh)
assert len(batches) == 5
expected = train(features=["number"]).repeat()
for _ in range(2):
    for (inputs, _), (wanted, _) in zip(batches, (next(expected) for _ in range(5)), strict=True):
        assert inputs["image"].shape == (20, 16, 24, 3) and inputs["image"].dtype == np.uint8
        assert inputs["image"].sharding.spec == PartitionSpec("data")
        assert [shard.data.shape[0] for shard in inputs["image"].addressable_shards] == [10] * 4
        np.testing.assert_array_equal(inputs["number"], wanted["number"])

evals = reader.eval_batches(url, "train", global_batch_size=32)
spread = reader.as_jax(evals, NamedSharding(mesh, PartitionSpec(("data", "model"))))
print(sum(float(weights.sum()) for _ in range(2) for *_, weights in spread))

one = train()
for number, _ in enumerate(reader.as_jax(one, mesh)):
    if number == 3:  # the fourth of five, so the last isn't on its way
        break
np.testing.assert_array_equal(next(iter(one))[1], next(iter(train()))[1])
print(next(reader.as_jax(train(), mesh).repeat())[0].shape)

def lines(call):
    try:
        call()
    except ValueError as error:
        print(error)

lines(lambda: reader.as_jax(reader.train_batches(url, "train", global_batch_size=5), mesh))
for name in ("filename", "scores"):
    lines(lambda: next(iter(reader.as_jax(train(features=[name]), mesh))))
lines(lambda: reader.as_jax([1, 2], "data"))
lines(lambda: reader.as_jax(train().repeat(), mesh)); lines(lambda: reader.as_jax("gs://b", mesh))

class Slow:
    \"\"\"Batches that tell how many were taken.\"\"\"
    taken = 0
    def __len__(self):
        return 6
    def __iter__(self):
        for number in range(6):
            self.taken = number + 1
            yield (np.zeros((4, 2)),)

slow = Slow()
print([slow.taken for _ in reader.as_jax(slow, mesh)])

class Broken(Slow):
    def __iter__(self):
        yield from itertools.islice(super().__iter__(), 4)
        raise OSError("no more")

count = 0
try:
    for _ in reader.as_jax(Broken(), mesh):
        count += 1
except OSError as error:
    print(count, error)
"""


@needs_jax
def test_batches_are_spread_over_a_mesh_two_ahead_the_last_and_errors_at_their_turn(
    info: reader.DatasetInfo, tmp_path: Path
) -> None:
    flags = "--xla_force_host_platform_device_count=4"
    done = run_without("tensorflow,torch", MESH_PROGRAM, tmp_path, info.url, XLA_FLAGS=flags)
    no_array = "a feature holds strings or lists, for which JAX has no array: leave it out of features=, or use "
    assert done.stdout.splitlines() == [
        "200.0",
        "(20, 16, 24, 3)",
        "a batch of 5 can't be spread over the 2 devices of mesh axis 'data'; give a global_batch_size that is a "
        "multiple of 2",
        *[f"{no_array}reader.train_batches"] * 2,
        "mesh must be a jax.sharding.Mesh, or a jax.sharding.Sharding of a batch, got 'data'",
        "reader.as_jax(generator): give what train_batches, eval_batches or the like returned",
        "reader.as_jax(str): give what train_batches, eval_batches or the like returned",
        "[2, 3, 4, 5, 5, 6]",
        "4 no more",
    ]


KERAS_PROGRAM = """
import itertools, sys
import keras, numpy as np, reader
from keras import ops

info = reader.load_info(sys.argv[1])
train = reader.train_batches(info, "train", global_batch_size=20, augment=reader.augment.flip_crop)
evals = reader.eval_batches(info, "train", global_batch_size=32)

layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(info.num_classes)]
model = keras.Sequential([keras.Input((16, 24, 3)), *layers])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), weighted_metrics=["accuracy"])
model.fit(train.repeat(), steps_per_epoch=len(train), epochs=2, verbose=0)
accuracy = model.evaluate(iter(evals), steps=len(evals), verbose=0, return_dict=True)["accuracy"]
right = np.concatenate([
    (np.asarray(model.predict_on_batch(images)).argmax(-1) == labels)[weights > 0] for images, labels, weights in evals
])
print(keras.backend.backend(), len(right), abs(accuracy - right.mean()) < 1e-6)

# A model whose only output are the numbers of its records shows what it is given.
class Total(keras.metrics.Metric):
    def __init__(self, power):
        super().__init__(name=f"sum{power}")
        self.power, self.total = power, self.add_variable((), "zeros", name="total")

    def update_state(self, numbers, _, sample_weight=None):
        values = ops.reshape(ops.cast(numbers, "float32"), (-1,)) ** self.power
        weights = 1.0 if sample_weight is None else ops.reshape(ops.cast(sample_weight, "float32"), (-1,))
        self.total.assign(self.total + ops.sum(values * weights))

    def result(self):
        return ops.convert_to_tensor(self.total) * 1.0

    def reset_state(self):
        self.total.assign(0.0)

def numbers(batches):
    for inputs, _, *weights in batches:
        column = inputs["number"][:, None].astype("float32")
        yield column, column, *weights

class Epochs(keras.utils.PyDataset):
    \"\"\"Batches that Keras begins again in each epoch, and for each validation.\"\"\"
    def __init__(self, batches):
        super().__init__()
        self.batches = batches
    def __len__(self):
        return len(self.batches)
    def on_epoch_begin(self):
        self.iteration = numbers(self.batches)
    def __getitem__(self, step):
        return next(self.iteration)

def fresh():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", weighted_metrics=[Total(0), Total(1), Total(2)])
    return model

train = reader.train_batches(info, "train", global_batch_size=20, features=["number"])
evals = reader.eval_batches(info, "train", global_batch_size=32, features=["number"])
model = fresh()
history = model.fit(numbers(train.repeat()), steps_per_epoch=len(train), epochs=3, verbose=0).history
print([history[f"sum{power}"] for power in range(3)])
first = next(iter(train))[0]["number"]  # of the fourth epoch
same = reader.train_batches(info, "train", global_batch_size=20, features=["number"]).repeat()
print(np.array_equal(first, next(itertools.islice(same, 15, None))[0]["number"]))
print([model.evaluate(numbers(evals), steps=len(evals), verbose=0, return_dict=True)[f"sum{n}"] for n in range(3)])
for shuffle in (True, False):
    train = reader.train_batches(info, "train", global_batch_size=20, features=["number"])
    history = fresh().fit(Epochs(train), epochs=3, validation_data=Epochs(evals), shuffle=shuffle, verbose=0).history
    print([history[f"{prefix}sum{power}"] for prefix in ("", "val_") for power in range(3)])

# A corrupt record isn't taken for the end of an epoch.
from beam_pipeline.errors import CorruptRecordError

ended = []
damaged = dict(global_batch_size=10, features=["number"])
train, evals = (build(sys.argv[2], "train", **damaged) for build in (reader.train_batches, reader.eval_batches))
for data in ((numbers(train.repeat()), len(train)), (Epochs(train), None)):
    seen = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ended.append(epoch))
    try:
        fresh().fit(data[0], steps_per_epoch=data[1], epochs=2, callbacks=[seen], verbose=0)
    except CorruptRecordError as error:
        print(str(error).rpartition("/")[2])
try:
    fresh().evaluate(numbers(evals), verbose=0)
except CorruptRecordError as error:
    print(str(error).rpartition("/")[2], ended)
"""


@pytest.mark.parametrize("backend", [pytest.param("jax", marks=needs_jax), "torch"])
def test_keras_without_tensorflow_trains_and_evaluates_each_record_once(
    info: reader.DatasetInfo, tmp_path: Path, backend: str
) -> None:
    if find_spec(backend) is None or find_spec("keras") is None:
        pytest.skip(f"{backend} or keras is not installed: pip install '.[{backend},train]'")
    damaged, where = flipped(tmp_path / "1.0.0", [40], 33, columns=COLUMNS)
    once = [[value] * 3 for value in (100.0, 4950.0, 328350.0)]  # 100 records: count, sum, sum of squares
    done = run_without("tensorflow", KERAS_PROGRAM, tmp_path, info.url, damaged, KERAS_BACKEND=backend)
    assert done.stdout.splitlines() == [
        f"{backend} 100 True",
        str(once),
        "True",
        str([values[0] for values in once]),
        *[str([*once, *once])] * 2,
        *[where] * 2,
        f"{where} []",
    ]


def test_numpy_batches_of_a_dataset_are_its_own(info: reader.DatasetInfo) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install '.[tensorflow]'")
    evals = reader.eval_dataset(info, "train", global_batch_size=30)
    batches = reader.as_numpy(evals)
    assert len(batches) == 4
    for ours, theirs in zip(batches, evals, strict=True):
        assert all(isinstance(array, np.ndarray) for array in ours)
        assert all(np.array_equal(array, tensor.numpy()) for array, tensor in zip(ours, theirs, strict=True))
    same = reader.eval_batches(info, "train", global_batch_size=30)
    assert reader.as_numpy(same) is same


def test_tensorflow_that_uses_an_accelerator_already_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax", reason="JAX is not installed: pip install '.[jax]'")
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install '.[tensorflow]'")

    def too_late(devices: list[Any], kind: str) -> None:
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "set_visible_devices", too_late)
    reader.keep_tensorflow_off_accelerators()  # it sees none
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["GPU:0"] if kind == "GPU" else [])
    with pytest.raises(UsageError, match="TensorFlow uses the GPU already: call"):
        reader.keep_tensorflow_off_accelerators()
