"""`python -m reader info`: what a dataset holds, in a few lines, as JSON, or as one hash."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from beam_pipeline import schema
from beam_pipeline.errors import EXIT_OK, ImageShardsError
from reader.hashing import dataset_hash
from reader.info import DatasetInfo, SplitInfo, load_info
from reader.words import count, size_range

_SHOWN_CLASSES = 20


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags, but for `--json`."""
    parser.add_argument(
        "--hash",
        action="store_true",
        help="Print one SHA-256 over all files but run.json and report.html; this reads every byte.",
    )


def run(flags: argparse.Namespace) -> int:
    """Print it; exit code 0."""
    info = load_info(flags.dataset)
    if flags.hash:
        _check_whole(info)
        digest = dataset_hash(flags.dataset)
        print(json.dumps({"hash": digest}) if flags.json else digest)
        return EXIT_OK
    print(json.dumps(dict(info.manifest), sort_keys=True, ensure_ascii=True) if flags.json else describe(info))
    return EXIT_OK


def _check_whole(info: DatasetInfo) -> None:
    """Raise ImageShardsError where a file is missing or has another size: the hash would be of something else."""
    there = dict(info.storage.files(info.url))
    wrong = [f"{info.path(file)} is missing" for file in sorted(info.manifest["files"]) if file not in there]
    for file, published in sorted(info.manifest.get("file_sizes", {}).items()):
        if there.get(file, published["bytes"]) != published["bytes"]:
            wrong.append(f"{info.path(file)} has {there[file]} bytes, the manifest says {published['bytes']}")
    for split in info.splits:
        wrong += info.wrong_sizes(split) if info.splits[split].records else []
    if wrong:
        more = f" (and {count(len(wrong) - 1, 'more file')})" if len(wrong) > 1 else ""
        raise ImageShardsError(f"{wrong[0]}{more}, so there is no hash: python -m reader verify {info.url} says more")


def describe(info: DatasetInfo) -> str:
    """A few lines on counts, classes, shards and sizes."""
    return "\n".join([f"{info.name} {info.version} at {info.url}", *(f"  {line}" for line in _lines(info))])


def _lines(info: DatasetInfo) -> Iterator[str]:
    image, manifest = info.image, info.manifest
    classes = count(info.num_classes, "class", "classes")
    yield f"{count(manifest['records'], 'record')} of {count(manifest['images'], 'image')}, {classes}"
    sizes = {size for size in (image.min_size, image.max_size) if size}
    pixels = " to ".join(f"{height}x{width}" for height, width in sorted(sizes))
    yield f"{image.format}, {count(image.channels, 'channel')}, {pixels or 'no image'} (height x width)"
    if manifest["features"]:
        yield f"columns: {', '.join(map(_column, manifest['features']))}"
    for split in info.splits.values():
        yield _split(split)
    elsewhere = _elsewhere(info)
    if elsewhere:
        yield f"this is an index: the shards lie in {elsewhere}"
    for number, label in enumerate(info.classes[:_SHOWN_CLASSES]):
        counts = ", ".join(f"{split.name} {split.class_counts[number]:,}" for split in info.splits.values())
        yield f"class {number} {label!r}: {counts}"
    if info.num_classes > _SHOWN_CLASSES:
        yield f"… and {count(info.num_classes - _SHOWN_CLASSES, 'more class', 'more classes')}; --json names them all"
    if image.mean:
        mean, std = (" ".join(f"{value:.4f}" for value in values) for values in (image.mean, image.std))
        yield f"mean {mean}, std {std} (of [0, 1], from {count(manifest['image']['sampled_images'], 'image')})"
    rejects: dict[str, Any] = manifest["rejects"]["by_reason"]
    if rejects:
        yield f"rejected: {', '.join(f'{reason} {number:,}' for reason, number in sorted(rejects.items()))}"


def _split(split: SplitInfo) -> str:
    sizes = [shard.bytes for shard in split.shards]
    shards = count(len(sizes), "shard")
    return f"{split.name}: {count(split.records, 'record')} in {shards} of {size_range(min(sizes), max(sizes))}"


def _column(column: dict[str, Any]) -> str:
    return f"{column['name']} ({'list of ' if column['list'] else ''}{column['dtype']})"


def _elsewhere(info: DatasetInfo) -> str:
    """The folders of the shards that don't lie with the manifest, "" where all do."""
    if schema.FOREIGN_KEY not in info.manifest:
        return ""
    files = [shard.file for split in info.splits.values() for shard in split.shards]
    folders = sorted({file.rpartition("/")[0] for file in files if info.path(file) == file})
    more = f" and {count(len(folders) - 1, 'more folder')}" if len(folders) > 1 else ""
    return f"{folders[0]}{more}" if folders else ""
