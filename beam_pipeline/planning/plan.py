"""Everything that decides the bytes of every shard, known before the first is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from beam_pipeline import images
from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.inputs.folders import ListingSummary
from beam_pipeline.inputs.references import ImageRef, ReferenceSum
from beam_pipeline.planning import sampling
from beam_pipeline.planning.cuts import Histogram, SizeModel, SplitPlan, plan_split, shard_count
from beam_pipeline.schema import canonical_json, relative_path_bytes, sha256


@dataclass(frozen=True)
class JobPlan:
    """The plan of one job: what plan.json holds.

    Attributes:
        configuration: `Config.fingerprint()`.
        classes: class names by id.
        columns: a manifest's features: name, dtype, list.
        splits: split → its shards.
        statistics: channel mean and standard deviation of the sample, how many images it had.
        references: order-free sums over every listed image, etags included, and over the duplicates that are dropped.
        codec: versions of the image libraries.
    """

    configuration: dict[str, Any]
    classes: tuple[str, ...]
    columns: tuple[dict[str, Any], ...]
    splits: dict[str, SplitPlan]
    statistics: dict[str, Any]
    references: str
    codec: dict[str, str]

    def document(self) -> dict[str, Any]:
        """The plan as `plan.json` holds it."""
        return {
            "configuration": self.configuration,
            "classes": self.classes,
            "features": self.columns,
            "splits": split_documents(self.splits),
            "statistics": self.statistics,
            "references": self.references,
            "codec": self.codec,
        }

    @property
    def images(self) -> int:
        """Number of listed images."""
        return sum(split.images for split in self.splits.values())

    @property
    def shards(self) -> int:
        """Number of shards of all splits."""
        return sum(split.shards for split in self.splits.values())

    @cached_property
    def sha256(self) -> str:
        """Its hash, which sidecars carry."""
        return sha256(canonical_json(self.document()))


def split_documents(splits: dict[str, SplitPlan]) -> dict[str, Any]:
    """Cuts as JSON; 64-bit keys as decimal strings."""
    return {
        split: {"images": plan.images, "estimated_bytes": plan.estimated_bytes, "cuts": [str(cut) for cut in plan.cuts]}
        for split, plan in splits.items()
    }


def split_plans(documents: dict[str, Any]) -> dict[str, SplitPlan]:
    """The inverse of `split_documents`."""
    return {
        split: SplitPlan(plan["images"], plan["estimated_bytes"], tuple(int(cut) for cut in plan["cuts"]))
        for split, plan in documents.items()
    }


class EstimatedSizes:
    """Estimated record bytes of listed images, by split and order key.

    Attributes:
        histograms: by split.
        dropped: sum over the duplicates that are dropped: they have an order key, but no record.
    """

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self.dropped = ReferenceSum()

    def add(self, refs: Iterable[ImageRef], sizes: SizeModel, images_listed: int) -> None:
        """Count some images of an input of `images_listed`."""
        shift = Histogram.shift_for(images_listed)
        for ref in refs:
            histogram = self.histograms.setdefault(ref.split, Histogram(shift))
            if ref.duplicate_of:
                histogram.add(ref.order_key, 1)
                self.dropped.add((relative_path_bytes(ref.path), ref.duplicate_of))
            else:
                histogram.add(ref.order_key, sizes.estimate(ref.path, ref.source_bytes))

    def merge(self, other: EstimatedSizes) -> None:
        """Count all images of `other`."""
        for split, histogram in other.histograms.items():
            self.histograms.setdefault(split, Histogram(histogram.shift)).merge(histogram)
        self.dropped.merge(other.dropped)


def plan_job(
    sizes: EstimatedSizes, config: Config, summary: ListingSummary, sample: Sequence[sampling.Measurement]
) -> JobPlan:
    """Cut every split into shards.

    Raises:
        ImageShardsError: no image is in split train.
    """
    if "train" not in sizes.histograms:
        found = ", ".join(sorted(sizes.histograms))
        raise ImageShardsError(f"no image is in split 'train' (found {found}): see --splits and --layout")
    splits = {
        split: plan_split(histogram, wanted_shards(config, split, histogram.total_bytes))
        for split, histogram in sorted(sizes.histograms.items())
    }
    return JobPlan(
        configuration=config.fingerprint(),
        classes=summary.classes,
        columns=config.columns,
        splits=splits,
        statistics=sampling.statistics(sample),
        references=f"{summary.references}, dropped {sizes.dropped}",
        codec=images.codec_versions(),
    )


def wanted_shards(config: Config, split: str, total_bytes: int) -> int:
    """How many shards a split of `total_bytes` should have, by the flags."""
    counts = config.num_shards
    if isinstance(counts, int):
        return counts
    if counts is not None and split in counts:
        return counts[split]
    return shard_count(total_bytes, config.target_shard_bytes)
