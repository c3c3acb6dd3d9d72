"""Finds what to train on: a TPU, GPUs or the CPU, under Keras on TensorFlow or JAX; and says what it found."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError

import keras
import numpy as np

from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.text import one_line, plural
from reader.hosts import tensorflow_worker
from reader.training.options import TrainOptions, check_backend

_BFLOAT16_FROM, _FLOAT16_FROM = (8, 0), (7, 0)  # compute capabilities of GPUs that are faster so
_ADDRESS, _COUNT, _INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


@dataclass(frozen=True)
class Devices:
    """What a run trains on.

    Attributes:
        kind: `tpu`, `gpu` or `cpu`.
        count: devices that share a batch, of all processes.
        description: one line: what was found, and why nothing better.
        process, processes: which of how many processes this is.
        strategy: a `tf.distribute.Strategy`, or None.
        capability: compute capability of a GPU.
    """

    kind: str
    count: int
    description: str
    process: int = 0
    processes: int = 1
    strategy: Any = None
    capability: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this process writes and reports what all of them do."""
        return self.process == 0

    def scope(self) -> AbstractContextManager[Any]:
        """In which variables are made."""
        return nullcontext() if self.strategy is None else self.strategy.scope()

    def gather(self, values: Any) -> Any:
        """The arrays that all processes give here: [processes, …]."""
        if self.processes == 1:
            return np.asarray(values)[None]
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(np.asarray(values)))

    def precision(self, wanted: str) -> str:
        """The dtype policy for `--mixed_precision`."""
        if wanted == "auto":
            fast = self.kind == "tpu" or self.capability >= _BFLOAT16_FROM
            wanted = "bfloat16" if fast else "float16" if self.capability >= _FLOAT16_FROM else "none"
        return "float32" if wanted == "none" else f"mixed_{wanted}"


@contextmanager
def use_devices(options: TrainOptions) -> Iterator[Devices]:
    """The devices, with Keras set up for them; its dtype policy and distribution are restored afterwards.

    Raises:
        UsageError: the backend, or TF_CONFIG, is one that can't train.
        ImageShardsError: `--device` names what isn't there.
    """
    policy, distribution = keras.config.dtype_policy(), keras.distribution.distribution()
    check_backend(backend := keras.backend.backend())
    if options.distributed and backend != "jax":
        raise UsageError("--distributed: several processes train on JAX only: set KERAS_BACKEND=jax")
    if options.distributed and options.out is None:
        raise UsageError("--distributed: --out is missing: give a URL or folder that all processes see")
    devices = _of_jax(options) if backend == "jax" else _of_tensorflow(options)
    try:
        keras.config.set_dtype_policy(devices.precision(options.mixed_precision))
        if backend == "jax" and devices.count > 1:
            keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
        yield devices
    finally:
        keras.config.set_dtype_policy(policy)
        keras.distribution.set_distribution(distribution)


def _absent(kind: str, why: str) -> ImageShardsError:
    return ImageShardsError(f"--device {kind}: none found: {why}")


# --- TensorFlow


def _of_tensorflow(options: TrainOptions) -> Devices:
    import tensorflow as tf

    if (workers := tensorflow_worker()[1]) > 1:  # https://github.com/keras-team/keras/issues/20585
        raise UsageError(
            f"TF_CONFIG names {workers} workers: Keras trains on several hosts with JAX only; "
            "set KERAS_BACKEND=jax, give --distributed and unset TF_CONFIG"
        )
    wanted, missing = options.device, []
    if wanted in ("auto", "tpu"):
        try:
            # A TPU VM's own TPU is `local`: without a name TensorFlow would ask the Cloud API for the one of TPU_NAME.
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
            tf.tpu.experimental.initialize_tpu_system(resolver)
            strategy = tf.distribute.TPUStrategy(resolver)
            count = strategy.num_replicas_in_sync
            return Devices("tpu", count, f"a TPU of {plural(count, 'core')} (TensorFlow)", strategy=strategy)
        except (ValueError, OSError, URLError, RuntimeError, tf.errors.OpError) as error:
            why = one_line(error).partition(". Failed in initialization")[0][:200]
            missing.append("no TPU" if isinstance(error, tf.errors.NotFoundError) else f"no TPU: {why}")
        if wanted == "tpu":
            raise _absent("tpu", why)
    if wanted == "cpu":
        tf.config.set_visible_devices([], "GPU")
    gpus = tf.config.list_logical_devices("GPU")
    if wanted == "gpu" and not gpus:
        raise _absent(
            "gpu", "TensorFlow sees none; nvidia-smi lists them, python -c 'import tensorflow' says what it lacks"
        )
    if wanted == "auto" and not gpus:
        missing.append("no GPU")
    devices = gpus or tf.config.list_logical_devices("CPU")
    # One device needs no strategy, which would only cost time.
    strategy = tf.distribute.MirroredStrategy([one.name for one in devices]) if len(devices) > 1 else None
    kind = "gpu" if gpus else "cpu"
    description = f"{_named(kind, len(devices))} (TensorFlow{''.join(f'; {one}' for one in missing)})"
    details = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    capability = min((one.get("compute_capability", ()) for one in details), default=())
    return Devices(kind, len(devices), description, strategy=strategy, capability=capability)


# --- JAX


def _of_jax(options: TrainOptions) -> Devices:
    import jax

    if "tensorflow" in sys.modules:  # Keras imports it if it is installed
        _keep_tensorflow_off_accelerators()
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")  # before the first look at the devices
    if options.distributed:
        _join_processes()
    try:
        devices, platform = jax.devices(), jax.default_backend()
    except RuntimeError as error:  # JAX_PLATFORMS names what isn't there
        raise _absent(options.device, one_line(error)[:200]) from None
    kind = "gpu" if platform in ("gpu", "cuda", "rocm") else platform
    if options.device not in ("auto", kind):
        raise _absent(options.device, f"JAX sees {_named(kind, len(devices))} only")
    processes = jax.process_count()
    of = f", {processes} processes" if processes > 1 else ""
    is_last_choice = (kind, options.device) == ("cpu", "auto")
    missing = "; no TPU or GPU: without 'jax[tpu]' or 'jax[cuda12]' it sees none" if is_last_choice else ""
    description = f"{_named(kind, len(devices))} (JAX{of}{missing})"
    capability = tuple(map(int, devices[0].compute_capability.split("."))) if kind == "gpu" else ()
    return Devices(kind, len(devices), description, jax.process_index(), processes, capability=capability)


def _join_processes() -> None:
    import jax

    given = [os.environ.get(name) for name in (_ADDRESS, _COUNT, _INDEX)]
    try:
        if any(given):
            address, count, index = given
            jax.distributed.initialize(address, int(count or ""), int(index or ""))
        else:
            jax.distributed.initialize()  # Cloud TPU, SLURM and Open MPI tell it themselves
    except (ValueError, RuntimeError) as error:
        raise ImageShardsError(
            f"--distributed: {one_line(error)[:300]}; on Cloud TPU, SLURM or Open MPI nothing need be set, "
            f"elsewhere {_ADDRESS}=HOST:PORT, {_COUNT} and {_INDEX}"
        ) from None


def _named(kind: str, count: int) -> str:
    return f"the {kind.upper()}" if count == 1 else f"{count} {kind.upper()} devices"


def _keep_tensorflow_off_accelerators() -> None:
    """Let TensorFlow see no GPU and no TPU: it would reserve nearly all of their memory.

    Raises:
        UsageError: TensorFlow has begun to use them; call this before anything else of TensorFlow.
    """
    import tensorflow as tf

    for kind in ("GPU", "TPU"):
        try:
            tf.config.set_visible_devices([], kind)
        except RuntimeError:  # too late to change
            if tf.config.get_visible_devices(kind):
                raise UsageError(f"TensorFlow uses the {kind} already: train in a process of its own") from None
