"""Writes TIFFs of every kind by hand: what Pillow can't write, and what it would read back with its own mistakes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

NONE, LZW, DEFLATE, PACKBITS = 1, 5, 8, 32773
UNSIGNED, SIGNED, FLOAT = 1, 2, 3
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, CMYK, YCBCR, LAB = 0, 1, 2, 3, 5, 6, 8
REDUCED, SUB_IFDS, DESCRIPTION = 254, 330, 270


def page(
    values: np.ndarray,
    photometric: int = RGB,
    bits: int = 8,
    format: int = UNSIGNED,
    planar: bool = False,
    compression: int = NONE,
    order: str = "<",
    tile: tuple[int, int] | None = None,
    rows: int | None = None,
    extra: Sequence[int] = (),
    predictor: bool = False,
    tags: Mapping[int, Any] | None = None,
) -> dict[int, Any]:
    """Tags of a picture, of which 273 or 324 holds the strips' or tiles' bytes.

    Args:
        values: [height, width, samples] as they are to be stored.
        tile: (height, width); else strips of `rows`.
        extra: ExtraSamples.
        predictor: each value less the one to its left.
    """
    height, width, samples = values.shape
    down, across = tile or (rows or height, width)
    parts = np.split(values, samples, axis=2) if planar else [values]
    data = []
    for part in parts:
        for top in range(0, height, down):
            for left in range(0, width, across):
                piece = part[top : top + down, left : left + across]
                if tile:
                    piece = np.pad(piece, ((0, down - piece.shape[0]), (0, across - piece.shape[1]), (0, 0)))
                if predictor:
                    piece = np.diff(piece, axis=1, prepend=piece[:, :1] * 0)
                data.append(_COMPRESS[compression](_packed(piece, bits, format, order)))
    found = {
        256: width,
        257: height,
        258: [bits] * samples,
        259: compression,
        262: photometric,
        277: samples,
        284: 2 if planar else 1,
        339: [format] * samples,
        **({322: across, 323: down, 324: data} if tile else {273: data, 278: down}),
        **({338: list(extra)} if extra else {}),
        **({317: 2} if predictor else {}),
        **(tags or {}),
    }
    return {tag: value for tag, value in found.items() if value is not None}


def tiff(*pages: dict[int, Any], order: str = "<", big: bool = False) -> bytes:
    """A file of some pages; the tag 330 of a page holds its SubIFDs, which are pages, too."""
    mark = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}H", 43 if big else 42)
    out = bytearray(mark + (struct.pack(f"{order}HHQ", 8, 0, 0) if big else bytes(4)))
    link = 8 if big else 4
    for tags in pages:
        start, end = _write_page(out, tags, order, big)
        struct.pack_into(f"{order}{'Q' if big else 'I'}", out, link, start)
        link = end
    return bytes(out)


def _write_page(out: bytearray, tags: dict[int, Any], order: str, big: bool) -> tuple[int, int]:
    """Append a page; where its IFD begins, and where the offset of the next one stands."""
    tags = dict(tags)
    if SUB_IFDS in tags:
        tags[SUB_IFDS] = [_write_page(out, one, order, big)[0] for one in tags[SUB_IFDS]]
    for offsets, counts in ((273, 279), (324, 325)):
        if offsets in tags:
            data = tags[offsets]
            tags[offsets], tags[counts] = [], [len(one) for one in data]
            for one in data:
                tags[offsets].append(len(out))
                out += one + bytes(len(one) % 2)
    entries = []
    for tag, value in sorted(tags.items()):
        if isinstance(value, bytes):
            kind, count, raw = (7 if tag == 34675 else 2), len(value), value
        else:
            value = value if isinstance(value, list) else [value]
            kind = 4 if tag in (273, 279, 324, 325, SUB_IFDS) or max(value) > 65535 else 3
            count, raw = len(value), struct.pack(f"{order}{len(value)}{'I' if kind == 4 else 'H'}", *value)
        most = 8 if big else 4
        if len(raw) > most:
            raw, place = struct.pack(f"{order}{'Q' if big else 'I'}", len(out)), raw
            out += place + bytes(len(place) % 2)
        entries.append(struct.pack(f"{order}HH{'Q' if big else 'I'}", tag, kind, count) + raw.ljust(most, b"\0"))
    start = len(out)
    out += struct.pack(f"{order}{'Q' if big else 'H'}", len(entries)) + b"".join(entries)
    out += bytes(8 if big else 4)
    return start, len(out) - (8 if big else 4)


def _packed(values: np.ndarray, bits: int, format: int, order: str) -> bytes:
    """Rows of values, each row from a byte on: TIFF 6.0, pages 29 and 39."""
    if bits % 8 == 0 and bits != 24:
        return values.astype(f"{order}{'?uif'[format]}{bits // 8}").tobytes()
    rows = values.reshape(len(values), -1, 1).astype(np.uint32)
    unpacked = (rows >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(unpacked.reshape(len(values), -1).astype(np.uint8), axis=1).tobytes()


def _lzw(data: bytes) -> bytes:
    """Codes of 9 bits only: the table is cleared before it needs more."""
    codes = []
    for start in range(0, len(data), 200):
        codes += [256, *data[start : start + 200]]
    text = "".join(f"{code:09b}" for code in [*codes, 257])
    return int(text.ljust(-(-len(text) // 8) * 8, "0"), 2).to_bytes(-(-len(text) // 8), "big")


def _packbits(data: bytes) -> bytes:
    """Literal runs only."""
    pieces = [data[start : start + 128] for start in range(0, len(data), 128)]
    return b"".join(bytes([len(piece) - 1]) + piece for piece in pieces)


_COMPRESS = {NONE: bytes, LZW: _lzw, DEFLATE: zlib.compress, PACKBITS: _packbits}
