"""Which split and which shard an image belongs to: pure integer arithmetic over references, the same on any machine.

An image's place depends on its relative path, the seed and the plan's cuts; the cuts depend only on the set of images,
in whatever order they come. Nothing here knows Beam, storage or codecs.
"""

from __future__ import annotations

import hashlib
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

from beam_pipeline.schema import relative_path_bytes

KEY_BITS = 64
# Fine enough that 10,000 shards cut 6.6 bins each, interpolated to ±1.1 % (benchmarks/plan.py); small enough that an
# accumulator pickles to well under 1 MB.
BIN_BITS = 16
# Up to here every key is a bin of its own: cuts fall exactly between images.
LARGEST_SAMPLE = 512
EXACT_IMAGES = 1 << BIN_BITS

_SPLIT_SALT = b"imageshards split"  # part of the format: changing it moves images between splits
_SUM_MODULUS = 1 << 128


class ImageRef(NamedTuple):
    """One listed image: what is shuffled instead of its pixels.

    Attributes:
        path: relative to the input, `/` separators, as listed; the full URL for a manifest's row outside the input.
        source_bytes: size of the source file.
        etag: `ListedFile.etag`, or "".
        label: class name.
        split: `train`, `validation`, …
        order_key: 64-bit place in the global order; ties go by `path`.
        features: serialized `tf.train.Feature`s of a manifest's columns, in the order of their names.
        duplicate_of: path of the image with the same bytes that gets the record, with `--duplicates drop`; else b"".
    """

    path: str
    source_bytes: int
    etag: str
    label: str
    split: str
    order_key: int
    features: tuple[bytes, ...] = ()
    duplicate_of: bytes = b""


def hash_text(path: str) -> bytes:
    """What of a relative path is hashed: UTF-8 of its NFC form, so that both normal forms of a name agree."""
    return relative_path_bytes(path if path.isascii() else unicodedata.normalize("NFC", path))


def order_key(path: str, seed: int) -> int:
    """64-bit key of an image's place in the order: BLAKE2b of its path keyed by the seed."""
    return int.from_bytes(hashlib.blake2b(hash_text(path), digest_size=8, key=str(seed).encode()).digest(), "big")


class Splits:
    """Deals images to splits by a hash of their path that no seed, version or other image has part in.

    Args:
        fractions: split name → share; they sum to 1. Shares are dealt in this order.
    """

    def __init__(self, fractions: Mapping[str, Fraction]) -> None:
        self._names = tuple(fractions)
        total = Fraction(0)
        self._limits = []
        for fraction in fractions.values():
            total += fraction
            self._limits.append(int(total * (1 << KEY_BITS)))

    def of(self, group: str) -> str:
        """The split of all images with this path, or with this `--split_by` group."""
        digest = hashlib.blake2b(hash_text(group), digest_size=8, key=_SPLIT_SALT).digest()
        return self._names[bisect_right(self._limits, int.from_bytes(digest, "big"))]


class ReferenceSum:
    """Count and order-free sum (mod 2^128) of hashes: equal for equal sets of images, in whatever order they come."""

    __slots__ = ("count", "total")

    def __init__(self, count: int = 0, total: int = 0) -> None:
        self.count = count
        self.total = total

    def add(self, fields: Iterable[bytes]) -> None:
        """Add one image, told by these fields."""
        digest = hashlib.blake2b(digest_size=16)
        for field in fields:
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
        self.count += 1
        self.total = (self.total + int.from_bytes(digest.digest(), "big")) % _SUM_MODULUS

    def merge(self, other: ReferenceSum) -> None:
        """Add all images of `other`."""
        self.count += other.count
        self.total = (self.total + other.total) % _SUM_MODULUS

    @property
    def hex(self) -> str:
        """The sum as 32 hexadecimal digits."""
        return f"{self.total:032x}"

    def __str__(self) -> str:
        return f"{self.count}-{self.hex}"


def listing_fields(ref: ImageRef) -> list[bytes]:
    """What the listing fingerprint sees of an image: nothing that differs from one storage to another."""
    fields = [
        relative_path_bytes(ref.path),
        str(ref.source_bytes).encode(),
        relative_path_bytes(ref.label),
        ref.split.encode(),
    ]
    return [*fields, *ref.features]


def reference_fields(ref: ImageRef) -> list[bytes]:
    """What tells a touched image from one as it was, within one storage: etag or mtime, and all else of a listing."""
    return [*listing_fields(ref), ref.etag.encode()]


def content_fields(ref: ImageRef, md5: bytes) -> list[bytes]:
    """What the content fingerprint sees of an image; `md5` is b"" for one that could not be read."""
    return [relative_path_bytes(ref.path), md5, relative_path_bytes(ref.label), ref.split.encode(), *ref.features]


class SizeModel(NamedTuple):
    """Bytes of a record before it is encoded, learned from a sample, in integers.

    Attributes:
        measured: path → record bytes, of every sampled image.
        mean_of_class: source-size class → mean record bytes of its sampled images.
    """

    measured: Mapping[str, int]
    mean_of_class: Mapping[int, int]

    @classmethod
    def learn(cls, sample: Iterable[tuple[str, int, int]]) -> SizeModel:
        """From (path, source bytes, record bytes; 0 for a reject), in any order."""
        measured: dict[str, int] = {}
        sums: dict[int, tuple[int, int]] = {}
        for path, source_bytes, record_bytes in sample:
            measured[path] = record_bytes
            size_class = source_bytes.bit_length()
            count, total = sums.get(size_class, (0, 0))
            sums[size_class] = (count + 1, total + record_bytes)
        return cls(measured, {size_class: total // count for size_class, (count, total) in sums.items()})

    def estimate(self, path: str, source_bytes: int) -> int:
        """Bytes of the record of one image, at least 1."""
        known = self.measured.get(path)
        if known is None:
            size_class = source_bytes.bit_length()
            nearest = min(self.mean_of_class, key=lambda other: (abs(other - size_class), other), default=None)
            known = 0 if nearest is None else self.mean_of_class[nearest]
        return max(1, known)


def sample_size(images: int) -> int:
    """How many images are measured before the plan: all of a small input, 2 % up to 512 of a larger one."""
    return images if images <= LARGEST_SAMPLE else max(64, min(LARGEST_SAMPLE, images // 50))


class Histogram:
    """Sparse bins of (images, estimated bytes) over the order keys of one split.

    Args:
        shift: a key's bin is `key >> shift`.
    """

    __slots__ = ("bins", "shift")

    def __init__(self, shift: int) -> None:
        self.shift = shift
        self.bins: dict[int, tuple[int, int]] = {}

    @staticmethod
    def shift_for(images: int) -> int:
        """Bits to drop from a key when the whole input has this many images."""
        return 0 if images <= EXACT_IMAGES else KEY_BITS - BIN_BITS

    def add(self, key: int, estimated_bytes: int) -> None:
        """Count one image."""
        place = key >> self.shift
        count, total = self.bins.get(place, (0, 0))
        self.bins[place] = (count + 1, total + estimated_bytes)

    def merge(self, other: Histogram) -> None:
        """Count all images of `other`, which has the same shift."""
        for place, (count, total) in other.bins.items():
            mine = self.bins.get(place, (0, 0))
            self.bins[place] = (mine[0] + count, mine[1] + total)


class SplitPlan(NamedTuple):
    """The shards of one split.

    Attributes:
        images: how many are listed.
        estimated_bytes: of all its shards.
        cuts: first order key of every shard but the first, strictly increasing.
    """

    images: int
    estimated_bytes: int
    cuts: tuple[int, ...]

    @property
    def shards(self) -> int:
        """How many shards it has."""
        return len(self.cuts) + 1

    def shard_of(self, key: int) -> int:
        """Number of the shard that holds an order key."""
        return bisect_right(self.cuts, key)


DEFAULT_SHARD_BYTES = 128 << 20
DEFAULT_LEAST_SHARDS = 16
DEFAULT_LEAST_SHARD_BYTES = 8 << 20


def shard_count(total_bytes: int, target_bytes: int | None) -> int:
    """How many shards a split of `total_bytes` gets.

    Args:
        total_bytes: estimated, of the split.
        target_bytes: `--target_shard_bytes`; None for the default, which also keeps enough files to read in parallel:
            at least 16 shards while each keeps 8 MiB.
    """
    if target_bytes is not None:
        return max(1, _rounded(total_bytes, target_bytes))
    enough_files = min(DEFAULT_LEAST_SHARDS, total_bytes // DEFAULT_LEAST_SHARD_BYTES)
    return max(1, _rounded(total_bytes, DEFAULT_SHARD_BYTES), enough_files)


def _rounded(dividend: int, divisor: int) -> int:
    return (2 * dividend + divisor) // (2 * divisor)


def plan_split(histogram: Histogram, shards: int) -> SplitPlan:
    """Cut one split into shards of equal estimated bytes, none of them empty.

    A cut inside a bin is interpolated. Every shard keeps at least one whole bin that holds an image, so that it can't
    come out empty wherever in their bins the images lie; fewer shards are made where there are fewer such bins.

    Args:
        histogram: of the split, at least one image.
        shards: how many are wanted, at least 1.
    """
    places = sorted(histogram.bins)
    counts = [histogram.bins[place] for place in places]
    before = [0]
    for _, estimated in counts:
        before.append(before[-1] + estimated)
    total, shards = before[-1], min(shards, len(places))
    cuts: list[int] = []
    whole = 0  # bins that lie before the last cut, a part of one counted as one
    for cut in range(1, shards):
        first, last = whole + 1, len(places) - (shards - cut)
        wanted = total * cut // shards
        position = bisect_right(before, wanted) - 1
        part = _part_of_bin(wanted - before[position], counts[position][1], histogram.shift) if position < last else 0
        if position < first:
            position, part = first, 0
        elif position >= last:
            position, part = last, 0
        width = 1 << histogram.shift
        if part == width:
            position, part = position + 1, 0
        cuts.append((places[position] << histogram.shift) + part)
        whole = position + (part > 0)
    images = sum(count for count, _ in counts)
    return SplitPlan(images, total, tuple(cuts))


def _part_of_bin(wanted: int, estimated: int, shift: int) -> int:
    """How many keys of a bin lie before the cut that should have `wanted` of its bytes before it."""
    if shift == 0:
        return 1 if 2 * wanted > estimated else 0  # one image: before or after it, whichever is nearer
    return (wanted << shift) // max(1, estimated)
