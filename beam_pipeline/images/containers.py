"""The outer structure of image files: JPEG segments, PNG chunks, EXIF's orientation, whether a file ends too early.

Reads bytes and decodes nothing. JPEG: https://www.w3.org/Graphics/JPEG/itu-t81.pdf (annex B), PNG:
https://www.w3.org/TR/png-3/#5DataRep, EXIF: https://www.cipa.jp/std/documents/e/DC-008-2012_E.pdf
"""

from __future__ import annotations

import contextlib
import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
SOI, EOI, SOS, DHT, COM = 0xD8, 0xD9, 0xDA, 0xC4, 0xFE
APP0, APP14 = 0xE0, 0xEE
_APPS = frozenset(range(0xE0, 0xF0))
SOF_BASELINE, SOF_EXTENDED, SOF_PROGRESSIVE = 0xC0, 0xC1, 0xC2
_FRAMES = frozenset(range(0xC0, 0xD0)) - {DHT, 0xC8, 0xCC}  # SOFn: all of the row but DHT, JPG and DAC
_COMMON_FRAMES = frozenset({SOF_BASELINE, SOF_EXTENDED, SOF_PROGRESSIVE, 0xC9, 0xCA})  # the last two: arithmetic
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})  # TEM, RSTn, SOI
_MOST_SCAN_HEADER_BYTES = 16  # of four channels
# In compressed data 0xFF is followed by 0, a restart marker or another 0xFF; all else ends it.
_END_OF_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_ORIENTATION = 0x0112
_SHORT = 3
_EXIF_PREFIX = b"Exif\0\0"
_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
_MOST_PROFILE_BYTES = 1 << 20  # PngImagePlugin.MAX_TEXT_CHUNK
PNG_EXIF_TEXT = "Raw profile type exif"  # keyword of the text that ImageMagick writes EXIF into


class EndsEarly(ValueError):
    """The file ends inside one of its parts."""


class Part(NamedTuple):
    """A JPEG segment or a PNG chunk: its kind, and its bytes in the file, marker or length included."""

    kind: int | bytes
    start: int
    end: int


class JpegFrame(NamedTuple):
    """What a JPEG's frame header says: which SOF, bits a sample, channels and their ids."""

    kind: int
    bits: int
    components: int
    ids: bytes

    @property
    def is_common(self) -> bool:
        """Whether it is a kind that decoders know: neither lossless nor hierarchical, 8 bits, 1, 3 or 4 channels."""
        return self.kind in _COMMON_FRAMES and self.bits == 8 and self.components in (1, 3, 4)


def jpeg_parts(data: bytes) -> Iterator[Part]:
    """The segments of a JPEG from SOI to EOI; a scan's compressed data belongs to its SOS.

    Raises:
        EndsEarly: no EOI.
        ValueError: something else where a marker should be.
    """
    yield Part(SOI, 0, 2)
    position, size = 2, len(data)
    while position + 2 <= size:
        if data[position] != 0xFF:
            raise ValueError("no marker")
        start, kind = position, data[position + 1]
        if kind == 0xFF:  # a fill byte, which belongs to nothing
            position += 1
            continue
        position += 2
        if kind not in _WITHOUT_LENGTH and kind != EOI:
            if position + 2 > size:
                break
            position += struct.unpack_from(">H", data, position)[0]
        if kind == SOS:
            found = _END_OF_SCAN.search(data, position)
            if found is None:
                break
            position = found.start()
        if position > size:
            break
        yield Part(kind, start, position)
        if kind == EOI:
            return
    raise EndsEarly


def ended_jpeg(data: bytes) -> bytes:
    """A JPEG that ends early, cut after its last complete segment or inside a scan, with the end that decoders need."""
    end = 0
    try:
        for part in jpeg_parts(data):
            end = part.end
    except EndsEarly:
        in_scan = data.startswith(bytes([0xFF, SOS]), end) and len(data) >= end + _MOST_SCAN_HEADER_BYTES
        return (data if in_scan else data[:end]) + bytes([0xFF, EOI])
    except ValueError:
        pass
    return data


def jpeg_frame(data: bytes) -> JpegFrame | None:
    """The first frame header of a JPEG, or None if there is none."""
    try:
        for kind, start, end in jpeg_parts(data):
            if kind in _FRAMES and end - start >= 10:  # marker 2, length 2, bits 1, height 2, width 2, channels 1
                components = data[start + 9]
                ids = data[start + 10 : start + 10 + 3 * components : 3]
                return JpegFrame(int(kind), data[start + 4], components, ids)
    except ValueError:
        pass
    return None


def first_scan_channels(data: bytes) -> int:
    """How many channels the first scan of a JPEG holds, without a look at its compressed data; 0 if it isn't found."""
    with contextlib.suppress(ValueError):
        for part in jpeg_parts(data):
            if data.startswith(bytes([0xFF, SOS]), part.end):
                return int.from_bytes(data[part.end + 4 : part.end + 5], "big")
    return 0


def png_parts(data: bytes) -> Iterator[Part]:
    """The chunks of a PNG from IHDR to IEND; their CRCs are for its decoder to check.

    Raises:
        EndsEarly: no IEND.
    """
    position = len(PNG_SIGNATURE)
    while position + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        if end > len(data):
            break
        yield Part(kind, position, end)
        if kind == b"IEND":
            return
        position = end
    raise EndsEarly


def plain_png(data: bytes) -> bytes:
    """A PNG without texts but EXIF's, and without a colour profile that is too large for Pillow to read.

    Pillow files texts with what it finds out itself, under any keyword: `transparency` or `interlace` would decide. It
    gives up an image for a text or profile of more than 1 MiB.
    """
    dropped = []
    with contextlib.suppress(EndsEarly):
        for part in png_parts(data):
            is_text = part.kind in _TEXTS and not data.startswith(f"{PNG_EXIF_TEXT}\0".encode(), part.start + 8)
            if is_text or (part.kind == b"iCCP" and _is_too_large(data[part.start + 8 : part.end - 4])):
                dropped.append(part)
    starts, ends = [0, *(part.end for part in dropped)], [*(part.start for part in dropped), len(data)]
    return b"".join(data[start:end] for start, end in zip(starts, ends, strict=True)) if dropped else data


def _is_too_large(profile: bytes) -> bool:
    """Whether what an iCCP chunk holds (a name, 0, method 0, zlib's data) is more than Pillow reads."""
    inflate = zlib.decompressobj()
    with contextlib.suppress(zlib.error):
        inflate.decompress(profile.partition(b"\0")[2][1:], _MOST_PROFILE_BYTES)
    return bool(inflate.unconsumed_tail)


def webp_canvas(data: bytes) -> tuple[int, int] | None:
    """(width, height) of an animated or otherwise extended WebP, None for a simple one, whose size has 14 bits.

    https://developers.google.com/speed/webp/docs/riff_container#extended_file_format
    """
    if data[12:16] != b"VP8X" or len(data) < 30:
        return None
    return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1


def ends_early(data: bytes, format: str) -> bool:
    """Whether a JPEG or PNG that can't be decoded is cut off; of other formats Pillow says it."""
    parts = {"JPEG": jpeg_parts, "PNG": png_parts}.get(format)
    try:
        for _ in parts(data) if parts else ():
            pass
    except EndsEarly:
        return True
    except ValueError:
        pass
    return False


def orientation(exif: bytes) -> int:
    """The orientation in the first directory of EXIF data, 1 if there is none that can be read.

    Pillow's `Exif` reads every tag for it: 64 µs, 5 here.
    """
    start = len(_EXIF_PREFIX) if exif.startswith(_EXIF_PREFIX) else 0
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[start : start + 4])
    if order is None or len(exif) < start + 8:
        return 1
    directory = start + struct.unpack_from(f"{order}I", exif, start + 4)[0]
    if len(exif) < directory + 2:
        return 1
    count = struct.unpack_from(f"{order}H", exif, directory)[0]
    for place in range(directory + 2, min(directory + 2 + 12 * count, len(exif) - 11), 12):
        tag, kind, values, value = struct.unpack_from(f"{order}HHIH", exif, place)
        if tag == _ORIENTATION:
            return value if (kind, values) == (_SHORT, 1) and 1 <= value <= 8 else 1
    return 1


_JFIF, _JFIF_BYTES = b"JFIF\0", 14  # without a thumbnail
_ADOBE, _ADOBE_BYTES, _ADOBE_YCBCR = b"Adobe", 12, 1


def jpeg_without_metadata(data: bytes, channels: int) -> bytes | None:
    """A JPEG without its metadata and what follows the picture, or None if it must be encoded again.

    Its compressed pixels can stay if they are baseline or extended Huffman-coded with 8 bits, YCbCr or gray, and it is
    well-formed up to its end and has no thumbnail in its JFIF header.

    Args:
        data: the file.
        channels: that are stored, 1 or 3.
    """
    frame = jpeg_frame(data)
    if frame is None or frame.kind not in (SOF_BASELINE, SOF_EXTENDED) or frame.ids == b"RGB":
        return None
    if (frame.bits, frame.components) != (8, channels):
        return None
    kept = []
    try:
        for part in jpeg_parts(data):
            body = data[part.start + 4 : part.end]
            if part.kind == APP0 and body.startswith(_JFIF):
                if len(body) != _JFIF_BYTES:
                    return None
            elif part.kind == APP14 and body.startswith(_ADOBE):
                if len(body) != _ADOBE_BYTES or body[-1] != (_ADOBE_YCBCR if channels == 3 else 0):
                    return None
            elif part.kind == COM or part.kind in _APPS:
                continue
            kept.append(data[part.start : part.end])
    except ValueError:
        return None
    return b"".join(kept)
