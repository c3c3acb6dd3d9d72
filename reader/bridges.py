"""The datasets of this package for trainers that aren't TensorFlow's: NumPy arrays, and global JAX arrays."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from beam_pipeline.errors import UsageError
from reader.packages import explained

Dataset = Any  # tf.data.Dataset: TensorFlow ships no types

# Batches on the device ahead of the one trained on: one that is being copied while the next is decoded. More only
# costs the device's memory.
_BATCHES_AHEAD = 2
_ACCELERATORS = ("GPU", "TPU")


class NumpyBatches:
    """What `as_numpy` returns: each iteration of it is one of the dataset. `len()` is the number of batches."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset.as_numpy_iterator())

    def __len__(self) -> int:
        return int(self._dataset.cardinality())


class JaxBatches:
    """What `as_jax` returns: each iteration of it is one of the dataset. `len()` is the number of batches."""

    def __init__(self, dataset: Dataset, sharding: Any) -> None:
        self._dataset = dataset
        self._sharding = sharding

    def __iter__(self) -> Iterator[Any]:
        import jax

        # Putting a batch on the devices only begins the copy.
        put = (jax.tree.map(self._put, batch) for batch in self._dataset.as_numpy_iterator())
        # Taking the last batch ends the iteration for the dataset, so it isn't taken before it is asked for.
        most = len(self) - 1 if self._dataset.cardinality() > 0 else None
        early = itertools.islice(put, most)
        ahead = deque(itertools.islice(early, _BATCHES_AHEAD))
        while ahead:
            yield ahead.popleft()
            ahead.extend(itertools.islice(early, 1))
        yield from put

    def __len__(self) -> int:
        return int(self._dataset.cardinality())

    def _put(self, local: Any) -> Any:
        """One process's part of a batch → the global array, whose parts on other processes' devices stay there."""
        import jax

        return jax.make_array_from_process_local_data(self._sharding, local)


def as_numpy(dataset: Dataset) -> NumpyBatches:
    """The batches of a dataset as NumPy arrays, in the structure that it has; read-only, without a copy.

    Args:
        dataset: of `train_dataset`, `eval_dataset` or any other `tf.data.Dataset`.
    """
    return NumpyBatches(dataset)


def as_jax(dataset: Dataset, mesh: Any) -> JaxBatches:
    """The batches of a dataset as global `jax.Array`s, copied to the devices two ahead (but for an iteration's last).

    Each process reads its own part: give the dataset `host=(jax.process_index(), jax.process_count())`.

    Args:
        dataset: of `train_dataset` or `eval_dataset`.
        mesh: `jax.sharding.Mesh`, over whose first axis the records of a batch are spread; or a `jax.sharding.Sharding`
            of the whole batch.

    Raises:
        ModuleNotFoundError: JAX isn't installed.
        UsageError: TensorFlow has taken the accelerator (call `keep_tensorflow_off_accelerators` before the first
            dataset is made), the batch can't be spread evenly, or JAX has no array for a feature: strings, lists.
    """
    try:
        import jax
    except ModuleNotFoundError as error:
        raise explained(error) from None

    keep_tensorflow_off_accelerators()
    _check_features(dataset)
    sharding = mesh
    if isinstance(mesh, jax.sharding.Mesh):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names[0]))
        _check_batch(dataset, mesh)
    return JaxBatches(dataset, sharding)


def keep_tensorflow_off_accelerators() -> None:
    """Let TensorFlow, which only feeds, see no GPU and no TPU: it would reserve nearly all of their memory.

    Raises:
        UsageError: TensorFlow has begun to use them; call this before the first dataset is made.
    """
    for kind in _ACCELERATORS:
        try:
            tf.config.set_visible_devices([], kind)
        except RuntimeError:  # too late to change
            if tf.config.get_visible_devices(kind):
                raise UsageError(
                    f"TensorFlow uses the {kind} already: call reader.keep_tensorflow_off_accelerators() before the "
                    "first dataset is made"
                ) from None


def _check_features(dataset: Dataset) -> None:
    """Raise UsageError where JAX has no array for something in a batch."""
    import jax

    for path, spec in jax.tree_util.tree_flatten_with_path(dataset.element_spec)[0]:
        is_list = not isinstance(spec, tf.TensorSpec)
        if is_list or spec.dtype == tf.string:
            name = getattr(path[-1], "key", jax.tree_util.keystr(path)) if path else "the dataset"
            what = "lists of different lengths" if is_list else "strings"
            raise UsageError(f"{name!r} holds {what}, for which JAX has no array: leave it out, or use reader.as_numpy")


def _check_batch(dataset: Dataset, mesh: Any) -> None:
    """Raise UsageError where a process's batch can't be dealt evenly to its devices."""
    spec = tf.nest.flatten(dataset.element_spec)[0]
    batch = spec.shape[0] if spec.shape.rank else None
    processes = len({device.process_index for device in mesh.devices.flat})
    shards = mesh.devices.shape[0]
    if batch is not None and batch * processes % shards:
        raise UsageError(
            f"a batch of {batch * processes} can't be spread over the {shards} devices of mesh axis "
            f"{mesh.axis_names[0]!r}; give a global_batch_size that is a multiple of {shards}"
        )
