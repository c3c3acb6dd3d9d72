"""`--stratify`: exact shares within each class, by the rank of an image's split hash among those of its class."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from beam_pipeline.config import Config
from beam_pipeline.inputs.references import KEY_BITS, ImageRef, split_hasher

Hashes: TypeAlias = "array[int]"  # 8 bytes an image
Limits = tuple[int, ...]


def class_hashes(refs: Iterable[ImageRef], config: Config) -> dict[str, Hashes]:
    """Class → split hashes of its images."""
    hash_of = split_hasher(config)
    hashes: dict[str, Hashes] = {}
    for ref in refs:
        hashes.setdefault(ref.label, array("Q")).append(hash_of(ref.path))
    return hashes


def limits(hashes: Hashes, config: Config) -> Limits:
    """For each split the first split hash behind it, in one class: its images are cut at the exact ranks.

    The first k splits together get their share of the n images, rounded: one image more moves each cut by at most one
    image. Equal hashes, of two spellings of one name, are not cut apart.
    """
    ranked = np.sort(np.frombuffer(hashes, np.uint64))
    shares = accumulate((config.split_fractions or {}).values())
    ends = [math.floor(len(ranked) * share + Fraction(1, 2)) for share in shares]
    return tuple(int(ranked[end]) if end < len(ranked) else 1 << KEY_BITS for end in ends)


def split_stratified(refs: Iterable[ImageRef], limits_of: Mapping[str, Limits], config: Config) -> Iterator[ImageRef]:
    """The references with their splits, by the limits of each class."""
    hash_of, names = split_hasher(config), tuple(config.split_fractions or {})
    for ref in refs:
        # A class that isn't among them was added between two listings, which differ then whatever its split is.
        yield ref._replace(split=names[bisect_right(limits_of.get(ref.label, ()), hash_of(ref.path))])
