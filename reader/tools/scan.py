"""Records read on all cores, for `verify` and `index`: the threads, what a record holds, and what is wrong with it."""

from __future__ import annotations

import hashlib
import io
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, ImageShardsError
from reader.decode import Encoded, Pixels, decode_pixels, stored_shape
from reader.example import Value, parse_example
from reader.info import DatasetInfo
from reader.limits import cpu_count
from reader.records import InvalidRecordError, RunReader

T = TypeVar("T")
R = TypeVar("R")

_FILES_AT_ONCE = 8
_KEPT_ERRORS = 10  # of a file's records that are left out
_GREY_MODES = ("1", "L", "I", "I;16", "F")
_COLOUR_MODES = {"Gray": "L", "YCbCr": "RGB", "RGB": "RGB"}  # others are four colours


class Scanners:
    """Threads that read some files at once, and one a core that check what is in them; a context manager.

    Args:
        files: how many there are.
    """

    def __init__(self, files: int) -> None:
        at_once = max(1, min(files, _FILES_AT_ONCE))
        self._ahead = max(2, 2 * cpu_count() // at_once)
        self._readers = ThreadPoolExecutor(at_once, "reader-files")
        self._workers = ThreadPoolExecutor(cpu_count(), "reader-records")

    def __enter__(self) -> Scanners:
        return self

    def __exit__(self, *_: object) -> None:
        # After an error readers still wait for workers: they fail at their next block.
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    def files(self, read: Callable[[T], R], files: Iterable[T]) -> Iterator[R]:
        """What `read` returns of each file, in order."""
        return self._readers.map(read, files)

    def blocks(self, check: Callable[[T], R], blocks: Iterable[T]) -> Iterator[R]:
        """What `check` returns of each block of a file, in order; a few are in flight."""
        pending: deque[Future[R]] = deque()
        for block in blocks:
            pending.append(self._workers.submit(check, block))
            if len(pending) > self._ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def open_split(info: DatasetInfo, split: str) -> RunReader:
    """What reads a split string's records. Raises ImageShardsError if a shard is missing or has another size."""
    table, wrong = info.run_table(split), info.wrong_sizes(split)
    if wrong:
        raise ImageShardsError(f"{wrong[0]}: run the job again with --repair")
    return RunReader(table)


class CheckedImage(NamedTuple):
    """An image that decodes.

    Attributes:
        format: `jpeg`, `png` or what else Pillow calls it, in small letters.
        channels: values that a stored pixel has.
        is_grey: whether it has no colours.
        pixels: uint8 [height, width, channels wanted].
    """

    format: str
    channels: int
    is_grey: bool
    pixels: Pixels


def decode_image(encoded: Encoded, channels: int = 3) -> CheckedImage:
    """Decode an image as the readers do. Raises UndecodableImageError."""
    stored_shape(encoded, channels)  # which refuses a header that would take all memory
    try:
        kind, mode = "jpeg", _COLOUR_MODES.get(simplejpeg.decode_jpeg_header(encoded)[2], "CMYK")
    except ValueError:
        with Image.open(io.BytesIO(encoded)) as opened:
            kind, mode = str(opened.format).lower(), opened.mode
    return CheckedImage(kind, Image.getmodebands(mode), mode in _GREY_MODES, decode_pixels(encoded, channels))


def type_name(value: Value) -> str:
    """`bytes`, `float32` or `int64`."""
    return "bytes" if isinstance(value, list) else str(value.dtype)


# --- for `verify`


def check_record(info: DatasetInfo, features: Mapping[str, Value], decode: bool) -> Iterator[str]:
    """What is wrong with the features of a record; of other people's records only image and class are known."""
    is_ours, one_hot = schema.FOREIGN_KEY not in info.manifest, bool(info.manifest["configuration"]["one_hot"])
    keys = schema.RECORD_KEYS[: None if one_hot else -1] if is_ours else (info.image_key, info.class_key)
    if missing := [key for key in keys if not len(features.get(key, ()))]:
        yield f"it lacks {', '.join(missing)}"
        return
    label = first_integer(features, info.class_key)
    if not 0 <= label < info.num_classes:
        yield f"class {label} is out of range: there are {info.num_classes}"
    elif is_ours and features[schema.LABEL_KEY] != [schema.relative_path_bytes(info.classes[label])]:
        yield f"label {features[schema.LABEL_KEY]!r} isn't the name of class {label}, {info.classes[label]!r}"
    if one_hot and not np.array_equal(np.asarray(features[schema.ONE_HOT_KEY]), np.arange(info.num_classes) == label):
        yield f"{schema.ONE_HOT_KEY} isn't class {label}"
    for column in info.manifest["features"] if is_ours else ():
        value = features.get(column["name"])
        if value is None:
            yield f"it lacks {column['name']}"
        elif len(value) and (type_name(value) != column["dtype"] or (len(value) > 1 and not column["list"])):
            yield f"{column['name']} has {len(value)} values of {type_name(value)}, not {column['dtype']}"
    stored = np.asarray(features[schema.SIZE_KEY]).tolist() if is_ours else None
    if stored is not None and not _is_within(info, stored):
        yield f"size {stored} isn't within the manifest's {_size_range(info)}"
    if decode:
        yield from _check_image(info, first_bytes(features, info.image_key), stored)


def _check_image(info: DatasetInfo, encoded: bytes, stored: Sequence[int] | None) -> Iterator[str]:
    """What is wrong with an image; `stored` is the size that its record has, None in third-party files."""
    try:
        image = decode_image(encoded, info.image.channels)
    except InvalidRecordError as error:
        yield str(error)
        return
    size = image.pixels.shape[:2]
    if stored is not None:
        found, expected = (*size, image.channels, image.format), (*stored, info.image.channels, info.image.format)
        if found != expected:
            yield f"the image is {found} (height, width, channels, format), expected {expected}"
        return
    if not _is_within(info, size):
        yield f"the image is {'x'.join(map(str, size))}, the manifest says {_size_range(info)}"
    if info.image.format not in (image.format, "mixed"):
        yield f"the image is {image.format}, the manifest says {info.image.format}"


def _is_within(info: DatasetInfo, size: Sequence[Any]) -> bool:
    least, most = info.image.min_size or (0, 0), info.image.max_size or (0, 0)
    return len(size) == 2 and all(
        isinstance(side, int) and low <= side <= high for low, side, high in zip(least, size, most, strict=True)
    )


def _size_range(info: DatasetInfo) -> str:
    return f"{list(info.image.min_size or (0, 0))} to {list(info.image.max_size or (0, 0))}"


def first_bytes(features: Mapping[str, Value], key: str) -> bytes:
    """The first value of a feature of bytes, b"" if it has none."""
    value = features.get(key, [])
    return value[0] if isinstance(value, list) and value else b""


def first_integer(features: Mapping[str, Value], key: str) -> int:
    """The first value of a feature of integers, -1 if it has none."""
    value = features.get(key, [])
    return -1 if isinstance(value, list) or value.dtype != np.int64 or not len(value) else int(value[0])


# --- for `index`


class RecordKeys(NamedTuple):
    """Which features hold an image, its class id, and its class name ("" if none does)."""

    image: str
    label: str
    name: str


@dataclass
class Contents:
    """What some records hold; the counters count records.

    Attributes:
        spans: (offset, bytes) of each with its framing, of a block's records only.
        left_out: those that aren't indexed, by reason.
        errors: the first of these.
        names: by (class id, class name).
        features: by (name, type, number of values: 0, 1 or 2 for more) of the features beside image and class.
        images: by (format, whether it is grey, height, width).
        histogram, sampled: of how many images the pixels are counted, int64 [3, 256].
        digest: sum over the records of a hash of their bytes.
    """

    spans: list[tuple[int, int]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    errors: list[CorruptRecordError] = field(default_factory=list)
    classes: Counter[int] = field(default_factory=Counter)
    names: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    features: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    images: Counter[tuple[str, bool, int, int]] = field(default_factory=Counter)
    histogram: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((3, 256), np.int64))
    sampled: int = 0
    digest: int = 0

    @property
    def records(self) -> int:
        """How many are indexed."""
        return self.classes.total()

    def take(self, record: bytes | CorruptRecordError, keys: RecordKeys, is_sampled: bool) -> tuple[str, str]:
        """Decode a record's image and count what the record holds, or say why it is left out: a reason, and details."""
        if isinstance(record, CorruptRecordError):
            return "corrupt_record", record.reason
        try:
            features = parse_example(record)
        except ValueError as error:
            return "not_an_example", str(error)
        image, label = features.pop(keys.image, []), features.pop(keys.label, [])
        if not isinstance(image, list) or len(image) != 1:
            return "no_image_or_class", f"it has {len(image)} values of {keys.image!r}, not one image"
        if isinstance(label, list) or len(label) != 1 or label.dtype != np.int64 or label[0] < 0:
            return "no_image_or_class", f"its {keys.label!r} isn't one class id"
        try:
            decoded = decode_image(image[0])
        except InvalidRecordError as error:
            return "decode_error", str(error)
        number, name = int(label[0]), features.get(keys.name, [])
        self.classes[number] += 1
        if isinstance(name, list) and len(name) == 1:
            self.names[number, name[0]] += 1
        self.features.update((key, type_name(value), min(len(value), 2)) for key, value in features.items())
        height, width, channels = decoded.pixels.shape
        self.images[decoded.format, decoded.is_grey, height, width] += 1
        if is_sampled:
            self.sampled += 1
            for channel in range(channels):
                self.histogram[channel] += np.bincount(decoded.pixels[..., channel].ravel(), minlength=256)
        self.digest += int.from_bytes(hashlib.blake2b(record, digest_size=16).digest(), "big")
        return "", ""

    def add(self, other: Contents) -> None:
        """Add what other records hold."""
        for name in ("left_out", "classes", "names", "features", "images"):
            getattr(self, name).update(getattr(other, name))
        self.errors = (self.errors + other.errors)[:_KEPT_ERRORS]
        self.histogram += other.histogram
        self.sampled += other.sampled
        self.digest = (self.digest + other.digest) % (1 << 128)
