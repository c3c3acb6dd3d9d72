"""One image in, one image out: decode, orient, resize and re-encode with Pillow; bytes to bytes, no storage, no Beam.

A bad image raises `Reject` with a reason and a detail made of deterministic values only.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import PIL
from PIL import Image, ImageFile, UnidentifiedImageError, features

from beam_pipeline.errors import Reject
from beam_pipeline.schema import RejectReason

RESIZE_MODES = ("stretch", "crop", "pad", "shorter", "longer")
RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    "nearest": Image.Resampling.NEAREST,
}
SUBSAMPLING = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}
FORMATS = {"jpeg": "JPEG", "png": "PNG"}

# How many times larger than its target an image may stay after the cheap reductions (DCT-scaled decoding, box
# averaging by whole factors) that come before the filter. 1.5 costs half of none and is not told apart by eye.
_REDUCING_GAP = 1.5
_OPENED_FORMATS = ("JPEG", "PNG")
_EXIF_ORIENTATION = 0x0112
# EXIF orientation → what shows the picture upright, https://www.cipa.jp/std/documents/e/DC-008-2012_E.pdf (4.6.4 A)
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = frozenset({5, 6, 7, 8})


Image.preinit()  # loads the decoders now, not with the first image
Image.MAX_IMAGE_PIXELS = None  # `max_pixels` decides, and says so; Pillow's own limit would warn or raise first


class ImageOptions(NamedTuple):
    """What decides the bytes of an image.

    Attributes:
        size: (height, width) in pixels, or None to keep the image's own.
        resize_mode: one of `RESIZE_MODES`.
        resample: a key of `RESAMPLING`.
        format: a key of `FORMATS`.
        jpeg_quality: 1–100.
        jpeg_subsampling: a key of `SUBSAMPLING`.
        max_pixels: larger images are rejected before they are decoded.
        max_image_bytes: larger files are rejected before they are fetched.
    """

    size: tuple[int, int] | None
    resize_mode: str
    resample: str
    format: str
    jpeg_quality: int
    jpeg_subsampling: str
    max_pixels: int
    max_image_bytes: int


class EncodedImage(NamedTuple):
    """A converted image: its encoded bytes, height and width in pixels."""

    data: bytes
    height: int
    width: int


def codec_versions() -> dict[str, str]:
    """Versions of everything that has a part in the bytes of an image."""
    versions = {"pillow": PIL.__version__}
    for name in ("libjpeg_turbo", "zlib", "zlib_ng"):
        version = features.version(name)
        if version:
            versions[name] = version
    return versions


def check_size(byte_count: int, options: ImageOptions) -> None:
    """Reject a file by its size alone.

    Raises:
        Reject: `too_many_bytes`.
    """
    if byte_count > options.max_image_bytes:
        raise Reject(RejectReason.TOO_MANY_BYTES, f"{byte_count} bytes, --max_image_bytes {options.max_image_bytes}")


def convert(data: bytes, options: ImageOptions, look: Callable[[Image.Image], None] | None = None) -> EncodedImage:
    """Convert one source image.

    Args:
        data: the file's bytes, JPEG or PNG whatever its name says.
        options: what to make of it.
        look: called with the finished pixels before they are encoded.

    Raises:
        Reject: there is nothing to make of it.
    """
    check_size(len(data), options)
    image = _open(data)
    width, height = image.size
    if width * height > options.max_pixels:
        raise Reject(RejectReason.TOO_MANY_PIXELS, f"{width}x{height} pixels, --max_pixels {options.max_pixels}")
    try:
        finished = _fit(image, options)
    except MemoryError:
        raise Reject(RejectReason.OUT_OF_MEMORY, f"{image.format} of {width}x{height} pixels") from None
    except Exception as error:
        truncated = isinstance(error, (OSError, SyntaxError, EOFError)) and "truncated" in str(error)
        reason = RejectReason.TRUNCATED if truncated else RejectReason.DECODE_ERROR
        raise Reject(reason, f"{image.format} of {width}x{height} pixels, {len(data)} bytes") from None
    if look is not None:
        look(finished)
    return EncodedImage(_encode(finished, options), finished.height, finished.width)


def _open(data: bytes) -> ImageFile.ImageFile:
    try:
        return Image.open(io.BytesIO(data), formats=_OPENED_FORMATS)
    except UnidentifiedImageError:
        raise Reject(RejectReason.NOT_AN_IMAGE, f"{len(data)} bytes, beginning {data[:8].hex() or 'nowhere'}") from None
    except Exception:
        raise Reject(RejectReason.DECODE_ERROR, f"{len(data)} bytes, beginning {data[:8].hex()}") from None


def _fit(image: ImageFile.ImageFile, options: ImageOptions) -> Image.Image:
    """Decode, resize and turn an image upright, in RGB."""
    orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    sideways = orientation in _SIDEWAYS
    target = options.size
    if target is not None and sideways:
        target = (target[1], target[0])  # resized as it lies, then turned: the small image is the cheap one to turn
    box, size, canvas = _geometry(image.size, target, options.resize_mode)
    scale = _shrink_on_load(image, box, size)
    pixels: Image.Image = image if image.mode == "RGB" else image.convert("RGB")
    if size != pixels.size or box != (0, 0, *pixels.size):
        scaled = (box[0] * scale, box[1] * scale, box[2] * scale, box[3] * scale)
        pixels = pixels.resize(size, RESAMPLING[options.resample], box=scaled, reducing_gap=_REDUCING_GAP)
    else:
        pixels.load()
    if canvas != size:
        padded = Image.new("RGB", canvas)
        padded.paste(pixels, ((canvas[0] - size[0]) // 2, (canvas[1] - size[1]) // 2))
        pixels = padded
    return pixels.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else pixels


_Box = tuple[float, float, float, float]
_Size = tuple[int, int]


def _geometry(source: _Size, target: tuple[int, int] | None, mode: str) -> tuple[_Box, _Size, _Size]:
    """Which part of an image is scaled to which size and laid on which canvas.

    Args:
        source: (width, height).
        target: (height, width), or None.
        mode: one of `RESIZE_MODES`.

    Returns:
        (left, top, right, bottom) in source pixels, (width, height) after scaling, (width, height) of the result.
    """
    width, height = source
    whole = (0.0, 0.0, float(width), float(height))
    if target is None:
        return whole, source, source
    target_height, target_width = target
    fixed = (target_width, target_height)
    if mode == "stretch":
        return whole, fixed, fixed
    if mode == "crop":
        # The largest centred box with the target's proportions.
        crop_width = min(float(width), height * target_width / target_height)
        crop_height = min(float(height), width * target_height / target_width)
        left, top = (width - crop_width) / 2, (height - crop_height) / 2
        return (left, top, left + crop_width, top + crop_height), fixed, fixed
    ratios = (target_width / width, target_height / height)
    ratio = min(1.0, max(ratios) if mode == "shorter" else min(ratios))  # these never enlarge
    size = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    return whole, size, fixed if mode == "pad" else size


def _shrink_on_load(image: ImageFile.ImageFile, box: _Box, size: _Size) -> float:
    """Let the JPEG decoder skip frequencies that the resize would throw away; returns the scale it decodes at."""
    width, height = image.size
    needed = (
        int(size[0] * width / (box[2] - box[0]) * _REDUCING_GAP),
        int(size[1] * height / (box[3] - box[1]) * _REDUCING_GAP),
    )
    decoded: Any = image.draft("RGB", needed)
    # The decoded size is rounded up; the box that Pillow returns is the exact one.
    return 1.0 if decoded is None else decoded[1][2] / width


def _encode(pixels: Image.Image, options: ImageOptions) -> bytes:
    pixels.info = {}  # comments, profiles and EXIF of the source would otherwise be written
    out = io.BytesIO()
    if options.format == "png":
        pixels.save(out, "PNG")
    else:
        pixels.save(out, "JPEG", quality=options.jpeg_quality, subsampling=SUBSAMPLING[options.jpeg_subsampling])
    return out.getvalue()
