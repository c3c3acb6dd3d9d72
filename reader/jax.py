"""`as_jax`: batches as global `jax.Array`s, two on the device ahead."""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from beam_pipeline.errors import UsageError
from reader.batches import Batches, TrainBatches
from reader.stream import BatchIterator, Element

# One that is being copied while the next is decoded. More only costs the device's memory.
_BATCHES_AHEAD = 2


class JaxBatches:
    """What `as_jax` returns: each iteration of it is one of the batches. `len()` is the number of batches.

    Its iterators have `get_state` and `set_state` (Grain, Orbax), which count the batches that they handed out.
    """

    def __init__(self, batches: Batches, sharding: jax.sharding.Sharding) -> None:
        self.batches = batches
        self._sharding = sharding

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> BatchIterator:
        return BatchIterator(self.batches, self._ahead)

    def repeat(self) -> BatchIterator:
        """Iteration after iteration, without end."""
        if not isinstance(self.batches, TrainBatches):
            raise UsageError("evaluation ends: only the batches of train_batches repeat")
        return BatchIterator(self.batches, self._ahead, is_endless=True)

    def _ahead(self, batches: Iterator[Element]) -> Iterator[Element]:
        # Putting a batch on the devices only begins the copy.
        ahead: deque[Any] = deque()
        error: Exception | None = None
        try:
            for batch in batches:
                ahead.append(jax.tree.map(self._put, batch))
                if len(ahead) == _BATCHES_AHEAD:
                    yield ahead.popleft()
        except Exception as raised:  # comes after the batches before it
            error = raised
        yield from ahead
        if error is not None:
            raise error

    def _put(self, local: np.ndarray[Any, Any]) -> jax.Array:
        """One process's part of a batch → the global array, whose other parts are on other processes' devices."""
        if local.dtype == object:
            raise UsageError(
                "a feature holds strings or lists, for which JAX has no array: leave it out of features=, or use "
                "imageshards.train_batches"
            )
        return jax.make_array_from_process_local_data(self._sharding, local)


def as_jax(batches: Batches, mesh: jax.sharding.Mesh | jax.sharding.Sharding) -> JaxBatches:
    """Batches as global `jax.Array`s, copied to the devices two ahead.

    Each process reads its own part: give the batches `host="auto"`.

    Args:
        batches: what `train_batches` or `eval_batches` returned.
        mesh: `jax.sharding.Mesh`, over whose first axis the records of a batch are spread; or a `jax.sharding.Sharding`
            of a batch.

    Raises:
        ModuleNotFoundError: JAX isn't installed.
        UsageError: the batches' hosts aren't the mesh's processes; the batch can't be spread evenly; while iterating,
            JAX has no array for a feature.
    """
    if not isinstance(batches, Batches):
        given = type(batches).__name__
        raise UsageError(f"imageshards.as_jax({given}): give what train_batches or eval_batches returned")
    if not isinstance(mesh, jax.sharding.Sharding | jax.sharding.Mesh):
        raise UsageError(
            f"mesh must be a jax.sharding.Mesh, or a jax.sharding.Sharding of a batch, got {reprlib.repr(mesh)}"
        )
    devices = mesh.device_set if isinstance(mesh, jax.sharding.Sharding) else set(mesh.devices.flat)
    processes = sorted({device.process_index for device in devices})
    host = processes.index(jax.process_index()) if jax.process_index() in processes else -1
    if (batches.host, batches.hosts) != (host, len(processes)):
        raise UsageError(
            f"the batches are those of host {batches.host} of {batches.hosts}, but this is process {host} of the "
            f"mesh's {len(processes)}, which would read equal or missing records: give host='auto'"
        )
    if isinstance(mesh, jax.sharding.Sharding):
        return JaxBatches(batches, mesh)
    size, spread = batches.batch_size * len(processes), mesh.devices.shape[0]
    if size % spread:
        raise UsageError(
            f"a batch of {size} can't be spread over the {spread} devices of mesh axis {mesh.axis_names[0]!r}; give a "
            f"global_batch_size that is a multiple of {spread}"
        )
    return JaxBatches(batches, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names[0])))
