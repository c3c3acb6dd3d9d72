"""Random cases of the compiled resize, each decided by seed and number, and what differs from Pillow's.

For the short comparison in the tests and the long one in benchmarks. Most are of up to 40 pixels a side, since those
are fast and their edges are nearly all of them; 1 in 200 is of up to 2,000.
"""

from __future__ import annotations

import functools
import math
import random
from types import ModuleType
from typing import NamedTuple

import numpy as np
from PIL import Image

SOURCES = ("RGB", "L", "RGB capsule", "RGB rows apart", "L rows apart", "RGB upside down", "RGB in place")
PIXELS = ("noise", "black or white", "gradient", "white")
AXES = ("all", "integers", "halves", "fractions", "tiny", "empty", "as large as the output", "shifted by a fraction")
LARGE_EVERY, LARGE_SIDE, SMALL_SIDE = 200, 2000, 40
POOL_BYTES = LARGE_SIDE * LARGE_SIDE * 3 + 4096
UNTOUCHED, MARGIN = 0xA5, 64


class Case(NamedTuple):
    """What is resized: `source` is one of SOURCES, `pixels` one of PIXELS, sizes are (height, width)."""

    number: int
    source: str
    pixels: str
    start: int
    size: tuple[int, int]
    target: tuple[int, int]
    box: tuple[float, float, float, float]

    @property
    def channels(self) -> int:
        return 1 if self.source.startswith("L") else 3


@functools.cache
def pool(pixels: str) -> np.ndarray:
    """Bytes that the images of a kind are cut from."""
    draw = np.random.default_rng(PIXELS.index(pixels))
    if pixels == "noise":
        return draw.integers(0, 256, POOL_BYTES, np.uint8)
    if pixels == "black or white":
        return draw.integers(0, 2, POOL_BYTES, np.uint8) * np.uint8(255)
    if pixels == "gradient":
        return (np.arange(POOL_BYTES) // 3).astype(np.uint8)
    return np.full(POOL_BYTES, 255, np.uint8)


def side(draw: random.Random, large: bool) -> int:
    """A side in pixels."""
    if large:
        return round(math.exp(draw.random() * math.log(LARGE_SIDE)))
    return draw.randint(1, SMALL_SIDE)


def edges(draw: random.Random, source: int, target: int) -> tuple[float, float]:
    """Where the box begins and ends along an axis."""
    kind = draw.choice(AXES)
    if kind == "integers":
        begin = draw.randrange(source)
        return begin, draw.randint(begin + 1, source)
    if kind == "halves":  # often a source pixel's center is on the edge of a filter
        begin = draw.randrange(2 * source)
        return begin / 2, draw.randint(begin + 1, 2 * source) / 2
    if kind == "fractions":
        begin, end = sorted((draw.random() * source, draw.random() * source))
        return begin, end
    if kind == "tiny":
        length = 10 ** draw.uniform(-7, 0)
        begin = draw.choice((0.0, draw.random() * (source - length), source - length))
        return begin, begin + length
    if kind == "empty":
        begin = draw.choice((0, source, draw.random() * source, draw.randrange(source)))
        return begin, begin
    if kind in AXES[-2:] and target < source:
        begin = draw.randrange(source - target) + (draw.random() if kind == AXES[-1] else 0)
        return begin, begin + target
    return 0, source


def case(seed: int, number: int, most: int = LARGE_SIDE) -> Case:
    """A case; `most` limits the sides of the large ones."""
    draw = random.Random(seed << 40 | number)
    large = number % LARGE_EVERY == 0
    height, width, new_height, new_width = (min(side(draw, large), most) for _ in range(4))
    shape = draw.random()
    if shape < 0.05:
        longest = min(100 * most, 4000) if large else 400  # the most that the kernel takes for one pixel
        height, width = draw.choice(((draw.randint(1, 3), draw.randint(1, longest)), (longest, longest // 100 + 1)))
    elif shape < 0.1:
        new_height, new_width = draw.choice(((draw.randint(1, 400), 1), (1, draw.randint(1, 400))))
    elif shape < 0.15:
        new_width = width
    elif shape < 0.2:
        new_height = height
    if height > 100 * width and new_height < height:
        new_height = height  # Pillow resizes these in another order, so the kernel isn't asked
    left, right = edges(draw, width, new_width)
    top, bottom = edges(draw, height, new_height)
    source, pixels = draw.choice(SOURCES), draw.choice(PIXELS)
    box = (float(left), float(top), float(right), float(bottom))
    return Case(number, source, pixels, draw.randrange(4096), (height, width), (new_height, new_width), box)


def view(memory: np.ndarray, case: Case, size: tuple[int, int], row: int, start: int = MARGIN) -> np.ndarray:
    """An image inside of memory whose rows begin every `row` bytes."""
    return np.ndarray((*size, case.channels), np.uint8, memory, start, (row, case.channels, 1))


def fails(case: Case, kernels: list[ModuleType]) -> list[str]:
    """What each kernel does otherwise than Pillow: nothing, if all is well."""
    height, width = case.size
    row, out_row = width * case.channels, case.target[1] * case.channels
    data = pool(case.pixels)[case.start : case.start + height * row]
    image = Image.frombytes("L" if case.channels == 1 else "RGB", (width, height), data.tobytes())
    upright = data.reshape(height, width, case.channels)
    if case.source == "RGB upside down":
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    wanted = image.resize(case.target[::-1], Image.Resampling.BILINEAR, case.box).tobytes()
    found = []
    for kernel in kernels:
        apart = 7 * case.source.endswith("apart")
        memory = np.full(case.target[0] * (out_row + apart) + 2 * MARGIN, UNTOUCHED, np.uint8)
        out, source = view(memory, case, case.target, out_row + apart), upright
        if case.source.endswith("capsule"):
            source = image.__arrow_c_array__()[1]
        elif case.source == "RGB upside down":
            source = upright[::-1]
        elif apart:
            source = view(np.empty(height * (row + 5) + MARGIN, np.uint8), case, case.size, row + 5, 3)
            source[:] = upright
        elif case.source == "RGB in place":
            memory = np.full(max(data.size, out.nbytes) + 2 * MARGIN, UNTOUCHED, np.uint8)
            out, source = view(memory, case, case.target, out_row), view(memory, case, case.size, row)
            source[:] = upright
        kernel.resize(source, out, case.box, case.size)
        if out.tobytes() != wanted:
            found.append(f"{kernel.__file__}: pixels differ")
        if case.source != "RGB in place":
            out[:] = UNTOUCHED
        if case.source.endswith("place"):
            memory = np.concatenate((memory[:MARGIN], memory[-MARGIN:]))
        if not (memory == UNTOUCHED).all():
            found.append(f"{kernel.__file__}: wrote outside of the output")
    return found
