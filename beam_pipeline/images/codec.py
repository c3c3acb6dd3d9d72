"""One image in, one image out, with Pillow: decode, resize, colours, upright, encode.

A bad image raises `Reject` with a reason and a detail made of deterministic values only. `docs/format.md` says what is
stored of each kind of input.
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
# Of this code: raised whenever the same image comes out with other bytes (tests/images holds the two together).
OWN_VERSION = "1"
# Image options that are flags under other names.
FLAG_NAMES = {"size": "image_size", "format": "image_format"}
_LONGEST_JPEG_SIDE = 65_500  # libjpeg's JPEG_MAX_DIMENSION
_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)


class ImageOptions(NamedTuple):
    """What decides the bytes of an image: the job's flags as the codec takes them.

    Attributes:
        size: (height, width) in pixels, or None to keep the image's own.
        resize_mode: one of `geometry.RESIZE_MODES`.
        resample: a key of `resize.RESAMPLING`.
        background: sRGB behind transparent pixels and around padded images; None is white behind, black around.
        channels: 3 for RGB, 1 for gray.
        format: a key of `FORMATS`.
        jpeg_quality: 1–100.
        jpeg_subsampling: a key of `SUBSAMPLING`.
        optimize: search for smaller codes.
        max_pixels: larger images are rejected before they are decoded.
        max_image_bytes: larger files are rejected before they are fetched.
        allow_truncated: take what there is of a file that ends early.
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
        """Those of a job's flags, or of a manifest's `configuration`, whose lists are tuples here."""
        values = (flags[FLAG_NAMES.get(name, name)] for name in cls._fields)
        return cls._make(tuple(value) if isinstance(value, list) else value for value in values)


class Source(NamedTuple):
    """What an image was: Pillow's name of its format, height and width in pixels once it is upright."""

    format: str
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class ChannelSums:
    """Sums over the pixels of an image, one of each a channel: integers, so that no order of addition changes a digit.

    Attributes:
        count: pixels.
        totals: of their values, 0–255.
        squares: of the squares of these.
    """

    count: int
    totals: tuple[int, ...]
    squares: tuple[int, ...]


class EncodedImage(NamedTuple):
    """A converted image.

    Attributes:
        data: the encoded bytes.
        height, width: in pixels.
        source: what it was.
        passthrough: one of `PASSTHROUGH` if `data` holds the source's compressed pixels; None if encoded again.
        sums: of its pixels before they were encoded, if they were asked for.
    """

    data: bytes
    height: int
    width: int
    source: Source
    passthrough: str | None = None
    sums: ChannelSums | None = None


def codec_versions() -> dict[str, str]:
    """Versions of everything that has a part in the bytes of an image."""
    versions = {"imageshards": OWN_VERSION, "pillow": PIL.__version__}
    for name in ("libjpeg_turbo", "zlib", "zlib_ng", "littlecms2", "libtiff", "webp", "avif"):
        version = features.version(name)
        if version:
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
        data: the file's bytes; they say what it is, not the file's name.
        options: what to make of it.
        reserve: called before a large image is decoded, with the bytes that it takes at most until this returns.
        with_sums: sum up the pixels too: 0.08 ms.

    Raises:
        Reject: there is nothing to make of it.
    """
    check_size(len(data), options)
    name = formats.recognise(data)
    size = None
    try:
        canvas = containers.webp_canvas(data) if name == "WEBP" else None
        if canvas is not None:  # its decoder takes memory for it when it is opened
            _check_pixels(canvas, options)
        ended = containers.ended_jpeg(data) if options.allow_truncated and name == "JPEG" else data
        image = formats.open_image(ended, name)
        size = image.size
        _check_pixels(size, options)
        pixels, source, own_pixels = _finish(image, data, options, reserve)
        sums = channel_sums(pixels) if with_sums else None
        stored = own_pixels or encode(pixels, options)
    except Reject:
        raise
    except Exception as error:
        raise formats.why_broken(data, name, size, error) from None
    whole, without_metadata = PASSTHROUGH
    passthrough = (whole if own_pixels == data else without_metadata) if own_pixels else None
    return EncodedImage(stored, pixels.height, pixels.width, source, passthrough, sums)


def _check_pixels(size: tuple[int, int], options: ImageOptions) -> None:
    if size[0] * size[1] > options.max_pixels:
        detail = f"{size[0]}x{size[1]} pixels, --max_pixels {options.max_pixels}"
        raise Reject(RejectReason.TOO_MANY_PIXELS, detail)


def _finish(
    image: ImageFile.ImageFile, data: bytes, options: ImageOptions, reserve: memory.Reserve | None
) -> tuple[Image.Image, Source, bytes | None]:
    """The stored pixels, what they were made of, and the bytes to store if the source's compressed pixels will do."""
    jpeg = image.format == "JPEG"
    if not jpeg:  # metadata may follow the pixels; a TIFF is turned as it is loaded
        memory.check(image, image.size, data, options, reserve)
        formats.load(image, options.allow_truncated)
    size, orientation, conversion = image.size, formats.orientation(image), colour.conversion(image)
    plan = geometry.fit(size, options.size, options.resize_mode, orientation)
    if options.format == "jpeg" and max(plan.canvas) > _LONGEST_JPEG_SIDE:
        detail = "{}x{} pixels, a JPEG's sides end at {}".format(*plan.canvas, _LONGEST_JPEG_SIDE)
        raise Reject(RejectReason.TOO_MANY_PIXELS, detail)
    width, height = geometry.upright_size(size, orientation)
    source = Source(str(image.format), height, width)
    own_pixels, scale = None, 1.0
    if jpeg:
        if options.format == "jpeg" and orientation == 1 and conversion is None and plan.changes_nothing(size):
            own_pixels = containers.jpeg_without_metadata(data, options.channels)
        luma_alone = options.channels == 1 and conversion is None and own_pixels is None
        scale = geometry.shrink_on_load(image, plan, "L" if luma_alone else "RGB")
        memory.check(image, size, data, options, reserve)
        formats.load(image, options.allow_truncated)
    pixels = geometry.resize(colour.to_bytes(image, data), plan, scale, options.resample)
    pixels = colour.finish(pixels, conversion, options.background or _WHITE, options.channels)
    pixels = geometry.upright(pixels, orientation)
    if plan.canvas != plan.size:
        around = colour.in_channels(options.background or _BLACK, options.channels)
        pixels = geometry.pad(pixels, geometry.upright_size(plan.canvas, orientation), around)
    return pixels, source, own_pixels


def channel_sums(pixels: Image.Image) -> ChannelSums:
    """Exact sums of one image, from its histogram: a twentieth of the time that summing the pixels takes."""
    histogram = pixels.histogram()
    channels = [histogram[start : start + 256] for start in range(0, len(histogram), 256)]
    return ChannelSums(
        sum(channels[0]),
        tuple(sum(value * times for value, times in enumerate(channel)) for channel in channels),
        tuple(sum(value * value * times for value, times in enumerate(channel)) for channel in channels),
    )


def encode(pixels: Image.Image, options: ImageOptions) -> bytes:
    """Encode finished pixels, `RGB` or `L`."""
    pixels.info = {}  # comments, profiles and EXIF of the source would otherwise be written
    out = io.BytesIO()
    if options.format == "png":
        pixels.save(out, "PNG", optimize=options.optimize)
        return out.getvalue()
    how = {"quality": options.jpeg_quality, "subsampling": SUBSAMPLING[options.jpeg_subsampling]}
    try:
        pixels.save(out, "JPEG", **how, optimize=options.optimize)
    except OSError:
        # libjpeg wants room for all of the file when it searches for codes, and Pillow gives it a byte a pixel (two
        # from quality 95 on): enough for photos. Noise, which has no smaller codes, gets the usual ones.
        out = io.BytesIO()
        pixels.save(out, "JPEG", **how)
    return out.getvalue()
