"""Everything that decides the bytes of every shard, known before the first is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from beam_pipeline.planning.cuts import SplitPlan
from beam_pipeline.schema import (
    canonical_json,
    sha256,
)


@dataclass(frozen=True)
class JobPlan:
    """Everything that decides the bytes of every shard, known before the first is written.

    Attributes:
        configuration: `Config.fingerprint()`.
        classes: class names, their place is the id.
        columns: a manifest's features: name, dtype, list.
        splits: split → its shards.
        statistics: channel mean and standard deviation of the sample, how many images it had.
        references: order-free sums over every listed image, etags included, and over the duplicates that are dropped.
        codec: versions of what encodes images.
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

    @property
    def sha256(self) -> str:
        """What sidecars carry."""
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
