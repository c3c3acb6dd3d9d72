"""`train_dataset` and `eval_dataset`: the builders that a trainer calls, one screen each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from beam_pipeline.errors import UsageError
from reader.batch_graph import BatchGraph, Labels
from reader.blocks import StepBlocks
from reader.decode import Augment, batch_decoder
from reader.features import pick_features
from reader.hosts import Host, batch_size_of, share_of_host
from reader.info import DatasetInfo, check_info
from reader.position import WINDOW_RUNS, Position
from reader.sources import as_it_is, batch_dataset
from reader.stream import EvalStream, RecordStream, open_source

Dataset = Any  # tf.data.Dataset: TensorFlow ships no types
OnError = Literal["raise", "skip"]

# Decoded batches that wait for the trainer besides those that each core holds: one under way to the device, one behind.
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
    labels: Labels = "int",
    features: Sequence[str] = (),
    window_runs: int = WINDOW_RUNS,
    cache: str | os.PathLike[str] | None = None,
    on_error: OnError = "raise",
) -> Dataset:
    """An endless stream of epochs without a seam, as a `tf.data.Dataset` of (images, labels).

    One iteration of it is `info.steps_per_epoch(split, global_batch_size)` batches, which is its cardinality; the next
    iteration begins where the last one that was read to its end stopped. An abandoned one (an early break, Keras' build
    pass) moves nothing. So `fit(epochs=N)` drops no record and pads none. (Where one iteration is one batch, reading
    that batch is reading to the end.)

    Args:
        info: from `load_info`.
        split: TFDS split string, such as `train`, `train[:10%]`, `train+validation`.
        global_batch_size: records that all hosts together read in a step.
        image_size: side or (height, width) in pixels; None for the stored size.
        resize_mode: `crop`, `stretch` or `pad`, where `image_size` isn't the stored size.
        seed: of the order and of augmentation.
        position: where to go on, from the trained steps; None for the beginning.
        host: which part of the records is read here: (index, count), or the `tf.distribute.InputContext` that
            `distribute_datasets_from_function` gives, whose replicas then take a batch each; None for all.
        augment: `f(images, seeds)` of `reader.augment`, or your own; or `reader.augment.random_resized_crop(…)`.
        labels: `int` or `one_hot`.
        features: names of further features that are wanted: of a manifest's columns, or `filename`, `label`, `size`.
        window_runs: runs of 64 records that are shuffled together; memory grows with it.
        cache: None, `memory` or a local folder: keeps undecoded what was read from remote storage (`reader.cache`).
        on_error: `raise`, or `skip` damaged records: another record of the split takes the place of each, they are
            counted (`reader.skipped(dataset)`) and logged at the end of an iteration.

    Returns:
        uint8 [b, height, width, channels] and int64 [b] (or float32 [b, classes]), all static, b = global_batch_size /
        hosts; with an InputContext it is divided by the host's replicas too, and there are as many batches more. With
        `features`, the first is a dict of `image` and the features, as Keras takes it for a model with several inputs:
        [b] each, [b, n] where all records have n values, ragged [b, None] for lists.
        A damaged record ends the iteration, in its place, with an error that names file, record and byte offset.

    Raises:
        ValueError: the batch can't be divided by the hosts or replicas; another dataset's position.
        UsageError: no such split, mixed stored sizes without `image_size`, or an argument has no such value.
        ImageShardsError: a shard is missing or has another size than the manifest says.
    """
    check_info(info)
    index, hosts, replicas = share_of_host(host)
    size = batch_size_of(global_batch_size, hosts, replicas)
    beginning = info.position(
        split, global_batch_size=global_batch_size, hosts=hosts, seed=seed, window_runs=window_runs
    )
    if position is not None:
        beginning = _resume(beginning, position)
    wanted = pick_features(info, features)
    decode = batch_decoder(info.image, image_size, resize_mode, augment)
    plain = decode if augment is None else batch_decoder(info.image, image_size, resize_mode)
    graph = BatchGraph(info, wanted, decode, plain, labels, has_weights=False)
    source = open_source(info, split, on_error=on_error, cache=cache)

    def open_at(batch: int) -> RecordStream:
        step, replica = divmod(batch, replicas)
        stream = RecordStream.train(source, beginning.after(step), index)
        stream.find(replica * size)
        return stream

    batches = info.steps_per_epoch(split, global_batch_size) * replicas
    blocks = StepBlocks(open_at, size, batches, is_endless=True, skips=source.skips)
    return _finish(batch_dataset(blocks, graph, _PREFETCHED_BATCHES), graph, batches, source.skips)


def eval_dataset(
    info: DatasetInfo,
    split: str,
    *,
    global_batch_size: int,
    image_size: int | tuple[int, int] | None = None,
    resize_mode: str = "crop",
    host: Host = None,
    labels: Labels = "int",
    features: Sequence[str] = (),
    on_error: OnError = "raise",
) -> Dataset:
    """Every record exactly once, in file order, as a `tf.data.Dataset` of (images, labels, weights).

    All batches are full and every host has as many; what fills them up has weight 0, as has the place of a skipped
    record. Give metrics to Keras as `weighted_metrics=[…]`: plain `metrics` count the padding.

    Args: as `train_dataset`.

    Returns:
        Images and labels as of `train_dataset`, and float32 [b] weights; ceil(records / global_batch_size) batches
        (for each replica of an InputContext).

    Raises: as `train_dataset`.
    """
    check_info(info)
    index, hosts, replicas = share_of_host(host)
    size = batch_size_of(global_batch_size, hosts, replicas)
    wanted = pick_features(info, features)
    decode = batch_decoder(info.image, image_size, resize_mode)
    graph = BatchGraph(info, wanted, decode, decode, labels, has_weights=True)
    source = open_source(info, split, on_error=on_error)

    def open_at(batch: int) -> EvalStream:
        return EvalStream(source, hosts, index, skip=batch * size)

    batches = -(-source.table.total // global_batch_size) * replicas
    blocks = StepBlocks(open_at, size, batches, is_endless=False, skips=source.skips)
    return _finish(batch_dataset(blocks, graph, _PREFETCHED_BATCHES), graph, batches, source.skips)


def _finish(dataset: Dataset, graph: BatchGraph, batches: int, skips: Any) -> Dataset:
    """Hosts are split by record ranges already, and batches keep their order."""
    options = tf.data.Options()
    # TensorFlow 2.21 wakes autotuning's thread before it sets the flag by which that sees that its iterator was closed;
    # then it may sleep on, and who closes the iterator waits: half of the epochs of 1.5 s ended 1 s late. What it would
    # tune is set in `sources`.
    options.autotune.enabled = False
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_optimization.inject_prefetch = False  # what notes the end of an iteration has to stay last
    if not graph.is_flat:
        dataset = dataset.map(as_it_is(graph.structure))
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(batches)).with_options(options)
    dataset._imageshards_skips = skips
    return dataset


def _resume(beginning: Position, position: Position) -> Position:
    """`position`, read on by the hosts and batches of `beginning`."""
    if not isinstance(position, Position):
        raise UsageError(f"position={position!r}: a reader.Position, such as info.position(…).after(trained_steps)")
    for name, meaning in (("source", "dataset and split"), ("records", "number of records"), ("seed", "seed")):
        here, there = getattr(beginning, name), getattr(position, name)
        if here != there:
            raise ValueError(f"the position was made with another {meaning}: {there!r}, here it is {here!r}")
    return position.on(
        global_batch_size=beginning.global_batch_size,
        hosts=beginning.hosts,
        window_runs=beginning.phases[0].window_runs,
    )
