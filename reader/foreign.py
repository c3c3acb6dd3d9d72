"""`record_dataset`: all features of third-party TFRecord files, by tf.data as one would write it by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import tensorflow as tf

from beam_pipeline import storage
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, UsageError
from reader.tfrecord_files import Pattern, find_files, infer_features, is_gzip, log_skipped, read_examples

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
    # TensorFlow reads local files. It opens no s3:// or az://, finds other credentials than our storage, and loses the
    # rest of a file after a corrupt record. In these cases our storage reads, in Python, at two to three times the CPU.
    by_python = skip is not None or not all(map(storage.is_local, files))

    dataset = tf.data.Dataset.from_tensor_slices([os.fsencode(file) for file in files])
    # Several files at once hide latency and decompress on several cores. The next record comes from any file that has
    # one, so none waits for a slow file. Only `num_parallel_calls` makes interleave parallel.
    dataset = dataset.interleave(
        _read_by_python(skip) if by_python else _read_by_tensorflow,
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


def _read_by_tensorflow(file: Tensor) -> tf.data.Dataset:
    """A local file's records, many at a time: names string [b], records string [b]."""
    compression = tf.ensure_shape(tf.numpy_function(_check_start, [file], tf.string), [])
    records = tf.data.TFRecordDataset(file, compression, buffer_size=1 << 20)
    # TensorFlow's error for a corrupt record doesn't name the file, so the rest of the file is dropped here. An empty
    # batch marks its end, where `count` compares the bytes read with the file's size.
    records = records.ignore_errors(log_warning=True).batch(_RECORDS_AT_ONCE)
    records = records.concatenate(tf.data.Dataset.from_tensors(tf.constant([], tf.string)))

    def count(state: tuple[Tensor, Tensor], batch: Tensor) -> tuple[Any, Any]:
        number, offset = state
        numbers = number + tf.range(tf.size(batch, tf.int64))
        names = tf.strings.join([file, ": record ", tf.strings.as_string(numbers)])
        framed = tf.reduce_sum(tf.cast(tf.strings.length(batch), tf.int64) + 16)
        end = tf.cond(
            tf.size(batch) > 0,
            lambda: offset + framed,
            lambda: tf.ensure_shape(tf.numpy_function(_check_end, [file, number, offset], tf.int64), []),
        )
        return (number + tf.size(batch, tf.int64), end), (names, batch)

    return records.scan((tf.constant(0, tf.int64), tf.constant(0, tf.int64)), count)


def _check_start(file: bytes) -> bytes:
    """A file's compression. Raises if it can't be read, which TensorFlow would try forever, or holds no Examples."""
    path = os.fsdecode(file)
    next(read_examples(path), None)
    return b"GZIP" if is_gzip(path) else b""


def _check_end(file: bytes, number: int, offset: int) -> int:
    """Raises unless TensorFlow read a file to the end: if it didn't, the file is read again to see what is wrong."""
    path = os.fsdecode(file)
    store, size = storage.open_storage(path), os.path.getsize(path)
    # GZIP ends with the uncompressed size. (With several members, of the last one: these are read twice, then.)
    expected = int.from_bytes(store.read(path, size - 4, size), "little") if is_gzip(path) else size % 2**32
    if offset % 2**32 != expected and (records := sum(1 for _ in read_examples(path))) != number:
        raise ImageShardsError(f"{path}: TensorFlow read {number} of {records} records; is it still being written?")
    return offset


def _read_by_python(skip: Callable[[CorruptRecordError], object] | None) -> Any:
    """As `_read_by_tensorflow`, for files of any storage."""

    def batches(file: bytes) -> Iterator[tuple[list[str], list[bytes]]]:
        examples = read_examples(os.fsdecode(file), skip)
        while batch := list(islice(examples, _RECORDS_AT_ONCE)):
            yield [name for name, _, _ in batch], [record for _, record, _ in batch]

    spec = tf.TensorSpec([None], tf.string)
    return lambda file: tf.data.Dataset.from_generator(batches, output_signature=(spec, spec), args=(file,))
