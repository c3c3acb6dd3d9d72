"""`train_dataset` and `eval_dataset`: what a user of tf.data and Keras may do with them."""

from __future__ import annotations

import gc
import itertools
import json
import logging
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import reader
from beam_pipeline.schema.example import bytes_feature, int64_feature
from tests import servers
from tests.reading.shards import flipped, make_dataset, numbers_in
from tests.reading.without import run_together

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'imageshards[tensorflow]'")
keras = pytest.importorskip("keras", reason="Keras is not installed: pip install 'imageshards[train]'")

COLUMNS: Any = [
    ("age", "int64", False, int64_feature, lambda number: [number]),
    ("tags", "bytes", True, bytes_feature, lambda number: [b"t"] * (number % 3)),
]


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    folder = tmp_path_factory.mktemp("dataset") / "1.0.0"
    splits = {"train": [100, 130, 70], "validation": [20, 17]}
    return reader.load_info(make_dataset(folder, splits, columns=COLUMNS, one_hot=True))


@pytest.fixture
def corrupt(tmp_path: Path) -> tuple[str, str]:
    """A dataset with a flipped bit in record 70 of its second shard, and how that is told."""
    return flipped(tmp_path / "1.0.0", [100, 100], 70)


def named(info: reader.DatasetInfo, batch: int = 50, **options: Any) -> Any:
    return reader.train_dataset(info, "train", global_batch_size=batch, features=["filename"], **options)


def stream(info: reader.DatasetInfo, count: int, batch: int = 50, **options: Any) -> list[int]:
    """Record numbers of the first `count` batches, as the NumPy door gives them."""
    batches = reader.train_batches(info, "train", global_batch_size=batch, features=["filename"], **options)
    return numbers_in(itertools.islice(batches.repeat(), count))


def test_shapes_and_length_are_known_before_anything_is_read(info: reader.DatasetInfo) -> None:
    names = ["size", "filename", "age", "one_hot_class", "tags"]
    train = reader.train_dataset(info, "train", global_batch_size=64, features=names, image_size=(8, 9))
    assert int(train.cardinality()) == len(train) == info.steps_per_epoch("train", 64) == 4
    inputs, labels = train.element_spec
    assert list(inputs) == ["image", *names] and isinstance(inputs.pop("tags"), tf.RaggedTensorSpec)
    assert {name: (tuple(spec.shape), spec.dtype.name) for name, spec in inputs.items()} == {
        "image": ((64, 8, 9, 3), "uint8"),
        "size": ((64, 2), "int64"),
        "filename": ((64,), "string"),
        "age": ((64,), "int64"),
        "one_hot_class": ((64, 3), "float32"),
    }
    assert (labels.shape, labels.dtype) == ((64,), "int64")
    evals = reader.eval_dataset(info, "validation", global_batch_size=16, labels="one_hot")
    assert [(spec.shape, spec.dtype) for spec in evals.element_spec] == [
        ((16, 16, 24, 3), "uint8"),
        ((16, 3), "float32"),
        ((16,), "float32"),
    ]
    assert len(evals) == 3


def test_map_prefetch_repeat_take_skip_batch_flat_map_and_cache_behave(info: reader.DatasetInfo) -> None:
    expected = stream(info, 18)
    assert numbers_in(named(info).map(lambda inputs, labels: (inputs, labels + 1)).prefetch(2)) == expected[:300]
    assert numbers_in(named(info).repeat(3)) == expected
    assert numbers_in(named(info).repeat().take(7)) == expected[:350]
    assert numbers_in(named(info).take(2)) == expected[:100]
    assert numbers_in(named(info).skip(2)) == expected[100:300]
    batched = named(info).batch(3, drop_remainder=True)
    assert batched.element_spec[0]["image"].shape == (3, 50, 16, 24, 3) and len(batched) == 2
    assert numbers_in(batched) == expected[:300]
    assert numbers_in(named(info).unbatch().batch(7)) == expected[:300]
    assert numbers_in(tf.data.Dataset.range(2).flat_map(lambda _: named(info))) == expected[:600]
    cached = named(info).cache()
    assert numbers_in(cached) == numbers_in(cached) == expected[:300]
    assert numbers_in(tf.data.Dataset.zip(named(info), named(info)).map(lambda one, other: other)) == expected[:300]


def test_iterations_go_on_and_abandoned_ones_move_nothing(info: reader.DatasetInfo) -> None:
    train, expected = named(info), stream(info, 24)
    assert numbers_in(train) == expected[:300]
    for _ in train:  # an early break
        break
    next(iter(train))  # Keras' build pass
    assert numbers_in(itertools.islice(train, 3)) == expected[300:450]
    assert numbers_in(train) == expected[300:600]
    iterator = iter(train)  # Keras' `fit` never asks for the end that it knows by the cardinality
    for _ in range(6):
        next(iterator)
    assert numbers_in(train) == expected[900:1200]
    ahead = named(info, 10).prefetch(4)  # that is dropped early
    for _ in range(3):
        assert numbers_in(ahead.take(5)) == stream(info, 5, 10)
    assert numbers_in(ahead) == stream(info, 30, 10)
    left, right = iter(train), iter(train)
    assert all(np.array_equal(next(left)[1], next(right)[1]) for _ in range(6))


def test_the_options_leave_nothing_to_tune_and_split_no_files(info: reader.DatasetInfo) -> None:
    for dataset in (
        reader.train_dataset(info, "train", global_batch_size=8),
        reader.eval_dataset(info, "train", global_batch_size=8).map(lambda *batch: batch),
    ):
        options = dataset.options()
        assert options.autotune.enabled is False
        assert options.experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.FILE


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_of_a_strategy_read_their_parts(info: reader.DatasetInfo, replicas: int) -> None:
    devices = tf.config.list_logical_devices("CPU")
    if len(devices) < replicas:
        pytest.skip("one logical CPU: tests/reading/conftest.py makes two if TensorFlow wasn't started yet")
    strategy = tf.distribute.MirroredStrategy([device.name for device in devices[:replicas]])
    position = reader.train_batches(info, "train", global_batch_size=50).position_at(2)
    for build in (
        partial(reader.train_dataset, info, "train", global_batch_size=50),
        lambda host=None: reader.as_tf(
            reader.train_batches(info, "train", global_batch_size=50, host=host).at(position, rest=False)
        ),
        partial(reader.eval_dataset, info, "train[:120]", global_batch_size=50),
    ):
        expected = [labels.numpy().tolist() for _, labels, *_ in build()]
        distributed = strategy.experimental_distribute_dataset(build())
        by_host = strategy.distribute_datasets_from_function(lambda context, build=build: build(host=context))
        for one in (distributed, by_host):
            steps = [
                [part.numpy().tolist() for part in strategy.experimental_local_results(labels)] for _, labels, *_ in one
            ]
            assert [np.concatenate(parts).tolist() for parts in steps] == expected
            assert {len(part) for parts in steps for part in parts} == {50 // replicas}


WORKER_PROGRAM = """
import json, os, sys
url, index, ports = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
cluster = {"worker": [f"localhost:{port}" for port in ports]}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import keras, reader

def build(kind, **options):
    return getattr(reader, kind)(url, "train[:120]", global_batch_size=50, **options)

def labels(dataset):
    return [strategy.experimental_local_results(labels)[0].numpy().tolist() for _, labels, *_ in dataset]

def kept(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

said = {}
with strategy.scope():
    model = keras.Sequential([keras.Input((16, 24, 3)), keras.layers.Flatten(), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
for kind in ("train_dataset", "eval_dataset"):
    said[kind] = [
        kept(lambda: build(kind)),
        kept(lambda: labels(strategy.experimental_distribute_dataset(build(kind, host="auto")))),
        kept(lambda: labels(strategy.experimental_distribute_dataset(build(kind, host=(0, 1))))),
        kept(lambda: model.fit(build(kind, host=(0, 1)), verbose=0)),
        labels(strategy.distribute_datasets_from_function(lambda context: build(kind, host=context))),
        labels(build(kind, host="auto")),
        len(labels(build(kind, host=(0, 1)))),
    ]
print(json.dumps(said))
"""


@pytest.mark.soak
def test_workers_of_a_cluster_read_their_parts_or_nothing(info: reader.DatasetInfo, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WORKER_PROGRAM)
    command, ports = [tmp_path / "program.py", info.url], [servers.free_port(), servers.free_port()]
    commands = ([*command, index, *ports] for index in range(2))
    done = run_together(commands, CUDA_VISIBLE_DEVICES="-1", KERAS_BACKEND="tensorflow")
    for index, (said, _) in enumerate(done):
        for kind, (refused, *split_again, by_context, by_hand, steps) in json.loads(said).items():
            batches = getattr(reader, kind.replace("dataset", "batches"))
            part = batches(info, "train[:120]", global_batch_size=50, host=(index, 2))
            assert by_context == by_hand == [labels.tolist() for _, labels, *_ in part] and steps == len(part)
            assert refused.startswith("UsageError: no host= is given, so each of 2 processes would read every record: ")
            assert all(error.startswith(("NotFoundError", "InvalidArgumentError")) for error in split_again), (
                split_again
            )
            assert all("Found an unshardable source dataset" in error for error in split_again), split_again


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="Keras has another backend: unset KERAS_BACKEND")
def test_a_corrupt_record_ends_fit_with_its_file_record_and_offset(corrupt: tuple[str, str]) -> None:
    info, where = corrupt
    epochs, model = list[int](), keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    seen = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    train = reader.train_dataset(info, "train", global_batch_size=10)
    with pytest.raises(tf.errors.OpError, match=where):
        model.fit(train, epochs=3, verbose=0, callbacks=[seen])
    assert epochs == []  # it isn't taken for the epoch's end
    evals = reader.eval_dataset(info, "train", global_batch_size=10)
    with pytest.raises(tf.errors.OpError, match=where):
        model.evaluate(evals, verbose=0)


def test_a_corrupt_record_comes_after_all_batches_before_it_and_what_follows_is_no_end(
    corrupt: tuple[str, str],
) -> None:
    info, where = corrupt
    for dataset in (
        reader.eval_dataset(info, "train", global_batch_size=10),
        reader.eval_dataset(info, "train", global_batch_size=10).prefetch(2),
    ):
        iterator = iter(dataset)
        for _ in range(17):
            next(iterator)
        with pytest.raises(tf.errors.OpError, match=where):
            next(iterator)
        with pytest.raises(tf.errors.FailedPreconditionError, match="expected to contain 20 elements"):
            next(iterator)


def test_skipped_counts_each_corrupt_record_once(corrupt: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    info, _ = corrupt
    train = reader.train_batches(info, "train", global_batch_size=10, on_error="skip")
    evals = reader.eval_batches(info, "train", global_batch_size=10, on_error="skip")
    assert train.skipped == evals.skipped == 0
    with caplog.at_level(logging.WARNING, "reader"):
        dataset = reader.as_tf(train).map(lambda *batch: batch)
        assert sum(len(labels) for _ in range(2) for _, labels in dataset) == 400
        assert sum(float(tf.reduce_sum(weights)) for _, _, weights in reader.as_tf(evals)) == 199
    assert train.skipped == evals.skipped == 1
    assert caplog.text.count("skipped 1 corrupt record, 1 so far: ") == 2


def test_batches_cross_into_tensorflow_without_a_copy(info: reader.DatasetInfo) -> None:
    """A tensor's memory is aligned as the engine's is, and comes back to the engine when the tensor is dropped."""
    places, batches = [], reader.train_batches(info, "train", global_batch_size=100)
    for images, *_ in reader.as_tf(batches).repeat(10).as_numpy_iterator():
        places.append(images.ctypes.data)
        assert not images.flags.writeable and places[-1] % 64 == 0
        del images
    assert len(places) == 30 and len(set(places)) <= 12


@pytest.mark.soak
def test_datasets_that_are_dropped_leave_no_memory(info: reader.DatasetInfo) -> None:
    """TensorFlow never frees a dataset's function, so it may hold no buffer and no open file: 10 MB a batch here."""
    process = psutil.Process()

    def read(datasets: int) -> int:
        for number in range(datasets):
            dataset = reader.train_dataset(info, "train", global_batch_size=50, image_size=256)
            for _ in itertools.islice(dataset, number % 2 or None):  # some are left early: a thread would hold buffers
                pass
        gc.collect()
        return process.memory_info().rss

    sizes = [read(10) for _ in range(5)]
    # The least of four: what other tests left comes and goes, a leak grows by 100 MB each time.
    assert min(after - before for before, after in pairwise(sizes)) < 5 << 20
