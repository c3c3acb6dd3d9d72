"""Detects the format of image files by their content, opens and decodes them with Pillow, and says why one is rejected.

Pillow's classes are called directly: `Image.open` has its own size limit, and any package may register readers there.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import logging
import random
import re
import warnings
from collections.abc import Callable
from typing import IO

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
)

from beam_pipeline.errors import Reject
from beam_pipeline.images import containers, tiff
from beam_pipeline.schema import RejectReason

# Suffixes of the formats that are read.
EXTENSIONS = (
    *("avif", "bmp", "dib", "gif", "heic", "heif"),
    *("jfif", "jpe", "jpeg", "jpg", "png", "tif", "tiff", "webp"),
)


def _heif(file: IO[bytes]) -> ImageFile.ImageFile:
    try:
        import pillow_heif
    except ImportError:
        raise Reject(RejectReason.UNSUPPORTED, "HEIF: install imageshards[heic] on the workers") from None
    image: ImageFile.ImageFile = pillow_heif.HeifImageFile(file)
    return image


# Pillow's name of each format that is read → its reader.
_READERS: dict[str, Callable[[IO[bytes]], ImageFile.ImageFile]] = {
    "AVIF": AvifImagePlugin.AvifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "HEIF": _heif,
    "JPEG": JpegImagePlugin.JpegImageFile,  # of several pictures (MPO) the first
    "PNG": PngImagePlugin.PngImageFile,
    "TIFF": lambda file: tiff.open_tiff(file.read()),
    "WEBP": WebPImagePlugin.WebPImageFile,
}

# First bytes of formats, also of those that are rejected by name.
_SIGNATURES = re.compile(
    rb"(?P<JPEG>\xff\xd8\xff)|(?P<PNG>\x89PNG\r\n\x1a\n)|(?P<WEBP>RIFF....WEBP)|(?P<GIF>GIF8[79]a)"
    rb"|(?P<CR2>II\*\0....CR)|(?P<TIFF>II[*+]\0|MM\0[*+])|(?P<ISO>....ftyp)"
    rb"|(?P<BMP>BM.{12}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\0\0\0)"
    rb"|(?P<JPEG_2000>\0\0\0\x0cjP  |\xff\x4f\xff\x51)|(?P<JPEG_XL>\xff\x0a|\0\0\0\x0cJXL )|(?P<PSD>8BPS)"
    rb"|(?P<SVG>\s*<svg|\s*<\?xml.{0,400}<svg)|(?P<PDF>%PDF-)|(?P<PostScript>%!PS|\xc5\xd0\xd3\xc6)"
    rb"|(?P<ICO>\0\0[\x01\x02]\0)|(?P<OpenEXR>v/1\x01)|(?P<DDS>DDS )|(?P<QOI>qoif)|(?P<PNM>P[1-7]\s)"
    rb"|(?P<camera_raw>FUJIFILMCCD-RAW|IIRO|IIRS|IIU\0|FOVb)",
    re.DOTALL,
)
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF_BRANDS = (b"avif", b"avis")
_FIRST_BYTES = 512
_ORIENTATION = 0x0112
_EOI = b"\xff\xd9"
_LAST_BYTES = {"JPEG": _EOI, "PNG": b"IEND\xaeB`\x82"}
# What compressed data may go on with: noise, longer than what a last MCU takes, and its complement, so that each bit is
# 0 and 1. Every fourth begins with all values of 3 bits.
_NOISE = [bytes([8 * n + 5, *random.Random(n).choices(range(1, 255), k=1000)]) for n in range(16)]
_FILLS = (*_NOISE, *(bytes(255 - byte for byte in noise) for noise in _NOISE))
_DETAILS = (0, 1, 8, 64)  # show a change of 1 in a coefficient, among large and small ones
_LAST_CODES = 16  # bytes
_BAND_ROWS = 64
_RESTART = re.compile(rb"\xff([\xd0-\xd7])")
_BMP_BITS, _BMP_COLOURS = 28, 46  # bytes of the file: bits per pixel, and how many colours the palette has
# Pillow's words for truncated files, and for kinds that it can't read.
_TRUNCATED = re.compile(r"truncated", re.IGNORECASE)
_UNSUPPORTED = re.compile(r"unsupported|cannot handle|unknown (pixel|raw) mode|data organization", re.IGNORECASE)


def hide_warnings() -> None:
    """Hide Pillow's warnings and log lines, in our own processes: a reject says what is wrong with an image."""
    warnings.filterwarnings("ignore", module=r"PIL\.|pillow_heif")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)


def recognise(data: bytes) -> str:
    """Pillow's name of a file's format.

    Raises:
        Reject: `not_an_image`, or `unsupported` for a format that is known and not read.
    """
    match = _SIGNATURES.match(data, 0, _FIRST_BYTES)
    name = match.lastgroup if match else None
    if name == "ISO":
        name = _iso_format(data)
    if name in _READERS:
        return name
    if name is None:
        raise Reject(RejectReason.NOT_AN_IMAGE, f"{len(data)} bytes, beginning {data[:8].hex() or 'nowhere'}")
    raise Reject(RejectReason.UNSUPPORTED, f"{name.replace('_', ' ')}, {len(data)} bytes")


def _iso_format(data: bytes) -> str:
    """AVIF, HEIF, CR3 or film, by the brands of the first box (ISO/IEC 14496-12, 4.3)."""
    end = min(int.from_bytes(data[:4], "big"), _FIRST_BYTES)
    brands = [data[8:12], *(data[start : start + 4] for start in range(16, end, 4))]
    if any(brand in _AVIF_BRANDS for brand in brands):
        return "AVIF"
    if any(brand in _HEIF_BRANDS for brand in brands):
        return "HEIF"
    return "CR3" if brands[0] == b"crx " else "film"


def open_image(data: bytes, name: str) -> ImageFile.ImageFile:
    """Read a file's header; `name` is its format by `recognise`.

    Raises:
        Reject: `unsupported`: raw camera data, a TIFF or PNG of a kind that isn't read, or HEIF without its extra.
        Exception: whatever Pillow raises for a corrupt file.
    """
    if name == "PNG" and data[12:16] == b"CgBI":
        raise Reject(RejectReason.UNSUPPORTED, "iPhone PNG (CgBI)")
    try:
        image = _READERS[name](io.BytesIO(containers.plain_png(data) if name == "PNG" else data))
    except Exception:
        if name != "JPEG":
            raise
        image = _READERS[name](io.BytesIO(containers.plain_jpeg(data)))
    if name == "BMP" and image.mode == "1" and data[_BMP_BITS] > 1:
        # Pillow takes a palette of black and white for 1 bit per pixel; of three colours it doesn't.
        image = _READERS[name](io.BytesIO(data[:_BMP_COLOURS] + b"\3\0\0\0" + data[_BMP_COLOURS + 4 :]))
    if name == "TIFF":
        for key in ("icc_profile", "xmp"):  # a tag may be of any type
            if not isinstance(image.info.get(key, b""), bytes):
                del image.info[key]
    return image


def orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1–8; 1 without one. Pillow itself applies that of TIFF and HEIF."""
    data, text = image.info.get("exif"), str(image.info.get(containers.PNG_EXIF_TEXT, ""))
    if not data and not text:
        return 1
    exif = Image.Exif()  # `Image.getexif` may load the image, and reads XMP, too
    with contextlib.suppress(Exception):
        # A text has two lines with its kind and length, then hexadecimal digits.
        exif.load(data or bytes.fromhex("".join(text.split("\n")[3:])))
        if exif.get(_ORIENTATION) in range(1, 9):
            return int(exif[_ORIENTATION])
    return 1


def load(image: ImageFile.ImageFile, allow_truncated: bool) -> None:
    """Decode the pixels; with `allow_truncated` the readable ones of a truncated file, the others black.

    Raises:
        Exception: whatever Pillow raises for a corrupt file.
    """
    try:
        image.load()
    except Exception as error:
        # Pillow's own switch for this is global to the process, so it isn't used.
        if not allow_truncated or not _TRUNCATED.search(str(error)):
            raise
        image.tile = []  # nothing more to read: the rows that were decoded are kept
        with contextlib.suppress(Exception):
            image.load_end()
        try:
            image.load()
        except Exception:
            raise error from None  # no row was decoded


def terminated(data: bytes, prepare: Callable[[ImageFile.ImageFile], object]) -> bytes | None:
    """A JPEG that lacks only its EOI, with it; None if any of its picture is missing, or something follows it.

    What follows the last code of a complete picture changes no pixel. What follows an incomplete one does, since a
    decoder takes it for codes; so it does if the last bytes are cut off, unless they don't belong to the picture. That
    takes 34 decodes, or 2 of a cut file; `prepare` sets the scale at which an opened image is decoded.
    """
    data = data.rstrip(b"\xff")  # of a cut marker
    begin = containers.last_scan(data)
    if begin is None:
        return None

    def is_complete(end: int) -> bool:
        return all(
            one == other
            for number, source in enumerate(containers.with_details(data, factor) for factor in _DETAILS)
            for one, other in itertools.pairwise(_picture(source[:end], begin, x, prepare) for x in _FILLS[number::4])
        )

    if is_complete(len(data)) and (not is_complete(max(begin, len(data) - _LAST_CODES)) or is_complete(begin)):
        return data + _EOI
    return None


def _picture(data: bytes, begin: int, fill: bytes, prepare: Callable[[ImageFile.ImageFile], object]) -> bytes:
    """A digest of the pixels that a JPEG has if the data of its last scan goes on with `fill`."""
    last = (_RESTART.findall(data, begin) or [b"\xd7"])[-1][0]
    # Each restart marker in turn: a decoder skips to the one that it expects.
    parts = (fill + bytes([0xFF, 0xD0 + (last + number) % 8]) for number in range(1, 9))
    image = open_image(data.rstrip(b"\xff") + b"".join(parts) + _EOI, "JPEG")
    prepare(image)
    image.load()
    digest = hashlib.sha256()
    for top in range(0, image.height, _BAND_ROWS):  # a copy of all pixels would take memory
        digest.update(image.crop((0, top, image.width, min(top + _BAND_ROWS, image.height))).tobytes())
    return digest.digest()


def why_broken(data: bytes, name: str, size: tuple[int, int] | None, error: Exception) -> Reject:
    """The reject for an error of Pillow's, without its text, which may hold memory addresses."""
    detail = f"{name}{f' of {size[0]}x{size[1]} pixels' if size else ''}, {len(data)} bytes"
    if isinstance(error, MemoryError):
        return Reject(RejectReason.OUT_OF_MEMORY, detail)
    if _TRUNCATED.search(str(error)) and (size or not data.endswith(_LAST_BYTES.get(name, ()))):
        return Reject(RejectReason.TRUNCATED, detail)
    if _UNSUPPORTED.search(str(error)):
        return Reject(RejectReason.UNSUPPORTED, detail)
    return Reject(RejectReason.DECODE_ERROR, detail)
