"""Every door hands out the same bytes: NumPy, tf.data, JAX and PyTorch."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline.schema.example import bytes_feature, float_feature, int64_feature
from tests.reading.shards import make_dataset

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'imageshards[jax]'")
tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'imageshards[tensorflow]'")
torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'imageshards[torch]'")

RECORDS, HOST_BATCH, SEED = 123, 10, 7
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
COLUMNS: Any = [
    ("age", "int64", False, int64_feature, lambda number: (number - 3,)),
    ("weight", "float32", False, float_feature, lambda number: (number / 3,)),
    ("note", "bytes", False, bytes_feature, lambda number: (b"\xff\x00\0%d" % number,)),
    ("codes", "int64", True, int64_feature, lambda number: range(number % 3)),
    ("scores", "float32", True, float_feature, lambda number: [number / 7] * (number % 4)),
    ("words", "bytes", True, bytes_feature, lambda number: [b"w\xfe", b""][: number % 3]),
]
FIXED = ["age", "weight", "class", "size", "one_hot_class"]
NAMES = [*FIXED, "note", "filename", "label", "codes", "scores", "words"]
AUGMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "flip_crop": lambda: {"augment": reader.augment.flip_crop},
    "own": lambda: {"augment": lambda image, seed: image ^ np.uint8(seed % 251)},
    "random_resized_crop": lambda: {
        "augment": reader.augment.random_resized_crop(then=reader.augment.flip),
        "image_size": (20, 14),
    },
    "resized": lambda: {"image_size": (10, 30), "resize_mode": "pad"},
}

DOORS: dict[str, Callable[[Any], Any]] = {
    "tf.data": reader.as_tf,
    "PyTorch": reader.as_torch,
    "JAX": lambda batches: reader.as_jax(batches, DEVICE),
}
QUICK = (("plain", 1), ("own", 3), ("random_resized_crop", 3))  # the others in the soak
Row = dict[str, Any]


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    folder = tmp_path_factory.mktemp("doors") / "1.0.0"
    return reader.load_info(make_dataset(folder, {"train": [50, 31, 42]}, columns=COLUMNS, one_hot=True))


def plain(value: Any) -> Any:
    """A value of a record as Python has it: what can be compared with ==."""
    value = value.numpy() if isinstance(value, torch.Tensor) else value
    if isinstance(value, list):
        return list(map(plain, value))
    return (str(value.dtype), value.shape, value.tobytes()) if isinstance(value, np.ndarray | np.generic) else value


def rows(batches: Iterable[Any]) -> Iterator[Row]:
    """The records of any door's batches."""
    for batch in batches:
        inputs, labels, *weights = batch
        inputs = dict(inputs) if isinstance(inputs, dict) else {"image": inputs}
        images = inputs.pop("image")
        images = np.ascontiguousarray(images.permute(0, 2, 3, 1) if isinstance(images, torch.Tensor) else images)
        assert images.dtype == np.uint8
        features = {name: list(_of_tensor(values)) for name, values in inputs.items()}
        weights = np.asarray(weights[0]) if weights else np.ones(len(labels), np.float32)
        for at, (image, label, weight) in enumerate(zip(images, np.asarray(labels), weights, strict=True)):
            yield {
                "image": (image.shape, hashlib.sha256(image.tobytes()).hexdigest()),
                "its label": plain(label),
                "its weight": plain(weight),
                **{name: plain(values[at]) for name, values in features.items()},
            }


def _of_tensor(values: Any) -> Any:
    if isinstance(values, tf.RaggedTensor):
        return [row.numpy().tolist() if row.dtype == tf.string else row.numpy() for row in values]
    return (
        values.numpy()
        if isinstance(values, tf.Tensor)
        else np.asarray(values)
        if isinstance(values, jax.Array)
        else values
    )


def epochs(batches: Any, count: int = 2) -> Any:
    return itertools.chain.from_iterable(batches for _ in range(count))


def only(names: list[str], found: list[Row]) -> list[Row]:
    """What JAX has arrays for; its integers have 32 bits unless it is told otherwise."""
    wide = {"int64": np.int64, "int32": np.int64}

    def widened(value: Any) -> Any:
        dtype, shape, data = value
        return (shape, np.frombuffer(data, dtype).astype(wide.get(dtype, dtype)).tobytes())

    return [
        {"image": row["image"], **{name: widened(row[name]) for name in ("its label", "its weight", *names)}}
        for row in found
    ]


def read_by_every_door(build: Callable[..., Any], count: int, features: list[str], **options: Any) -> list[Row]:
    """The records of so many loops over NumPy batches, which must be those of every other door."""
    seen = list(rows(epochs(build(features=features, **options), count)))
    for name, door in DOORS.items():
        if name != "JAX":
            assert list(rows(epochs(door(build(features=features, **options)), count))) == seen, name
        elif options.get("host", (0, 1)) == (0, 1):  # it reads with the processes of its mesh
            fixed = [one for one in features if one in FIXED]
            found = list(rows(epochs(door(build(features=fixed, **options)), count)))
            assert only(fixed, found) == only(fixed, seen), name
    return seen


@pytest.mark.parametrize(
    ("augment", "hosts"),
    [
        pytest.param(augment, hosts, marks=[] if (augment, hosts) in QUICK else [pytest.mark.soak])
        for augment in AUGMENTS
        for hosts in (1, 3)
    ],
)
def test_every_byte_of_two_epochs_is_the_same_on_every_door(info: reader.DatasetInfo, augment: str, hosts: int) -> None:
    for host in range(hosts):
        options: dict[str, Any] = {"global_batch_size": HOST_BATCH * hosts, "host": (host, hosts), "seed": SEED}
        seen = read_by_every_door(
            partial(reader.train_batches, info, "train"), 2, NAMES, **options, **AUGMENTS[augment]()
        )
        assert len(seen) == 2 * (RECORDS // (HOST_BATCH * hosts)) * HOST_BATCH


@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("size", [pytest.param(None, marks=pytest.mark.soak), (30, 10)])
def test_every_byte_of_evaluation_is_the_same_on_every_door(info: reader.DatasetInfo, size: Any, hosts: int) -> None:
    names: list[str] = []
    for host in range(hosts):
        options: dict[str, Any] = {"global_batch_size": 21, "host": (host, hosts), "image_size": size}
        seen = read_by_every_door(partial(reader.eval_batches, info, "train"), 1, NAMES, **options)
        counted = [row for row in seen if np.frombuffer(row["its weight"][2], np.float32)[0]]
        for door in (reader.as_tf, reader.as_torch):
            evals = reader.eval_batches(info, "train", features=NAMES, pad=False, **options)
            assert list(rows(door(evals))) == counted
        names += [row["filename"].decode() for row in counted]
    assert sorted(int(name[-10:-4]) for name in names) == list(range(RECORDS))


@pytest.mark.parametrize(("batch", "hosts", "pad"), [(36, 9, False), (36, 9, True), (3, 3, False)])
def test_hosts_with_fewer_records_than_steps_evaluate_each_once_and_know_their_length(
    info: reader.DatasetInfo, batch: int, hosts: int, pad: bool
) -> None:
    for door in (lambda evals: evals, reader.as_tf, reader.as_torch):
        found = []
        for host in range(hosts):
            options: dict[str, Any] = {"global_batch_size": batch, "host": (host, hosts), "pad": pad}
            evals = door(reader.eval_batches(info, "train[:7]", features=["filename"], **options))
            read = list(evals)
            assert len(read) == len(evals)
            found += [row["filename"] for row in rows(read) if any(row["its weight"][2])]
        assert [int(name[-10:-4]) for name in found] == list(range(7))


@pytest.mark.parametrize("labels", ["int", "one_hot"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("image_format", ["jpeg", "png"])
def test_grey_and_png_images_and_one_hot_labels_are_the_same_on_every_door(
    tmp_path: Path, image_format: str, channels: int, labels: Any
) -> None:
    folder = make_dataset(tmp_path / "1.0.0", {"train": [30]}, image_format=image_format, channels=channels)
    options: dict[str, Any] = {"global_batch_size": 10, "labels": labels, "seed": SEED}
    seen = read_by_every_door(partial(reader.train_batches, folder, "train"), 1, [], **options)
    dataset = reader.train_dataset(folder, "train", **options)
    assert dataset.element_spec[0].shape == (10, 16, 24, channels)
    assert seen[0]["its label"][1] == (() if labels == "int" else (3,))


@pytest.mark.parametrize("door", ["NumPy", *DOORS, "tf.data in other batches"])
def test_batches_that_are_kept_stay_as_they_were(info: reader.DatasetInfo, door: str) -> None:
    """The engine's memory is used again: not while anybody holds a batch."""
    batches: Any = reader.train_batches(info, "train", global_batch_size=8, seed=SEED)
    if door in DOORS:
        batches = DOORS[door](batches)
    elif door != "NumPy":
        batches = reader.as_tf(batches).unbatch().batch(5)
    kept, copies = [], []
    for images, *_ in batches:
        kept.append(images[2:5].numpy() if isinstance(images, torch.Tensor) else np.asarray(images)[2:5][:, 1:])
        copies.append(kept[-1].copy())
        del images
    for _ in batches:
        pass
    assert len(kept) >= 15 and all(map(np.array_equal, kept, copies))
