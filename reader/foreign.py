"""`record_dataset`: all features of third-party TFRecord files as a `tf.data.Dataset`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import tensorflow as tf

from beam_pipeline.errors import CorruptRecordError, ImageShardsError, UsageError
from reader.tfrecord_files import Pattern, find_files, infer_features, log_skipped, read_examples

Tensor = Any  # TensorFlow ships no types
Feature = Any  # tf.io.FixedLenFeature and its like

_FILES_AT_ONCE = 8
_RECORDS_AT_ONCE = 32  # cheaper calls from 64 on, but with records of 1 MB each batch in flight would hold 64 MB


def record_dataset(
    pattern: Pattern,
    *,
    keys: Sequence[str] | Mapping[str, Feature] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
) -> tf.data.Dataset:
    """Every record of some TFRecord files of `tf.train.Example`s as a `tf.data.Dataset` of dicts.

    Files are read side by side: records keep their order within a file, not between files. Images stay encoded.

    Args:
        pattern: files, such as `gs://any/where/*.tfrec`, plain or GZIP; a published dataset's folder; or a list of
            these. A file that several of them match is read once.
        keys: names of features; None for all that the first 100 records of up to 4 files have. A mapping says how each
            is parsed, as `tf.io.parse_single_example` takes it: for features that only later records have, or defaults.
        on_error: `raise`, or `skip` records that are corrupt or can't be parsed, and log each. A corrupt length costs
            the rest of its file: only lengths tell where a record begins.

    Returns:
        Feature name → tensor: tf.string, int64 or float32. A feature that has one value in each of the first records
        is a scalar, others are vectors of any length, empty if a record lacks the feature.

    Raises:
        UsageError: no file matches, or no record has such a key; lists what there is.
        ImageShardsError: the files hold no record, or no Examples. Later, the iteration ends with an error that names
            the file and the record.
    """
    if on_error not in ("raise", "skip"):
        raise UsageError(f"on_error must be raise or skip, got {on_error!r}")
    if keys is not None and (isinstance(keys, str) or not len(keys)):
        raise UsageError(f"keys must be a list such as ['image'], or None for all features, got {keys!r}")
    files, skip = find_files(pattern), log_skipped if on_error == "skip" else None
    specs = dict(keys) if isinstance(keys, Mapping) else _specs(infer_features(files, keys, skip))

    dataset = tf.data.Dataset.from_tensor_slices([os.fsencode(file) for file in files])
    # Several files at once hide latency and decompress on several cores. The next record comes from any file that has
    # one, so none waits for a slow file. Only `num_parallel_calls` makes interleave parallel.
    dataset = dataset.interleave(
        _batches(skip),
        cycle_length=min(len(files), _FILES_AT_ONCE),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=False,
    )
    # `deterministic` from here on, or the records of one file would change their order.
    if skip is None and all(isinstance(spec, tf.io.FixedLenFeature) for spec in specs.values()):
        # One call for many records: 60 µs of CPU a record of 16 kB in all, 40 of them for `unbatch`; singly 95.
        dataset = dataset.map(
            lambda names, records: tf.io.parse_example(records, specs, example_names=names),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        # Records are parsed while the caller works with earlier ones; prefetching batches costs nothing.
        return dataset.prefetch(tf.data.AUTOTUNE).unbatch()

    # Lists come out of a batch as ragged tensors, which cost more to take apart than single calls: 118 µs against 87.
    def parse(name: Tensor, record: Tensor) -> dict[str, Tensor]:
        # The error for a record that doesn't fit begins with this name.
        parsed: dict[str, Tensor] = tf.io.parse_single_example(record, specs, example_names=name)
        return parsed

    def parse_valid(names: Tensor, records: Tensor) -> tf.data.Dataset:
        # Around the parsing only: an earlier error, such as a file that can't be read, must not be ignored.
        return tf.data.Dataset.from_tensor_slices((names, records)).map(parse).ignore_errors(log_warning=True)

    if skip is not None:
        dataset = dataset.flat_map(parse_valid)
    else:
        dataset = dataset.unbatch().map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return dataset.prefetch(tf.data.AUTOTUNE)


def _specs(features: Mapping[str, tuple[str, bool]]) -> dict[str, Feature]:
    return {
        key: tf.io.FixedLenFeature([], tf.as_dtype(dtype)) if is_scalar else tf.io.RaggedFeature(tf.as_dtype(dtype))
        for key, (dtype, is_scalar) in features.items()
    }


def _batches(skip: Callable[[CorruptRecordError], object] | None) -> Any:
    """A function from a file's name to its records, many at a time: names string [b], records string [b].

    Our storage reads, in Python. TensorFlow takes a third to half of the CPU on local files, but opens no s3://, finds
    other credentials, and after a corrupt record loses the rest of the file without naming it.
    """

    def batches(file: bytes) -> Iterator[tuple[list[str], list[bytes]]]:
        examples, error = read_examples(os.fsdecode(file), skip), None
        while error is None:
            names: list[str] = []
            records: list[bytes] = []
            try:
                for name, record, _ in islice(examples, _RECORDS_AT_ONCE):
                    names.append(name)
                    records.append(record)
            except ImageShardsError as caught:  # after the records before it
                error = caught
            if names:
                yield names, records
            elif error is None:
                return
        raise error

    spec = tf.TensorSpec([None], tf.string)
    return lambda file: tf.data.Dataset.from_generator(batches, output_signature=(spec, spec), args=(file,))
