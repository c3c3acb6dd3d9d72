"""`as_jax`: batches as global `jax.Array`s, two on the device ahead."""

from __future__ import annotations

import itertools
import reprlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from beam_pipeline.errors import UsageError
from reader.batches import as_numpy

# One that is being copied while the next is decoded. More only costs the device's memory.
_BATCHES_AHEAD = 2


class JaxBatches:
    """What `as_jax` returns: each iteration of it is one of the batches. `len()` is the number of batches."""

    def __init__(self, batches: Any, sharding: Any) -> None:
        self._batches = batches
        self._sharding = sharding

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        # Putting a batch on the devices only begins the copy.
        put = (jax.tree.map(self._put, batch) for batch in self._batches)
        ahead: deque[Any] = deque()
        error: Exception | None = None
        try:
            # Taking the last batch ends the iteration, so it isn't taken before it is asked for.
            for arrays in itertools.islice(put, len(self) - 1):
                ahead.append(arrays)
                if len(ahead) == _BATCHES_AHEAD:
                    yield ahead.popleft()
        except Exception as raised:  # comes after the batches before it
            error = raised
        yield from ahead
        if error is not None:
            raise error
        yield from put

    def repeat(self) -> Iterator[Any]:
        """Iteration after iteration, without end."""
        while True:
            yield from self

    def _put(self, local: np.ndarray[Any, Any]) -> jax.Array:
        """One process's part of a batch → the global array, whose other parts are on other processes' devices."""
        if local.dtype == object:
            raise UsageError(
                "a feature holds strings or lists, for which JAX has no array: leave it out of features=, or use "
                "reader.train_batches"
            )
        return jax.make_array_from_process_local_data(self._sharding, local)


def as_jax(batches: Iterable[Any], mesh: Any) -> JaxBatches:
    """Batches as global `jax.Array`s, copied to the devices two ahead (but for an iteration's last).

    Each process reads its own part: give the batches `host=(jax.process_index(), jax.process_count())`.

    Args:
        batches: of `train_batches` or `eval_batches` (or a `tf.data.Dataset`, whose TensorFlow should then be kept off
            the accelerators).
        mesh: `jax.sharding.Mesh`, over whose first axis the records of a batch are spread; or a `jax.sharding.Sharding`
            of a batch.

    Raises:
        ModuleNotFoundError: JAX isn't installed.
        UsageError: the batch can't be spread evenly; while iterating, JAX has no array for a feature.
    """
    batches = as_numpy(batches)
    if isinstance(batches, str) or not (hasattr(batches, "__len__") and hasattr(batches, "__iter__")):
        raise UsageError(
            f"reader.as_jax({type(batches).__name__}): give what train_batches, eval_batches or the like returned"
        )
    if isinstance(mesh, jax.sharding.Sharding):
        return JaxBatches(batches, mesh)
    if not isinstance(mesh, jax.sharding.Mesh):
        raise UsageError(
            f"mesh must be a jax.sharding.Mesh, or a jax.sharding.Sharding of a batch, got {reprlib.repr(mesh)}"
        )
    size = getattr(batches, "batch_size", None)
    processes = len({device.process_index for device in mesh.devices.flat})
    devices = mesh.devices.shape[0]
    if size is not None and size * processes % devices:
        raise UsageError(
            f"a batch of {size * processes} can't be spread over the {devices} devices of mesh axis "
            f"{mesh.axis_names[0]!r}; give a global_batch_size that is a multiple of {devices}"
        )
    return JaxBatches(batches, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names[0])))


def keep_tensorflow_off_accelerators() -> None:
    """Let TensorFlow see no GPU and no TPU: it would reserve nearly all of their memory.

    Only for programs that use both TensorFlow and JAX: `train_batches` needs no TensorFlow.

    Raises:
        UsageError: TensorFlow has begun to use them; call this before anything else of TensorFlow.
    """
    import tensorflow as tf

    for kind in ("GPU", "TPU"):
        try:
            tf.config.set_visible_devices([], kind)
        except RuntimeError:  # too late to change
            if tf.config.get_visible_devices(kind):
                raise UsageError(
                    f"TensorFlow uses the {kind} already: call reader.keep_tensorflow_off_accelerators() first"
                ) from None
