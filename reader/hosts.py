"""Which part of a step's records is read here, and in how many batches."""

from __future__ import annotations

import operator
from typing import Any

import tensorflow as tf

from beam_pipeline.errors import UsageError
from reader.position import host_batch_size

Host = Any  # tf.distribute.InputContext, or (index, count)


def share_of_host(host: Host) -> tuple[int, int, int]:
    """(index, count) of the host that reads, and how many replicas there take a batch each."""
    if host is None:
        return 0, 1, 1
    if isinstance(host, tf.distribute.InputContext):
        replicas = max(1, host.num_replicas_in_sync // host.num_input_pipelines)
        return host.input_pipeline_id, host.num_input_pipelines, replicas
    try:
        index, count = map(operator.index, host)
    except (TypeError, ValueError):
        index, count = 0, 0
    if not 0 <= index < count:
        raise UsageError(f"host={host!r}: (index, count) with 0 <= index < count")
    return index, count, 1


def batch_size_of(global_batch_size: int, hosts: int, replicas: int) -> int:
    """Records in one batch of one host.

    Raises:
        ValueError: the hosts and their replicas can't share the records of a step evenly.
    """
    size = host_batch_size(global_batch_size, hosts)
    if size % replicas:
        raise ValueError(
            f"global_batch_size={global_batch_size} can't be divided by {hosts * replicas} replicas: "
            "make it a multiple of that"
        )
    return size // replicas
