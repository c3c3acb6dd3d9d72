"""Which shard each image goes to, and all else that decides the bytes of shards, known before the first is written.

Pure integer arithmetic: the same on any machine and for images in any order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.images import codec_versions
from beam_pipeline.inputs.folders import ListingSummary
from beam_pipeline.inputs.references import KEY_BITS, ImageRef
from beam_pipeline.planning import sampling
from beam_pipeline.schema.job import Plan
from beam_pipeline.schema.manifest import PlannedSplit

# Fine enough that 10,000 shards cut 6.6 bins each, interpolated to ±1.1 % (benchmarks/scale_write.py); small enough
# that an accumulator pickles to well under 1 MB.
BIN_BITS = 16
EXACT_IMAGES = 1 << BIN_BITS
DEFAULT_SHARD_BYTES = 128 << 20
DEFAULT_MIN_SHARDS = 16
DEFAULT_MIN_SHARD_BYTES = 8 << 20


class SizeModel(NamedTuple):
    """Estimates the bytes of records from a sample, in integers.

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
        """Bits to drop from a key when the input has this many images."""
        return 0 if images <= EXACT_IMAGES else KEY_BITS - BIN_BITS

    @property
    def total_bytes(self) -> int:
        """Estimated bytes of all images."""
        return sum(estimated for _, estimated in self.bins.values())

    def add(self, key: int, estimated_bytes: int, images: int = 1) -> None:
        """Count images with this order key, or with one of the same bin."""
        count, total = self.bins.get(key >> self.shift, (0, 0))
        self.bins[key >> self.shift] = (count + images, total + estimated_bytes)

    def merge(self, other: Histogram) -> None:
        """Count all images of `other`, which has the same shift."""
        for number, (images, estimated) in other.bins.items():
            self.add(number << self.shift, estimated, images)


class EstimatedSizes:
    """Estimated record bytes of listed images, by split and order key.

    Attributes:
        histograms: by split.
    """

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}

    def add(self, refs: Iterable[ImageRef], sizes: SizeModel, images_listed: int) -> None:
        """Count some images of an input of `images_listed`."""
        shift = Histogram.shift_for(images_listed)
        for ref in refs:
            histogram = self.histograms.setdefault(ref.split, Histogram(shift))
            histogram.add(ref.order_key, sizes.estimate(ref.path, ref.source_bytes))

    def merge(self, other: EstimatedSizes) -> None:
        """Count all images of `other`."""
        for split, histogram in other.histograms.items():
            self.histograms.setdefault(split, Histogram(histogram.shift)).merge(histogram)


def plan_job(
    sizes: EstimatedSizes, config: Config, summary: ListingSummary, sample: Sequence[sampling.Measurement]
) -> Plan:
    """Cut every split into shards.

    Raises:
        ImageShardsError: no image is in split train.
    """
    if "train" not in sizes.histograms:
        names = ", ".join(sorted(sizes.histograms))
        raise ImageShardsError(f"no image is in split 'train' (found {names}): see --splits and --layout")
    splits = {
        split: plan_split(histogram, shards_of(config, split, histogram.total_bytes))
        for split, histogram in sorted(sizes.histograms.items())
    }
    return Plan(
        configuration=config.fingerprint(),
        classes=summary.classes,
        features=config.columns,
        splits=splits,
        statistics=sampling.statistics(sample),
        inputs=str(summary.references),
        codec=codec_versions(),
    )


def shards_of(config: Config, split: str, total_bytes: int) -> int:
    """How many shards per split of `total_bytes` should have, by the flags.

    By default at least 16 while each keeps 8 MiB: enough files to read in parallel.
    """
    wanted = config.num_shards
    if isinstance(wanted, dict):
        wanted = wanted.get(split)
    if wanted is not None:
        return wanted
    if config.target_shard_bytes is not None:
        return max(1, _round_div(total_bytes, config.target_shard_bytes))
    enough_files = min(DEFAULT_MIN_SHARDS, total_bytes // DEFAULT_MIN_SHARD_BYTES)
    return max(1, _round_div(total_bytes, DEFAULT_SHARD_BYTES), enough_files)


def _round_div(dividend: int, divisor: int) -> int:
    return (2 * dividend + divisor) // (2 * divisor)


def plan_split(histogram: Histogram, shards: int) -> PlannedSplit:
    """Cut one split into shards of equal estimated bytes, none of them empty.

    A cut inside a bin is interpolated. Every shard keeps at least one complete bin that holds an image, so that it
    isn't empty wherever in their bins the images are; if there are fewer such bins, fewer shards are made.

    Args:
        histogram: of the split, at least one image.
        shards: how many are wanted, at least 1.
    """
    numbers = sorted(histogram.bins)
    counts = [histogram.bins[number] for number in numbers]
    before = [0]
    for _, estimated in counts:
        before.append(before[-1] + estimated)
    total, shards = before[-1], min(shards, len(numbers))
    cuts: list[int] = []
    used = 0  # bins before the last cut, one that is cut counted as one
    for cut in range(1, shards):
        first, last = used + 1, len(numbers) - (shards - cut)
        wanted = total * cut // shards
        position = bisect_right(before, wanted) - 1
        part = _part_of_bin(wanted - before[position], counts[position][1], histogram.shift) if position < last else 0
        if not first <= position < last:
            position, part = min(max(position, first), last), 0
        if part == 1 << histogram.shift:
            position, part = position + 1, 0
        cuts.append((numbers[position] << histogram.shift) + part)
        used = position + (part > 0)
    return PlannedSplit(sum(count for count, _ in counts), total, tuple(map(str, cuts)))


def _part_of_bin(wanted: int, estimated: int, shift: int) -> int:
    """How many keys of a bin come before the cut that should have `wanted` of its bytes before it."""
    if shift == 0:
        return 1 if 2 * wanted > estimated else 0  # one image: before or after it, whichever is nearer
    return (wanted << shift) // max(1, estimated)
