"""`as_jax` on devices of one process and of several; and Keras on JAX."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import reader
from beam_pipeline.errors import CorruptRecordError, UsageError
from beam_pipeline.schema.example import float_feature, int64_feature
from reader.stream import TrainBatches
from reader.training import devices
from tests import servers
from tests.reading.shards import flipped, make_dataset
from tests.reading.without import run_together

needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed: pip install 'imageshards[jax]'")

COLUMNS: Any = [
    ("scores", "float32", True, float_feature, lambda number: [1.0] * (number % 3)),
    ("number", "int64", False, int64_feature, lambda number: (number,)),
]


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    folder = tmp_path_factory.mktemp("jax") / "1.0.0"
    return reader.load_info(make_dataset(folder, {"train": [60, 40]}, columns=COLUMNS))


def on_one_device(batches: Any) -> Any:
    import jax

    return reader.as_jax(batches, jax.sharding.Mesh(jax.devices("cpu")[:1], ("data",)))


class Counting(TrainBatches):
    """Batches that tell how many were taken."""

    taken = 0

    def read(self, *arguments: Any) -> Any:
        for self.taken, batch in enumerate(super().read(*arguments), 1):
            yield batch


@needs_jax
def test_two_batches_are_ahead(info: reader.DatasetInfo) -> None:
    counting: Any = reader.train_batches(info, "train", global_batch_size=20)
    counting.__class__ = Counting
    arrays = on_one_device(counting)
    assert len(arrays) == 5 and [counting.taken for _ in arrays] == [2, 3, 4, 5, 5]
    first = next(iter(counting))[1].tolist()
    for number, _ in enumerate(arrays):
        if number == 3:  # the last of the five is on its way
            break
    assert next(iter(counting))[1].tolist() == first  # of a loop that was left


@needs_jax
def test_an_error_comes_after_the_batches_before_it(tmp_path: Path) -> None:
    corrupt, where = flipped(tmp_path / "1.0.0", [40], 33)
    batches = reader.train_batches(corrupt, "train", global_batch_size=2, seed=4)
    counts = []
    for some in (batches, on_one_device(batches)):
        counts.append(0)
        with pytest.raises(CorruptRecordError, match=where):
            for _ in some:
                counts[-1] += 1
    assert counts[0] == counts[1] > 3


NO_ARRAY = "holds strings or lists, for which JAX has no array: leave it out of features=, or use imageshards.train_b"
WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "texts": (lambda train, evals: next(iter(on_one_device(train("filename")))), f"feature 'filename' {NO_ARRAY}"),
    "lists": (lambda train, evals: next(iter(on_one_device(train("scores")))), f"feature 'scores' {NO_ARRAY}"),
    "no mesh": (
        lambda train, evals: reader.as_jax(train(), "data"),  # type: ignore[arg-type]
        "mesh must be a jax.sharding.Mesh, or a jax.sharding.Sharding of a batch, got 'data'",
    ),
    "endless": (lambda train, evals: on_one_device(evals(True)).repeat(), "evaluation ends: only the batches of train"),
    "no padding": (lambda train, evals: on_one_device(evals(False)), "batches without padding differ in size, which"),
}


@needs_jax
@pytest.mark.parametrize("kind", WRONG)
def test_what_jax_cannot_hold_is_one_line(info: reader.DatasetInfo, kind: str) -> None:
    call, message = WRONG[kind]
    with pytest.raises(UsageError) as error:
        call(
            lambda *names: reader.train_batches(info, "train", global_batch_size=20, features=names),
            lambda pad: reader.eval_batches(info, "train", global_batch_size=32, pad=pad),
        )
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


PROCESSES_PROGRAM = """
import json, sys
import jax, numpy as np, reader
from jax.sharding import Mesh, NamedSharding, PartitionSpec

address, count, process, url, meshes = sys.argv[1:]
jax.distributed.initialize(address, int(count), int(process))
devices = np.array(jax.devices())

def build(kind, host="auto", **options):
    return getattr(reader, kind)(url, "train", global_batch_size=24, features=["number"], host=host, **options)

def rows(array):
    \"\"\"What this process holds of an array: row of the global one -> value.\"\"\"
    found = {}
    for shard in array.addressable_shards:
        for row, value in zip(range(*shard.index[0].indices(len(array))), np.asarray(shard.data), strict=True):
            assert found.setdefault(row, value.tolist()) == value.tolist()  # replicas agree
    return found

def line(call):
    try:
        return call() and ""
    except ValueError as error:
        return str(error)

said = []
for order, axes, spec in json.loads(meshes):
    mesh = Mesh(devices[np.array(order)], axes)
    where = mesh
    if spec is not None:
        where = NamedSharding(mesh, PartitionSpec(*(tuple(axis) if isinstance(axis, list) else axis for axis in spec)))
    train, evals = build("train_batches"), build("eval_batches")
    if refused := line(lambda: reader.as_jax(train, where)):
        said.append(refused)
        continue
    batches = []
    for number, (inputs, labels, *weights) in enumerate([*reader.as_jax(train, where), *reader.as_jax(evals, where)]):
        assert inputs["image"].shape == (24, 16, 24, 3)
        pixels = inputs["image"].astype("int32")[:, 0, 0, 0]
        batches.append([rows(one) for one in (inputs["number"], labels, pixels, *weights)])
    resumed = iter(reader.as_jax(build("train_batches"), where))  # from a position after one step, and from a state
    state = iter(reader.as_jax(build("train_batches", position=train.position_at(1)), where)).get_state()
    resumed.set_state(state)
    assert [rows(inputs["number"]) for inputs, _ in resumed][:3] == [batch[0] for batch in batches[1:4]]
    other = [host for host in ((0, 1), (0, 2), (1, 2)) if host != (train.host, train.hosts)]
    refusals = [line(lambda: reader.as_jax(build("train_batches", host), where)) for host in (None, *other)]
    said.append([train.host, train.hosts, batches, refusals])
own = Mesh(np.array(jax.local_devices()), ("data",))
alone = [inputs["number"].tolist() for inputs, _ in reader.as_jax(build("train_batches", None), own)]
print(json.dumps([said, alone, line(lambda: reader.as_jax(build("train_batches"), own))]))
"""

# Device numbers of a mesh, its axes, the spec (None: give the mesh); the part that each process reads. Process i has
# devices 2i and 2i + 1. Of two processes:
TWO: Any = [
    ([0, 1, 2, 3], ["data"], None, [(0, 2), (1, 2)]),
    ([[0, 1], [2, 3]], ["data", "model"], None, [(0, 2), (1, 2)]),
    ([[0, 2], [1, 3]], ["data", "model"], None, [(0, 1)] * 2),  # the model axis crosses processes
    ([[0, 1, 2, 3]], ["data", "model"], None, [(0, 1)] * 2),
    ([[0, 2], [1, 3]], ["a", "b"], [["a", "b"]], [(0, 2), (1, 2)]),  # rows of the processes take turns
    ([[0, 2], [1, 3]], ["a", "b"], [["b", "a"]], [(0, 2), (1, 2)]),
    ([3, 2, 1, 0], ["data"], None, [(1, 2), (0, 2)]),
    ([0, 1, 2, 3], ["data"], [], [(0, 1)] * 2),  # all of it everywhere
    ([0, 1, 2], ["data"], None, "the mesh gives its processes parts of a batch that"),
    ([[0, 1], [2, 3]], ["a", "b"], ["a", "b"], "a batch of 24 can't be spread by NamedSharding("),
]
FOUR: Any = [
    ([[0, 1], [2, 3], [4, 5], [6, 7]], ["data", "model"], None, [(host, 4) for host in range(4)]),
    ([[0, 1, 2, 3], [4, 5, 6, 7]], ["data", "model"], None, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ([[0, 1, 4, 5], [2, 3, 6, 7]], ["data", "model"], None, [(0, 2), (1, 2), (0, 2), (1, 2)]),
    ([[*range(8)]], ["data", "model"], None, [(0, 1)] * 4),
    ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ["a", "b", "c"], [["a", "b"]], [(host, 4) for host in range(4)]),
    ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ["a", "b", "c"], [["a", "c"]], [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ["a", "b", "c"], ["b"], [(0, 2), (1, 2)] * 2),
    ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ["a", "b", "c"], ["c"], [(0, 1)] * 4),
    ([0, 2, 4, 6, 1, 3, 5, 7], ["data"], None, [(host, 4) for host in range(4)]),
    ([[0, 2], [1, 4], [3, 6], [5, 7]], ["data", "model"], None, "the mesh gives its processes parts of a batch that"),
]


def in_processes(count: int, program: str, folder: Path, *arguments: str, **environment: str) -> list[tuple[str, str]]:
    """What a program says and complains of in each of so many processes, with two devices each."""
    (folder / "program.py").write_text(program)
    address = f"localhost:{servers.free_port()}"
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", **environment}
    commands = ([folder / "program.py", address, count, process, *arguments] for process in range(count))
    return run_together(commands, **flags)


@needs_jax
@pytest.mark.parametrize("meshes", [pytest.param(TWO, id="2"), pytest.param(FOUR, id="4", marks=pytest.mark.soak)])
def test_each_process_reads_the_rows_of_its_devices_whatever_axes_cross_processes(
    info: reader.DatasetInfo, tmp_path: Path, meshes: Any
) -> None:
    count = len(meshes[0][3])
    done = in_processes(count, PROCESSES_PROGRAM, tmp_path, info.url, json.dumps([mesh[:3] for mesh in meshes]))
    for _, errors in done:
        assert errors.count(f"no host= is given, so each of {count} processes reads every record") == 1
    said, alone, refused = zip(*(json.loads(text) for text, _ in done), strict=True)

    def of_numpy(host: Any, kind: str = "train_batches") -> Any:
        build = getattr(reader, kind)
        for inputs, *more in build(info, "train", global_batch_size=24, features=["number"], host=host):
            yield [inputs["number"], more[0], inputs["image"][:, 0, 0, 0], *more[1:]]

    for process in range(count):  # a mesh of its own devices only
        assert alone[process] == [numbers.tolist() for numbers, *_ in of_numpy(None)]
        assert "but the mesh gives this process part 0 of 1, so records would be read twice" in refused[process]
    for mesh, *of_processes in zip(meshes, *said, strict=True):
        if isinstance(mesh[3], str):
            assert all(text.startswith(mesh[3]) and "\n" not in text for text in of_processes), of_processes
            continue
        assert [tuple(one[:2]) for one in of_processes] == mesh[3]
        for host, hosts, batches, refusals in of_processes:
            assert all(refusals[hosts == 1 :]), refusals  # no host is host 0 of 1
            expected = [*of_numpy((host, hosts)), *of_numpy((host, hosts), "eval_batches")]
            for batch, wanted in zip(batches, expected, strict=True):
                for held, column in zip(batch, wanted, strict=True):
                    assert [value for _, value in sorted(held.items(), key=lambda one: int(one[0]))] == column.tolist()
        for columns in zip(*(batches for *_, batches, _ in of_processes), strict=True):
            for helds in zip(*columns, strict=True):  # of one array in all processes
                merged: dict[str, Any] = {}
                for held in helds:
                    assert all(merged.setdefault(row, value) == value for row, value in held.items())
                assert len(merged) == 24


WRAPPED = [5_000_000_001, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)]


@needs_jax
@pytest.mark.parametrize("number", [*WRAPPED, 2**31 - 1, -(2**31), 0])
def test_an_integer_that_jax_would_wrap_is_an_error(tmp_path: Path, number: int) -> None:
    import jax

    columns: Any = [("photo_id", "int64", False, int64_feature, lambda record: (number if record == 3 else record,))]
    url = make_dataset(tmp_path / "1.0.0", {"train": [12]}, columns=columns)
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:1], ("data",))

    def numbers() -> list[int]:
        batches = reader.as_jax(reader.eval_batches(url, "train", global_batch_size=2, features=["photo_id"]), mesh)
        return [int(one) for inputs, *_ in batches for one in inputs["photo_id"]]

    expected = [0, 1, 2, number, *range(4, 12)]
    try:
        jax.config.update("jax_enable_x64", True)
        assert numbers() == expected
    finally:
        jax.config.update("jax_enable_x64", False)
    if number not in WRAPPED:
        assert numbers() == expected
    else:
        match = f"^feature 'photo_id' holds {number}, which JAX would wrap to int32: leave it out of .*jax_enable_x64"
        with pytest.raises(UsageError, match=match):
            numbers()


KERAS_PROCESSES_PROGRAM = """
import json, sys
import jax

address, count, process, url, folder, big = sys.argv[1:]
jax.distributed.initialize(address, int(count), int(process))
import keras, numpy as np, reader

keras.utils.set_random_seed(1)
devices = [f"cpu:{device.id}" for device in jax.devices()]
said = []
for shape, order in (((4, 1), [0, 1, 2, 3]), ((2, 2), [0, 2, 1, 3])):  # the second's model axis crosses processes
    mesh = keras.distribution.DeviceMesh(shape, ["batch", "model"], np.array(devices)[order])
    layout = keras.distribution.LayoutMap(mesh)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False)
    )

    def compiled():
        model = keras.Sequential([keras.Input((16, 24, 3)), keras.layers.Rescaling(1 / 255), keras.layers.Flatten()])
        model.add(keras.layers.Dense(3, kernel_initializer="zeros"))
        model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def fit(batches):
        return compiled().fit(**reader.keras.fit_arguments(batches), verbose=0).history["loss"]

    def train(host="auto", **options):
        return reader.train_batches(url, "train", global_batch_size=20, host=host, **options)

    batches = train()
    said.append([fit(batches), batches.host, batches.hosts, batches.position_at(1).hosts])
    resume = reader.keras.Resume(f"{folder}/{shape[0]}", train(), every_steps=2)
    said[-1] += [resume.fit(compiled(), epochs=2, verbose=0).history["loss"], resume._batches.hosts]
    for host in [(0, 1), (1, 2), (0, 2)]:
        if host != (batches.host, batches.hosts):
            try:
                fit(train(host))
                raise AssertionError(host)
            except ValueError as error:
                assert "so records would be read twice or not at all" in str(error), error
ids = reader.train_batches(big, "train", global_batch_size=4, features=["photo_id"], host="auto")
try:
    fit(ids)
except ValueError as error:
    said.append(str(error))
print(json.dumps(said))
"""


@needs_jax
@pytest.mark.soak
def test_keras_on_jax_reads_in_each_process_the_rows_of_its_devices(info: reader.DatasetInfo, tmp_path: Path) -> None:
    pytest.importorskip("keras", reason="Keras is not installed: pip install 'imageshards[train]'")
    columns: Any = [("photo_id", "int64", False, int64_feature, lambda record: (record + 5_000_000_000,))]
    big = make_dataset(tmp_path / "1.0.0", {"train": [12]}, columns=columns)
    arguments = info.url, str(tmp_path), big
    done = in_processes(2, KERAS_PROCESSES_PROGRAM, tmp_path, *arguments, KERAS_BACKEND="jax")
    of_processes = [json.loads(said.splitlines()[-1]) for said, _ in done]
    for process, ((spread, crossing, wrapped), (_, errors)) in enumerate(zip(of_processes, done, strict=True)):
        assert spread[1:4] == [process, 2, 2] and crossing[1:4] == [0, 1, 1]
        assert spread[5:] == [2] and crossing[5:] == [1]
        assert wrapped.startswith("feature 'photo_id' holds 50000000")
        assert "no host= is given" not in errors
    assert [one[::4] for one in of_processes[0][:2]] == [one[::4] for one in of_processes[1][:2]]  # losses
    for number in range(2):
        names = sorted(file.name for file in (tmp_path / ("4", "2")[number]).iterdir())
        assert names == ["step-000000008.npz", "step-000000010.npz"]


def test_tensorflow_that_uses_an_accelerator_already_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'imageshards[tensorflow]'")

    def too_late(devices: list[Any], kind: str) -> None:
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "set_visible_devices", too_late)
    devices._keep_tensorflow_off_accelerators()  # it sees none
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["GPU:0"] if kind == "GPU" else [])
    with pytest.raises(UsageError, match="TensorFlow uses the GPU already: train in a process of its own"):
        devices._keep_tensorflow_off_accelerators()
