"""Encoded images → pixels in a given row of a batch: JPEG by libjpeg-turbo, everything else by Pillow.

The pixels are exactly Pillow's (accurate DCT, fancy upsampling, its bilinear filter if they are resized).
"""

from __future__ import annotations

import io
import math
import operator
import reprlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageFile

from beam_pipeline.errors import Reject, UsageError
from beam_pipeline.images import colour, containers, formats
from beam_pipeline.images.resize import Box, resize_into
from beam_pipeline.text import one_line
from reader.augment import Augment, RandomResizedCrop, check_augment
from reader.info import ImageInfo
from reader.runs import InvalidRecordError

Pixels = npt.NDArray[np.uint8]
Encoded = bytes | memoryview

MAX_PIXELS = 178_956_970  # as Pillow: a forged header must not take all memory

_MAX_SIDE = 16_384  # as the writer
_KEPT_BYTES = 100 << 20  # of scratch memory
RESIZE_MODES = ("stretch", "crop", "pad")

# Colour spaces whose pixels libjpeg-turbo and Pillow agree on, by channels wanted; CMYK differs by 1.
_SAME_AS_PILLOW = {1: {"Gray"}, 3: {"YCbCr", "RGB", "Gray"}}
_COLOUR = {1: "GRAY", 3: "RGB"}
_JPEG = b"\xff\xd8"
_AS_WRITTEN = (b"II", b"MM", b"BM")  # how TIFF and BMP begin, some of which Pillow alone reads wrongly
_PLAIN = {_JPEG: containers.plain_jpeg, b"\x89P": containers.plain_png}  # without metadata that Pillow may refuse


class UndecodableImageError(InvalidRecordError):
    """The bytes hold no image that Pillow can decode, or one of another size than the manifest says."""


class ImageDecoder:
    """Decodes, resizes and augments one image after the other into rows of a batch. Thread-safe.

    Args:
        image: how the dataset's images are stored.
        image_size: side or (height, width) in pixels; None for the stored size.
        resize_mode: `crop`, `stretch` or `pad`.
        augment: `f(image, seed)`, or a `RandomResizedCrop`, which takes the place of resizing.
        is_foreign: whether the images may come from other encoders, in any colour space.

    Attributes:
        shape: (height, width, channels) of a row.

    Raises:
        UsageError: stored sizes are mixed and `image_size` is None, or an argument's value is invalid.
    """

    def __init__(
        self,
        image: ImageInfo,
        image_size: int | tuple[int, int] | None = None,
        resize_mode: str = "crop",
        augment: Augment | None = None,
        is_foreign: bool = True,
    ) -> None:
        check_augment(augment)
        check_resize_mode(resize_mode)
        self._crop = augment if isinstance(augment, RandomResizedCrop) else None
        self._augment = augment if self._crop is None else self._crop.then
        if self._crop is not None and image_size is None:
            raise UsageError("random_resized_crop resizes its crops: give image_size")
        self.shape = (*target_size(image, image_size), image.channels)
        # None if sizes are mixed: then each image's header says it.
        self._stored = (
            (*image.min_size, image.channels) if image.min_size and image.min_size == image.max_size else None
        )
        self._largest = image.max_size
        self._resize_mode = resize_mode
        self._is_foreign = is_foreign
        self._scratch = _Scratch()

    def __call__(self, encoded: Encoded, row: Pixels, seed: int) -> None:
        """Decode an image into `row`, uint8 `shape`.

        Args:
            encoded: JPEG or PNG.
            row: part of a batch, contiguous.
            seed: of the record's augmentation.

        Raises:
            UndecodableImageError: Pillow can't decode it either, or it has another size than the manifest says.
            UsageError: the augment failed, or returned something else than an image of this shape.
        """
        if self._crop is None and self._stored == self.shape:
            self._decode(encoded, row)
        else:
            height, width, channels = self._stored or self._shape_of(encoded)
            if self._crop is None:
                box, out = fit((height, width), row, self._resize_mode)
            else:
                top, left, crop_height, crop_width = self._crop.window(height, width, seed)
                box, out = (left, top, left + crop_width, top + crop_height), row
            scale = _scale(encoded, box, out)
            decoded = self._scratch.array((-(-height // scale), -(-width // scale), channels))
            edges = [edge / scale for edge in box]
            resize_into(self._decode(encoded, decoded, scale), (edges[0], edges[1], edges[2], edges[3]), out)
        if self._augment is not None:
            _store(call_user(self._augment, row, seed), row)

    def _shape_of(self, encoded: Encoded) -> tuple[int, int, int]:
        height, width, channels = stored_shape(encoded, self.shape[2])
        if self._largest and (height > self._largest[0] or width > self._largest[1]):  # a header may ask for 12 GB
            largest = "x".join(map(str, self._largest))
            raise UndecodableImageError(f"the image is {height}x{width}, the manifest says at most {largest}")
        return height, width, channels

    def _decode(self, encoded: Encoded, out: Pixels, scale: int = 1) -> Pixels:
        """Decode at the stored size divided by `scale`, into `out`."""
        pixels = decode_pixels(encoded, out.shape[2], out, self._is_foreign, scale)
        if pixels.shape != out.shape:  # a smaller one decodes without an error
            actual, expected = (
                f"{height * scale}x{width * scale}" for height, width in (pixels.shape[:2], out.shape[:2])
            )
            raise UndecodableImageError(f"the image is {actual}, the manifest says {expected}")
        return pixels


class _Scratch(threading.local):
    """Memory for an image at its stored size, reused, one a thread: fresh pages cost more than resizing."""

    def __init__(self) -> None:
        self._buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...]) -> Pixels:
        size = math.prod(shape)
        if size > _KEPT_BYTES:  # a thread that waits for the next image shouldn't hold it
            return np.empty(shape, np.uint8)
        if size >= len(self._buffer):
            self._buffer = np.empty(size + 1, np.uint8)
        # One byte off: libjpeg-turbo writes rows that are aligned to 32 bytes past the cache, where resizing reads them
        # (decoding and resizing then take 1.14 to 1.19 times the CPU: benchmarks/resize.py).
        return self._buffer[1 : size + 1].reshape(shape)


def decode_pixels(
    encoded: Encoded, channels: int, out: Pixels | None = None, is_foreign: bool = True, scale: int = 1
) -> Pixels:
    """A JPEG or PNG as pixels.

    Args:
        encoded: the file's bytes.
        channels: 3 (RGB) or 1 (grey).
        out: uint8 [height, width, channels], contiguous: used if the image has this shape.
        is_foreign: whether the JPEG may have another colour space than `channels` says (reading its header: 2 µs).
        scale: 2, 4 or 8 decode a JPEG at this part of its size, rounded up; `out` has to be given.

    Returns:
        uint8 [height, width, channels] of the image; in the memory of `out` if the shape is the same.

    Raises:
        UndecodableImageError: Pillow can't decode it either.
    """
    try:
        if not is_foreign or simplejpeg.decode_jpeg_header(encoded)[2] in _SAME_AS_PILLOW[channels]:
            least = (0, 0) if out is None else out.shape[:2]
            pixels: Pixels = simplejpeg.decode_jpeg(encoded, _COLOUR[channels], False, False, *least, scale, out, True)
            return pixels
    except ValueError:  # no JPEG, an unsupported one (12 bits, arithmetic coding), or corrupt: Pillow decides
        pass
    pixels = _decode_with_pillow(encoded, channels, scale)
    if out is None or pixels.shape != out.shape:
        return pixels
    out[:] = pixels
    return out


def stored_shape(encoded: Encoded, channels: int) -> tuple[int, int, int]:
    """(height, width, channels) of an image by its header. Raises UndecodableImageError, also if it is a bomb."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(encoded)
    except ValueError:
        width, height = open_image(encoded).size
    if height * width > MAX_PIXELS:
        raise UndecodableImageError(f"the image has {height}x{width} pixels, more than {MAX_PIXELS}")
    return height, width, channels


def fit(size: tuple[int, int], out: Pixels, mode: str) -> tuple[Box, Pixels]:
    """Which part of an image goes to which part of a row.

    Args:
        size: the image's (height, width) in pixels.
        out: the row, uint8 [height, width, channels]; what stays free is made black.
        mode: `stretch`, `crop` the middle after scaling the shorter side, or `pad` with black after scaling the longer.

    Returns:
        (left, top, right, bottom) in the image, and the view of `out` that it is resized to.
    """
    (from_height, from_width), (height, width) = size, out.shape[:2]
    ratios = height / from_height, width / from_width
    if mode == "crop":
        new_height = min(max(round(height / max(ratios)), 1), from_height)
        new_width = min(max(round(width / max(ratios)), 1), from_width)
        top, left = (from_height - new_height) // 2, (from_width - new_width) // 2
        return (left, top, left + new_width, top + new_height), out
    if mode == "pad":
        new_height = min(max(round(from_height * min(ratios)), 1), height)
        new_width = min(max(round(from_width * min(ratios)), 1), width)
        top, left = (height - new_height) // 2, (width - new_width) // 2
        out[:] = 0
        out = out[top : top + new_height, left : left + new_width]
    return (0, 0, from_width, from_height), out


def _scale(encoded: Encoded, box: Box, out: Pixels) -> int:
    """How many times smaller a JPEG is decoded, so that twice the size of `out` is left, as the writer does it."""
    left, top, right, bottom = box
    times = min((bottom - top) // out.shape[0], (right - left) // out.shape[1])
    if times < 4 or encoded[:2] != _JPEG:
        return 1
    return 8 if times >= 16 else 4 if times >= 8 else 2


def _decode_with_pillow(encoded: Encoded, channels: int, scale: int) -> Pixels:
    image = open_image(encoded)
    try:
        if scale > 1:
            image.draft(image.mode, (image.width // scale, image.height // scale))
        picture, mode = in_8_bits(image), "L" if channels == 1 else "RGB"
        is_ready = picture.mode == mode  # `convert` would copy it
        pixels: Pixels = np.asarray(picture if is_ready else picture.convert(mode))
    except MemoryError:
        raise  # not the image's fault
    except Exception as error:  # Pillow raises a dozen types for corrupt images
        raise undecodable(error) from None
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def open_image(encoded: Encoded) -> ImageFile.ImageFile:
    """An image whose header was read; a TIFF or BMP as the writer reads it. Raises UndecodableImageError."""
    try:
        if encoded[:2] not in _AS_WRITTEN:
            return Image.open(io.BytesIO(_PLAIN.get(bytes(encoded[:2]), bytes)(bytes(encoded))))
        data = bytes(encoded)
        image = formats.open_image(data, formats.recognise(data))
    except Exception as error:
        raise undecodable(error) from None
    if image.width * image.height > MAX_PIXELS:
        raise undecodable(Image.DecompressionBombError())
    return image


def in_8_bits(image: Image.Image) -> Image.Image:
    """An image of 16 bits as the writer reads it, which `convert` would clip at 255. Raises Reject."""
    return colour.to_bytes(image, b"") if image.mode[0] in "IF" else image


def undecodable(error: Exception) -> UndecodableImageError:
    """What an error in decoding means."""
    if isinstance(error, Image.DecompressionBombError):
        return UndecodableImageError(f"the image has over {MAX_PIXELS:,} pixels")
    what = ": ".join(error.args) if isinstance(error, Reject) else type(error).__name__
    return UndecodableImageError(f"the image doesn't decode ({what})")


def call_user(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's function. Raises UsageError, of one line, if it fails."""
    try:
        return function(*arguments)
    except Exception as error:  # StopIteration too, which would end the reader's own loops
        name = getattr(function, "__name__", None) or type(function).__name__
        raise UsageError(f"{name} failed: {type(error).__name__}: {one_line(error)[:200]}") from error


def _store(image: Any, row: Pixels) -> None:
    """Copy an augment's result into the row."""
    if image is row:
        return
    array = call_user(np.asarray, image)
    if array.shape != row.shape or array.dtype != row.dtype:
        kind = f"{array.dtype} {list(array.shape)}" if array.dtype != object else type(image).__name__
        raise UsageError(f"the augment returned {kind}: it has to return uint8 {list(row.shape)}, the image's shape")
    row[:] = array


def check_resize_mode(mode: str) -> None:
    """Raise UsageError unless it is one of `RESIZE_MODES`."""
    if mode not in RESIZE_MODES:
        raise UsageError(f"resize_mode must be one of {', '.join(RESIZE_MODES)}, got {mode!r}")


def checked_size(image_size: int | Iterable[int]) -> tuple[int, int]:
    """(height, width) of an `image_size` argument. Raises UsageError if it is no size."""
    try:
        height, width = image_size if isinstance(image_size, Iterable) else (image_size, image_size)
        size = operator.index(height), operator.index(width)
    except (TypeError, ValueError):
        size = 0, 0
    if min(size) < 1:
        raise UsageError(f"image_size must be a side or (height, width) in pixels, got {reprlib.repr(image_size)}")
    if max(size) > _MAX_SIDE:
        raise UsageError(f"image_size must be at most {_MAX_SIDE} pixels a side, got {reprlib.repr(image_size)}")
    return size


def target_size(image: ImageInfo, image_size: int | Iterable[int] | None) -> tuple[int, int]:
    """(height, width) of the decoded images.

    Raises:
        UsageError: stored sizes are mixed and `image_size` is None, or it is no size.
    """
    if image_size is not None:
        return checked_size(image_size)
    if image.min_size is None or image.max_size is None:
        raise UsageError("the dataset holds no image, so its size isn't known: give image_size")
    if image.min_size != image.max_size:
        sizes = f"{_pixels(image.min_size)} to {_pixels(image.max_size)}"
        raise UsageError(f"the stored images have mixed sizes ({sizes}), which make no batch: give image_size")
    return image.min_size


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
