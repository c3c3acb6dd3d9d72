"""`train_dataset` and `eval_dataset`: the builders that a trainer calls, one screen each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from beam_pipeline.errors import UsageError
from reader.decode import Tensor, batch_decoder, parse
from reader.info import DatasetInfo
from reader.position import Position, host_batch_size
from reader.sources import BatchStream
from reader.stream import EvalStream, RecordStream, train_stream

Augment = Callable[[Tensor, Tensor], Tensor]
Host = Any  # tf.distribute.InputContext, or (index, count)
Dataset = Any  # tf.data.Dataset: TensorFlow ships no types

# Decoded batches that wait for the trainer: one under way to the device, one behind it. More only costs memory.
_PREFETCHED_BATCHES = 2


def train_dataset(
    info: DatasetInfo,
    split: str,
    *,
    global_batch_size: int,
    image_size: int | tuple[int, int] | None = None,
    resize_mode: str = "crop",
    seed: int = 0,
    position: Position | None = None,
    host: Host = None,
    augment: Augment | None = None,
    labels: Literal["int", "one_hot"] = "int",
    window_runs: int = 16,
) -> Dataset:
    """An endless stream of epochs without a seam, as a `tf.data.Dataset` of (images, labels).

    One iteration of it is `info.steps_per_epoch(split, global_batch_size)` batches, which is its cardinality; the next
    iteration begins where the last one that was read to its end stopped. An abandoned one (an early break, Keras' build
    pass) moves nothing. So `fit(epochs=N)` drops no record and pads none.

    Args:
        info: from `load_info`.
        split: TFDS split string, such as `train`, `train[:10%]`, `train+validation`.
        global_batch_size: records that all hosts together read in a step.
        image_size: side or (height, width) in pixels; None for the stored size.
        resize_mode: `crop`, `stretch` or `pad`, where `image_size` isn't the stored size.
        seed: of the order and of augmentation.
        position: where to go on, from the trained steps; None for the beginning.
        host: which part of the records is read here: `tf.distribute.InputContext` or (index, count); None for all.
        augment: `f(images, seeds)` of `reader.augment`, or your own.
        labels: `int` or `one_hot`.
        window_runs: runs of 64 records that are shuffled together; memory grows with it.

    Returns:
        uint8 [b, height, width, channels] and int64 [b] (or float32 [b, classes]), all static, b = global_batch_size /
        hosts.
        A corrupt record ends the iteration with an error that names file, record and byte offset.

    Raises:
        ValueError: the batch can't be divided by the hosts; another dataset's position.
        UsageError: no such split, mixed stored sizes without `image_size`, or an argument has no such value.
    """
    _check_labels(labels)
    index, hosts = _host(host)
    beginning = info.position(
        split, global_batch_size=global_batch_size, hosts=hosts, seed=seed, window_runs=window_runs
    )
    if position is not None:
        beginning = _resume(beginning, position)
    storage, table, steps = info.storage, info.run_table(split), info.steps_per_epoch(split, global_batch_size)
    decode = batch_decoder(info.image, image_size, resize_mode)

    def prepare(
        step: Tensor, seeds: Tensor, _: Tensor, encoded: Tensor, classes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        images = decode(encoded)
        if augment is not None:
            images = tf.ensure_shape(augment(images, seeds), images.shape)
        return step, images, _labels(classes, labels, info.num_classes)

    def open_at(step: int) -> RecordStream:
        return train_stream(storage, table, beginning.after(step), index)

    stream = BatchStream(open_at, beginning.host_batch_size, steps)
    dataset = stream.dataset(parse).map(prepare, num_parallel_calls=tf.data.AUTOTUNE).prefetch(_PREFETCHED_BATCHES)
    dataset = dataset.map(stream.note_end)  # after the prefetch: only what was handed out counts
    return _with_options(dataset, steps)


def eval_dataset(
    info: DatasetInfo,
    split: str,
    *,
    global_batch_size: int,
    image_size: int | tuple[int, int] | None = None,
    resize_mode: str = "crop",
    host: Host = None,
    labels: Literal["int", "one_hot"] = "int",
) -> Dataset:
    """Every record exactly once, in file order, as a `tf.data.Dataset` of (images, labels, weights).

    All batches are full and every host has as many; what fills them up has weight 0. Give metrics to Keras as
    `weighted_metrics=[…]`: plain `metrics` count the padding.

    Args: as `train_dataset`.

    Returns:
        Images and labels as of `train_dataset`, and float32 [b] weights; ceil(records / global_batch_size) batches.

    Raises: as `train_dataset`.
    """
    _check_labels(labels)
    index, hosts = _host(host)
    size = host_batch_size(global_batch_size, hosts)
    storage, table = info.storage, info.run_table(split)
    decode = batch_decoder(info.image, image_size, resize_mode)
    steps = -(-table.total // global_batch_size)

    def prepare(
        _: Tensor, __: Tensor, weights: Tensor, encoded: Tensor, classes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return decode(encoded), _labels(classes, labels, info.num_classes), weights

    stream = BatchStream(lambda step: EvalStream(storage, table, hosts, index, skip=step * size), size, steps)
    dataset = stream.dataset(parse).map(prepare, num_parallel_calls=tf.data.AUTOTUNE).prefetch(_PREFETCHED_BATCHES)
    return _with_options(dataset, steps)


def _host(host: Host) -> tuple[int, int]:
    """(index, count) of the host that reads."""
    if host is None:
        return 0, 1
    if isinstance(host, tf.distribute.InputContext):
        return host.input_pipeline_id, host.num_input_pipelines
    index, count = host
    if not 0 <= index < count:
        raise UsageError(f"host={host!r}: (index, count) with 0 <= index < count")
    return int(index), int(count)


def _resume(beginning: Position, position: Position) -> Position:
    """`position`, read on by the hosts and batches of `beginning`."""
    for name, meaning in (("source", "dataset and split"), ("records", "number of records"), ("seed", "seed")):
        here, there = getattr(beginning, name), getattr(position, name)
        if here != there:
            raise ValueError(f"the position was made with another {meaning}: {there!r}, here it is {here!r}")
    return position.on(
        global_batch_size=beginning.global_batch_size,
        hosts=beginning.hosts,
        window_runs=beginning.phases[0].window_runs,
    )


def _check_labels(labels: str) -> None:
    if labels not in ("int", "one_hot"):
        raise UsageError(f"labels={labels!r}: int or one_hot")


def _labels(classes: Tensor, labels: str, num_classes: int) -> Tensor:
    return tf.one_hot(classes, num_classes, dtype=tf.float32) if labels == "one_hot" else classes


def _with_options(dataset: Dataset, steps: int) -> Dataset:
    """Hosts are split by record ranges already, and batches keep their order."""
    options = tf.data.Options()
    options.autotune.enabled = True
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_optimization.inject_prefetch = False  # `note_end` has to stay last
    return dataset.apply(tf.data.experimental.assert_cardinality(steps)).with_options(options)
