"""One pass over one foreign TFRecord file: where its records lie, and what images and classes they hold."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import google_crc32c
from PIL import Image

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, UsageError
from reader.example import Value, parse_example
from reader.scanning import Frame, is_gzip, scan_file
from reader.storage import Storage, open_storage

# Names in use for the image and its class id: ours and the TFRecord tutorial's, TFDS', TF-Slim's and the object
# detection API's, then what people write by hand. The first that a file has is taken.
IMAGE_KEYS = (schema.IMAGE_KEY, "image/encoded", "image_raw", "image_bytes", "img", "jpeg", "jpg", "png")
CLASS_KEYS = (schema.CLASS_KEY, "label", "image/class/label", "class_id", "label_id", "cls", "target")
NAME_KEYS = (schema.LABEL_KEY, "image/class/text", "class_name", "label_name", schema.CLASS_KEY)

_FORMATS = {"JPEG": "jpeg", "PNG": "png"}
_GREY_MODES = ("1", "L", "I", "I;16", "F")
# Records in which the names are looked for, so that a first one without a class is no end.
_SEARCHED_RECORDS = 100


class RecordKeys(NamedTuple):
    """Which features hold an image, its class id, and its class name (None where no feature does)."""

    image: str
    label: str
    name: str | None


@dataclass
class Scan:
    """What the pass found; an entry of the counters is a record that is right.

    Attributes:
        runs: rows of `schema.RUN_DTYPE`.
        records: that are right.
        damaged: what is wrong with the others; they keep their places in the runs.
        names: every class name that a class id has.
        types: of the features beside image and class that have a value, by name.
        empty: (name, type) of features without a value → number of the first such record.
        singles: how many records have exactly one value of a feature.
        fingerprint: sum mod 2^128 over the records of a hash of their bytes.
        histograms: of the first images' pixels, a list of 256 numbers a channel.
    """

    file: str
    bytes: int
    crc32c: int = 0
    runs: list[tuple[int, int, int, int]] = field(default_factory=list)
    records: int = 0
    damaged: list[CorruptRecordError] = field(default_factory=list)
    classes: Counter[int] = field(default_factory=Counter)
    names: dict[int, set[str]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    empty: dict[tuple[str, str], int] = field(default_factory=dict)
    singles: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    fingerprint: int = 0
    histograms: list[list[int]] = field(default_factory=list)


class _SummingStorage:
    """Extends a CRC by everything that is read, so that a file is read once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.is_remote = storage.is_remote
        self.size, self.sizes, self.names = storage.size, storage.sizes, storage.names
        self.files, self.glob = storage.files, storage.glob
        self.read_into, self.ranges_at_once = storage.read_into, 1  # of runs, which aren't known yet
        self.crc32c = 0

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        data = self._storage.read(path, start, stop)
        self.crc32c = google_crc32c.extend(self.crc32c, data)
        return data


def scan(keys: RecordKeys, sampled_images: int, on_error: str, number: int, file: str) -> Scan:
    """Read a file from end to end.

    Args:
        keys: as `find_keys` found them.
        sampled_images: how many of the first images are decoded for the histograms.
        on_error: `raise`, or `skip` what is wrong with a record.
        number: of the file among its split's.
        file: its path or URL.

    Raises:
        UsageError: the file is GZIP, or its images are no JPEG and no PNG.
        CorruptRecordError: a record is damaged, or lacks image or class, and that isn't skipped.
    """
    if is_gzip(open_storage(file), file):
        raise UsageError(
            f"{file} is GZIP, where no record can be found by its offset: read it with reader.record_dataset, or write "
            "it without compression"
        )
    storage = _SummingStorage(open_storage(file))
    found = Scan(file, storage.size(file))
    lengths: list[int] = []
    last_offset = 0
    for index, frame in enumerate(scan_file(storage, file)):
        if index:
            lengths.append(frame.offset - last_offset)
        last_offset = frame.offset
        error = _note_frame(found, index, frame, keys, index < sampled_images)
        if error is not None and on_error == "raise":
            raise error
        found.damaged += [] if error is None else [error]
    if found.records or found.damaged:
        lengths.append(found.bytes - last_offset)
    found.runs = schema.run_rows(number, lengths)
    found.crc32c = storage.crc32c
    return found


def find_keys(file: str, image_key: str | None, class_key: str | None, on_error: str = "raise") -> RecordKeys | None:
    """The keys of image and class in the first of a file's records that has both; None where there is no record.

    Args:
        image_key, class_key: what the user says, None to look for the names in use.
        on_error: `raise`, or `skip` records that are damaged.

    Raises:
        UsageError: the first records have no such features; lists what the first one has.
        CorruptRecordError: it is no TFRecord file.
    """
    wrong: UsageError | None = None
    for features in islice(_examples(file, on_error), _SEARCHED_RECORDS):
        try:
            return _keys_in(features, file, image_key, class_key)
        except UsageError as error:
            wrong = wrong or error
    if wrong is not None:
        raise wrong
    return None


def _keys_in(features: dict[str, Value], file: str, image_key: str | None, class_key: str | None) -> RecordKeys:
    texts = [key for key, value in features.items() if isinstance(value, list) and len(value) == 1]
    numbers = [
        key for key, value in features.items() if str(getattr(value, "dtype", "")) == "int64" and len(value) == 1
    ]
    image = _choose(image_key, IMAGE_KEYS, texts)
    label = _choose(class_key, CLASS_KEYS, numbers)
    if image is None or label is None:
        missing = "an image (one bytes value)" if image is None else "a class id (one int64 value)"
        flag = "--image_key" if image is None else "--class_key"
        held = ", ".join(f"{key} ({_type(value)}, {len(value)})" for key, value in sorted(features.items()))
        raise UsageError(f"{file}: no feature is known to hold {missing}; name it by {flag} among: {held or 'nothing'}")
    return RecordKeys(image, label, next((key for key in NAME_KEYS if key in texts and key != image), None))


def _examples(file: str, on_error: str) -> Iterator[dict[str, Value]]:
    """The features of every record of a file."""
    for number, frame in enumerate(scan_file(open_storage(file), file)):
        try:
            if isinstance(frame.record, CorruptRecordError):
                raise frame.record
            yield parse_example(frame.record)
        except (CorruptRecordError, ValueError) as error:
            if on_error == "raise":
                located = isinstance(error, CorruptRecordError)
                raise error if located else CorruptRecordError(file, number, frame.offset, str(error)) from None


def _choose(given: str | None, known: Sequence[str], there: Sequence[str]) -> str | None:
    return next((key for key in ([given] if given else known) if key in there), None)


def _note_frame(
    found: Scan, number: int, frame: Frame, keys: RecordKeys, is_sampled: bool
) -> CorruptRecordError | None:
    """Add one record to what was found, or say what is wrong with it."""
    if isinstance(frame.record, CorruptRecordError):
        return frame.record
    try:
        _note(found, frame.record, keys, is_sampled)
    except UsageError:
        raise
    except ValueError as error:
        return CorruptRecordError(found.file, number, frame.offset, str(error))
    return None


def _note(found: Scan, record: bytes, keys: RecordKeys, is_sampled: bool) -> None:
    """Add one record to what was found. Raises ValueError where it isn't like the others."""
    features = parse_example(record)
    image, label = features.pop(keys.image, []), features.pop(keys.label, [])
    if not isinstance(image, list) or len(image) != 1:
        raise ValueError(f"it has {len(image)} values of {keys.image!r}, not one image")
    if isinstance(label, list) or len(label) != 1 or label.dtype.kind != "i" or label[0] < 0:
        raise ValueError(f"its {keys.label!r} isn't one class id")
    for key, value in features.items():
        if len(value) and found.types.get(key, _type(value)) != _type(value):
            raise ValueError(f"its {key!r} is {_type(value)}, in the records before {found.types[key]}")
    _note_image(found, image[0], is_sampled)
    for key, value in features.items():
        if len(value):
            found.types[key] = _type(value)
            found.singles[key] += len(value) == 1
        else:
            found.empty.setdefault((key, _type(value)), found.records + len(found.damaged))
    number = int(label[0])
    found.records += 1
    found.classes[number] += 1
    name = features.get(keys.name or "", [])
    if isinstance(name, list) and len(name) == 1:
        found.names.setdefault(number, set()).add(name[0].decode("utf-8", "replace"))
    digest = hashlib.blake2b(record, digest_size=16).digest()
    found.fingerprint = (found.fingerprint + int.from_bytes(digest, "big")) % (1 << 128)


def _note_image(found: Scan, encoded: bytes, is_sampled: bool) -> None:
    try:
        image = Image.open(io.BytesIO(encoded))
        image_format = _FORMATS.get(image.format or "")
        if image_format is None:
            number = found.records + len(found.damaged)
            raise UsageError(f"{found.file}: record {number} holds {image.format}; only JPEG and PNG are read")
        if is_sampled:
            found.histograms.append(image.convert("RGB").histogram())
    except UsageError:
        raise
    except Exception as error:  # Pillow raises a dozen types for broken images
        raise ValueError(f"its image can't be opened: {type(error).__name__}") from None
    found.formats[image_format] += 1
    found.channels[1 if image.mode in _GREY_MODES else 3] += 1
    found.sizes[image.height, image.width] += 1


def _type(value: Value) -> str:
    return "bytes" if isinstance(value, list) else str(value.dtype)
