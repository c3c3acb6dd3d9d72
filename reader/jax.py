"""`as_jax`: batches as global `jax.Array`s, two on the device ahead."""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from beam_pipeline.errors import UsageError
from reader.hosts import AutoHost
from reader.stream import Batches, BatchIterator, Element, EvalBatches, TrainBatches

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
                check_values(batch)
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
        # Given the shape, JAX doesn't guess which axes are spread over processes.
        shape = local.shape[0] * self.batches.hosts, *local.shape[1:]
        return jax.make_array_from_process_local_data(self._sharding, local, shape)


def check_values(batch: Element) -> None:
    """Raise UsageError if JAX has no array for a part of a batch, or would wrap it: it has 32 bits by default."""
    columns = batch[0] if isinstance(batch[0], dict) else {}
    for name, values in columns.items():
        if values.dtype == object:
            raise UsageError(
                f"feature {name!r} holds strings or lists, for which JAX has no array: leave it out of features=, or "
                "use imageshards.train_batches"
            )
        held = jax.dtypes.canonicalize_dtype(values.dtype)
        if held != values.dtype and values.dtype.kind in "iu" and (lost := values[values.astype(held) != values]).size:
            raise UsageError(
                f"feature {name!r} holds {lost[0]}, which JAX would wrap to {held}: leave it out of features=, or call "
                "jax.config.update('jax_enable_x64', True) first"
            )


def take_part(batches: Batches, sharding: jax.sharding.Sharding) -> None:
    """Check that the batches have the rows that a sharding of a batch puts on this process's devices.

    With `host="auto"` they have them from now on: processes share rows where a model axis crosses them.

    Raises:
        UsageError: they have others, or no host has these.
    """
    rows, classes = batches.batch_size * batches.hosts, batches.one_hot_classes
    try:
        indices = sharding.devices_indices_map((rows,) if classes is None else (rows, classes))
    except (ValueError, IndexError):
        fit = "give a global_batch_size that its first axis divides, or a sharding of that axis only"
        raise UsageError(f"a batch of {rows} can't be spread by {sharding}: {fit}") from None
    ranges: dict[int, set[Any]] = {}  # of rows, by process
    for device, index in indices.items():
        ranges.setdefault(device.process_index, set()).add(index[0].indices(rows)[:2])
    parts = sorted(set(map(frozenset, ranges.values())), key=min)
    process = jax.process_index(), jax.process_count()
    if process[0] not in ranges or {len(parts) * len(part) for part in parts} != {len(set().union(*parts))}:
        raise UsageError(
            "the mesh gives its processes parts of a batch that differ in size or overlap, or none to process "
            f"{process[0]}: order its devices so that two processes have the same rows or none in common"
        )
    part, given = (parts.index(frozenset(ranges[process[0]])), len(parts)), batches.given_host
    if isinstance(given, AutoHost) and given == process and len(ranges) == process[1]:
        batches.read_as(part)
    if (batches.host, batches.hosts) != part:
        raise UsageError(
            f"the batches are those of host {batches.host} of {batches.hosts}, but the mesh gives this process part "
            f"{part[0]} of {part[1]}, so records would be read twice or not at all: give host={part}, or host='auto' "
            "after jax.distributed.initialize"
        )


def as_jax(batches: Batches, mesh: jax.sharding.Mesh | jax.sharding.Sharding) -> JaxBatches:
    """Batches as global `jax.Array`s, copied to the devices two ahead.

    Each process reads the rows of its devices: give the batches `host="auto"`, whose part then follows from the mesh.
    Processes whose devices hold the same rows, as along a model axis, read the same records.

    Args:
        batches: what `train_batches` or `eval_batches` returned.
        mesh: `jax.sharding.Mesh`, over whose first axis the records of a batch are spread; or a `jax.sharding.Sharding`
            of a batch.

    Raises:
        ModuleNotFoundError: JAX isn't installed.
        UsageError: the batches' host has other rows than this process's devices; the batch can't be spread evenly, or
            isn't padded; while iterating, JAX has no array for a feature, or would wrap an integer.
    """
    Batches.check_given(batches, "as_jax")
    if isinstance(mesh, jax.sharding.Mesh):
        mesh = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names[0]))
    if not isinstance(mesh, jax.sharding.Sharding):
        raise UsageError(
            f"mesh must be a jax.sharding.Mesh, or a jax.sharding.Sharding of a batch, got {reprlib.repr(mesh)}"
        )
    if isinstance(batches, EvalBatches) and not batches.is_padded:
        raise UsageError("batches without padding differ in size, which no sharding spreads: leave out pad=False")
    take_part(batches, mesh)
    return JaxBatches(batches, mesh)
