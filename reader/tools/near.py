"""Near-duplicates: which pictures of a dataset look the same, whatever their size, quality, brightness or side.

Hashes of all pairs are compared, exactly: 64 bits, at most 8 of which differ. What is found gets a second look at the
pictures themselves, since chance pairs grow with the square of the records (about 2e-7 of all pairs).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from beam_pipeline.errors import ImageShardsError
from beam_pipeline.machine import cpu_count
from reader.info import DatasetInfo
from reader.runs import Integers
from reader.tools.pictures import GRID, TINT_GRID, Floats, Pictures, look_of
from reader.tools.read import checked_table, read_images

_MAX_BITS = 8  # that differ: of photos a 5 % crop is still found in 0.92 of cases (docs/decisions/021)
_MIN_CORRELATION = 0.88  # of 32 x 32 grey pictures: of copies at least 0.89, of other photos at most 0.87
# What one picture of a pair may lack: a part of height and width; how much of that at the top, and on the left.
_CROPS = [(0.1, 0.5, 0.5), *((0.05, top, left) for top in (0.0, 0.5, 1.0) for left in (0.0, 0.5, 1.0))]
_FLAT = 4.0  # standard deviation below which a picture is of one brightness, and correlations mean nothing
_MIN_TINT, _GREYISH = 0.7, 12.0  # cosine of the colours of pictures that have any; their mean strength, of 255
_PER_HASH = 16  # pictures with the same hash that are compared with all others
_ROWS = 512  # of a task
_TILE = 32, 4096  # hashes compared at once, in memory that a cache holds
_MAX_PAIRS = 10_000_000  # that get a second look
_LOOKS_AT_ONCE = 20_000  # pairs; their pictures take up to 40 MB


class Pairs(NamedTuple):
    """Rows of `Pictures` whose hashes are near, the first below the second.

    Attributes:
        first, second: int64 [n].
        is_mirrored: bool [n], whether one is near the mirror image of the other.
    """

    first: Integers
    second: Integers
    is_mirrored: npt.NDArray[np.bool_]


def near_groups(info: DatasetInfo, found: Pictures) -> tuple[Integers, Integers, int]:
    """The records that look like another one: rows of `Pictures`, group after group; where each begins, and the end.

    The last value is how many pairs got a second look.

    Groups are in order of their first row, rows ascend within a group. A picture is in the group of each that it looks
    like, so two of a large group may be less alike.

    Args:
        found: statistics of all splits.

    Raises:
        ImageShardsError: ten million pairs are near: nearly all pictures look the same.
    """
    pairs = near_pairs(found)
    is_alike = np.concatenate([*second_looks(info, found.splits, pairs), np.empty(0, np.bool_)])
    root = _joined(len(found), pairs.first[is_alike], pairs.second[is_alike])
    sizes = np.bincount(root, minlength=len(root))
    rows = np.flatnonzero(sizes[root] > 1)
    rows = rows[np.argsort(root[rows], kind="stable")]  # a group's root is its first row
    return rows, np.append(np.flatnonzero(np.diff(root[rows], prepend=-1)), len(rows)), len(pairs.first)


def near_pairs(found: Pictures) -> Pairs:
    """All pairs of rows of which at most 8 bits differ, by brute force, but for those of one hash.

    Of these, copies (no number differs) are paired with each other, one after the other; 16 that differ with all
    rows; each further one with the first, and with the one whose numbers come next, so that many placeholders don't
    make their square of pairs.
    """
    numbers: list[npt.NDArray[Any]] = [found.sharpness, found.one_colour, found.spread, found.mean, found.hash]
    order = np.lexsort(numbers)
    is_other, is_head = np.ones((2, len(order)), np.bool_)
    is_head[1:] = np.diff(found.hash[order]) != 0
    is_other[1:] = np.any([np.diff(column[order]) != 0 for column in numbers], axis=0)
    head = np.maximum.accumulate(np.where(is_head, np.arange(len(order)), 0))
    others = np.cumsum(is_other)
    is_further = is_other & (others - others[head] >= _PER_HASH)
    again, further = np.flatnonzero(~is_other | is_further), np.flatnonzero(is_further)
    ends = np.concatenate([order[again - 1], order[head[further]]]), np.concatenate([order[again], order[further]])
    rows = np.sort(order[is_other & ~is_further])
    parts, count = [(np.minimum(*ends), np.maximum(*ends), np.zeros(len(ends[0]), np.bool_))], len(ends[0])
    one, other = found.hash[rows], found.mirrored[rows]
    with ThreadPoolExecutor(cpu_count(), "reader-near") as pool:
        for a, b, is_mirrored in pool.map(lambda start: _near(one, other, start), range(0, len(one), _ROWS)):
            parts.append((rows[a], rows[b], is_mirrored))
            if (count := count + len(a)) > _MAX_PAIRS:
                raise ImageShardsError(
                    f"over {_MAX_PAIRS:,} pairs of pictures are near, so nearly all look the same; "
                    "leave exact copies out first (duplicates without --near)"
                )
    return Pairs(*map(np.concatenate, zip(*parts, strict=True)))


def _near(
    hashes: npt.NDArray[np.uint64], mirrored: npt.NDArray[np.uint64], start: int
) -> tuple[Integers, Integers, npt.NDArray[np.bool_]]:
    """Near pairs of some rows with all later ones: of nearly symmetric pictures both ways, since one may be alike.

    Half of the bits are the same in a mirror: where more than 8 of these differ, the others needn't be compared.
    """
    found = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))]
    half, stop = (hashes[start:] >> np.uint64(32)).astype(np.uint32), min(_ROWS, len(hashes) - start)
    differs, bits, is_near = (np.empty(_TILE[0] * _TILE[1], kind) for kind in (np.uint32, np.uint8, np.bool_))
    for row in range(0, stop, _TILE[0]):
        rows = half[row : min(row + _TILE[0], stop), None]
        for column in range(row, len(half), _TILE[1]):
            columns = half[None, column : column + _TILE[1]]
            size = rows.size * columns.size
            np.bitwise_xor(rows, columns, out=differs[:size].reshape(rows.size, columns.size))
            np.bitwise_count(differs[:size], out=bits[:size])
            np.less_equal(bits[:size], _MAX_BITS, out=is_near[:size])
            a, b = np.divmod(np.flatnonzero(is_near[:size]), columns.size)
            a, b = a + (start + row), b + (start + column)
            for some, is_mirrored in ((hashes, False), (mirrored, True)):
                both = np.flatnonzero((np.bitwise_count(some[a] ^ hashes[b]) <= _MAX_BITS) & (b > a))
                if len(both):
                    found.append((a[both], b[both], np.full(len(both), is_mirrored)))
    first, second, ways = map(np.concatenate, zip(*found, strict=True))
    return first, second, ways


def second_looks(info: DatasetInfo, splits: Sequence[str], pairs: Pairs) -> Iterator[npt.NDArray[np.bool_]]:
    """Whether the pictures of each pair are alike; each is read again, by its range."""
    channels, split = info.image.channels, "+".join(splits)
    for start in range(0, len(pairs.first), _LOOKS_AT_ONCE):
        some = slice(start, start + _LOOKS_AT_ONCE)
        first, second, is_mirrored = pairs.first[some], pairs.second[some], pairs.is_mirrored[some]
        rows = np.unique(np.concatenate([first, second]))
        small, tints = np.empty((len(rows), GRID, GRID), np.uint8), np.empty((len(rows), 2, TINT_GRID, TINT_GRID), "f4")

        def look(number: int, encoded: memoryview, small: Any = small, tints: Any = tints) -> None:
            small[number], tints[number] = look_of(encoded, channels)

        deque(read_images(info, checked_table(info, split, rows), look), 0)
        one, other = (np.searchsorted(rows, part) for part in (first, second))
        for piece in np.array_split(np.arange(len(one)), len(one) // 1024 + 1):
            a, b, mirrored = one[piece], other[piece], is_mirrored[piece]
            is_flat = _are_flat(small[a], small[b])
            yield _alike(small[a], small[b], mirrored) & _of_one_colour(tints[a], tints[b], mirrored, is_flat)


def _alike(
    one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8], is_mirrored: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """bool [n] of uint8 [n, 32, 32]: whether pictures correlate; those without contrast, whether they are as bright.

    One of them may be a part of the other: `_CROPS`.
    """
    a: Floats = one.astype(np.float32)
    b: Floats = np.where(is_mirrored[:, None, None], other[:, :, ::-1], other).astype(np.float32)
    correlation = _correlation(a, b)
    for part, top, left in _CROPS:
        rows, columns = _zoom(part, top), _zoom(part, left).T
        correlation = np.maximum(correlation, _correlation(rows @ a @ columns, b))
        correlation = np.maximum(correlation, _correlation(a, rows @ b @ columns))
    is_as_bright = np.abs(a.mean((1, 2)) - b.mean((1, 2))) < 2 * _FLAT
    is_alike: npt.NDArray[np.bool_] = np.where(_are_flat(one, other), is_as_bright, correlation >= _MIN_CORRELATION)
    return is_alike


def _are_flat(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """bool [n] of uint8 [n, 32, 32]: whether neither picture has contrast."""
    are_flat: npt.NDArray[np.bool_] = np.maximum(one.std((1, 2)), other.std((1, 2))) < _FLAT
    return are_flat


def _of_one_colour(
    one: Floats, other: Floats, is_mirrored: npt.NDArray[np.bool_], is_flat: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """bool [n] of float32 [n, 2, 4, 4]: whether the tints are alike; a copy that is nearly grey has none.

    Of pictures without contrast there is nothing else to tell them by, so those have the same.
    """
    other = np.where(is_mirrored[:, None, None, None], other[..., ::-1], other)
    a, b = (tint.reshape(len(tint), -1) for tint in (one, other))
    strength = [np.sqrt((tint**2).mean(1)) for tint in (a, b)]
    is_alike: npt.NDArray[np.bool_] = (a * b).mean(1) >= _MIN_TINT * strength[0] * strength[1]
    is_alike |= np.minimum(*strength) < _GREYISH
    is_alike &= ~is_flat | (np.sqrt(((a - b) ** 2).mean(1)) < 2 * _FLAT)
    return is_alike


def _zoom(part: float, before: float) -> Floats:
    """float32 [32, 32] that enlarges pixels, but for a part of which `before` is before them, linearly."""
    at = np.clip((np.arange(GRID) + 0.5) * (1 - part) + GRID * part * before - 0.5, 0, GRID - 1)
    zoom: Floats = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(GRID)), dtype=np.float32)
    return zoom


def _correlation(one: Floats, other: Floats) -> Floats:
    """float32 [n] of float32 [n, 32, 32]."""
    a, b = (part - part.mean((1, 2), keepdims=True) for part in (one, other))
    found: Floats = (a * b).mean((1, 2)) / np.maximum(a.std((1, 2)) * b.std((1, 2)), 1e-6)
    return found


def _joined(total: int, first: Integers, second: Integers) -> Integers:
    """int64 [total]: the first row of each row's group."""
    root = np.arange(total)
    while (root[first] != root[second]).any():
        one, other = root[first], root[second]
        low = np.minimum(one, other)
        np.minimum.at(root, one, low)
        np.minimum.at(root, other, low)
        while (root != root[root]).any():
            root = root[root]
    return root
