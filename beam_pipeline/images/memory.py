"""Estimates from an image's header how much memory its conversion takes at most, before any of it is allocated.

The constants are bytes per pixel: the peak resident set of a process, measured with glibc 2.36 and Pillow 12.3 on
images of 6 and 9 million pixels and rounded up; tests/images/test_memory.py measures again. Formats differ by a factor
of 15: a JPEG is decoded row by row at a reduced size, libwebp and libavif keep three or four copies of a picture.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from PIL import ImageFile
from PIL import TiffImagePlugin as plugin

from beam_pipeline.errors import Reject
from beam_pipeline.images import containers, formats, geometry
from beam_pipeline.images.colour import STORED_MODES
from beam_pipeline.images.tiff import YCBCR
from beam_pipeline.schema import RejectReason

if TYPE_CHECKING:
    from beam_pipeline.images.codec import ImageOptions

Reserve = Callable[[int], None]

# One image may take --max_pixels times 6 bytes, as a JPEG that isn't resized: 1 GiB at the default limit. A lower limit
# is meant for pixels, not for memory.
_BYTES_PER_PERMITTED_PIXEL = 6
MIN_BOUND = 1 << 30
# Smaller images needn't wait for each other.
LARGE = 100 << 20
_MAX_BYTES_PER_PIXEL = 50

# While decoding and converting to 8 bits. Pillow's pixels have 4 bytes, also those of LA.
_BY_MODE = {"1": 2, "L": 2, "P": 8, "I;16": 6, "I;16B": 6, "RGB": 4, "CMYK": 8}
_OTHER_MODES = 9
_WITH_TRANSPARENT_COLOUR = 11
# Decoders that return a complete picture: their planes (8 bytes at 12 bits, 4:4:4 and alpha), RGBA, a copy for Python,
# Pillow's pixels.
_BY_FORMAT = {"WEBP": 17, "AVIF": 17, "HEIF": 17}
_COEFFICIENT = 2  # for each sample of a JPEG in several scans: all are in memory before the first pixel

# After resizing.
_COPY = 4
_WITH_ALPHA = 8
_HUFFMAN_OPTIMISATION = 6  # libjpeg keeps all coefficients
_ENCODED = {"jpeg": 2, "png": 6}

_TIFF_ORIENTATION = 274


class MemoryBudget:
    """Bytes that threads may reserve together; a request beyond the limit waits until nothing else is reserved."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._reserved = 0
        self._changed = threading.Condition()

    def reserve(self, size: int, wait: bool = True) -> bool:
        """Reserve bytes; returns whether they were free. A caller that holds some must not block: deadlock."""
        with self._changed:
            while self._reserved and self._reserved + size > self._limit:
                if not wait:
                    return False
                self._changed.wait()
            self._reserved += size
            return True

    def release(self, size: int) -> None:
        """Release bytes."""
        with self._changed:
            self._reserved -= size
            self._changed.notify_all()

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Bytes that are reserved within a `with` block."""
        self.reserve(size)
        try:
            yield
        finally:
            self.release(size)


# Large images of all threads share what one may take at the default --max_pixels; one that takes more is decoded alone.
SHARED = MemoryBudget(MIN_BOUND)


def bound(options: ImageOptions) -> int:
    """Bytes that one image may take."""
    return max(MIN_BOUND, _BYTES_PER_PERMITTED_PIXEL * options.max_pixels)


def reserve_memory(
    image: ImageFile.ImageFile, size: geometry.Size, data: bytes, options: ImageOptions, reserve: Reserve | None
) -> None:
    """Call `reserve` with the bytes that an image takes at most besides its file, if they are more than `LARGE`.

    Args:
        image: opened, and set to the scale at which it will be decoded.
        size: (width, height) in its file.
        data, options: the file, and how it is converted.
        reserve: blocks until there is memory.

    Raises:
        Reject: `too_many_pixels`, the image takes more than `bound`.
    """
    target = options.size[0] * options.size[1] if options.size else 0
    # Nearly all images are small. The tiles of a TIFF may be larger than the image.
    if (size[0] * size[1] + target) * _MAX_BYTES_PER_PIXEL < LARGE and image.format != "TIFF":
        return
    needed = to_decode(image, data, size[0] * size[1]) + _to_store(image, size, options)
    if needed > bound(options):
        what = f"{size[0]}x{size[1]} pixels of {image.format} {image.mode} take {needed >> 20} MiB"
        limit = f"--max_pixels {options.max_pixels} permits {bound(options) >> 20} MiB"
        raise Reject(RejectReason.TOO_MANY_PIXELS, f"{what}, {limit}")
    if reserve is not None and needed > LARGE:
        reserve(needed)


def to_decode(image: ImageFile.ImageFile, data: bytes, pixels: int) -> int:
    """Bytes that an opened image, of `pixels` in its file, takes at most until it has 8 bits per channel."""
    per_pixel = _BY_FORMAT.get(str(image.format)) or _BY_MODE.get(image.mode, _OTHER_MODES)
    if "transparency" in image.info:
        per_pixel = max(per_pixel, _WITH_TRANSPARENT_COLOUR)
    decoded = image.width * image.height * per_pixel
    if image.format == "JPEG":
        return decoded + _coefficients(image, data, pixels)
    return decoded + (_tiff_buffers(image) if image.format == "TIFF" else 0)


def _coefficients(image: Any, data: bytes, pixels: int) -> int:
    """Bytes of the coefficients of a JPEG in several scans, at whatever scale it is decoded."""
    if "progressive" not in image.info:
        with contextlib.suppress(EOFError, ValueError, IndexError):
            first = next(part for part in containers.jpeg_segments(data) if part.kind == containers.SOS)
            if data[first.start + 4] == image.layers:  # all channels are in one scan
                return 0
    _, across, down, _ = zip(*image.layer, strict=True)
    samples = sum(columns * rows for columns, rows in zip(across, down, strict=True))
    return int(_COEFFICIENT * pixels * samples // (max(across) * max(down)))


def _tiff_buffers(image: Any) -> int:
    """Bytes of the strip or tile that libtiff decodes at a time, and of the copy that Pillow turns."""
    tags = image.tag_v2
    turned = _COPY * image.width * image.height if tags.get(_TIFF_ORIENTATION, 1) != 1 else 0
    if not image.tile or image.tile[0].codec_name != "libtiff":
        return turned
    bits = max(tags.get(plugin.BITSPERSAMPLE, (1,))) * tags.get(plugin.SAMPLESPERPIXEL, 1)
    if tags.get(plugin.PHOTOMETRIC_INTERPRETATION) == YCBCR:  # libtiff converts it to RGBA
        bits = 32
    across = max(image.width, tags.get(plugin.TILEWIDTH, 0))
    down = tags.get(plugin.TILELENGTH) or min(image.height, tags.get(plugin.ROWSPERSTRIP, image.height))
    return turned + int(across * down * bits) // 8


def _to_store(image: ImageFile.ImageFile, size: geometry.Size, options: ImageOptions) -> int:
    orientation = formats.orientation(image)
    canvas = geometry.fit(size, options.size, options.resize_mode, orientation).canvas
    per_pixel = _ENCODED[options.format]
    per_pixel += _HUFFMAN_OPTIMISATION if options.optimize else 0
    if image.has_transparency_data:
        per_pixel += _WITH_ALPHA
    elif image.mode != STORED_MODES[options.channels]:
        per_pixel += _COPY
    copies = (canvas != size, orientation != 1, "icc_profile" in image.info)
    return canvas[0] * canvas[1] * (per_pixel + _COPY * sum(copies))
