"""Converts any pixels to 8-bit sRGB or gray: depth, palettes, transparency, CMYK, ICC profiles.

A profile is ignored if it is corrupt, made for another kind of image, or larger than 4 MiB.
"""

from __future__ import annotations

import io
import itertools
import struct
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageCms, TiffImagePlugin

from beam_pipeline.errors import Reject
from beam_pipeline.images.tiff import WHITE_IS_ZERO
from beam_pipeline.schema import RejectReason

STORED_MODES = {1: "L", 3: "RGB"}  # channels → Pillow's mode
Rgb = tuple[int, int, int]
Conversion = ImageCms.ImageCmsTransform | list[int]  # a lookup table for `L`, which stays `L`

_MAX_PROFILE_BYTES = 4 << 20
_CACHED_PROFILES = 32
# A profile that changes no colour by more is sRGB under another name: there are dozens, which differ by rounding.
_SAME_COLOUR = 2
_PROFILE_SPACES = {b"RGB ": "RGB", b"GRAY": "L", b"CMYK": "CMYK"}
_SRGB = ImageCms.createProfile("sRGB")
_BAND_PIXELS = 1 << 18
_BMP_WITH_ALPHA, _16_BITS_BY_MASKS = 56, b"\x10\0\x03"  # from which length of the header on; bits, compression
_PNG_DEPTH_BYTE = 24  # of the file: signature 8, length 4, "IHDR" 4, width 4, height 4


def to_bytes(image: Image.Image, data: bytes) -> Image.Image:
    """A decoded image as `L`, `LA`, `RGB`, `RGBA` or `CMYK`, 8 bits per channel.

    Of 16 and 12 bits the highest 8 are kept, as Pillow does for colour: black, white and order are preserved.

    Raises:
        Reject: `unsupported`, pixels without a known white (32-bit integers, floats, inks of a corrupt JPEG).
    """
    mode = image.mode
    key = image.info.get("transparency")
    if image.format == "BMP" and mode == "RGB" and (alpha := _alpha_of_16_bits(image, data)):
        image.putalpha(alpha)
        return _without_opaque_alpha(image)
    if mode in ("L", "RGB"):
        return image if key is None else _with_transparent_colour(image, key, data)
    if mode == "CMYK":
        # Pillow always reads 0 as full ink, which only Adobe's marker says: https://www.itu.int/rec/T-REC-T.872
        if "APP14" in getattr(image, "app", {}) and "adobe_transform" not in image.info:
            raise Reject(RejectReason.UNSUPPORTED, "JPEG of inks with a corrupt Adobe marker: is 0 full ink?")
        return ImageChops.invert(image) if image.format == "JPEG" and "adobe" not in image.info else image
    if mode in ("LA", "RGBA"):
        return _without_opaque_alpha(image)
    if mode.startswith("I;16") or (mode, image.format) == ("I", "PPM"):  # PPM only in third-party records
        return _from_16_bits(image, key)
    if mode in ("I", "F"):
        raise Reject(RejectReason.UNSUPPORTED, f"{image.format} with 32 bits per channel: white level unknown")
    if image.has_transparency_data:  # palettes
        return _without_opaque_alpha(image.convert("RGBA"))
    return image.convert("L" if mode == "1" else "RGB")


def _from_16_bits(image: Image.Image, key: int | None) -> Image.Image:
    """`L`, or `LA` if one value is transparent; in bands of rows, or a large image would be in memory three times."""
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0]  # 12 bits are values up to 4095
    white = (1 << bits) - 1
    inverted = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == WHITE_IS_ZERO
    result = Image.new("L" if key is None else "LA", image.size)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        values = np.asarray(band)  # in the machine's byte order, whatever the file's
        high = Image.fromarray(((white - values if inverted else values) >> bits - 8).astype(np.uint8))
        if key is not None:
            high.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
        result.paste(high, (0, top))
    return result


def bits_used(image: Image.Image, pixels: Image.Image, data: bytes) -> int | None:
    """12 if all values of a PNG or TIFF of 16 bits, `to_bytes` of which are `pixels`, are below 4096; else 16."""
    tags = getattr(image, "tag_v2", {})
    bits = data[_PNG_DEPTH_BYTE] if image.format == "PNG" else tags.get(TiffImagePlugin.BITSPERSAMPLE, (8,))[0]
    if bits != 16 or pixels.mode == "CMYK":
        return None
    return 16 if any(any(pixels.getchannel(name).histogram()[16:]) for name in pixels.getbands() if name != "A") else 12


def _alpha_of_16_bits(image: Image.Image, data: bytes) -> Image.Image | None:
    """The bit of alpha of a BMP, which Pillow ignores."""
    if data[14] < _BMP_WITH_ALPHA or data[28:31] != _16_BITS_BY_MASKS:
        return None
    (start, height, mask), width = struct.unpack_from("<I8xi40xI", data, 10), image.width
    if not mask or len(data) < start + 2 * image.height * (width + 1 & ~1):  # cut, but its rows were decoded
        return None
    values = np.frombuffer(data, "<u2", image.height * (width + 1 & ~1), start).reshape(image.height, -1)
    alpha = np.where(values[:, :width] & mask, 255, 0).astype(np.uint8)
    return Image.fromarray(alpha if height < 0 else alpha[::-1])


def _with_transparent_colour(image: Image.Image, key: int | Rgb, data: bytes) -> Image.Image:
    """The one transparent colour of a GIF or PNG as alpha; Pillow ignores that PNG's tRNS has the file's depth."""
    depth = data[_PNG_DEPTH_BYTE] if image.format == "PNG" else 8

    def scaled(value: int) -> int:
        return value >> 8 if depth == 16 else value * 255 // ((1 << depth) - 1)

    image.info["transparency"] = tuple(map(scaled, key)) if isinstance(key, tuple) else scaled(key)
    return image.convert("RGBA" if image.mode == "RGB" else "LA")


def _without_opaque_alpha(image: Image.Image) -> Image.Image:
    """The alpha of a BMP that is 0 everywhere is none: many programs leave these bytes empty."""
    extrema: Any = image.getchannel("A").getextrema()
    is_none = extrema[0] == 255 or (extrema[1] == 0 and image.format == "BMP")
    return image.convert(image.mode[:-1]) if is_none else image


def to_channels(pixels: Image.Image, conversion: Conversion | None, background: Rgb, channels: int) -> Image.Image:
    """Pixels as they are stored, from those of `to_bytes`.

    Args:
        pixels: `L`, `LA`, `RGB`, `RGBA` or `CMYK`; inks without a conversion become (255 - ink) × (255 - black) / 255.
        conversion: of the source image.
        background: sRGB colour behind transparent pixels.
        channels: 3, or 1 for luma (ITU-R BT.601, as JPEG's).
    """
    stored = STORED_MODES[channels]
    alpha = pixels.getchannel("A") if pixels.mode in ("LA", "RGBA") else None
    opaque = pixels if alpha is None else pixels.convert(pixels.mode[:-1])
    if isinstance(conversion, list):
        opaque = opaque.point(conversion)
    elif conversion is not None:
        opaque = conversion.apply(opaque)
    if opaque.mode == "CMYK":
        opaque = opaque.convert("RGB")
    if opaque.mode != stored:
        opaque = opaque.convert(stored)
    if alpha is None:
        return opaque
    behind = Image.new(stored, pixels.size, in_channels(background, channels))
    behind.paste(opaque, mask=alpha)
    return behind


def in_channels(colour: Rgb, channels: int) -> int | Rgb:
    """An sRGB colour as a pixel of the stored image."""
    pixel: Any = Image.new("RGB", (1, 1), colour).convert(STORED_MODES[channels]).getpixel((0, 0))
    return pixel  # type: ignore[no-any-return]


def conversion(image: Image.Image) -> Conversion | None:
    """How an image's pixels become sRGB; None without a profile that can be used and isn't sRGB's."""
    profile = image.info.get("icc_profile")
    if not profile:
        return None
    gray = image.mode in ("1", "L", "LA") or image.mode.startswith("I;16")
    return _conversion(profile, "CMYK" if image.mode == "CMYK" else "L" if gray else "RGB")


@lru_cache(_CACHED_PROFILES)
def _conversion(profile: bytes, mode: str) -> Conversion | None:
    """How pixels of a mode become sRGB; None if they stay unchanged.

    Threads may share a transform: lcms2 keeps its working state on the stack.
    """
    space = _PROFILE_SPACES.get(profile[16:20])
    # Gray pixels often have an RGB profile, which then means R = G = B.
    if len(profile) > _MAX_PROFILE_BYTES or space is None or (space != mode and (mode, space) != ("L", "RGB")):
        return None
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        # For `L` only 256 grays are converted, exactly: lcms2's optimisations err by up to 10.
        flags = ImageCms.Flags.NOOPTIMIZE if mode == "L" else ImageCms.Flags.NONE
        transform = ImageCms.buildTransform(source, _SRGB, space, "RGB", ImageCms.Intent.PERCEPTUAL, flags)
    except (OSError, ImageCms.PyCMSError):
        return None
    if mode == "CMYK":
        return transform
    if mode == "L":
        ramp = Image.frombytes("L", (256, 1), bytes(range(256)))
        table = list(transform.apply(ramp.convert(space)).convert("L").tobytes())
        return None if max(abs(value - number) for number, value in enumerate(table)) <= _SAME_COLOUR else table
    grid = Image.frombytes("RGB", (256, 16), bytes(itertools.chain(*itertools.product(range(0, 256, 17), repeat=3))))
    changes: Any = ImageChops.difference(grid, transform.apply(grid)).getextrema()
    return None if max(largest for _, largest in changes) <= _SAME_COLOUR else transform
