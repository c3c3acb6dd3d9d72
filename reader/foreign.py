"""`record_dataset`: the features of anybody's TFRecord files as they are, ours or not, plain or GZIP.

Files are read by our own reader, so any fsspec URL works and a wrong record is named by file, number and offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, UsageError
from reader.patterns import Pattern, find_files
from reader.scanning import Frame, scan_file
from reader.skips import Skips
from reader.sources import record_blocks
from reader.storage import open_storage

Dataset = Any  # tf.data.Dataset: TensorFlow ships no types
Feature = Any  # tf.io.FixedLenFeature and its like

# Records from which the features are inferred: this many of each of so many files, spread over all of them.
_SAMPLED_RECORDS = 100
_SAMPLED_FILES = 4

_BYTES, _FLOATS, _INTEGERS = "bytes_list", "float_list", "int64_list"


def record_dataset(
    pattern: Pattern,
    *,
    keys: Sequence[str] | Mapping[str, Feature] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
) -> Dataset:
    """Every record of some TFRecord files of `tf.train.Example`s, file after file, as a `tf.data.Dataset` of dicts.

    Args:
        pattern: files, such as `gs://any/where/*.tfrec`; a published dataset's folder; or a list of these.
        keys: the features wanted; None for all that the first records have. A mapping says how each is parsed, as
            `tf.io.parse_single_example` takes it: for features that only later records have, or defaults.
        on_error: `raise`, or `skip` records that are damaged or lack what the first ones have (`reader.skipped` counts
            them). What follows a wrong length in a file is lost with it: only lengths tell where a record begins.

    Returns:
        Feature name → tensor: tf.string, int64 or float32. A feature that has exactly one value in each of the first
        100 records of up to 4 files is a scalar, others are vectors of any length, empty where a record lacks the
        feature. Images stay encoded: `tf.io.decode_image` them.

    Raises:
        UsageError: no file matches, or a key isn't there; lists what there is.
        ImageShardsError: the files hold no record, or no Examples; later, the iteration ends with such an error that
            names file, record and offset.
    """
    if on_error not in ("raise", "skip"):
        raise UsageError(f"on_error={on_error!r}: raise or skip")
    files = find_files(pattern)
    if isinstance(keys, Mapping):
        specs, shapes = dict(keys), {}
    else:
        shapes = _chosen(infer_shapes(files, on_error), keys, files)
        specs = {key: shape.spec for key, shape in shapes.items()}
    skips = Skips() if on_error == "skip" else None
    blocks = record_blocks(lambda place: _good_records(files, shapes, skips, _Place(*place)), _Place(0, 0, 0))
    records = blocks.prefetch(1).unbatch()
    dataset = records.map(lambda record: tf.io.parse_single_example(record, specs), num_parallel_calls=tf.data.AUTOTUNE)
    dataset._imageshards_skips = skips
    return dataset


class Shape(NamedTuple):
    """What a feature holds: which of the three lists, and whether it was one value in each sampled record."""

    kind: str
    is_scalar: bool

    @property
    def dtype(self) -> Any:
        """The TensorFlow type of its values."""
        return {_BYTES: tf.string, _FLOATS: tf.float32, _INTEGERS: tf.int64}[self.kind]

    @property
    def spec(self) -> Feature:
        """How `tf.io.parse_single_example` parses it."""
        return tf.io.FixedLenFeature([], self.dtype) if self.is_scalar else tf.io.RaggedFeature(self.dtype)


def infer_shapes(files: Sequence[str], on_error: str = "raise") -> dict[str, Shape]:
    """Feature name → what it holds, in order of names, from the first records of some of the files.

    Args:
        on_error: `raise` or `skip` records that are damaged or no Examples.

    Raises:
        ImageShardsError: they hold no record, no Examples, or one feature with two types.
    """
    spread = [files[i * (len(files) - 1) // (_SAMPLED_FILES - 1)] for i in range(_SAMPLED_FILES)]
    examples: list[Any] = []
    sampled: list[str] = []
    for file in dict.fromkeys((*spread, *files)):  # the others only where these are empty
        found = list(islice(_examples(file, on_error), _SAMPLED_RECORDS))
        examples += found
        sampled += [file] * bool(found)
        if len(sampled) == _SAMPLED_FILES:
            break
    if not examples:
        raise ImageShardsError(f"{', '.join(files[:_SAMPLED_FILES])}: no record in {len(files)} files")
    kinds: dict[str, str] = {}
    scalars: dict[str, int] = {}
    for example in examples:
        for key, feature in example.features.feature.items():
            kind = feature.WhichOneof("kind")
            count = len(getattr(feature, kind).value) if kind else 0
            if count and kinds.setdefault(key, kind) != kind:
                raise ImageShardsError(
                    f"{sampled[0]} and others: feature {key!r} is {kinds[key]} here and {kind} there"
                )
            scalars[key] = scalars.get(key, 0) + (count == 1)
    return {key: Shape(kinds[key], scalars[key] == len(examples)) for key in sorted(kinds)}


def _examples(file: str, on_error: str) -> Iterator[Any]:
    """Every record of a file as tf.train.Example."""
    for number, frame in enumerate(scan_file(open_storage(file), file)):
        error = _fault(file, number, frame, {})
        if error is None:
            yield _parse(frame.record)  # type: ignore[arg-type]  # a record, since there is no fault
        elif on_error == "raise":
            raise error


def _chosen(shapes: Mapping[str, Shape], keys: Sequence[str] | None, files: Sequence[str]) -> dict[str, Shape]:
    wanted = list(shapes) if keys is None else list(keys)
    unknown = [key for key in wanted if key not in shapes]
    if unknown:
        raise UsageError(f"no feature {', '.join(unknown)} in {files[0]}: it has {', '.join(shapes) or 'none'}")
    return {key: shapes[key] for key in wanted}


class _Place(NamedTuple):
    """Where reading goes on: the number of the file, and of the next record and its byte offset in it."""

    file: int
    record: int
    offset: int


def _good_records(
    files: Sequence[str], shapes: Mapping[str, Shape], skips: Skips | None, place: _Place
) -> Iterator[tuple[list[bytes], _Place]]:
    """Every record from `place` on that fits `shapes`, some at a time; the others are raised, or counted."""
    for index in range(place.file, len(files)):
        file, records = files[index], list[bytes]()
        frames = scan_file(open_storage(file), file, place.offset, place.record)
        for number, frame in enumerate(frames, place.record):
            if len(records) == schema.RUN_RECORDS:
                yield records, _Place(index, number, frame.offset)
                records = []
            error = _fault(file, number, frame, shapes)
            if error is None:
                records.append(frame.record)  # type: ignore[arg-type]  # a record, since there is no fault
            elif skips is None:
                raise error
            else:
                skips.add((index, number), error)
        place = _Place(index + 1, 0, 0)
        if records:
            yield records, place
    if skips is not None:
        skips.report()


def _fault(file: str, number: int, frame: Frame, shapes: Mapping[str, Shape]) -> CorruptRecordError | None:
    """Why TensorFlow couldn't parse a record, with the place that TensorFlow doesn't know. Costs 5 µs a record."""
    if isinstance(frame.record, CorruptRecordError):
        return frame.record
    example = _parse(frame.record)
    if example is None:
        return _located(file, number, frame, "not a tf.train.Example")
    features = example.features.feature
    for key, shape in shapes.items():
        found = features[key].WhichOneof("kind") if key in features else None
        count = len(getattr(features[key], found).value) if found else 0
        if count and found != shape.kind:
            return _located(file, number, frame, f"{key!r} is a {found}, in the first records a {shape.kind}")
        if shape.is_scalar and count != 1:
            keys = f"keys={{{key!r}: tf.io.RaggedFeature(tf.{shape.dtype.name}), …}}"
            return _located(
                file, number, frame, f"{key!r} has {count} values, in the first records 1; read with {keys}"
            )
    return None


def _located(file: str, number: int, frame: Frame, reason: str) -> CorruptRecordError:
    return CorruptRecordError(file, number, frame.offset, reason)


def _parse(record: bytes) -> Any:
    """The record as tf.train.Example, None where it is none."""
    try:
        return tf.train.Example.FromString(record)
    except Exception:  # google.protobuf.message.DecodeError, which isn't ours to import
        return None
