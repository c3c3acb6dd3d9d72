"""A small file of every kind of image that a bucket may hold, and of every way to be broken."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops, TiffImagePlugin

from beam_pipeline.images.containers import APP14, jpeg_segments
from tests.images.profiles import ink_profile, wide_profile
from tests.images.tiffs import BLACK_IS_ZERO, page, tiff
from tests.make import encoded, noise, picture

WIDTH, HEIGHT = 48, 36
UPRIGHT = picture(WIDTH, HEIGHT, seed=4)
SIDEWAYS = UPRIGHT.transpose(Image.Transpose.ROTATE_90)
# From libjpeg-turbo's `cjpeg -arithmetic` and `-sample 4x1`, 24×18: Pillow decodes such files but writes none.
ARITHMETIC, LUMA_4_1_1 = (Path(__file__).with_name(f"{name}.jpg").read_bytes() for name in ("arithmetic", "luma_4_1_1"))


def png(width: int, height: int, depth: int, colour_type: int, rows: Sequence[bytes], *chunks: bytes) -> bytes:
    """A PNG from its rows as they are packed; `chunks` stand before the pixels."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0))
    pixels = png_chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels + png_chunk(b"IEND", b"")


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_depth(gray: Image.Image, depth: int, *chunks: bytes) -> bytes:
    """A gray PNG of 1, 2, 4, 8 or 16 bits, which Pillow doesn't write all."""
    values = np.asarray(gray).astype(np.uint16)
    if depth == 16:
        rows = [(row * 257).astype(">u2").tobytes() for row in values]
    else:
        bits = np.unpackbits((values >> (8 - depth)).astype(np.uint8)[..., None], axis=2)[..., -depth:]
        rows = [np.packbits(row.ravel()).tobytes() for row in bits]
    return png(gray.width, gray.height, depth, 0, rows, *chunks)


def without_segment(data: bytes, kind: int) -> bytes:
    """A JPEG without its segments of a kind."""
    return b"".join(data[part.start : part.end] for part in jpeg_segments(data) if part.kind != kind)


def cmyk(image: Image.Image) -> Image.Image:
    """A picture in inks, with as much black as there can be."""
    inks = 255 - np.asarray(image.convert("RGB")).astype(int)
    black = inks.min(axis=2)
    white = np.maximum(255 - black, 1)
    colour = (inks - black[..., None]) * 255 // white[..., None]
    return Image.frombytes("CMYK", image.size, np.dstack([colour, black]).astype(np.uint8).tobytes())


def ycck(image: Image.Image) -> bytes:
    """A JPEG of inks whose C, M and Y are stored as luma and chroma, as Photoshop writes them."""
    cyan, magenta, yellow, black = cmyk(image).split()
    luma = Image.merge("RGB", (cyan, magenta, yellow)).convert("YCbCr").split()
    # Pillow inverts what it writes; black is stored inverted, and so is CMY in the sense of RGB.
    planes = Image.merge("CMYK", (*map(ImageChops.invert, luma), black))
    data = encoded(planes, subsampling=0)
    (place,) = (part for part in jpeg_segments(data) if part.kind == APP14)
    return data[: place.end - 1] + b"\2" + data[place.end :]


def animation(format: str, **options: Any) -> bytes:
    """`UPRIGHT`, then noise."""
    return encoded(UPRIGHT, format, save_all=True, append_images=[noise(WIDTH, HEIGHT, seed=9)], **options)


def with_alpha(image: Image.Image) -> Image.Image:
    """A picture that fades from left to right, with hidden noise where nothing is to be seen."""
    fade = np.tile(np.linspace(0, 255, image.width).astype(np.uint8), (image.height, 1))
    hidden = np.asarray(noise(image.width, image.height, seed=7))
    visible = np.where(fade[..., None] == 0, hidden, np.asarray(image))
    return Image.fromarray(np.dstack([visible, fade]))


def turned(orientation: int) -> Image.Exif:
    """EXIF with an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@cache
def every_kind() -> dict[str, bytes]:
    """Name → file. HEIC is there where its extra is installed."""
    gray, rgba = UPRIGHT.convert("L"), with_alpha(UPRIGHT)
    sixteen = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    big_endian = Image.frombytes("I;16B", gray.size, (np.asarray(gray).astype(">u2") * 257).astype(">u2").tobytes())
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[0x0112] = 6
    twelve = np.asarray(gray).astype(int) * 4095 // 255
    inks = cmyk(UPRIGHT)
    rows16 = [(np.asarray(row).astype(np.uint16) * 257).astype(">u2").tobytes() for row in np.asarray(UPRIGHT)]
    kinds = {
        "jpeg": encoded(UPRIGHT),
        "jpeg_progressive": encoded(UPRIGHT, progressive=True),
        "jpeg_gray": encoded(gray),
        "jpeg_444": encoded(UPRIGHT, subsampling=0),
        "jpeg_422": encoded(UPRIGHT, subsampling=1),
        "jpeg_411": LUMA_4_1_1,
        "jpeg_restarts": encoded(UPRIGHT, restart_marker_blocks=1),
        "jpeg_rgb": encoded(UPRIGHT, keep_rgb=True),
        "jpeg_arithmetic": ARITHMETIC,
        "jpeg_cmyk": encoded(inks, subsampling=0),
        "jpeg_cmyk_unmarked": without_segment(encoded(ImageChops.invert(inks), subsampling=0), APP14),
        "jpeg_cmyk_profile": encoded(inks, subsampling=0, icc_profile=ink_profile()),
        "jpeg_ycck": ycck(UPRIGHT),
        "jpeg_exif": encoded(SIDEWAYS, exif=turned(6), comment=b"a comment"),
        "jpeg_profile": encoded(UPRIGHT, icc_profile=wide_profile()),
        "jpeg_two_pictures": animation("MPO"),
        "png": encoded(UPRIGHT, "PNG"),
        "png_palette": encoded(UPRIGHT.quantize(64), "PNG"),
        "png_palette_alpha": encoded(rgba.quantize(64), "PNG"),
        "png_1bit": png_of_depth(gray, 1),
        "png_2bit": png_of_depth(gray, 2),
        "png_4bit": png_of_depth(gray, 4),
        "png_8bit": encoded(gray, "PNG"),
        "png_16bit": encoded(sixteen, "PNG"),
        "png_rgb_16bit": png(WIDTH, HEIGHT, 16, 2, rows16),
        "png_rgba": encoded(rgba, "PNG"),
        "png_gray_alpha": encoded(rgba.convert("LA"), "PNG"),
        "png_transparent_colour": encoded(UPRIGHT, "PNG", transparency=(0, 0, 0)),
        "png_exif": encoded(SIDEWAYS, "PNG", exif=turned(6)),
        "png_profile": encoded(rgba, "PNG", icc_profile=wide_profile()),
        "png_animated": animation("PNG"),
        "webp": encoded(UPRIGHT, "WEBP", quality=95),
        "webp_lossless_alpha": encoded(rgba, "WEBP", lossless=True, exact=True),
        "webp_animated": animation("WEBP", lossless=True),
        "bmp": encoded(UPRIGHT, "BMP"),
        "bmp_palette": encoded(UPRIGHT.quantize(64), "BMP"),
        "gif": encoded(UPRIGHT.quantize(64), "GIF"),
        "gif_transparent": encoded(rgba.quantize(64), "GIF", transparency=0),
        "gif_animated": animation("GIF"),
        "tiff": encoded(UPRIGHT, "TIFF"),
        "tiff_lzw": encoded(UPRIGHT, "TIFF", compression="tiff_lzw"),
        "tiff_jpeg": encoded(UPRIGHT, "TIFF", compression="jpeg", quality=95),
        "tiff_deflate_alpha": encoded(rgba, "TIFF", compression="tiff_adobe_deflate"),
        "tiff_1bit_fax": encoded(gray.convert("1"), "TIFF", compression="group4"),
        "tiff_16bit": encoded(sixteen, "TIFF"),
        "tiff_16bit_big_endian": encoded(big_endian, "TIFF"),
        "tiff_12bit": tiff(page(twelve[..., None], BLACK_IS_ZERO, 12, tags={284: None, 339: None})),
        "tiff_cmyk": encoded(inks, "TIFF"),
        "tiff_lab": encoded(_lab(UPRIGHT), "TIFF"),
        "tiff_turned": encoded(SIDEWAYS, "TIFF", tiffinfo=tags),
        "tiff_pages": animation("TIFF"),
        "avif": encoded(UPRIGHT, "AVIF", quality=95),
        "avif_alpha": encoded(rgba, "AVIF", quality=95),
    }
    return kinds | heic_kinds()


def heic_kinds() -> dict[str, bytes]:
    """Files of phones, where pillow-heif is there to write them."""
    try:
        import pillow_heif
    except ImportError:
        return {}
    pillow_heif.register_heif_opener()
    sideways = SIDEWAYS.copy()
    sideways.info["exif"] = turned(6).tobytes()  # written as EXIF and as the box `irot`, which is the one that counts
    return {"heic": encoded(UPRIGHT, "HEIF", quality=95), "heic_turned": encoded(sideways, "HEIF", quality=95)}


def _lab(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    return ImageCms.buildTransform(*profiles, "RGB", "LAB").apply(image)


@cache
def broken() -> dict[str, tuple[str, bytes]]:
    """File name → (the reason it is rejected for, the file): 20 of them."""
    jpeg, whole_png = encoded(UPRIGHT), encoded(UPRIGHT, "PNG")
    kinds = every_kind()
    frame = next(part for part in jpeg_segments(jpeg) if part.kind == 0xC0)
    flipped = bytearray(whole_png)
    flipped[len(flipped) // 2] ^= 1
    floats = encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
    return {
        "empty.jpg": ("not_an_image", b""),
        "text.jpg": ("not_an_image", b"404 page not found\n"),
        "page.png": ("not_an_image", b"<!DOCTYPE html><html><body>Sign in</body></html>"),
        "zeros.jpg": ("not_an_image", bytes(4096)),
        "drawing.png": ("unsupported", b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"),
        "layers.tif": ("unsupported", b"8BPS\0\1" + bytes(60)),
        "paper.jpg": ("unsupported", b"%PDF-1.7\n" + bytes(60)),
        "film.heic": ("unsupported", b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + bytes(60)),
        "twelve_bits.jpg": ("unsupported", jpeg[: frame.start + 4] + b"\x0c" + jpeg[frame.start + 5 :]),
        "floats.tif": ("unsupported", floats),
        "half.jpg": ("truncated", jpeg[: len(jpeg) // 2]),
        "head.jpg": ("truncated", jpeg[:40]),
        "half.png": ("truncated", whole_png[: len(whole_png) // 2]),
        "half.webp": ("decode_error", kinds["webp"][:300]),
        "half.gif": ("truncated", kinds["gif"][: len(kinds["gif"]) // 2]),
        "half.bmp": ("truncated", kinds["bmp"][:3000]),
        "half.tiff": ("truncated", kinds["tiff"][:3000]),
        "half.avif": ("truncated", kinds["avif"][: len(kinds["avif"]) - 40]),
        "flipped.png": ("decode_error", bytes(flipped)),
        "bomb.png": ("too_many_pixels", png(60_000, 60_000, 8, 2, [b""])),
    }
