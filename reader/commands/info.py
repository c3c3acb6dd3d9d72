"""`python -m reader info`: what a dataset holds, in a few lines, as JSON, or as one hash."""

from __future__ import annotations

import argparse
import json
from typing import Any

from beam_pipeline.errors import EXIT_OK
from reader.hashing import dataset_hash
from reader.info import DatasetInfo, load_info


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags, but for `--json`."""
    parser.add_argument("--hash", action="store_true", help="one SHA-256 for all files but run.json")


def run(flags: argparse.Namespace) -> int:
    """Print it; exit code 0."""
    if flags.hash:
        load_info(flags.dataset)  # a folder without a dataset has no hash
        digest = dataset_hash(flags.dataset)
        print(json.dumps({"hash": digest}) if flags.json else digest)
        return EXIT_OK
    info = load_info(flags.dataset)
    print(json.dumps(dict(info.manifest), sort_keys=True, ensure_ascii=True) if flags.json else describe(info))
    return EXIT_OK


def describe(info: DatasetInfo) -> str:
    """A few lines on counts, classes, shards and sizes."""
    image = info.image
    sizes = {size for size in (image.min_size, image.max_size) if size}
    lines = [
        f"{info.name} {info.version} at {info.url}",
        f"  {info.manifest['records']:,} records of {info.manifest['images']:,} images, {info.num_classes} classes",
        f"  {image.format}, {image.channels} channels, "
        f"{' to '.join(f'{height}x{width}' for height, width in sorted(sizes)) or 'no image'} (height x width)",
    ]
    for split in info.splits.values():
        sizes_mb = [shard.bytes / 1e6 for shard in split.shards]
        shards = f"{len(sizes_mb)} shard{'s' * (len(sizes_mb) > 1)}"
        lines.append(
            f"  {split.name}: {split.records:,} records in {shards} of {min(sizes_mb):.1f} to {max(sizes_mb):.1f} MB"
        )
    for number, label in enumerate(info.classes[:20]):
        counts = ", ".join(f"{split.name} {split.class_counts[number]:,}" for split in info.splits.values())
        lines.append(f"  class {number} {label!r}: {counts}")
    if info.num_classes > 20:
        lines.append(f"  … and {info.num_classes - 20} more classes")
    if image.mean:
        mean, std = (" ".join(f"{value:.4f}" for value in values) for values in (image.mean, image.std))
        lines.append(f"  mean {mean}, std {std} (of [0, 1], from {info.manifest['image']['sampled_images']} images)")
    rejects: dict[str, Any] = info.manifest["rejects"]["by_reason"]
    if rejects:
        lines.append(f"  rejected: {', '.join(f'{reason} {count}' for reason, count in sorted(rejects.items()))}")
    return "\n".join(lines)
