"""One image in, one image out, with Pillow: decode, resize, colours, upright, encode.

An image that can't be used raises `Reject`, whose detail holds deterministic values only. docs/format.md has a table of
what is stored of each kind of input.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import PIL
from PIL import Image, ImageFile, features

from beam_pipeline.errors import Reject
from beam_pipeline.images import colour, containers, formats, geometry, memory
from beam_pipeline.schema import RejectReason
from beam_pipeline.schema.table import PASSTHROUGH

SUBSAMPLING = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}
FORMATS = {"jpeg": "JPEG", "png": "PNG"}
# Raise it whenever the same image comes out with other bytes; tests/pinned checks that.
OWN_VERSION = "2"
# Image options whose flags have other names.
FLAG_NAMES = {"size": "image_size", "format": "image_format"}
_MAX_JPEG_SIDE = 65_500  # libjpeg's JPEG_MAX_DIMENSION
_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)


class ImageOptions(NamedTuple):
    """The flags of a job that decide an image's bytes.

    Attributes:
        size: (height, width) in pixels, or None to keep the image's own.
        resize_mode: one of `geometry.RESIZE_MODES`.
        resample: a key of `resize.RESAMPLING`.
        background: sRGB colour behind transparent pixels and around padded images; None for white and black.
        channels: 3 for RGB, 1 for gray.
        format: a key of `FORMATS`.
        jpeg_quality: 1–100.
        jpeg_subsampling: a key of `SUBSAMPLING`.
        optimize: search for smaller Huffman codes.
        max_pixels: larger images are rejected before they are decoded.
        max_image_bytes: larger files are rejected before they are fetched.
        allow_truncated: store the readable part of a truncated file.
    """

    size: tuple[int, int] | None
    resize_mode: str
    resample: str
    background: colour.Rgb | None
    channels: int
    format: str
    jpeg_quality: int
    jpeg_subsampling: str
    optimize: bool
    max_pixels: int
    max_image_bytes: int
    allow_truncated: bool

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> ImageOptions:
        """The options in a job's flags, or in a manifest's `configuration`, whose lists become tuples."""
        values = (flags[FLAG_NAMES.get(name, name)] for name in cls._fields)
        return cls._make(tuple(value) if isinstance(value, list) else value for value in values)


class SourceInfo(NamedTuple):
    """The source of an image: Pillow's name of its format, height and width in pixels once it is upright."""

    format: str
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class ChannelSums:
    """Sums over an image's pixels for each channel; of integers, so that the order of addition doesn't matter.

    Attributes:
        count: number of pixels.
        totals: sums of their values, 0–255.
        squares: sums of the squared values.
    """

    count: int
    totals: tuple[int, ...]
    squares: tuple[int, ...]


class EncodedImage(NamedTuple):
    """A converted image.

    Attributes:
        data: the encoded bytes.
        height, width: in pixels.
        source: the file that it was made from.
        passthrough: one of `PASSTHROUGH` if `data` holds the source's compressed pixels; None if encoded again.
        sums: of its pixels before they were encoded, if asked for.
        bits_used: `colour.bits_used` of its source.
    """

    data: bytes
    height: int
    width: int
    source: SourceInfo
    passthrough: str | None = None
    sums: ChannelSums | None = None
    bits_used: int | None = None


def codec_versions() -> dict[str, str]:
    """Versions of everything that decides the bytes of an image."""
    versions = {"imageshards": OWN_VERSION, "pillow": PIL.__version__}
    for name in ("libjpeg_turbo", "zlib", "zlib_ng", "littlecms2", "libtiff", "webp", "avif"):
        if version := features.version(name):
            versions[name] = version
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["pillow_heif"] = importlib.metadata.version("pillow-heif")
    return versions


def check_size(byte_count: int, options: ImageOptions) -> None:
    """Reject a file by its size alone.

    Raises:
        Reject: `too_many_bytes`.
    """
    if byte_count > options.max_image_bytes:
        raise Reject(RejectReason.TOO_MANY_BYTES, f"{byte_count} bytes, --max_image_bytes {options.max_image_bytes}")


def convert(
    data: bytes, options: ImageOptions, reserve: memory.Reserve | None = None, with_sums: bool = False
) -> EncodedImage:
    """Convert one source image.

    Args:
        data: the file's bytes; the format is detected from them, not from the file's name.
        options: how to convert it.
        reserve: called before a large image is decoded, with the most bytes of memory that the conversion takes.
        with_sums: compute the channel sums, too: 0.08 ms.

    Raises:
        Reject: the image can't be used.
    """
    check_size(len(data), options)
    name = formats.recognise(data)
    size = None
    try:
        canvas = containers.webp_canvas(data) if name == "WEBP" else None
        if canvas is not None:  # libwebp allocates it as soon as the file is opened
            _check_pixels(canvas, options)
        terminated = containers.terminate_jpeg(data) if options.allow_truncated and name == "JPEG" else data
        image = formats.open_image(terminated, name)
        size = image.size
        _check_pixels(size, options)
        pixels, source, passthrough_bytes, bits_used = _render(image, data, options, reserve)
        sums = channel_sums(pixels) if with_sums else None
        stored = passthrough_bytes or encode(pixels, options)
    except Reject:
        raise
    except Exception as error:
        raise formats.why_broken(data, name, size, error) from None
    unchanged, without_metadata = PASSTHROUGH
    passthrough = (unchanged if passthrough_bytes == data else without_metadata) if passthrough_bytes else None
    return EncodedImage(stored, pixels.height, pixels.width, source, passthrough, sums, bits_used)


def _check_pixels(size: tuple[int, int], options: ImageOptions) -> None:
    if size[0] * size[1] > options.max_pixels:
        detail = f"{size[0]}x{size[1]} pixels, --max_pixels {options.max_pixels}"
        raise Reject(RejectReason.TOO_MANY_PIXELS, detail)


def _render(
    image: ImageFile.ImageFile, data: bytes, options: ImageOptions, reserve: memory.Reserve | None
) -> tuple[Image.Image, SourceInfo, bytes | None, int | None]:
    """Decode, convert and resize; also returns the source's own bytes if they can be stored, and `bits_used`."""
    jpeg = image.format == "JPEG"
    if not jpeg:  # metadata may follow the pixels; Pillow turns a TIFF as it loads it
        memory.reserve_memory(image, image.size, data, options, reserve)
        formats.load(image, options.allow_truncated)
    size, orientation, conversion = image.size, formats.orientation(image), colour.conversion(image)
    plan = geometry.fit(size, options.size, options.resize_mode, orientation)
    if options.format == "jpeg" and max(plan.canvas) > _MAX_JPEG_SIDE:
        detail = "{}x{} pixels, a JPEG's sides end at {}".format(*plan.canvas, _MAX_JPEG_SIDE)
        raise Reject(RejectReason.TOO_MANY_PIXELS, detail)
    width, height = geometry.upright_size(size, orientation)
    source = SourceInfo(str(image.format), height, width)
    passthrough_bytes, scale = None, 1.0
    if jpeg:
        if options.format == "jpeg" and orientation == 1 and conversion is None and plan.changes_nothing(size):
            passthrough_bytes = containers.jpeg_without_metadata(data, options.channels)
        only_luma = options.channels == 1 and conversion is None and passthrough_bytes is None
        mode = "L" if only_luma else "RGB"
        scale = geometry.shrink_on_load(image, plan, mode)
        memory.reserve_memory(image, size, data, options, reserve)
        try:
            formats.load(image, options.allow_truncated)
        except Exception:
            image.close()  # its memory
            complete = formats.terminated(data, lambda copy: geometry.shrink_on_load(copy, plan, mode))
            if complete is None:
                raise
            return _render(formats.open_image(complete, "JPEG"), complete, options, None)
    pixels = colour.to_bytes(image, data)
    bits_used = colour.bits_used(image, pixels, data)
    pixels = geometry.resize(pixels, plan, scale, options.resample)
    pixels = colour.to_channels(pixels, conversion, options.background or _WHITE, options.channels)
    pixels = geometry.upright(pixels, orientation)
    if plan.canvas != plan.size:
        around = colour.in_channels(options.background or _BLACK, options.channels)
        pixels = geometry.pad(pixels, geometry.upright_size(plan.canvas, orientation), around)
    return pixels, source, passthrough_bytes, bits_used


def channel_sums(pixels: Image.Image) -> ChannelSums:
    """Exact sums of one image, from its histogram: 20 times as fast as summing the pixels."""
    histogram = pixels.histogram()
    channels = [histogram[start : start + 256] for start in range(0, len(histogram), 256)]
    return ChannelSums(
        sum(channels[0]),
        tuple(sum(value * count for value, count in enumerate(channel)) for channel in channels),
        tuple(sum(value * value * count for value, count in enumerate(channel)) for channel in channels),
    )


def encode(pixels: Image.Image, options: ImageOptions) -> bytes:
    """Encode pixels, `RGB` or `L`."""
    pixels.info = {}  # comments, profiles and EXIF of the source would otherwise be written
    out = io.BytesIO()
    if options.format == "png":
        pixels.save(out, "PNG", optimize=options.optimize)
        return out.getvalue()
    flags = {"quality": options.jpeg_quality, "subsampling": SUBSAMPLING[options.jpeg_subsampling]}
    try:
        pixels.save(out, "JPEG", **flags, optimize=options.optimize)
    except OSError:
        # To optimise codes, libjpeg needs a buffer for the complete file, and Pillow gives it one byte per pixel (two
        # from quality 95): enough for photos. Noise, which has no smaller codes, gets the default ones.
        out = io.BytesIO()
        pixels.save(out, "JPEG", **flags)
    return out.getvalue()
