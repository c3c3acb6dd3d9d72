"""Which host this process is, and how hosts share a step's records; integers of any kind."""

from __future__ import annotations

import operator
import os
import reprlib
import sys
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from msgspec import json

from beam_pipeline.errors import UsageError


class InputContext(Protocol):
    """What is read of a `tf.distribute.InputContext`: no TensorFlow here."""

    input_pipeline_id: int
    num_input_pipelines: int
    num_replicas_in_sync: int


class AutoHost(NamedTuple):
    """What `host="auto"` stood for when batches were built: a mesh may know better."""

    process: int
    processes: int


# (index, count), "auto" or a tf.distribute.InputContext; None for one host
Host: TypeAlias = tuple[int, int] | Literal["auto"] | InputContext | None


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """An integer of any kind as an int: NumPy's, a tensor, a variable such as Keras' `optimizer.iterations`.

    Raises:
        UsageError: it is something else, or out of bounds.
    """
    try:
        number = int(value)
        is_integer = bool(number == value)
    except (TypeError, ValueError, OverflowError):
        is_integer = False
    if not is_integer:
        raise UsageError(f"{name} must be a whole number, got {reprlib.repr(value)}")
    if least is not None and number < least:
        raise UsageError(f"{name} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise UsageError(f"{name} must be at most {most}, got {number}")
    return number


def share_of_host(host: Host) -> tuple[int, int, int]:
    """(index, count) of the host that reads, and how many replicas there take a batch each.

    Raises:
        UsageError: `host` is no `Host`, or 0 <= index < count doesn't hold; or the processes aren't known for sure.
    """
    if host is None:
        return 0, 1, 1
    if host == "auto":
        return *process_of_several(), 1
    given: Any = host
    if hasattr(given, "input_pipeline_id"):
        replicas = max(1, given.num_replicas_in_sync // given.num_input_pipelines)
        return given.input_pipeline_id, given.num_input_pipelines, replicas
    try:
        index, count = map(operator.index, given)
    except (TypeError, ValueError):
        index, count = 0, 0
    if not 0 <= index < count:
        raise UsageError(f"host must be (index, count) with 0 <= index < count, or 'auto', got {reprlib.repr(host)}")
    return index, count, 1


def process_of_several() -> tuple[int, int]:
    """(rank, size) of torch.distributed or jax.distributed, if one is imported and initialized; else of torchrun or
    TF_CONFIG, in the environment; else (0, 1).

    Raises:
        UsageError: both are initialized, with other numbers; or TF_CONFIG is invalid.
    """
    found = {}
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        found["torch.distributed"] = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # Asked first: `process_count` starts JAX' backend, which must come after `jax.distributed.initialize`.
    if jax is not None and jax.distributed.is_initialized():
        found["jax.distributed"] = jax.process_index(), jax.process_count()
    if len({*found.values()}) > 1:
        numbers = " and ".join(f"process {index} of {count} ({name})" for name, (index, count) in found.items())
        raise UsageError(f"this is {numbers}: give host=(index, count)")
    if found:
        return next(iter(found.values()))
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    told = (int(rank), int(size)) if rank.isdecimal() and size.isdecimal() else tensorflow_worker()
    return told if 0 <= told[0] < told[1] else (0, 1)


def tensorflow_worker() -> tuple[int, int]:
    """(index, count) of this worker in TF_CONFIG, index -1 if it is none of them. Raises UsageError."""
    try:
        config = json.decode(os.environ.get("TF_CONFIG") or "{}")
        cluster, task = config.get("cluster", {}), config.get("task", {})
        workers = [(job, at) for job in ("chief", "master", "worker") for at in range(len(cluster.get(job, ())))]
        this = task.get("type"), int(task.get("index", 0))
    except (ValueError, AttributeError, TypeError):
        raise UsageError("TF_CONFIG is not a JSON object with a cluster: correct or unset it") from None
    return workers.index(this) if this in workers else -1, len(workers)


def batch_size_of(global_batch_size: int, hosts: int, replicas: int = 1) -> int:
    """Records in one batch of one of `hosts` hosts, on each of which `replicas` replicas take a batch in a step.

    Raises:
        ValueError: not divisible; names both and the nearest batch sizes that fit.
    """
    global_batch_size = integer("global_batch_size", global_batch_size, 1)
    shares = integer("hosts", hosts, 1) * replicas
    if global_batch_size % shares:
        below = global_batch_size // shares * shares
        fits = f"{below} or {below + shares}" if below else f"{shares}"
        raise ValueError(
            f"global_batch_size={global_batch_size} can't be divided by {shares} "
            f"{'hosts' if replicas == 1 else 'replicas'}; the nearest that fit: {fits}"
        )
    return global_batch_size // shares
