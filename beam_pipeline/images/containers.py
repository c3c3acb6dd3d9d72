"""The segments of JPEG files and the chunks of PNG files: finds, cuts and completes them, and decodes no picture.

JPEG: https://www.w3.org/Graphics/JPEG/itu-t81.pdf (annex B), PNG: https://www.w3.org/TR/png-3/#5DataRep
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

SOI, EOI, SOS, DQT, DHT, COM = 0xD8, 0xD9, 0xDA, 0xDB, 0xC4, 0xFE
APP0, APP14 = 0xE0, 0xEE
_APPS = range(0xE0, 0xF0)
SOF_BASELINE, SOF_EXTENDED = 0xC0, 0xC1
_FRAMES = frozenset(range(0xC0, 0xD0)) - {DHT, 0xC8, 0xCC}  # SOFn: all but DHT, JPG and DAC
_MAX_SCAN_HEADER_BYTES = 16  # of four channels
# In compressed data 0xFF is followed by 0, a restart marker or another 0xFF; any other byte ends it.
_END_OF_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_JFIF, _JFIF_BYTES = b"JFIF\0", 14  # without a thumbnail
_ADOBE, _ADOBE_BYTES, _ADOBE_YCBCR = b"Adobe", 12, 1
_USED = re.compile(rb"JFIF\0.{9}|Exif\0\0|ICC_PROFILE\0..|Adobe.{7}", re.DOTALL)

_PNG_SIGNATURE_BYTES = 8
_PNG_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
PNG_EXIF_TEXT = "Raw profile type exif"  # keyword of the text that ImageMagick writes EXIF into
_MAX_PROFILE_BYTES = 1 << 20  # of a PNG: Pillow refuses larger ones


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
        in_scan = data.startswith(bytes([0xFF, SOS]), end) and len(data) >= end + _MAX_SCAN_HEADER_BYTES
        return (data if in_scan else data[:end]) + bytes([0xFF, EOI])
    except ValueError:
        pass
    return data


def last_scan(data: bytes) -> int | None:
    """Where the compressed data begins of the scan that ends a JPEG without EOI; None if a scan must follow it.

    Each channel must have had one, and in a progressive JPEG the last bit of each coefficient.
    """
    missing, begin, end = {(0, 0)}, 0, 0  # channels, numbers of coefficients
    with suppress(EOFError, ValueError, IndexError):
        for kind, start, stop in jpeg_segments(data + bytes([0xFF, EOI])):
            body = data[start + 4 : stop]
            if kind in _FRAMES:
                missing = {(channel, number) for channel in body[6::3] for number in range(64)}
            elif kind == SOS:  # channels 1, id and tables of each, first and last coefficient, bits before and after
                channels, (first, last, bits) = body[1 : 1 + 2 * body[0] : 2], body[1 + 2 * body[0] :][:3]
                if bits & 15 == 0:
                    missing -= {(channel, number) for channel in channels for number in range(first, last + 1)}
                begin, end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big"), stop
    return begin if not missing and end == len(data) else None


def with_details(data: bytes, factor: int) -> bytes:
    """A JPEG around medium gray, whose coefficients are multiplied by `factor`; 0 changes nothing."""
    changed = bytearray(data)
    with suppress(EOFError, ValueError):
        for kind, start, end in jpeg_segments(data + bytes([0xFF, EOI])) if factor else ():
            if kind == DQT and data[start + 4] < 16:  # tables of 8 bits: number 1, the mean's factor 1, 63 others
                for mean in range(start + 5, end, 65):
                    changed[mean : mean + 64] = bytes([0, *[factor] * 63])
    return bytes(changed)


def plain_jpeg(data: bytes) -> bytes:
    """A JPEG whose metadata is empty unless it is used and long enough: Pillow refuses some that is too short."""
    kept, end = [], 0
    with suppress(EOFError, ValueError):
        for kind, start, end in jpeg_segments(data):
            is_needed = not (kind in _APPS or kind == COM) or _USED.match(data, start + 4, end)
            kept.append(data[start:end] if is_needed else bytes([0xFF, kind, 0, 2]))
    return b"".join([*kept, data[end:]])


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
    """A PNG of its critical chunks, tRNS and, if they are valid, EXIF and the colour profile.

    No other chunk changes a pixel if it is valid. A broken one would: Pillow refuses the file, crops the picture as an
    animation's frame, or takes a text's keyword, `transparency` or `interlace`, for what it found out itself.
    """
    kept, kept_from, position, has_pixels = [], 0, _PNG_SIGNATURE_BYTES, False
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        has_pixels |= kind == b"IDAT"
        is_needed = not kind.isalpha() or kind[:1].isupper() or kind == b"tRNS"
        # A file that ends in a chunk before the pixels is truncated, and Pillow says so.
        is_needed |= not has_pixels and end > len(data)
        if not is_needed and not _is_valid_metadata(kind, data[position + 4 : end]):
            kept.append(data[kept_from:position])
            kept_from = end
        position = end
    return b"".join([*kept, data[kept_from:]]) if kept else data


def _is_valid_metadata(kind: bytes, chunk: bytes) -> bool:
    """Whether a chunk, its length apart, is EXIF or a profile, of a size that Pillow reads, and its CRC is correct."""
    is_used = kind in (b"eXIf", b"iCCP") or (kind in _PNG_TEXTS and chunk.startswith(f"{PNG_EXIF_TEXT}\0".encode(), 4))
    if kind in (b"iCCP", b"zTXt"):  # a name, 0, method 0, zlib's data
        packed, inflate = chunk[4:-4].partition(b"\0")[2], zlib.decompressobj()
        with suppress(zlib.error):
            inflate.decompress(packed[1:], _MAX_PROFILE_BYTES)
        is_used &= packed[:1] == b"\0" and not inflate.unconsumed_tail
    return is_used and zlib.crc32(chunk[:-4]) == int.from_bytes(chunk[-4:], "big")


def webp_canvas(data: bytes) -> tuple[int, int] | None:
    """(width, height) of an animated or otherwise extended WebP; None for a simple one, whose sides have 14 bits.

    https://developers.google.com/speed/webp/docs/riff_container#extended_file_format
    """
    if data[12:16] != b"VP8X" or len(data) < 30:
        return None
    return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
