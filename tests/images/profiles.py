"""ICC profiles built byte by byte, and their meaning in float64: what colour conversion is tested against.

The format: https://www.color.org/specification/ICC.1-2001-04.pdf (version 2.4).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
D50 = np.array([0.9642, 1.0, 0.8249])
# XYZ (D50) → linear sRGB, Bradford-adapted: http://www.brucelindbloom.com/Eqn_RGB_XYZ_Matrix.html
XYZ_TO_SRGB = np.array(
    [[3.1338561, -1.6168667, -0.4906146], [-0.9787684, 1.9161415, 0.0334540], [0.0719453, -0.2289914, 1.4052427]]
)
ADOBE_RGB_TO_XYZ = np.array(
    [[0.6097559, 0.2052401, 0.1492240], [0.3111242, 0.6256560, 0.0632197], [0.0194811, 0.0608902, 0.7448387]]
)


def profile(space: bytes, tags: Mapping[bytes, bytes], connection: bytes = b"XYZ ") -> bytes:
    """An ICC profile: header, tag table, tags."""
    content, table, offset = b"", struct.pack(">I", len(tags)), 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += name + struct.pack(">II", offset + len(content), len(data))
        content += data + b"\0" * (-len(data) % 4)
    date = struct.pack(">6H", 2024, 1, 1, 0, 0, 0)
    header = b"\0" * 8 + b"\x02\x40\0\0" + (b"prtr" if space == b"CMYK" else b"mntr") + space + connection + date
    header += b"acsp" + b"\0" * 28 + _numbers(D50)
    body = (header.ljust(128, b"\0") + table + content)[4:]
    return struct.pack(">I", len(body) + 4) + body


def _numbers(values: Array) -> bytes:
    return struct.pack(f">{len(values)}i", *(round(float(value) * 65536) for value in values))


def xyz(values: Array) -> bytes:
    """A tag that holds one colour."""
    return b"XYZ \0\0\0\0" + _numbers(values)


def gamma(value: float) -> bytes:
    """A tag that holds a curve."""
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(value * 256)) + b"\0\0"


def gray_profile(exponent: float) -> bytes:
    """Gray whose light is value to the power of `exponent`."""
    return profile(b"GRAY", {b"wtpt": xyz(D50), b"kTRC": gamma(exponent)})


def wide_profile() -> bytes:
    """Adobe RGB (1998)."""
    columns = {b"rXYZ": 0, b"gXYZ": 1, b"bXYZ": 2}
    tags = {b"wtpt": xyz(D50)} | {name: xyz(ADOBE_RGB_TO_XYZ[:, place]) for name, place in columns.items()}
    return profile(b"RGB ", tags | {name: gamma(563 / 256) for name in (b"rTRC", b"gTRC", b"bTRC")})


def ink_colours() -> Array:
    """A made-up printing process: float64 [2, 2, 2, 2, 3], the Lab colour of each combination of full or no ink."""
    inks = np.array([[0.55, -37, -50], [0.48, 74, -3], [0.89, -5, 93], [0.16, 0, 0]])
    colours = np.empty((2, 2, 2, 2, 3))
    for c, m, y, k in np.ndindex(2, 2, 2, 2):
        used = [ink for ink, there in zip(inks, (c, m, y, k), strict=True) if there]
        lightness = 100 * float(np.prod([ink[0] for ink in used]))
        shade = sum((ink[1:] for ink in used), np.zeros(2)) * (lightness / 100 if len(used) > 1 else 1)
        colours[c, m, y, k] = (lightness, *np.clip(shade, -120, 120))
    return colours


def ink_profile() -> bytes:
    """`ink_colours` as a table of 2 points an ink (lut8Type)."""
    grid = np.clip(np.round(ink_colours() * [2.55, 1, 1] + [0, 128, 128]), 0, 255).astype(np.uint8)
    straight = bytes(range(256))
    head = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + _numbers(np.eye(3).ravel())
    table = head + straight * 4 + grid.tobytes() + straight * 3
    return profile(b"CMYK", {b"wtpt": xyz(D50), b"A2B0": table}, b"Lab ")


def srgb_of_linear(light: Array) -> Array:
    """Linear sRGB 0–1 → values 0–255, https://www.w3.org/Graphics/Color/sRGB."""
    light = np.clip(light, 0, 1)
    return np.asarray(255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055))


def srgb_of_lab(lab: Array, black: float) -> Array:
    """CIE Lab (D50) [..., 3] → sRGB 0–255, perceptual: a gray of lightness `black` becomes 0, white stays white.

    Black point compensation: https://www.color.org/AdobeBPC.pdf
    """
    light, darkest = _xyz_of_lab(lab), _xyz_of_lab(np.array([black, 0.0, 0.0]))
    return srgb_of_linear((light - darkest) * D50 / (D50 - darkest) @ XYZ_TO_SRGB.T)


def _xyz_of_lab(lab: Array) -> Array:
    middle = (lab[..., 0] + 16) / 116
    f = np.stack([middle + lab[..., 1] / 500, middle, middle - lab[..., 2] / 200], axis=-1)
    return np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)) * D50


def srgb_of_adobe_rgb(values: Array) -> Array:
    """Adobe RGB 0–255 [..., 3] → sRGB 0–255."""
    return srgb_of_linear((values / 255.0) ** (563 / 256) @ ADOBE_RGB_TO_XYZ.T @ XYZ_TO_SRGB.T)
