"""Records checked on all cores, for `verify` and `index`: the threads, the features of a record, its image."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import simplejpeg
from PIL import Image

from beam_pipeline import schema
from reader.decode import Pixels, decode_pixels, stored_shape
from reader.example import Value
from reader.info import DatasetInfo
from reader.limits import cpu_count
from reader.records import InvalidRecordError

T = TypeVar("T")
R = TypeVar("R")

_FILES_AT_ONCE = 8
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
        """What `check` returns of each block of a file, in order; a few are under way."""
        pending: deque[Future[R]] = deque()
        for block in blocks:
            pending.append(self._workers.submit(check, block))
            if len(pending) > self._ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


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


def decode_image(encoded: bytes, channels: int = 3) -> CheckedImage:
    """Decode an image as the readers do. Raises UndecodableImageError."""
    stored_shape(encoded, channels)  # which refuses a header that would take all memory
    try:
        kind, mode = "jpeg", _COLOUR_MODES.get(simplejpeg.decode_jpeg_header(encoded)[2], "CMYK")
    except ValueError:
        with Image.open(io.BytesIO(encoded)) as opened:
            kind, mode = str(opened.format).lower(), opened.mode
    return CheckedImage(kind, Image.getmodebands(mode), mode in _GREY_MODES, decode_pixels(encoded, channels))


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
        kind = "bytes" if isinstance(value, list) else str(getattr(value, "dtype", ""))
        if value is None:
            yield f"it lacks {column['name']}"
        elif len(value) and (kind != column["dtype"] or (len(value) > 1 and not column["list"])):
            yield f"{column['name']} has {len(value)} values of {kind}, not {column['dtype']}"
    stored = np.asarray(features[schema.SIZE_KEY]).tolist() if is_ours else None
    if stored is not None and not _is_within(info, stored):
        yield f"size {stored} isn't within the manifest's {_size_range(info)}"
    if decode:
        yield from _check_image(info, first_bytes(features, info.image_key), stored)


def _check_image(info: DatasetInfo, encoded: bytes, stored: Sequence[int] | None) -> Iterator[str]:
    """What is wrong with an image; `stored` is the size that its record has, None if it is somebody else's."""
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
