"""BMPs of every header, depth, mask and alpha, by hand: their picture is stored or they are rejected.

https://learn.microsoft.com/en-us/windows/win32/gdi/bitmap-header-types, and OS/2's for headers of 12 and 64 bytes.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import numpy as np
import pytest

from beam_pipeline.images import convert
from tests.images.test_codec import OWN_SIZE, opened, rejected

HEADERS = (12, 40, 52, 56, 64, 108, 124)
RAW, BITFIELDS, ALPHA_BITFIELDS = 0, 3, 6
RANDOM = np.random.default_rng(3)
SHAPE = 7, 13
WITH_MASKS, WITH_ALPHA = (40, 52, 56, 108, 124), (56, 108, 124)
# Bits, masks of red, green, blue and alpha → whether they are read.
# fmt: off
MASKS = {
    (32, 0xFF0000, 0xFF00, 0xFF, 0): True, (32, 0xFF0000, 0xFF00, 0xFF, 0xFF000000): True,
    (32, 0xFF, 0xFF00, 0xFF0000, 0xFF000000): True, (32, 0xFF000000, 0xFF0000, 0xFF00, 0): True,
    (32, 0xFF000000, 0xFF0000, 0xFF00, 0xFF): True, (32, 0xFF000000, 0xFF00, 0xFF, 0xFF0000): True,
    (32, 0xFF, 0xFF00, 0xFF0000, 0): False, (32, 0xFF00, 0xFF0000, 0xFF000000, 0xFF): False,
    (32, 0x3FF00000, 0xFFC00, 0x3FF, 0): False, (32, 0x3FF00000, 0xFFC00, 0x3FF, 0xC0000000): False,
    (24, 0xFF0000, 0xFF00, 0xFF, 0): True,
    (16, 0xF800, 0x7E0, 0x1F, 0): True, (16, 0x7C00, 0x3E0, 0x1F, 0): True, (16, 0x7C00, 0x3E0, 0x1F, 0x8000): True,
    (16, 0x1F, 0x7E0, 0xF800, 0): False, (16, 0xF00, 0xF0, 0xF, 0): False, (16, 0xF00, 0xF0, 0xF, 0xF000): False,
}
# fmt: on


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


def channel(values: np.ndarray, mask: int) -> np.ndarray:
    """0–255 of the bits that a mask selects."""
    lowest = mask & -mask
    return (values & mask) // lowest * 255 // (mask // lowest)


@pytest.mark.parametrize("alpha", ["none", "some", "all"])
@pytest.mark.parametrize("masks", MASKS)
def test_masks_and_alpha(masks: tuple[int, ...], alpha: str) -> None:
    bits, *colours, alpha_mask = masks
    for header, top_down in itertools.product(WITH_MASKS, (False, True)):
        values = RANDOM.integers(0, 1 << bits, SHAPE) & ~alpha_mask
        if alpha != "none":
            values |= alpha_mask & (RANDOM.integers(0, 1 << bits, SHAPE) if alpha == "some" else -1)
        used = (*colours, alpha_mask) if header in WITH_ALPHA else colours
        data = bmp(header, bits, values, used, compression=BITFIELDS, top_down=top_down)
        # Without their alpha some masks are others.
        if not MASKS.get(masks if header in WITH_ALPHA else (bits, *colours, 0), MASKS[masks]):
            assert rejected(data)[0] == "unsupported", (header, top_down)
            continue
        expected = np.stack([channel(values, mask) for mask in colours], -1).astype(float)
        if alpha == "some" and alpha_mask and header in WITH_ALPHA:
            opacity = channel(values, alpha_mask)[..., None] / 255
            expected = expected * opacity + 255 * (1 - opacity)
        assert np.abs(opened(convert(data, OWN_SIZE).data) - expected).max() <= 1, (header, top_down)


@pytest.mark.parametrize("header", HEADERS)
def test_without_masks_the_rest_is_no_alpha(header: int) -> None:
    for bits, colours in ((16, (0x7C00, 0x3E0, 0x1F)), (24, (0xFF0000, 0xFF00, 0xFF)), (32, (0xFF0000, 0xFF00, 0xFF))):
        values = RANDOM.integers(0, 1 << bits, SHAPE)
        expected = np.stack([channel(values, mask) for mask in colours], -1)
        assert np.array_equal(opened(convert(bmp(header, bits, values), OWN_SIZE).data), expected), bits


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_palettes(header: int, bits: int) -> None:
    most = 1 << bits
    full = [tuple(colour) for colour in RANDOM.integers(0, 256, (most, 3)).tolist()]
    grays = [(value * 255 // (most - 1),) * 3 for value in range(most)]
    few = [] if header == 12 else [[(0, 0, 0), (255, 255, 255)], [(255, 255, 255), (0, 0, 0)]]
    for palette in (full, grays, *few):
        values = RANDOM.integers(0, len(palette), SHAPE)
        data = bmp(header, bits, values, palette=palette)
        if bits == 2:
            assert rejected(data)[0] == "unsupported"
            continue
        found = opened(convert(data, OWN_SIZE).data)
        assert np.array_equal(found, np.array(palette)[values]), (palette[:2], len(palette))


def test_the_smallest() -> None:
    assert opened(convert(bmp(12, 24, np.array([[0xFF8000]])), OWN_SIZE).data).tolist() == [[[255, 128, 0]]]
