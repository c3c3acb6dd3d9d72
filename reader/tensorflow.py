"""`as_tf`: batches as a `tf.data.Dataset`, without a copy; TensorFlow parses and decodes nothing."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import numpy as np
import tensorflow as tf

from beam_pipeline.errors import UsageError
from reader.batches import eval_batches, train_batches
from reader.features import Feature
from reader.hosts import process_of_several
from reader.stream import Batches, Element, EvalBatches

Arguments = ParamSpec("Arguments")


def as_tf(batches: Batches) -> tf.data.Dataset:
    """Batches as a `tf.data.Dataset`, for `model.fit(train, epochs=N)`.

    Its cardinality is one iteration, `len(batches)`; the next iteration continues where the last one that was read to
    its end stopped. Iterators that are alive at one time on one dataset (`interleave`, `zip` of a dataset with itself)
    read the same iteration. To resume, save `batches.position_at(optimizer.iterations)`: a tf.data iterator reads ahead
    of the trainer, so it has no state of its own.

    Args:
        batches: what `train_batches` or `eval_batches` returned.

    Returns:
        Elements as the batches have them, with static shapes: uint8 [b, height, width, channels] and int64 [b] (or
        float32 [b, classes]), and float32 [b] weights in evaluation; with an InputContext a batch for each replica.
        With `features`, the first is a dict of `image` and the features: [b], [b, n], ragged [b, None] for lists of any
        length.

    Raises:
        UsageError: the batches begin inside an iteration, whose rest is shorter than the cardinality; or this is one
            of several processes, such as a worker of TF_CONFIG, and `host` wasn't given.
        While iterating, errors of the batches as TensorFlow's, whose text names file, record and byte offset.
    """
    Batches.check_given(batches, "as_tf")
    if batches.given_host is None and (several := process_of_several()[1]) > 1:
        raise UsageError(
            f"no host= is given, so each of {several} processes would read every record: give host=context in "
            "distribute_datasets_from_function(lambda context: …), else host='auto', or (0, 1) to read all in each"
        )
    batches.check_full()
    return dataset_of(batches, iter, len(batches))


def dataset_of(batches: Batches, begin: Callable[[Batches], Iterator[Element]], length: int) -> tf.data.Dataset:
    """A dataset of so many batches, which `begin` starts to read in each iteration."""
    light = batches.light()  # TensorFlow never frees a dataset's function
    signature = _signature(batches)
    dataset = tf.data.Dataset.from_generator(lambda: _elements(light, begin(light)), output_signature=signature)
    options = tf.data.Options()
    # Autotuning has nothing to tune here. Its thread may miss that an iterator is closed: the epoch then ends a second
    # late (TensorFlow 2.21).
    options.autotune.enabled = False
    # Hosts are split. This refuses to split it again over workers, by TensorFlow's message: there are no files in it.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    # Asserted, so that what follows an error isn't a normal end.
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(length)).with_options(options)
    weakref.finalize(dataset, id, batches).atexit = False  # files and buffers stay open as long as the dataset is there
    return dataset


def _dataset_of(build: Callable[Arguments, Batches]) -> Callable[Arguments, tf.data.Dataset]:
    """`as_tf` of what a builder returns, with the builder's arguments."""

    def dataset(*args: Arguments.args, **kwargs: Arguments.kwargs) -> tf.data.Dataset:
        return as_tf(build(*args, **kwargs))

    name = build.__name__.replace("batches", "dataset")
    dataset.__name__ = dataset.__qualname__ = name
    dataset.__doc__ = f"`imageshards.as_tf({build.__name__}(…))`, with the same arguments.\n\n"
    dataset.__doc__ += f"    As a `tf.data.Dataset`: {inspect.getdoc(build)}"
    signature = inspect.signature(build)
    vars(dataset)["__signature__"] = signature.replace(return_annotation="tf.data.Dataset")
    return dataset


train_dataset, eval_dataset = _dataset_of(train_batches), _dataset_of(eval_batches)


def _elements(batches: Batches, elements: Iterator[Element]) -> Iterator[Element]:
    lists = [name for name, feature in batches.features.items() if feature.shape is None]
    for inputs, *more in elements:
        if lists:
            inputs = inputs | {name: _ragged(inputs[name], batches.features[name]) for name in lists}
        yield (inputs, *more)


def _ragged(lists: Sequence[Any], feature: Feature) -> Any:
    flat = [value for values in lists for value in values]
    values = tf.constant(flat, _dtype(feature), shape=[len(flat)])
    return tf.RaggedTensor.from_row_lengths(values, np.array([len(values) for values in lists], np.int64))


def _signature(batches: Batches) -> tuple[Any, ...]:
    is_equal = not isinstance(batches, EvalBatches) or batches.is_padded
    rows = batches.batch_size if is_equal else None
    images = tf.TensorSpec((rows, *batches.shape), tf.uint8)
    labels = tf.TensorSpec((rows,), tf.int64)
    if batches.one_hot_classes is not None:
        labels = tf.TensorSpec((rows, batches.one_hot_classes), tf.float32)
    inputs: Any = images
    if batches.features:
        features = {
            name: tf.RaggedTensorSpec((rows, None), _dtype(feature), row_splits_dtype=tf.int64)
            if feature.shape is None
            else tf.TensorSpec((rows, *feature.shape), _dtype(feature))
            for name, feature in batches.features.items()
        }
        inputs = {"image": images, **features}
    weights = (tf.TensorSpec((rows,), tf.float32),) if isinstance(batches, EvalBatches) else ()
    return (inputs, labels, *weights)


def _dtype(feature: Feature) -> Any:
    return tf.string if feature.dtype == "bytes" else tf.dtypes.as_dtype(feature.dtype)
