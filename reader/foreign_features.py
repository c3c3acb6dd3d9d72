"""What features anybody's Examples hold, inferred from some records, and which records don't fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import tensorflow as tf

from beam_pipeline.errors import CorruptRecordError, ImageShardsError
from reader.scanning import Frame, scan_file
from reader.storage import open_storage

Feature = Any  # tf.io.FixedLenFeature and its like

# Records from which the features are inferred: this many of each of so many files, spread over all of them.
_SAMPLED_RECORDS = 100
_SAMPLED_FILES = 4

_TENSORFLOWS_REASON = re.compile(r"(?:Feature|Key): .*?(?= \[Op:|$)", re.MULTILINE)

_BYTES, _FLOATS, _INTEGERS = "bytes_list", "float_list", "int64_list"


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


class Wanted(NamedTuple):
    """How records are parsed, and the shapes that says so; None where the user said how."""

    specs: Mapping[str, Feature]
    shapes: Mapping[str, Shape] | None


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
    if not kinds:
        raise ImageShardsError(f"{sampled[0]}: the first records are Examples without a value")
    return {key: Shape(kinds[key], scalars[key] == len(examples)) for key in sorted(kinds)}


def _examples(file: str, on_error: str) -> Iterator[Any]:
    """Every record of a file as tf.train.Example."""
    for number, frame in enumerate(scan_file(open_storage(file), file)):
        error = _fault(file, number, frame, {})
        if error is None:
            yield _parse(frame.record)  # type: ignore[arg-type]  # a record, since there is no fault
        elif on_error == "raise":
            raise error


def faults(file: str, block: Sequence[tuple[int, Frame]], wanted: Wanted) -> list[CorruptRecordError | None]:
    """Why TensorFlow couldn't parse each record of a block, with the place that TensorFlow doesn't know."""
    found = [_fault(file, number, frame, wanted.shapes or {}) for number, frame in block]
    whole = [frame.record for (_, frame), fault in zip(block, found, strict=True) if fault is None]
    if wanted.shapes is not None or _misfit(whole, wanted.specs) is None:
        return found
    for place, (number, frame) in enumerate(block):
        reason = _misfit([frame.record], wanted.specs) if found[place] is None else None
        if reason is not None:
            found[place] = _located(file, number, frame, f"it doesn't fit keys={{…}}: {reason}")
    return found


def _misfit(records: Sequence[Any], specs: Mapping[str, Feature]) -> str | None:
    """Why TensorFlow can't parse some Examples as the user said; tried, since there are many ways to say it.

    Costs 20 µs a record for 64 at once, 1 ms for a single one.
    """
    try:
        if records:
            tf.io.parse_example(tf.constant(records), specs)
    except tf.errors.InvalidArgumentError as error:
        found = _TENSORFLOWS_REASON.search(error.message)
        return " ".join(found[0].split()) if found else "TensorFlow can't parse it"
    return None


def _fault(file: str, number: int, frame: Frame, shapes: Mapping[str, Shape]) -> CorruptRecordError | None:
    """What is wrong with a record, or differs from `shapes`. Costs 5 µs."""
    if isinstance(frame.record, CorruptRecordError):
        return frame.record
    example = _parse(frame.record)
    if example is None:
        return _located(file, number, frame, "not a tf.train.Example")
    features = example.features.feature
    for key, shape in shapes.items():
        found = features[key].WhichOneof("kind") if key in features else None
        count = len(getattr(features[key], found).value) if found else 0
        if found and found != shape.kind:
            reason = f"{key!r} is a {found}, in the first records a {shape.kind}"
            if not count:  # as some writers store a list without a value; TensorFlow refuses even these
                reason = (
                    f"{key!r} is an empty {found}, in the first records a {shape.kind}; name other features by keys"
                )
            return _located(file, number, frame, reason)
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
