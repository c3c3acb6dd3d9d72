"""`train_dataset` and `eval_dataset`: the batches as `tf.data.Dataset`s; TensorFlow parses and decodes nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from reader.augment import Augment
from reader.batches import (
    BEHIND,
    Cache,
    EvalBatches,
    ImageSize,
    Info,
    Labels,
    OnError,
    TrainBatches,
    eval_batches,
    train_batches,
)
from reader.features import Feature
from reader.position import WINDOW_RUNS, Host, Position

Dataset = Any  # tf.data.Dataset: TensorFlow ships no types


def train_dataset(
    info: Info,
    split: str,
    *,
    global_batch_size: int,
    image_size: ImageSize = None,
    resize_mode: str = "crop",
    seed: int = 0,
    position: Position | None = None,
    host: Host = None,
    augment: Augment | None = None,
    labels: Labels = "int",
    features: Sequence[str] = (),
    window_runs: int = WINDOW_RUNS,
    cache: Cache = None,
    on_error: OnError = "raise",
) -> Dataset:
    """The batches of `train_batches` as a `tf.data.Dataset` of (images, labels), for `model.fit(train, epochs=N)`.

    Its cardinality is one iteration, `info.steps_per_epoch(split, global_batch_size)` batches; the next iteration goes
    on where the last one that was read to its end stopped. (`fit` may read the last batches of an iteration that it
    abandons, if it is shorter than its buffers: resume by `position`.)

    Args: as `train_batches`.

    Returns:
        uint8 [b, height, width, channels] and int64 [b] (or float32 [b, classes]), all static; with an InputContext a
        batch for each replica. With `features`, the first is a dict of `image` and the features: [b], [b, n], ragged
        [b, None] for lists of any length.

    Raises:
        As `train_batches`; while iterating as TensorFlow's errors, whose text names file, record and byte offset.
    """
    return _dataset(
        train_batches(
            info,
            split,
            global_batch_size=global_batch_size,
            image_size=image_size,
            resize_mode=resize_mode,
            seed=seed,
            position=position,
            host=host,
            augment=augment,
            labels=labels,
            features=features,
            window_runs=window_runs,
            cache=cache,
            on_error=on_error,
        )
    )


def eval_dataset(
    info: Info,
    split: str,
    *,
    global_batch_size: int,
    image_size: ImageSize = None,
    resize_mode: str = "crop",
    host: Host = None,
    labels: Labels = "int",
    features: Sequence[str] = (),
    on_error: OnError = "raise",
) -> Dataset:
    """The batches of `eval_batches` as a `tf.data.Dataset` of (images, labels, weights): every record exactly once.

    Give metrics to Keras as `weighted_metrics=[…]`: plain `metrics` count the padding.

    Args: as `eval_batches`.

    Returns:
        Images and labels as of `train_dataset`, and float32 [b] weights.

    Raises: as `train_dataset`.
    """
    return _dataset(
        eval_batches(
            info,
            split,
            global_batch_size=global_batch_size,
            image_size=image_size,
            resize_mode=resize_mode,
            host=host,
            labels=labels,
            features=features,
            on_error=on_error,
        )
    )


def _dataset(batches: TrainBatches | EvalBatches) -> Dataset:
    """The batches' memory crosses into TensorFlow without a copy, since it is aligned."""
    # TensorFlow keeps a dataset's functions forever: they refer to the batches weakly, `BEHIND` keeps these as long as
    # the dataset, or one made of it, is in use.
    behind = weakref.ref(batches)
    dataset = generated(lambda: _elements(behind()), _signature(batches), len(batches))
    BEHIND[dataset] = batches
    return dataset


def generated(begin: Callable[[], Iterator[Any]], signature: tuple[Any, ...], length: int) -> Dataset:
    """A dataset of so many batches, which `begin` starts in each iteration."""
    dataset = tf.data.Dataset.from_generator(begin, output_signature=signature)
    options = tf.data.Options()
    # Autotuning has nothing to tune here. Its thread may miss that an iterator is closed: the epoch then ends a second
    # late (TensorFlow 2.21).
    options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF  # hosts are split
    # Asserted, so that what follows an error isn't a normal end.
    return dataset.apply(tf.data.experimental.assert_cardinality(length)).with_options(options)


def _elements(batches: TrainBatches | EvalBatches | None) -> Iterator[Any]:
    if batches is None:
        raise RuntimeError("the dataset of train_dataset or eval_dataset was dropped: keep it while it is read")
    lists = [name for name, feature in batches.features.items() if feature.shape is None]
    for inputs, *more in batches:
        if lists:
            inputs = inputs | {name: _ragged(inputs[name], batches.features[name]) for name in lists}
        yield (inputs, *more)


def _ragged(lists: Sequence[Any], feature: Feature) -> Any:
    flat = [value for values in lists for value in values]
    values = tf.constant(flat, _dtype(feature), shape=[len(flat)])
    return tf.RaggedTensor.from_row_lengths(values, np.array([len(values) for values in lists], np.int64))


def _signature(batches: TrainBatches | EvalBatches) -> tuple[Any, ...]:
    rows = batches.batch_size
    images = tf.TensorSpec((rows, *batches.shape), tf.uint8)
    labels = tf.TensorSpec((rows,), tf.int64)
    if batches.classes is not None:
        labels = tf.TensorSpec((rows, batches.classes), tf.float32)
    inputs: Any = images
    if batches.features:
        inputs = {"image": images, **_feature_specs(rows, batches.features)}
    weights = (tf.TensorSpec((rows,), tf.float32),) if isinstance(batches, EvalBatches) else ()
    return (inputs, labels, *weights)


def _feature_specs(rows: int, features: Mapping[str, Feature]) -> dict[str, Any]:
    return {
        name: tf.RaggedTensorSpec((rows, None), _dtype(feature), row_splits_dtype=tf.int64)
        if feature.shape is None
        else tf.TensorSpec((rows, *feature.shape), _dtype(feature))
        for name, feature in features.items()
    }


def _dtype(feature: Feature) -> Any:
    return tf.string if feature.dtype == "bytes" else tf.dtypes.as_dtype(feature.dtype)
