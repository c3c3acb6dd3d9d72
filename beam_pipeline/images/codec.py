"""One image in, one image out, with Pillow: decode, resize, colours, upright, encode. Knows no storage and no Beam.

A bad image raises `Reject` with a reason and a detail made of deterministic values only. `docs/format.md` says what is
stored of each kind of input.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
from collections.abc import Callable
from typing import NamedTuple

import PIL
from PIL import Image, ImageFile, features

from beam_pipeline.errors import Reject
from beam_pipeline.images import codec, colour, containers, formats, geometry, memory
from beam_pipeline.images.options import SUBSAMPLING, ImageOptions
from beam_pipeline.schema import RejectReason

_LONGEST_JPEG_SIDE = 65_500  # libjpeg's JPEG_MAX_DIMENSION
_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)
# How a source's compressed pixels came through where they weren't encoded anew.
WHOLE, WITHOUT_METADATA = "whole", "without_metadata"
Claim = Callable[[int], None]


class Source(NamedTuple):
    """What an image was: Pillow's name of its format, height and width in pixels once it is upright."""

    format: str
    height: int
    width: int


class EncodedImage(NamedTuple):
    """A converted image.

    Attributes:
        data: the encoded bytes.
        height, width: in pixels.
        source: what it was.
        passed: `data` is the source's, bit for bit or without metadata; None where it was encoded anew.
    """

    data: bytes
    height: int
    width: int
    source: Source
    passed: str | None = None


def codec_versions() -> dict[str, str]:
    """Versions of everything that has a part in the bytes of an image."""
    versions = {"pillow": PIL.__version__}
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
    data: bytes,
    options: ImageOptions,
    look: Callable[[Image.Image], None] | None = None,
    claim: Claim | None = None,
) -> EncodedImage:
    """Convert one source image.

    Args:
        data: the file's bytes; what they are is for them to say, not for the file's name.
        options: what to make of it.
        look: called with the finished pixels, `RGB` or `L`, before they are encoded.
        claim: called before a large image is decoded, with the bytes that it takes at the most until this returns.

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
        readable = containers.ended_jpeg(data) if options.allow_truncated and name == "JPEG" else data
        image = formats.open_image(readable, name)
        size = image.size
        _check_pixels(size, options)
        finished, source, passed = _finish(image, data, options, claim)
    except Reject:
        raise
    except MemoryError:
        raise Reject(RejectReason.OUT_OF_MEMORY, f"{name}, {len(data)} bytes") from None
    except Exception as error:
        raise formats.why_broken(data, name, size, error) from None
    if look is not None:
        look(finished)
    if passed is not None:
        how = WHOLE if passed == data else WITHOUT_METADATA
        return EncodedImage(passed, finished.height, finished.width, source, how)
    return EncodedImage(codec.encode(finished, options), finished.height, finished.width, source)


def _check_pixels(size: geometry.Size, options: ImageOptions) -> None:
    if size[0] * size[1] > options.max_pixels:
        raise Reject(RejectReason.TOO_MANY_PIXELS, f"{size[0]}x{size[1]} pixels, --max_pixels {options.max_pixels}")


def _check_sides(size: geometry.Size, options: ImageOptions) -> None:
    if options.format == "jpeg" and max(size) > _LONGEST_JPEG_SIDE:
        detail = f"{size[0]}x{size[1]} pixels, a JPEG's sides end at {_LONGEST_JPEG_SIDE}"
        raise Reject(RejectReason.TOO_MANY_PIXELS, detail)


def _check_memory(
    image: ImageFile.ImageFile, size: geometry.Size, data: bytes, options: ImageOptions, claim: Claim | None = None
) -> None:
    if memory.is_small(image, size, options):
        return
    needed = memory.check(image, size, data, _orientation(image), options)
    if claim is not None and needed > memory.LARGE:
        claim(needed)


def _finish(
    image: ImageFile.ImageFile, data: bytes, options: ImageOptions, claim: Claim | None
) -> tuple[Image.Image, Source, bytes | None]:
    """The stored pixels, what they were made of, and the bytes to store where the source's own will do."""

    jpeg, size = colour.is_jpeg(image), image.size
    if not jpeg:  # metadata may follow the pixels, which in turn may differ in size from what the header says
        _check_memory(image, size, data, options, claim)
        formats.load(image, data, options.allow_truncated)
        size = image.size
        _check_pixels(size, options)
        _check_memory(image, size, data, options)
    orientation = _orientation(image)
    plan = geometry.fit(size, options.size, options.resize_mode, orientation)
    _check_sides(plan.canvas, options)
    width, height = geometry.upright_size(size, orientation)
    source = Source("JPEG" if jpeg else str(image.format), height, width)
    profile = _profile_to_convert(image)
    passed = None
    if jpeg and options.format == "jpeg" and orientation == 1 and profile is None and plan.changes_nothing(size):
        passed = containers.passed_jpeg(data, options.channels)
    scale = 1.0
    if jpeg:
        luma = options.channels == 1 and profile is None
        scale = geometry.shrink_on_load(image, plan, "L" if luma and passed is None else "RGB")
        _check_memory(image, size, data, options, claim)
        formats.load(image, data, options.allow_truncated)
    pixels = geometry.resize(colour.to_bytes(image, data), plan, scale, options.resample)
    pixels = colour.finish(pixels, profile, options.background or _WHITE, options.channels)
    pixels = geometry.upright(pixels, orientation)
    if plan.canvas != plan.size:
        beside = colour.in_channels(options.background or _BLACK, options.channels)
        pixels = geometry.pad(pixels, geometry.upright_size(plan.canvas, orientation), beside)
    return pixels, source, passed


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation; 1 where there is none. Pillow itself applies that of TIFF and HEIF."""
    exif: bytes | None = image.info.get("exif")
    text = image.info.get(containers.PNG_EXIF_TEXT)
    if not exif and isinstance(text, str):  # two lines say what and how long, then hexadecimal
        with contextlib.suppress(ValueError):
            exif = bytes.fromhex("".join(text.split("\n")[3:]))
    return containers.orientation(exif) if exif else 1


def _profile_to_convert(image: Image.Image) -> bytes | None:
    """The ICC profile that pixels are converted from, None if it is sRGB's."""
    profile: bytes | None = image.info.get("icc_profile")
    if not profile or image.mode == "CMYK":
        return profile
    gray = image.mode in ("1", "L", "LA") or image.mode.startswith("I;16")
    return None if colour.is_srgb(profile, "L" if gray else "RGB") else profile


def encode(pixels: Image.Image, options: ImageOptions) -> bytes:
    """Encode finished pixels.

    Args:
        pixels: `RGB` or `L`.
        options: the format, and how.

    Raises:
        Reject: `out_of_memory`.
    """
    pixels.info = {}  # comments, profiles and EXIF of the source would otherwise be written
    try:
        if options.format == "png":
            out = io.BytesIO()
            pixels.save(out, "PNG", optimize=options.optimize)
            return out.getvalue()
        try:
            return _jpeg(pixels, options, options.optimize)
        except OSError:
            if not options.optimize:
                raise
            # libjpeg wants room for the whole file where it searches for codes, and Pillow gives it a byte a pixel (two
            # from quality 95 on): enough for photos. Noise, which has no smaller codes, gets the usual ones.
            return _jpeg(pixels, options, optimize=False)
    except MemoryError:
        raise Reject(RejectReason.OUT_OF_MEMORY, f"{pixels.width}x{pixels.height} pixels to encode") from None


def _jpeg(pixels: Image.Image, options: ImageOptions, optimize: bool) -> bytes:
    out = io.BytesIO()
    subsampling = SUBSAMPLING[options.jpeg_subsampling]
    pixels.save(out, "JPEG", quality=options.jpeg_quality, subsampling=subsampling, optimize=optimize)
    return out.getvalue()
