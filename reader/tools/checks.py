"""Shared by the tools: threads that read files and check their records, and decoding as the readers do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import simplejpeg
from PIL import Image

from beam_pipeline.images.codec import ChannelSums, channel_sums
from beam_pipeline.images.memory import MIN_BOUND, SHARED, to_decode
from beam_pipeline.machine import cpu_count
from beam_pipeline.text import size_text
from reader.example import Value
from reader.pixels import UndecodableImageError, decode_pixels, in_8_bits, open_image, undecodable
from reader.runs import InvalidRecordError

T = TypeVar("T")
R = TypeVar("R")

_FILES_AT_ONCE = 8
_LARGE_PIXELS = 1 << 24  # of a JPEG that Pillow decodes too: an array in addition to its image would double the memory
_GREY_MODES = ("1", "L", "I", "I;16", "I;16B")


class Scanners:
    """Threads that read some files at once, and one per core that check their records; a context manager.

    Args:
        files: how many are to be read.
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
        """The results of `read` for each file, in order."""
        return self._readers.map(read, files)

    def blocks(self, check: Callable[[T], R], blocks: Iterable[T]) -> Iterator[R]:
        """The results of `check` for each block of a file, in order; a few are in flight."""
        return in_order(self._workers, check, blocks, self._ahead)


def in_order(pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], ahead: int) -> Iterator[R]:
    """The results of a function for each item, in order; so many more are in flight."""
    pending: deque[Future[R]] = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) > ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


class CheckedImage(NamedTuple):
    """An image that decodes.

    Attributes:
        format: `jpeg`, `png` or what else Pillow calls it, in lower case.
        is_grey: whether it is stored without colour.
        height, width: in pixels.
        sums: of its pixels, if they were asked for.
    """

    format: str
    is_grey: bool
    height: int
    width: int
    sums: ChannelSums | None


def check_image(encoded: bytes, channels: int = 3, with_sums: bool = False) -> CheckedImage:
    """Decode an image as the readers do. Raises UndecodableImageError."""
    try:
        height, width, colour, _ = simplejpeg.decode_jpeg_header(encoded)
    except ValueError:
        height, width, colour = 0, 0, ""
    if colour and height * width < _LARGE_PIXELS:
        decoded = decode_pixels(encoded, channels)
        sums = channel_sums(Image.fromarray(decoded)) if with_sums else None
        return CheckedImage("jpeg", colour == "Gray", height, width, sums)
    image = open_image(encoded)
    kind, is_grey = "jpeg" if colour else str(image.format).lower(), image.mode in _GREY_MODES
    try:
        needed = to_decode(image, encoded, image.width * image.height)
        if needed > MIN_BOUND:
            takes = f"takes {size_text(needed)} of memory to decode, more than {size_text(MIN_BOUND)}"
            raise UndecodableImageError(f"the image of {image.height}x{image.width} pixels {takes}")
        with SHARED.held(needed):
            image.load()
            pixels = in_8_bits(image)
            pixels = pixels if pixels.mode in ("L", "RGB") else pixels.convert("RGB")
            return CheckedImage(kind, is_grey, image.height, image.width, channel_sums(pixels) if with_sums else None)
    except (InvalidRecordError, MemoryError):
        raise
    except Exception as error:  # Pillow raises a dozen types for corrupt images
        raise undecodable(error) from None


def type_name(value: Value) -> str:
    """`bytes`, `float32` or `int64`."""
    return "bytes" if isinstance(value, list) else str(value.dtype)


def single_bytes(features: Mapping[str, Value], key: str) -> bytes | None:
    """The one value of a feature of bytes; None if it isn't that."""
    value = features.get(key)
    return value[0] if isinstance(value, list) and len(value) == 1 else None
