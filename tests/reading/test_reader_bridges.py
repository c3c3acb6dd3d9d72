"""`as_numpy` and `as_jax`: the same batches for other trainers."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline.errors import UsageError
from beam_pipeline.examples import float_feature
from tests.make import ROOT
from tests.reading.shards import make_dataset


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    scores = ("scores", "float32", True, float_feature, lambda number: [1.0] * (number % 3))
    folder = tmp_path_factory.mktemp("bridges") / "1.0.0"
    return reader.load_info(make_dataset(folder, {"train": [60, 40]}, columns=[scores]))


def test_numpy_batches_are_those_of_the_dataset(info: reader.DatasetInfo) -> None:
    evals = reader.eval_dataset(info, "train", global_batch_size=30)
    batches = reader.as_numpy(evals)
    assert len(batches) == 4
    for _ in range(2):
        for ours, theirs in zip(batches, evals, strict=True):
            for array, tensor in zip(ours, theirs, strict=True):
                assert isinstance(array, np.ndarray)
                np.testing.assert_array_equal(array, tensor.numpy())


def test_numpy_iterations_go_on_where_the_last_one_ended(info: reader.DatasetInfo) -> None:
    train = reader.as_numpy(reader.train_dataset(info, "train", global_batch_size=50, seed=1))
    labels = [sorted(np.concatenate([labels for _, labels in train]).tolist()) for _ in range(2)]
    assert labels[0] == labels[1]


JAX = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed: pip install '.[jax]'")


# TensorFlow, JAX and Keras cost 10 s to import: one process for all that is asked of them together.
JAX_PROGRAM = """
import sys
import jax, keras, numpy as np, reader
from jax.sharding import NamedSharding, PartitionSpec

info = reader.load_info(sys.argv[1])
mesh = jax.make_mesh((2,), ("data",))
train = reader.train_dataset(info, "train", global_batch_size=20, seed=3)
expected = list(reader.as_numpy(reader.train_dataset(info, "train", global_batch_size=20, seed=3)))
batches = reader.as_jax(train, mesh)
print(len(batches))
for (images, labels), (pixels, classes) in zip(batches, expected, strict=True):
    assert images.shape == (20, 16, 24, 3) and images.dtype == np.uint8, images
    assert images.sharding.spec == PartitionSpec("data")
    assert [shard.data.shape[0] for shard in images.addressable_shards] == [10, 10]
    np.testing.assert_array_equal(images, pixels)
    np.testing.assert_array_equal(labels, classes)

evals = reader.eval_dataset(info, "train", global_batch_size=32)
weights = [weights for _, _, weights in reader.as_jax(evals, NamedSharding(mesh, PartitionSpec("data")))]
print(sum(float(one.sum()) for one in weights))
try:
    reader.as_jax(reader.train_dataset(info, "train", global_batch_size=5), mesh)
except ValueError as error:
    print(error)

abandoned = reader.train_dataset(info, "train", global_batch_size=20, seed=3)
for number, _ in enumerate(reader.as_jax(abandoned, mesh)):
    if number == 3:  # the fourth of five
        break
np.testing.assert_array_equal(next(iter(abandoned))[1], expected[0][1])
for name in ("filename", "scores"):
    try:
        reader.as_jax(reader.train_dataset(info, "train", global_batch_size=20, features=[name]), mesh)
    except ValueError as error:
        print(error)

layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(3)]
model = keras.Sequential([keras.Input((16, 24, 3)), *layers])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), weighted_metrics=["accuracy"])
train = reader.train_dataset(info, "train", global_batch_size=20, augment=reader.augment.flip_crop)
history = model.fit(train, epochs=3, validation_data=evals, verbose=0)
print(keras.backend.backend(), len(history.history["val_accuracy"]), int(model.optimizer.iterations))

from reader.augment import on_device

inputs = keras.Input((16, 24, 3), dtype="uint8")
outputs = keras.layers.Dense(3)(keras.layers.Flatten()(on_device.Normalize(info)(inputs)))
model = on_device.AugmentedModel(inputs, outputs)
model.augment = on_device.Augment(info, rand_augment=(1, 9), mixup=0.2)
loss = keras.losses.CategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, weighted_metrics=["accuracy"])
history = model.fit(train, validation_data=evals, verbose=0).history
right = [
    ((model.predict_on_batch(images).argmax(-1) == labels) * weights).sum()
    for images, labels, weights in reader.as_numpy(evals)
]
print("augmented", abs(history["val_accuracy"][0] - sum(right) / 100) < 1e-6)
"""


@JAX
def test_jax_arrays_are_spread_over_the_mesh_and_keras_on_jax_fits(info: reader.DatasetInfo) -> None:
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
    }
    command = [sys.executable, "-c", JAX_PROGRAM, info.url]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "5",
        "100.0",
        "a batch of 5 can't be spread over the 2 devices of mesh axis 'data'; give a global_batch_size that is a "
        "multiple of 2",
        "'filename' holds strings, for which JAX has no array: leave it out, or use reader.as_numpy",
        "'scores' holds lists of different lengths, for which JAX has no array: leave it out, or use reader.as_numpy",
        "jax 3 15",
        "augmented True",
    ]


TORCH_PROGRAM = """
import sys
import keras, numpy as np, reader

info = reader.load_info(sys.argv[1])
layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(info.num_classes)]
model = keras.Sequential([keras.Input((16, 24, 3)), *layers])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), weighted_metrics=["accuracy"])
train = reader.train_dataset(info, "train", global_batch_size=20, augment=reader.augment.flip_crop)
evals = reader.eval_dataset(info, "train", global_batch_size=32)
history = model.fit(train, epochs=3, validation_data=evals, verbose=0)
right = [
    (model.predict_on_batch(images).argmax(-1) == labels)[weights > 0]
    for images, labels, weights in reader.as_numpy(evals)
]
np.testing.assert_allclose(history.history["val_accuracy"][-1], np.concatenate(right).mean(), rtol=1e-6)
print(keras.backend.backend(), len(np.concatenate(right)), model.optimizer.iterations.numpy())
"""


def test_keras_on_torch_fits_and_its_accuracy_is_exact(info: reader.DatasetInfo) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install '.[torch]'")
    done = subprocess.run(
        [sys.executable, "-c", TORCH_PROGRAM, info.url],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "torch 100 15"


@JAX
@pytest.mark.skipif("IMAGESHARDS_LONG_TESTS" not in os.environ, reason="takes half a minute: IMAGESHARDS_LONG_TESTS=1")
def test_two_jax_processes_make_one_global_batch(info: reader.DatasetInfo) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    program = f"""
import os, jax
process = int(os.environ["PROCESS"])
jax.distributed.initialize({address!r}, num_processes=2, process_id=process)
import numpy as np, reader
info = reader.load_info({info.url!r})
mesh = jax.make_mesh((4,), ("data",))
options = dict(global_batch_size=20, seed=3)
train = reader.train_dataset(info, "train", host=(jax.process_index(), jax.process_count()), **options)
mine = list(reader.as_numpy(reader.train_dataset(info, "train", host=(process, 2), **options)))
for (images, labels), (_, expected) in zip(reader.as_jax(train, mesh), mine, strict=True):
    assert images.shape == (20, 16, 24, 3)
    local = np.concatenate([shard.data for shard in labels.addressable_shards])
    np.testing.assert_array_equal(local, expected)
total = jax.jit(lambda labels: labels.sum())(labels)
print("sums", int(total), local.sum())
"""
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env={**environment, "PROCESS": str(i)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (total, one), (same, other) = (map(int, out.split(b"sums")[1].split()) for out, _ in outputs)
    assert total == same == one + other


class _Config:
    """TensorFlow's configuration where it has begun to use a GPU."""

    @staticmethod
    def set_visible_devices(devices: list[Any], kind: str) -> None:
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    @staticmethod
    def get_visible_devices(kind: str) -> list[str]:
        return ["GPU:0"] if kind == "GPU" else []


def test_an_accelerator_that_tensorflow_has_taken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from reader import bridges

    monkeypatch.setattr(bridges.tf, "config", _Config)
    with pytest.raises(UsageError, match="TensorFlow uses the GPU already: call"):
        reader.keep_tensorflow_off_accelerators()
