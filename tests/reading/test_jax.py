"""`as_jax`; and Keras on JAX and PyTorch, for users who have no TensorFlow."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline.errors import UsageError
from beam_pipeline.schema.example import float_feature, int64_feature
from reader.training import devices
from tests.make import ROOT
from tests.reading.shards import flipped, make_dataset
from tests.reading.without import run_without

needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed: pip install 'imageshards[jax]'")

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
lines(lambda: reader.as_jax(train(host=(1, 2)), mesh))
lines(lambda: reader.as_jax(evals, mesh).repeat())
for name in ("filename", "scores"):
    lines(lambda: next(iter(reader.as_jax(train(features=[name]), mesh))))
lines(lambda: reader.as_jax(train(), "data"))
lines(lambda: reader.as_jax(train().repeat(), mesh)); lines(lambda: reader.as_jax("gs://b", mesh))

class Counting(reader.batches.TrainBatches):
    \"\"\"Batches that tell how many were taken.\"\"\"
    taken = 0
    def read(self, *arguments):
        for self.taken, batch in enumerate(super().read(*arguments), 1):
            yield batch

counting = train()
counting.__class__ = Counting
print([counting.taken for _ in reader.as_jax(counting, mesh)])

corrupt = reader.train_batches(sys.argv[2], "train", global_batch_size=2, seed=4)
wanted = 0
try:
    for _ in corrupt:
        wanted += 1
except reader.batches.ImageShardsError as error:
    print(wanted > 3, str(error).rpartition("/")[2])
count = 0
try:
    for _ in reader.as_jax(corrupt, mesh):
        count += 1
except reader.batches.ImageShardsError as error:
    print(count == wanted, str(error).rpartition("/")[2])
"""


@needs_jax
def test_batches_are_spread_over_a_mesh_two_ahead_the_last_and_errors_at_their_turn(
    info: reader.DatasetInfo, tmp_path: Path
) -> None:
    corrupt, where = flipped(tmp_path / "1.0.0", [40], 33)
    flags = "--xla_force_host_platform_device_count=4"
    done = run_without("tensorflow,torch", MESH_PROGRAM, tmp_path, info.url, corrupt, XLA_FLAGS=flags)
    no_array = "a feature holds strings or lists, for which JAX has no array: leave it out of features=, or use "
    assert done.stdout.splitlines() == [
        "200.0",
        "(20, 16, 24, 3)",
        "a batch of 5 can't be spread over the 2 devices of mesh axis 'data'; give a global_batch_size that is a "
        "multiple of 2",
        "the batches are those of host 1 of 2, but this is process 0 of the mesh's 1, which would read equal or "
        "missing records: give host='auto'",
        "evaluation ends: only the batches of train_batches repeat",
        *[f"{no_array}imageshards.train_batches"] * 2,
        "mesh must be a jax.sharding.Mesh, or a jax.sharding.Sharding of a batch, got 'data'",
        "imageshards.as_jax(BatchIterator): give what train_batches or eval_batches returned",
        "imageshards.as_jax(str): give what train_batches or eval_batches returned",
        "[2, 3, 4, 5, 5]",
        *[f"True {where}"] * 2,
    ]


@needs_jax
def test_batches_of_another_host_are_refused(info: reader.DatasetInfo) -> None:
    import jax

    device = jax.devices("cpu")[0]
    meshes = jax.sharding.Mesh([device], ("data",)), jax.sharding.SingleDeviceSharding(device)
    for mesh, host, build in itertools.product(meshes, (0, 2), (reader.train_batches, reader.eval_batches)):
        batches = build(info, "train", global_batch_size=30, host=(host, 3))
        with pytest.raises(UsageError, match=rf"^the batches are those of host {host} of 3, but this is process 0 of"):
            reader.as_jax(batches, mesh)
    assert len(reader.as_jax(reader.train_batches(info, "train", global_batch_size=30, host=(0, 1)), meshes[0])) == 3


@needs_jax
def test_a_state_counts_what_was_handed_out_and_resumes_exactly(info: reader.DatasetInfo) -> None:
    import jax

    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    options: dict[str, Any] = {"global_batch_size": 9, "features": ["number"]}  # 11 batches and a record

    def arrays() -> Any:
        return reader.as_jax(reader.train_batches(info, "train", **options), sharding)

    def numbers(batches: Any) -> list[list[int]]:
        return [np.asarray(inputs["number"]).tolist() for inputs, _ in batches]

    stream = numbers(itertools.islice(reader.train_batches(info, "train", **options).repeat(), 44))
    for steps in (0, 1, 4, 10, 11):
        iterator = iter(arrays())
        assert numbers(itertools.islice(iterator, steps)) == stream[:steps]
        state = iterator.get_state()
        position = reader.train_batches(info, "train", **options).position_at(steps)
        assert json.loads(state) == {"position": json.loads(position.to_json()), "iteration": 0, "step": steps}
        assert len(state) < 10_000
        for batches in (arrays(), reader.train_batches(info, "train", **options)):  # of one stream
            resumed = iter(batches)
            resumed.set_state(state)
            assert resumed.get_state() == state
            assert numbers(resumed) == stream[steps:11] and numbers(batches) == stream[11:22]
    endless = arrays().repeat()
    assert numbers(itertools.islice(endless, 25)) == stream[:25]
    state = endless.state_dict()
    assert (state["iteration"], state["step"]) == (2, 3)
    assert numbers(itertools.islice(endless, 3)) == stream[25:28]
    endless.load_state_dict(state)  # back
    assert numbers(itertools.islice(endless, 12)) == stream[25:37]
    with pytest.raises(UsageError, match="not a state of batches: "):
        endless.set_state(b"{}")
    assert numbers(itertools.islice(endless, 5)) == stream[37:42]


PROCESSES_PROGRAM = """
import sys
import jax, numpy as np, reader
from jax.sharding import Mesh

url, address, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(address, 2, process)
mesh = Mesh(np.array(jax.devices()), ("data",))
own = Mesh(np.array(jax.local_devices()), ("data",))

def train(**options):
    return reader.train_batches(url, "train", global_batch_size=20, features=["number"], **options)

def numbers(array):
    return [shard.data.tolist() for shard in array.addressable_shards]

for host in (None, (1 - process, 2)):
    try:
        reader.as_jax(train(host=host), mesh)
    except ValueError as error:
        print(error)
print([numbers(inputs["number"]) for inputs, _ in reader.as_jax(train(host="auto"), mesh)])
print([numbers(inputs["number"]) for inputs, _ in reader.as_jax(train(), own)])
inputs, labels = next(iter(reader.as_jax(train(host="auto"), mesh)))
print(inputs["image"].shape, labels.shape)
"""


@needs_jax
def test_each_process_puts_its_own_part_of_a_batch_on_its_devices(info: reader.DatasetInfo, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROCESSES_PROGRAM)
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    command = [sys.executable, "-W", "ignore", str(tmp_path / "program.py"), info.url, address]
    flags = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": flags}
    processes = [subprocess.Popen([*command, str(process)], cwd=ROOT, **pipes) for process in range(2)]
    done = [process.communicate(timeout=200) for process in processes]
    for process, (said, errors) in enumerate(done):
        assert processes[process].returncode == 0, errors[-3000:]

        def of_numpy(devices: int, **options: Any) -> str:
            options = {"global_batch_size": 20, "features": ["number"], **options}
            batches = reader.train_batches(info, "train", **options)
            return str([inputs["number"].reshape(devices, -1).tolist() for inputs, _ in batches])

        refused = "the batches are those of host {}, but this is process {} of the mesh's 2, which would read equal or "
        assert said.splitlines() == [
            *[
                refused.format(host, process) + "missing records: give host='auto'"
                for host in ("0 of 1", f"{1 - process} of 2")
            ],
            of_numpy(2, host=(process, 2)),
            of_numpy(2),
            "(20, 16, 24, 3) (20,)",
        ]
        assert errors.count("no host= is given, so each of 2 processes reads every record: give host='auto'") == 1


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
model.fit((batch for batch in train.repeat()), steps_per_epoch=len(train), epochs=2, verbose=0)
accuracy = model.evaluate((batch for batch in evals), steps=len(evals), verbose=0, return_dict=True)["accuracy"]
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
corrupt = dict(global_batch_size=10, features=["number"])
train, evals = (build(sys.argv[2], "train", **corrupt) for build in (reader.train_batches, reader.eval_batches))
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


@pytest.mark.soak
@pytest.mark.parametrize("backend", [pytest.param("jax", marks=needs_jax), "torch"])
def test_keras_without_tensorflow_trains_and_evaluates_each_record_once(
    info: reader.DatasetInfo, tmp_path: Path, backend: str
) -> None:
    if find_spec(backend) is None or find_spec("keras") is None:
        pytest.skip(f"{backend} or keras is not installed: pip install 'imageshards[{backend},train]'")
    corrupt, where = flipped(tmp_path / "1.0.0", [40], 33, columns=COLUMNS)
    once = [[value] * 3 for value in (100.0, 4950.0, 328350.0)]  # 100 records: count, sum, sum of squares
    done = run_without("tensorflow", KERAS_PROGRAM, tmp_path, info.url, corrupt, KERAS_BACKEND=backend)
    assert done.stdout.splitlines() == [
        f"{backend} 100 True",
        str(once),
        "True",
        str([values[0] for values in once]),
        *[str([*once, *once])] * 2,
        *[where] * 2,
        f"{where} []",
    ]


def test_tensorflow_that_uses_an_accelerator_already_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'imageshards[tensorflow]'")

    def too_late(devices: list[Any], kind: str) -> None:
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "set_visible_devices", too_late)
    devices._keep_tensorflow_off_accelerators()  # it sees none
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["GPU:0"] if kind == "GPU" else [])
    with pytest.raises(UsageError, match="TensorFlow uses the GPU already: train in a process of its own"):
        devices._keep_tensorflow_off_accelerators()
