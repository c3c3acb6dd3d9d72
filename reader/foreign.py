"""`record_dataset`: the features of anybody's TFRecord files as they are, ours or not, plain or GZIP.

Files are read by our own reader, so any fsspec URL works and a wrong record is named by file, number and offset.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from beam_pipeline import schema
from beam_pipeline.errors import UsageError
from reader.foreign_features import Feature, Shape, Wanted, faults, infer_shapes
from reader.patterns import Pattern, find_files
from reader.scanning import Frame, scan_file
from reader.skips import Skips
from reader.sources import record_blocks
from reader.storage import open_storage

Dataset = Any  # tf.data.Dataset: TensorFlow ships no types


def record_dataset(
    pattern: Pattern,
    *,
    keys: Sequence[str] | Mapping[str, Feature] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
) -> Dataset:
    """Every record of some TFRecord files of `tf.train.Example`s, file after file, as a `tf.data.Dataset` of dicts.

    Args:
        pattern: files, such as `gs://any/where/*.tfrec`; a published dataset's folder; or a list of these. A file that
            several of them match is read once.
        keys: the features wanted; None for all that the first records have. A mapping says how each is parsed, as
            `tf.io.parse_single_example` takes it: for features that only later records have, or defaults.
        on_error: `raise`, or `skip` records that are damaged, lack what the first ones have or don't fit the mapping
            (`reader.skipped` counts them). What follows a wrong length in a file is lost with it: only lengths tell
            where a record begins.

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
    if isinstance(keys, str):
        raise UsageError(f"keys={keys!r}: give a list, such as [{keys!r}]")
    if keys is not None and not len(keys):
        raise UsageError(f"keys={keys!r}: name a feature, or leave keys away for all of them")
    files = find_files(pattern)
    if isinstance(keys, Mapping):
        wanted = Wanted(dict(keys), None)
    else:
        shapes = _chosen(infer_shapes(files, on_error), keys, files)
        wanted = Wanted({key: shape.spec for key, shape in shapes.items()}, shapes)
    skips = Skips() if on_error == "skip" else None
    blocks = record_blocks(lambda place: _good_records(files, wanted, skips, _Place(*place)), _Place(0, 0, 0))
    records = blocks.prefetch(1).unbatch()
    dataset = records.map(
        lambda record: tf.io.parse_single_example(record, wanted.specs), num_parallel_calls=tf.data.AUTOTUNE
    )
    dataset._imageshards_skips = skips
    return dataset


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
    files: Sequence[str], wanted: Wanted, skips: Skips | None, place: _Place
) -> Iterator[tuple[list[bytes], _Place]]:
    """Every record from `place` on that fits `wanted`, some at a time; others are counted, or the first is raised."""
    for index in range(place.file, len(files)):
        for block, behind in _blocks(files, place if index == place.file else _Place(index, 0, 0)):
            records: list[bytes] = []
            for (number, frame), error in zip(block, faults(files[index], block, wanted), strict=True):
                if error is None:
                    records.append(frame.record)  # type: ignore[arg-type]  # a record, since there is no fault
                elif skips is not None:
                    skips.add((index, number), error)
                else:
                    if records:
                        yield records, _Place(index, number, frame.offset)
                    raise error
            if records:
                yield records, behind
    if skips is not None:
        skips.report()


def _blocks(files: Sequence[str], place: _Place) -> Iterator[tuple[list[tuple[int, Frame]], _Place]]:
    """The numbered frames of one file from `place` on, some at a time, each time with the place behind them."""
    file = files[place.file]
    frames = enumerate(scan_file(open_storage(file), file, place.offset, place.record), place.record)
    block = list(itertools.islice(frames, schema.RUN_RECORDS))
    while block:
        following = list(itertools.islice(frames, schema.RUN_RECORDS))
        behind = _Place(place.file, following[0][0], following[0][1].offset) if following else None
        yield block, behind or _Place(place.file + 1, 0, 0)
        block = following
