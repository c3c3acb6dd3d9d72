"""One pass over a foreign TFRecord file: where its records are, and what images and classes they hold."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema, storage
from beam_pipeline.errors import CorruptRecordError
from reader.example import Value, parse_example
from reader.record_files import Frame
from reader.records import InvalidRecordError
from reader.tools.scan import FileScan, Scanners, decode_image

_LOG = logging.getLogger("reader")

_LOGGED = 10  # records left out, of a file


class RecordKeys(NamedTuple):
    """Which features hold an image, its class id, and its class name ("" if none does)."""

    image: str
    label: str
    name: str


class _Record(NamedTuple):
    """What is noted of a valid record.

    Attributes:
        number, offset, framed_bytes: where it is in the file.
        features: name → (type, number of values) of those beside image and class.
        histogram: int64 [3, 256] of its pixels, None if it isn't sampled.
    """

    number: int
    offset: int
    framed_bytes: int
    label: int
    name: bytes | None
    features: dict[str, tuple[str, int]]
    format: str
    is_grey: bool
    size: tuple[int, int]
    histogram: npt.NDArray[np.int64] | None
    digest: int


class _LeftOut(NamedTuple):
    """A record that isn't indexed, and why."""

    reason: str
    error: CorruptRecordError


@dataclass
class ImageScan:
    """What the pass over a file found.

    Attributes:
        runs: rows of `schema.RUN_DTYPE` without the shard's number; a run also ends before a record that is left out.
        records: in the index.
        left_out: how many aren't, by reason.
        first_error: of them.
        names: every class name that a class id has.
        types: of the features beside image and class that have a value, by name.
        empty: (name, type) of features without a value → number of the first such record.
        singles: how many records have exactly one value of a feature.
        formats, greys, sizes: how many images have each.
        histogram, sampled: of how many images the pixels are counted, int64 [3, 256].
        digest: sum mod 2^128 over the records of a hash of their bytes.
    """

    file: str
    file_bytes: int
    crc32c: int = 0
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    records: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    first_error: CorruptRecordError | None = None
    classes: Counter[int] = field(default_factory=Counter)
    names: dict[int, set[bytes]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    empty: dict[tuple[str, str], int] = field(default_factory=dict)
    singles: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    greys: Counter[bool] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    histogram: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((3, 256), np.int64))
    sampled: int = 0
    digest: int = 0

    def add(self, record: _Record) -> str:
        """Note a record, or say what keeps it out."""
        for key, (kind, values) in record.features.items():
            if values and self.types.get(key, kind) != kind:
                return f"its {key!r} is {kind}, in the records before {self.types[key]}"
        for key, (kind, values) in record.features.items():
            if values:
                self.types[key] = kind
                self.singles[key] += values == 1
            else:
                self.empty.setdefault((key, kind), record.number)
        offset, size, records = self.runs[-1] if self.runs else (0, -1, 0)
        if offset + size == record.offset and records < schema.RUN_RECORDS:
            self.runs[-1] = offset, size + record.framed_bytes, records + 1
        else:
            self.runs.append((record.offset, record.framed_bytes, 1))
        self.records += 1
        self.classes[record.label] += 1
        if record.name is not None:
            self.names.setdefault(record.label, set()).add(record.name)
        self.formats[record.format] += 1
        self.greys[record.is_grey] += 1
        self.sizes[record.size] += 1
        if record.histogram is not None:
            self.histogram += record.histogram
            self.sampled += 1
        self.digest = (self.digest + record.digest) % (1 << 128)
        return ""

    def leave_out(self, reason: str, error: CorruptRecordError) -> None:
        """Count a record that isn't indexed."""
        self.left_out[reason] += 1
        self.first_error = self.first_error or error
        if self.left_out.total() <= _LOGGED:
            _LOG.warning("left out: %s", error)


def scan_images(keys: RecordKeys, sampled: int, on_error: str, scanners: Scanners, file: str) -> ImageScan:
    """Read a file from end to end.

    Args:
        keys: of the features.
        sampled: of how many of the first records the pixels are counted.
        on_error: `raise`, or `skip` records that are corrupt or don't decode.
        scanners: whose threads decode.
        file: path or URL, not GZIP.

    Raises:
        CorruptRecordError: of the first such record, with `raise`.
    """
    found, scan = ImageScan(file, storage.open_storage(file).size(file)), FileScan(file)
    for block in scanners.blocks(partial(_read_block, file, keys, sampled), scan.blocks()):
        for one in block:
            if isinstance(one, _Record):
                wrong = found.add(one)
                if not wrong:
                    continue
                one = _LeftOut("other_type", CorruptRecordError(file, one.number, one.offset, wrong))
            if on_error == "raise":
                raise one.error
            found.leave_out(*one)
    if found.left_out.total() > _LOGGED:
        _LOG.warning("%s: %d records are left out", file, found.left_out.total())
    found.crc32c = scan.crc32c
    return found


def _read_block(file: str, keys: RecordKeys, sampled: int, block: Iterable[Frame]) -> list[_Record | _LeftOut]:
    """What the records of a block hold; CRCs are checked and images decoded here, by any thread."""
    return [_read(file, keys, frame.number < sampled, frame) for frame in block]


def _read(file: str, keys: RecordKeys, is_sampled: bool, frame: Frame) -> _Record | _LeftOut:
    def left_out(reason: str, why: str) -> _LeftOut:
        return _LeftOut(reason, CorruptRecordError(file, frame.number, frame.offset, why))

    if isinstance(frame.record, CorruptRecordError):
        return _LeftOut("corrupt_record", frame.record)
    try:
        features = parse_example(frame.record)
    except ValueError as error:
        return left_out("not_an_example", str(error))
    image, label = features.pop(keys.image, []), features.pop(keys.label, [])
    if not isinstance(image, list) or len(image) != 1:
        return left_out("no_image_or_class", f"it has {len(image)} values of {keys.image!r}, not one image")
    if isinstance(label, list) or len(label) != 1 or label.dtype != np.int64 or label[0] < 0:
        return left_out("no_image_or_class", f"its {keys.label!r} isn't one class id")
    try:
        decoded = decode_image(image[0])
    except InvalidRecordError as error:
        return left_out("decode_error", str(error))
    names = features.get(keys.name, [])
    return _Record(
        frame.number,
        frame.offset,
        len(frame.record) + schema.FRAME_BYTES,
        int(label[0]),
        names[0] if isinstance(names, list) and len(names) == 1 else None,
        {key: (type_name(value), len(value)) for key, value in features.items()},
        decoded.format,
        decoded.is_grey,
        decoded.size,
        _histogram(decoded.pixels) if is_sampled else None,
        int.from_bytes(hashlib.blake2b(frame.record, digest_size=16).digest(), "big"),
    )


def _histogram(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    return np.stack([np.bincount(pixels[..., channel].ravel(), minlength=256) for channel in range(3)])


def type_name(value: Value) -> str:
    """`bytes`, `float32` or `int64`."""
    return "bytes" if isinstance(value, list) else str(value.dtype)
