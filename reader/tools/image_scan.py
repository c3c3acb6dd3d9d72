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
from reader.record_files import FileScan, Frame
from reader.records import InvalidRecordError
from reader.tools.scan import Scanners, decode_image

_LOG = logging.getLogger("reader")

_LOGGED = 10  # records left out, of a file


class RecordKeys(NamedTuple):
    """Which features hold an image, its class id, and its class name ("" if none does)."""

    image: str
    label: str
    name: str


class LeftOutError(Exception):
    """A record that isn't indexed: the reason, as it is counted, and the words for it."""


@dataclass
class Contents:
    """What some records of a file hold; the counters count records.

    Attributes:
        spans: (offset, bytes) of each with its framing.
        left_out: (reason, error) of each that isn't indexed.
        names: by (class id, class name).
        features: by (name, type, number of values: 0, 1 or 2 for more) of the features beside image and class.
        images: by (format, whether it is grey, (height, width)).
        histogram, sampled: of how many images the pixels are counted, int64 [3, 256].
        digest: sum over the records of a hash of their bytes.
    """

    spans: list[tuple[int, int]] = field(default_factory=list)
    left_out: list[tuple[str, CorruptRecordError]] = field(default_factory=list)
    classes: Counter[int] = field(default_factory=Counter)
    names: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    features: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    images: Counter[tuple[str, bool, tuple[int, int]]] = field(default_factory=Counter)
    histogram: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((3, 256), np.int64))
    sampled: int = 0
    digest: int = 0

    def add(self, record: bytes, keys: RecordKeys, is_sampled: bool) -> None:
        """Decode a record's image and count what the record holds. Raises LeftOutError."""
        try:
            features = parse_example(record)
        except ValueError as error:
            raise LeftOutError("not_an_example", str(error)) from None
        image, label = features.pop(keys.image, []), features.pop(keys.label, [])
        if not isinstance(image, list) or len(image) != 1:
            raise LeftOutError("no_image_or_class", f"it has {len(image)} values of {keys.image!r}, not one image")
        if isinstance(label, list) or len(label) != 1 or label.dtype != np.int64 or label[0] < 0:
            raise LeftOutError("no_image_or_class", f"its {keys.label!r} isn't one class id")
        try:
            decoded = decode_image(image[0])
        except InvalidRecordError as error:
            raise LeftOutError("decode_error", str(error)) from None
        number, name = int(label[0]), features.get(keys.name, [])
        self.classes[number] += 1
        if isinstance(name, list) and len(name) == 1:
            self.names[number, name[0]] += 1
        self.features.update((key, type_name(value), min(len(value), 2)) for key, value in features.items())
        self.images[decoded.format, decoded.is_grey, decoded.pixels.shape[:2]] += 1
        if is_sampled:
            self.sampled += 1
            for channel in range(3):
                self.histogram[channel] += np.bincount(decoded.pixels[..., channel].ravel(), minlength=256)
        self.digest += int.from_bytes(hashlib.blake2b(record, digest_size=16).digest(), "big")


@dataclass
class ImageScan:
    """What the pass over a file found.

    Attributes:
        contents: of its records, without `spans` and `left_out`.
        runs: rows of `schema.RUN_DTYPE` without the shard's number; a run also ends before a record that is left out.
        left_out: how many records aren't indexed, by reason.
        first_error: of these.
    """

    file: str
    bytes: int
    contents: Contents = field(default_factory=Contents)
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    records: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    first_error: CorruptRecordError | None = None
    crc32c: int = 0

    def add(self, block: Contents) -> None:
        """Add the next records of the file."""
        for offset, size in block.spans:
            begin, run_size, records = self.runs[-1] if self.runs else (0, -1, 0)
            if begin + run_size == offset and records < schema.RUN_RECORDS:
                self.runs[-1] = begin, run_size + size, records + 1
            else:
                self.runs.append((offset, size, 1))
        self.records += len(block.spans)
        for reason, error in block.left_out:
            self.left_out[reason] += 1
            self.first_error = self.first_error or error
            if self.left_out.total() <= _LOGGED:
                _LOG.warning("left out: %s", error)
        for name in ("classes", "names", "features", "images"):
            getattr(self.contents, name).update(getattr(block, name))
        self.contents.histogram += block.histogram
        self.contents.sampled += block.sampled
        self.contents.digest = (self.contents.digest + block.digest) % (1 << 128)


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
        if block.left_out and on_error == "raise":
            raise block.left_out[0][1]
        found.add(block)
    if found.left_out.total() > _LOGGED:
        _LOG.warning("%s: %d records are left out", file, found.left_out.total())
    found.crc32c = scan.crc32c
    return found


def _read_block(file: str, keys: RecordKeys, sampled: int, block: Iterable[Frame]) -> Contents:
    """What the records of a block hold; CRCs are checked and images decoded here, by any thread."""
    contents = Contents()
    for number, offset, record in block:
        if isinstance(record, CorruptRecordError):
            contents.left_out.append(("corrupt_record", record))
            continue
        try:
            contents.add(record, keys, number < sampled)
            contents.spans.append((offset, len(record) + schema.FRAME_BYTES))
        except LeftOutError as error:
            reason, why = error.args
            contents.left_out.append((reason, CorruptRecordError(file, number, offset, why)))
    return contents


def type_name(value: Value) -> str:
    """`bytes`, `float32` or `int64`."""
    return "bytes" if isinstance(value, list) else str(value.dtype)
