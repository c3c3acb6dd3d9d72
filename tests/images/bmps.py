"""Writes BMPs of every header, depth and mask by hand.

https://learn.microsoft.com/en-us/windows/win32/gdi/bitmap-header-types, and OS/2's for headers of 12 and 64 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

HEADERS = (12, 40, 52, 56, 64, 108, 124)
RAW, BITFIELDS, ALPHA_BITFIELDS = 0, 3, 6


def bmp(
    header: int,
    bits: int,
    values: np.ndarray,
    masks: Sequence[int] = (),
    palette: Sequence[tuple[int, int, int]] = (),
    compression: int = RAW,
    top_down: bool = False,
) -> bytes:
    """A BMP of values [height, width] as they are stored.

    Args:
        masks: of red, green, blue, and of alpha if the header has one.
        palette: RGB.
    """
    height, width = values.shape
    if bits < 8:
        unpacked = (values[..., None] >> np.arange(bits - 1, -1, -1)) & 1
        rows = np.packbits(unpacked.reshape(height, -1).astype(np.uint8), axis=1)
    else:
        rows = values.astype("<u4")[..., None].view(np.uint8)[..., : bits // 8].reshape(height, -1)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4)))
    pixels = (rows if top_down else rows[::-1]).tobytes()
    colours = b"".join(bytes([blue, green, red, 0][: 3 if header == 12 else 4]) for red, green, blue in palette)
    if header == 12:
        info = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        size = -height if top_down else height
        info = struct.pack(
            "<IiiHHIIiiII", header, width, size, 1, bits, compression, len(pixels), 0, 0, len(palette), 0
        )
        if header >= 52 and header != 64:
            info += struct.pack("<4I", *masks, *[0] * (4 - len(masks)))[: header - 40]
        info = info.ljust(header, b"\0") + (struct.pack(f"<{len(masks)}I", *masks) if header == 40 else b"")
    offset = 14 + len(info) + len(colours)
    return b"BM" + struct.pack("<IHHI", offset + len(pixels), 0, 0, offset) + info + colours + pixels
