"""What a finished job tells its user, and returns to its caller."""

from __future__ import annotations

import dataclasses
from typing import Any

from beam_pipeline.options import Config

PUBLISHED = "published"
REPAIRED = "repaired"
ALREADY_PUBLISHED = "already published"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A published version: what `run` returns.

    Attributes:
        url: folder or URL of the version.
        data: content of manifest.json, as `docs/format.md` describes it.
        outcome: `published`, `repaired`, or `already published` where nothing was written.
    """

    url: str
    data: dict[str, Any]
    outcome: str = PUBLISHED

    @property
    def images(self) -> int:
        """How many images were listed."""
        return int(self.data["images"])

    @property
    def records(self) -> int:
        """How many of them have a record."""
        return int(self.data["records"])

    @property
    def rejects(self) -> dict[str, int]:
        """Reason → rejected images."""
        return dict(self.data["rejects"]["by_reason"])

    @property
    def classes(self) -> list[str]:
        """Class names, their place is the id."""
        return list(self.data["classes"])

    @property
    def splits(self) -> dict[str, int]:
        """Split → records."""
        return {split: content["records"] for split, content in self.data["splits"].items()}


def plan_text(document: dict[str, Any]) -> str:
    """What `--plan_only` prints: the plan's splits and their shards.

    Args:
        document: `JobPlan.document()`.
    """
    lines = []
    for split, plan in sorted(document["splits"].items()):
        shards = len(plan["cuts"]) + 1
        mean = megabytes(plan["estimated_bytes"] / shards)
        lines.append(f"{split}: {plan['images']:,} images in {shards} shard{'s' * (shards > 1)} of about {mean}")
    return "\n".join([*lines, f"{len(document['classes'])} classes; nothing is written"])


def megabytes(byte_count: float) -> str:
    """Bytes as a person reads them."""
    return f"{byte_count / 1e6:.1f} MB" if byte_count < 1e9 else f"{byte_count / 1e9:.2f} GB"


def published_text(manifest: Manifest) -> str:
    """What a published dataset holds, with the balance of its shards."""
    data = manifest.data
    lines = [f"{manifest.outcome} {manifest.url}{', nothing written' * (manifest.outcome == ALREADY_PUBLISHED)}"]
    for split, content in sorted(data["splits"].items()):
        sizes = [shard["bytes"] for shard in content["shards"]]
        mean = sum(sizes) / len(sizes)
        low, high = ((size - mean) / mean * 100 if mean else 0.0 for size in (min(sizes), max(sizes)))
        balance = (
            f"s of {megabytes(mean)} ({low:+.1f} % to {high:+.1f} %)" if len(sizes) > 1 else f" of {megabytes(mean)}"
        )
        lines.append(f"  {split}: {content['records']:,} records in {len(sizes)} shard{balance}")
    rejected = ", ".join(f"{reason} {count}" for reason, count in sorted(data["rejects"]["by_reason"].items()))
    lines.append(
        f"  {manifest.images:,} images listed = {manifest.records:,} records + "
        f"{manifest.images - manifest.records:,} rejects{f' ({rejected}; see rejects.jsonl)' if rejected else ''}"
    )
    passed = data["image"]["passed_through"]
    if any(passed.values()):
        lines.append(f"  {sum(passed.values()):,} stored as they were compressed, {passed['whole']:,} bit for bit")
    lines.append(f"  {len(manifest.classes)} classes")
    found = data.get("duplicates", {})
    if found.get("groups"):
        lines.append(
            f"  {found['images']:,} images hold the same bytes as others: {found['groups']:,} groups, "
            f"{found['across_classes']:,} of several classes, {found['across_splits']:,} of several splits; "
            "see duplicates.jsonl"
        )
    return "\n".join(lines)


def warnings(config: Config, manifest: Manifest) -> list[str]:
    """What a user should look at, though the dataset is published."""
    data = manifest.data
    counts = [content["class_counts"] for content in data["splits"].values()]
    empty = [label for number, label in enumerate(manifest.classes) if not any(count[number] for count in counts)]
    found = []
    if empty:
        some = ", ".join(repr(label) for label in empty[:5])
        found.append(f"{len(empty)} classes have no record: {some}{', …' if empty[5:] else ''}")
    found += [
        f"split {split!r} got no image and is left out"
        for split in (config.split_fractions or {})
        if split not in data["splits"]
    ]
    wanted = config.shard_counts
    for split, content in data["splits"].items():
        asked = wanted if isinstance(wanted, int) else (wanted or {}).get(split, 0)
        if asked > len(content["shards"]):
            found.append(f"--num_shards {asked}: split {split!r} has images for {len(content['shards'])} only")
    if config.compression == "gzip":
        found.append("gzip shards have no index and no TFDS metadata: read them with reader.record_dataset")
    return found
