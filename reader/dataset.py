"""`train_dataset` and `eval_dataset`: the builders that a trainer calls, one screen each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from beam_pipeline.errors import UsageError
from reader.blocks import StepBlocks
from reader.decode import Augment, BatchDecoder, Tensor, batch_decoder
from reader.features import Feature, pick_features
from reader.info import DatasetInfo, check_info
from reader.parsing import RecordParser, parse_lists
from reader.position import WINDOW_RUNS, Position, host_batch_size
from reader.sources import as_it_is, batch_dataset
from reader.stream import EvalStream, RecordStream, open_source

Host = Any  # tf.distribute.InputContext, or (index, count)
Dataset = Any  # tf.data.Dataset: TensorFlow ships no types
Labels = Literal["int", "one_hot"]
OnError = Literal["raise", "skip"]

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
    labels: Labels = "int",
    features: Sequence[str] = (),
    window_runs: int = WINDOW_RUNS,
    cache: str | None = None,
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
        host: which part of the records is read here: `tf.distribute.InputContext` or (index, count); None for all.
        augment: `f(images, seeds)` of `reader.augment`, or your own; or `reader.augment.random_resized_crop(…)`.
        labels: `int` or `one_hot`.
        features: names of further features that are wanted: of a manifest's columns, or `filename`, `label`, `size`.
        window_runs: runs of 64 records that are shuffled together; memory grows with it.
        cache: None, `memory` or a local folder: keeps undecoded what was read from remote storage (`reader.cache`).
        on_error: `raise`, or `skip` damaged records: another record of the split takes the place of each, they are
            counted (`reader.skipped(dataset)`) and logged at the end of an iteration.

    Returns:
        uint8 [b, height, width, channels] and int64 [b] (or float32 [b, classes]), all static, b = global_batch_size /
        hosts. With `features`, the first is a dict of `image` and the features, as Keras takes it for a model with
        several inputs: [b] each, [b, n] where all records have n values, ragged [b, None] for lists.
        A damaged record ends the iteration, in its place, with an error that names file, record and byte offset.

    Raises:
        ValueError: the batch can't be divided by the hosts; another dataset's position.
        UsageError: no such split, mixed stored sizes without `image_size`, or an argument has no such value.
        ImageShardsError: a shard is missing or has another size than the manifest says.
    """
    check_info(info)
    index, hosts = _host(host)
    beginning = info.position(
        split, global_batch_size=global_batch_size, hosts=hosts, seed=seed, window_runs=window_runs
    )
    if position is not None:
        beginning = _resume(beginning, position)
    wanted = pick_features(info, features)
    decode = batch_decoder(info.image, image_size, resize_mode, augment)
    plain = decode if augment is None else batch_decoder(info.image, image_size, resize_mode)
    graph = _Graph(info, wanted, decode, plain, labels, has_weights=False)
    source = open_source(info, split, on_error=on_error, cache=cache)

    def open_at(step: int) -> RecordStream:
        return RecordStream.train(source, beginning.after(step), index)

    steps = info.steps_per_epoch(split, global_batch_size)
    blocks = StepBlocks(open_at, beginning.host_batch_size, steps, is_endless=True, skips=source.skips)
    return _finish(batch_dataset(blocks, graph, _PREFETCHED_BATCHES), graph, steps, source.skips)


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
        Images and labels as of `train_dataset`, and float32 [b] weights; ceil(records / global_batch_size) batches.

    Raises: as `train_dataset`.
    """
    check_info(info)
    index, hosts = _host(host)
    size = host_batch_size(global_batch_size, hosts)
    wanted = pick_features(info, features)
    decode = batch_decoder(info.image, image_size, resize_mode)
    graph = _Graph(info, wanted, decode, decode, labels, has_weights=True)
    source = open_source(info, split, on_error=on_error)

    def open_at(step: int) -> EvalStream:
        return EvalStream(source, hosts, index, skip=step * size)

    steps = -(-source.table.total // global_batch_size)
    blocks = StepBlocks(open_at, size, steps, is_endless=False, skips=source.skips)
    return _finish(batch_dataset(blocks, graph, _PREFETCHED_BATCHES), graph, steps, source.skips)


class _Graph:
    """What TensorFlow does with the records of a batch (see `gaps.Graph`).

    Args:
        info: the dataset.
        features: what is wanted beside image and label.
        decode: makes what is handed out of encoded images.
        plain: decodes without augmentation, whose errors aren't the image's.
        labels: `int` or `one_hot`.
        has_weights: whether weights are handed out.
    """

    def __init__(
        self,
        info: DatasetInfo,
        features: dict[str, Feature],
        decode: BatchDecoder,
        plain: BatchDecoder,
        labels: Labels,
        has_weights: bool,
    ) -> None:
        if labels not in ("int", "one_hot"):
            raise UsageError(f"labels={labels!r}: int or one_hot")
        self._parser = RecordParser(info.image_key, info.class_key, features)
        self._features = features
        self._lists = {name: feature for name, feature in features.items() if feature.shape is None}
        self._decode = decode
        self._plain = plain
        self._class_ids = np.arange(info.num_classes)
        self._classes = info.num_classes if labels == "one_hot" else 0
        self._has_weights = has_weights

    def parse(self, records: Tensor) -> tuple[Tensor, ...]:
        if not self._lists:
            return self._parser(records)
        # Ragged tensors can't be cut into batches: what they are made of goes along and is parsed last. Here they only
        # have to parse, so that a record of which one doesn't is found where others are. (Asserted, since TensorFlow
        # drops what nothing depends on.)
        values = [tf.size(lists.flat_values) for lists in parse_lists(records, self._lists).values()]
        tf.debugging.Assert(tf.add_n(values) >= 0, ["lists hold values"])
        return (*self._parser(records), records)

    def prepare(self, seeds: Tensor, weights: Tensor, encoded: Tensor, classes: Tensor, *more: Tensor) -> Any:
        images = self._decode(encoded, seeds)
        classes = tf.gather(self._class_ids, classes)  # an error where there is no such class
        labels = tf.one_hot(classes, self._classes, dtype=tf.float32) if self._classes else classes
        return (images, labels, *([weights] if self._has_weights else ()), *more)

    def fault(self, record: bytes) -> str | None:
        if not record:
            return None  # its error is known
        try:
            encoded, classes, *_ = self._parser(tf.constant([record]))
            if self._lists:
                parse_lists(tf.constant([record]), self._lists)
        except (tf.errors.InvalidArgumentError, UnicodeDecodeError) as error:  # TensorFlow quotes the record's bytes
            return f"it isn't an Example with the dataset's features ({_first_line(error)})"
        try:
            self._plain(encoded)
        except tf.errors.InvalidArgumentError as error:
            return f"the image doesn't decode ({_first_line(error)})"
        label = int(classes[0])
        return None if 0 <= label < len(self._class_ids) else f"class {label}: there are {len(self._class_ids)}"

    def structure(self, images: Tensor, labels: Tensor, *more: Tensor) -> Any:
        """What is handed out, from what `prepare` makes: [b, …] each, the last of them serialized records if lists are
        wanted.
        """
        weights, more = (more[:1], more[1:]) if self._has_weights else ((), more)
        values = dict(zip(self._dense(), more, strict=False))
        lists = parse_lists(more[-1], self._lists) if self._lists else {}
        inputs = {"image": images, **{name: (values | lists)[name] for name in self._features}}
        return (inputs if self._features else images, labels, *weights)

    def _dense(self) -> list[str]:
        return [name for name, feature in self._features.items() if feature.shape is not None]

    @property
    def is_flat(self) -> bool:
        """Whether `prepare` makes what is handed out."""
        return not self._features


def _finish(dataset: Dataset, graph: _Graph, steps: int, skips: Any) -> Dataset:
    """Hosts are split by record ranges already, and batches keep their order."""
    options = tf.data.Options()
    options.autotune.enabled = True
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_optimization.inject_prefetch = False  # what notes the end of an iteration has to stay last
    if not graph.is_flat:
        dataset = dataset.map(as_it_is(graph.structure))
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps)).with_options(options)
    dataset._imageshards_skips = skips
    return dataset


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()[0].split("}} ")[-1].split(", value: ")[0]
    return "".join(filter(str.isprintable, text))[:200]


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
