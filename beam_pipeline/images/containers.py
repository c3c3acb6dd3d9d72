"""The segments of JPEG files and the chunks of PNG files: finds, cuts and completes them, and decodes nothing.

JPEG: https://www.w3.org/Graphics/JPEG/itu-t81.pdf (annex B), PNG: https://www.w3.org/TR/png-3/#5DataRep
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

SOI, EOI, SOS, DHT, COM = 0xD8, 0xD9, 0xDA, 0xC4, 0xFE
APP0, APP14 = 0xE0, 0xEE
_APPS = range(0xE0, 0xF0)
SOF_BASELINE, SOF_EXTENDED = 0xC0, 0xC1
_FRAMES = frozenset(range(0xC0, 0xD0)) - {DHT, 0xC8, 0xCC}  # SOFn: all but DHT, JPG and DAC
_MOST_SCAN_HEADER_BYTES = 16  # of four channels
# In compressed data 0xFF is followed by 0, a restart marker or another 0xFF; any other byte ends it.
_END_OF_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_JFIF, _JFIF_BYTES = b"JFIF\0", 14  # without a thumbnail
_ADOBE, _ADOBE_BYTES, _ADOBE_YCBCR = b"Adobe", 12, 1

_PNG_SIGNATURE_BYTES = 8
_PNG_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
PNG_EXIF_TEXT = "Raw profile type exif"  # keyword of the text that ImageMagick writes EXIF into
_MOST_PROFILE_BYTES = 1 << 20  # of a PNG: Pillow refuses larger ones


class Segment(NamedTuple):
    """A segment of a JPEG: its marker, and its first and last byte in the file, marker included."""

    kind: int
    start: int
    end: int


def jpeg_segments(data: bytes) -> Iterator[Segment]:
    """The segments of a JPEG from SOI to EOI; a scan's compressed data belongs to its SOS.

    Raises:
        EOFError: no EOI.
        ValueError: no marker at the end of a segment.
    """
    yield Segment(SOI, 0, 2)
    start = 2
    while start + 2 <= len(data):
        if data[start] != 0xFF:
            raise ValueError("no marker")
        kind = data[start + 1]
        if kind == 0xFF:  # a fill byte
            start += 1
            continue
        if kind == EOI:
            yield Segment(EOI, start, start + 2)
            return
        if kind < 2 or 0xD0 <= kind <= SOI:  # decoders differ in how they skip these
            raise ValueError("a marker without a length")
        end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        if kind == SOS:
            match = _END_OF_SCAN.search(data, end)
            end = match.start() if match else len(data) + 1
        if end > len(data):
            break
        yield Segment(kind, start, end)
        start = end
    raise EOFError


def terminate_jpeg(data: bytes) -> bytes:
    """A truncated JPEG, cut after its last complete segment or inside a scan, with the EOI that decoders need."""
    end = 0
    try:
        for part in jpeg_segments(data):
            end = part.end
    except EOFError:
        in_scan = data.startswith(bytes([0xFF, SOS]), end) and len(data) >= end + _MOST_SCAN_HEADER_BYTES
        return (data if in_scan else data[:end]) + bytes([0xFF, EOI])
    except ValueError:
        pass
    return data


def jpeg_without_metadata(data: bytes, channels: int) -> bytes | None:
    """A JPEG without its metadata and without bytes after the picture; None if it must be encoded again.

    Its compressed pixels can be kept if they are baseline or extended Huffman-coded with 8 bits, YCbCr or gray, and the
    file is well-formed and has no thumbnail in its JFIF header.

    Args:
        data: a file that a decoder has accepted.
        channels: the stored image's, 1 or 3.
    """
    kept = []
    try:
        for kind, start, end in jpeg_segments(data):
            body = data[start + 4 : end]
            if kind in _FRAMES:  # bits 1, height 2, width 2, channels 1, then id, sampling, table of each channel
                if kind not in (SOF_BASELINE, SOF_EXTENDED) or body[6::3] == b"RGB":
                    return None
                if (body[0], body[5]) != (8, channels):
                    return None
            elif kind == APP0 and body.startswith(_JFIF):
                if len(body) != _JFIF_BYTES:
                    return None
            elif kind == APP14 and body.startswith(_ADOBE):
                if len(body) != _ADOBE_BYTES or body[-1] != (_ADOBE_YCBCR if channels == 3 else 0):
                    return None
            elif kind == COM or kind in _APPS:
                continue
            kept.append(data[start:end])
    except (EOFError, ValueError, IndexError):
        return None
    return b"".join(kept)


def plain_png(data: bytes) -> bytes:
    """A PNG without its texts, except EXIF's, and without a colour profile that is too large for Pillow.

    Pillow keeps texts in the same dict as its own findings: the keyword `transparency` or `interlace` would replace
    these. It raises an error for a text or profile of more than 1 MiB.
    """
    kept, kept_from, position = [], 0, _PNG_SIGNATURE_BYTES
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        is_text = kind in _PNG_TEXTS and not data.startswith(f"{PNG_EXIF_TEXT}\0".encode(), position + 8)
        if is_text or (kind == b"iCCP" and _is_too_large(data[position + 8 : end - 4])):
            kept.append(data[kept_from:position])
            kept_from = end
        position = end
    return b"".join([*kept, data[kept_from:]]) if kept else data


def _is_too_large(profile: bytes) -> bool:
    """Whether the profile in an iCCP chunk (a name, 0, method 0, zlib's data) is larger than Pillow reads."""
    inflate = zlib.decompressobj()
    with suppress(zlib.error):
        inflate.decompress(profile.partition(b"\0")[2][1:], _MOST_PROFILE_BYTES)
    return bool(inflate.unconsumed_tail)


def webp_canvas(data: bytes) -> tuple[int, int] | None:
    """(width, height) of an animated or otherwise extended WebP; None for a simple one, whose sides have 14 bits.

    https://developers.google.com/speed/webp/docs/riff_container#extended_file_format
    """
    if data[12:16] != b"VP8X" or len(data) < 30:
        return None
    return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
