"""Statistics of a dataset's stored pictures: brightness, contrast, sharpness, one colour, and a perceptual hash.

One pass over the shards, with no learned model. What they can't see is most wrong labels.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from reader.info import DatasetInfo, load_info
from reader.pixels import Pixels, decode_pixels, stored_shape
from reader.tools.read import read_images, with_records

Floats = npt.NDArray[np.floating[Any]]
GRID = 32  # side of the grey picture that is hashed and compared
TINT_GRID = 4  # of its colours
_MAX_SIDE, _MIN_SIDE = 256, 128  # larger pictures are decoded at a half, a quarter or an eighth, not below the second
_WAVES = 8  # of the cosine transform, each way
_COSINES = np.cos(np.pi * (2 * np.arange(GRID) + 1) * np.arange(_WAVES)[:, None] / (2 * GRID)).astype(np.float32)
_EVEN_FIRST = _COSINES[[*range(0, _WAVES, 2), *range(1, _WAVES, 2)]]  # from left to right; the odd ones change their
_MIRROR = np.repeat([1.0, -1.0], _WAVES // 2)[:, None]  # sign in a mirror
_ROUNDING = 16.0  # of waves that are sums of 1024 pixels: what a plain or a symmetric picture lacks isn't exactly 0
_COLOURS = np.array([64, 8, 1], np.float32)  # a number for each of 512
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
_LEAST_RANGE = 0.1  # between quartiles on a fence's scale, for pictures that are all alike
_ROW = np.dtype(
    [("mean", "f4"), ("spread", "f4"), ("one_colour", "f4"), ("sharpness", "f4"), ("hash", "u8"), ("mirrored", "u8")]
)


class Suspects(NamedTuple):
    """The pictures that are suspicious for one reason.

    Attributes:
        rows: int64 [n], of `Pictures`, the worst first.
        values: float64 [n] of the column of `Pictures` that says so.
        threshold: from which on a picture is suspicious: `Fence` of this dataset's own quartiles.
    """

    rows: npt.NDArray[np.int64]
    values: Floats
    threshold: float


class _Fence(NamedTuple):
    """What is far from the middle half of a dataset, on a scale on which usual pictures are spread evenly."""

    column: str
    is_low: bool
    quartile_ranges: float  # how many beyond the quartile
    scale: str  # `log`, or `logit` of values with a largest one
    largest: float = 1.0
    never: float = 0.0  # no value on this side of it is suspicious, however even the others are

    def on_scale(self, values: Any) -> Any:
        if self.scale == "log":
            return np.log(np.asarray(values, np.float64) + self.largest)
        part = (np.asarray(values, np.float64) / self.largest * 254 + 1) / 256  # never 0 or 1
        return np.log(part / (1 - part))

    def from_scale(self, value: float) -> float:
        if self.scale == "log":
            return float(np.exp(value) - self.largest)
        return float((256 / (1 + np.exp(-value)) - 1) / 254 * self.largest)


# Of 300 photos 3 are dark, 4 bright, 3 blurred and 1 of one colour, all by sight, too; planted ones: test_near.py.
FENCES = {
    "dark": _Fence("mean", True, 2.5, "logit", 255, 50),
    "bright": _Fence("mean", False, 2.5, "logit", 255, 205),
    "flat": _Fence("spread", True, 3.0, "log", 1, 20),
    "blurred": _Fence("sharpness", True, 1.5, "log", 1e-4, 0.02),
    "one_colour": _Fence("one_colour", False, 3.0, "logit", 1, 0.7),
}


@dataclass(frozen=True, slots=True)
class Pictures:
    """What `statistics` returns: a row per record, in file order, split after split; 40 bytes each.

    Attributes:
        split: uint16 [n], an index into `splits`.
        record: int64 [n], the record's number in its split.
        mean, spread: float32 [n], mean and standard deviation of the grey picture, 0 to 255.
        one_colour: float32 [n], the largest share of pixels in one of 512 colours, 0 to 1.
        sharpness: float32 [n], variance of the Laplacian divided by that of the grey picture.
        hash, mirrored: uint64 [n], perceptual hash of the picture and of its mirror image: similar pictures have
            similar bits. The higher 32 bits of both are the same.
        splits: their names.
    """

    split: npt.NDArray[np.uint16]
    record: npt.NDArray[np.int64]
    mean: npt.NDArray[np.float32]
    spread: npt.NDArray[np.float32]
    one_colour: npt.NDArray[np.float32]
    sharpness: npt.NDArray[np.float32]
    hash: npt.NDArray[np.uint64]
    mirrored: npt.NDArray[np.uint64]
    splits: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.record)

    def suspicious(self) -> dict[str, Suspects]:
        """What is far from this dataset's usual pictures, for each reason: dark, bright, flat, blurred, one_colour.

        Thresholds follow from the quartiles of the dataset itself, so pictures of stars aren't dark among pictures of
        stars. What is flat is not blurred as well.
        """
        found = {reason: self._beyond(fence) for reason, fence in FENCES.items()}
        blurred, plain = found["blurred"], np.concatenate([found["flat"].rows, found["one_colour"].rows])
        kept = ~np.isin(blurred.rows, plain)
        found["blurred"] = blurred._replace(rows=blurred.rows[kept], values=blurred.values[kept])
        return found

    def _beyond(self, fence: _Fence) -> Suspects:
        values = getattr(self, fence.column)
        if not len(values):
            return Suspects(np.empty(0, np.int64), np.empty(0), fence.never)
        low, high = fence.on_scale(np.quantile(values, [0.25, 0.75]))
        step = fence.quartile_ranges * max(high - low, _LEAST_RANGE)
        edge = fence.from_scale(low - step if fence.is_low else high + step)
        threshold = min(edge, fence.never) if fence.is_low else max(edge, fence.never)
        rows = np.flatnonzero(values < threshold if fence.is_low else values > threshold)
        rows = rows[np.argsort(values[rows] if fence.is_low else -values[rows], kind="stable")]
        return Suspects(rows, values[rows].astype(np.float64), threshold)

    def rows(self) -> Iterator[dict[str, Any]]:
        """A dict per record, for JSON; hashes in hexadecimal."""
        columns = [name for name in self.__slots__ if name != "splits"]
        for values in zip(*(getattr(self, name) for name in columns), strict=True):
            row = dict(zip(columns, (value.item() for value in values), strict=True))
            row |= {"split": self.splits[row["split"]]} | {name: f"{row[name]:016x}" for name in ("hash", "mirrored")}
            yield row


def statistics(dataset: DatasetInfo | str | os.PathLike[str]) -> Pictures:
    """Read every record once, on all cores, and say what its picture is like.

    Args:
        dataset: what `load_info` returned, or the URL.

    Raises:
        CorruptRecordError: a record is corrupt; names file, record and byte offset.
        ImageShardsError: the version is compressed.
    """
    info = load_info(dataset)
    names, channels = with_records(info), info.image.channels
    counts = [info.records(name) for name in names]
    found = np.zeros(sum(counts), _ROW)

    def measure(number: int, encoded: memoryview) -> None:
        found[number] = measured(_decoded(encoded, channels))

    deque(read_images(info, info.run_table("+".join(names)), measure) if names else (), 0)
    columns: dict[str, Any] = {name: np.ascontiguousarray(found[name]) for name in _ROW.names or ()}
    number = np.concatenate([np.arange(count) for count in counts] or [np.empty(0, np.int64)])
    return Pictures(np.repeat(np.arange(len(names), dtype=np.uint16), counts), number, **columns, splits=tuple(names))


def _decoded(encoded: memoryview, channels: int) -> Pixels:
    """Pixels of a picture, smaller ones of a large one."""
    height, width, _ = stored_shape(encoded, channels)
    if max(height, width) <= _MAX_SIDE:
        return decode_pixels(encoded, channels)
    scale = next((scale for scale in (8, 4, 2) if min(height, width) >= scale * _MIN_SIDE), 1)
    return decode_pixels(
        encoded, channels, np.empty((-(-height // scale), -(-width // scale), channels), np.uint8), True, scale
    )


def measured(pixels: Pixels) -> tuple[float, float, float, float, int, int]:
    """Mean, spread, share of one colour, sharpness, hash and hash of the mirror image of uint8 [h, w, c]."""
    grey = _grey(pixels)
    code = ((pixels[::2] >> 5) @ _COLOURS[-pixels.shape[2] :]).astype(np.int64)  # of every second row
    share = np.bincount(code.ravel()).max() / code.size
    mean, variance = _moments(grey)
    edges = 4 * grey[1:-1, 1:-1]
    for neighbour in (grey[:-2, 1:-1], grey[2:, 1:-1], grey[1:-1, :-2], grey[1:-1, 2:]):
        edges -= neighbour
    sharpness = _moments(edges)[1] / (variance + 1) if edges.size else 0.0
    waves = _EVEN_FIRST @ small(grey).T @ _COSINES.T
    even = waves[: _WAVES // 2]
    even -= np.sort(even.ravel()[1:])[even.size // 2 - 1]  # the median of all but brightness
    return mean, variance**0.5, float(share), sharpness, _hash(waves), _hash(waves * _MIRROR)


def _moments(plane: npt.NDArray[np.float32]) -> tuple[float, float]:
    """Mean and variance; a fourth of the time of NumPy's own on small pictures."""
    mean = float(np.add.reduce(plane, None)) / plane.size
    return mean, max(0.0, float(np.einsum("ij,ij", plane, plane)) / plane.size - mean**2)


def small(plane: npt.NDArray[np.float32], side: int = GRID) -> npt.NDArray[np.float32]:
    """A plane of a picture as float32 [side, side], means of its parts."""
    return np.asarray(Image.fromarray(plane).resize((side, side), Image.Resampling.BOX), np.float32)


def look_of(encoded: memoryview, channels: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The picture of a record: grey, float32 [32, 32], and how red and blue it is, float32 [2, 4, 4], 0 for grey."""
    pixels = _decoded(encoded, channels)
    if channels == 1:
        return small(_grey(pixels)), np.zeros((2, TINT_GRID, TINT_GRID), np.float32)
    red, green, blue = np.moveaxis(pixels.astype(np.float32), 2, 0)
    return small(_grey(pixels)), np.stack([small(colour - green, TINT_GRID) for colour in (red, blue)])


def _grey(pixels: Pixels) -> npt.NDArray[np.float32]:
    return pixels[..., 0].astype(np.float32) if pixels.shape[2] == 1 else pixels @ _LUMA


def _hash(waves: Floats) -> int:
    """Which waves are positive: 64 bits, first those that are the same in a mirror."""
    return int.from_bytes(np.packbits(waves > _ROUNDING).tobytes())
