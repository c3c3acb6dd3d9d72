"""`record_dataset`: the features of anybody's TFRecord files as they are, ours or not, plain or GZIP.

Files are read by our own reader, so any fsspec URL works and a wrong record is named by file, number and offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import tensorflow as tf

from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, UsageError
from reader.example import Value, parse_example
from reader.runs import read_file
from reader.sources import record_blocks
from reader.storage import normalize, open_storage

Dataset = Any  # tf.data.Dataset: TensorFlow ships no types
Pattern = str | Sequence[str]

# Records from which the features are inferred, taken from this many files.
_SAMPLED_RECORDS = 100
_SAMPLED_FILES = 4


def record_dataset(pattern: Pattern, *, keys: Sequence[str] | None = None) -> Dataset:
    """Every record of some TFRecord files of `tf.train.Example`s, file after file, as a `tf.data.Dataset` of dicts.

    Args:
        pattern: files, such as `gs://any/where/*.tfrec`; a published dataset's folder; or a list of these.
        keys: the features wanted; None for all that the first records have.

    Returns:
        Feature name → tensor: tf.string, int64 or float32. A feature that has exactly one value in each of the first
        100 records is a scalar, others are vectors of any length, empty where a record lacks the feature. Images stay
        encoded: `tf.io.decode_image` them.

    Raises:
        UsageError: no file matches, or a key isn't there; lists what the files have.
        ImageShardsError: the files hold no record, or no Examples.
        CorruptRecordError: already in one of the first records; later, the iteration ends with such an error.
    """
    files = _files(pattern)
    features = _infer(files)
    wanted = list(features) if keys is None else list(keys)
    unknown = [key for key in wanted if key not in features]
    if unknown:
        raise UsageError(f"no feature {', '.join(unknown)} in {files[0]}: it has {', '.join(features) or 'none'}")
    specs = {key: features[key] for key in wanted}
    blocks = record_blocks(lambda: chain.from_iterable(read_file(open_storage(file), file) for file in files))
    records = blocks.prefetch(1).unbatch()
    return records.map(lambda record: tf.io.parse_single_example(record, specs), num_parallel_calls=tf.data.AUTOTUNE)


def _files(pattern: Pattern) -> list[str]:
    files: list[str] = []
    for text in [pattern] if isinstance(pattern, str) else pattern:
        storage = open_storage(text)
        found = storage.glob(text)
        # A folder is a dataset's: its shards lie beside other files.
        inside = [] if found else [name for name in storage.names(normalize(text)) if schema.ShardName.parse(name)]
        found += [f"{normalize(text)}/{name}" for name in inside]
        if not found:
            raise UsageError(f"no file matches {text}")
        files += found
    return files


def _infer(files: Sequence[str]) -> dict[str, Any]:
    """Feature name → `tf.io` feature, from the first records."""
    each = -(-_SAMPLED_RECORDS // min(len(files), _SAMPLED_FILES))
    examples = [example for file in files[:_SAMPLED_FILES] for example in islice(_examples(file), each)]
    if not examples:
        raise ImageShardsError(f"{', '.join(files[:_SAMPLED_FILES])}: no record in the first {_SAMPLED_FILES} files")
    kinds: dict[str, Any] = {}
    is_scalar: dict[str, bool] = {}
    for example in examples:
        for key, value in example.items():
            if len(value):
                kinds[key] = _kind(value)
    for key in kinds:
        is_scalar[key] = all(len(example.get(key, ())) == 1 for example in examples)
    return {
        key: tf.io.FixedLenFeature([], kind) if is_scalar[key] else tf.io.RaggedFeature(kind)
        for key, kind in sorted(kinds.items())
    }


def _examples(file: str) -> Iterator[dict[str, Value]]:
    number = 0
    for records in read_file(open_storage(file), file):
        for record in records:
            try:
                yield parse_example(record)
            except ValueError as error:
                raise ImageShardsError(f"{file}: record {number} is {error}") from None
            number += 1


def _kind(value: Value) -> Any:
    if isinstance(value, list):
        return tf.string
    return tf.float32 if value.dtype == "float32" else tf.int64
