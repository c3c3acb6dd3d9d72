"""`python -m reader info`: what a dataset holds, in a few lines, as JSON, or as one hash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError
from reader.commands.flags import Command, Flag, Result
from reader.info import DatasetInfo, SplitInfo, load_info
from reader.tools.copy import dataset_hash
from reader.words import count, size_range

_SHOWN_CLASSES = 20


def _info(values: dict[str, Any]) -> Result:
    info = load_info(values["dataset"])
    if not values["hash"]:
        return Result(dict(info.manifest), describe(info))
    _check_files(info)
    digest = dataset_hash(values["dataset"])
    return Result({"hash": digest}, digest)


def _check_files(info: DatasetInfo) -> None:
    """Raise ImageShardsError if a file is missing or has another size: the hash would be of something else."""
    there = {file.path: file.bytes for file in info.storage.files(info.url)}
    wrong = [f"{info.path(file)} is missing" for file in sorted(info.manifest["files"]) if file not in there]
    for file, published in sorted(info.manifest.get("file_sizes", {}).items()):
        if there.get(file, published["bytes"]) != published["bytes"]:
            wrong.append(f"{info.path(file)} has {there[file]} bytes, the manifest says {published['bytes']}")
    for split in info.splits.values():
        wrong += info.wrong_sizes(split.name) if split.records else []
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
    pixels = " to ".join(
        f"{height}x{width}" for height, width in sorted({*filter(None, (image.min_size, image.max_size))})
    )
    yield f"{image.format}, {count(image.channels, 'channel')}, {pixels or 'no image'} (height x width)"
    if manifest["features"]:
        columns = (f"{one['name']} ({'list of ' * one['list']}{one['dtype']})" for one in manifest["features"])
        yield f"columns: {', '.join(columns)}"
    yield from map(_split, info.splits.values())
    elsewhere = _elsewhere(info)
    if elsewhere:
        yield f"this is an index: the shards are in {elsewhere}"
    for number, label in enumerate(info.classes[:_SHOWN_CLASSES]):
        counts = ", ".join(f"{split.name} {split.class_counts[number]:,}" for split in info.splits.values())
        yield f"class {number} {label!r}: {counts}"
    if info.num_classes > _SHOWN_CLASSES:
        yield f"… and {count(info.num_classes - _SHOWN_CLASSES, 'more class', 'more classes')}; --json names them all"
    if image.mean:
        mean, std = (" ".join(f"{value:.4f}" for value in values) for values in (image.mean, image.std))
        yield f"mean {mean}, std {std} (of [0, 1], from {count(manifest['image']['sampled_images'], 'image')})"
    rejects = manifest["rejects"]["by_reason"]
    if rejects:
        name = "left out" if schema.FOREIGN_KEY in manifest else "rejected"
        yield f"{name}: {', '.join(f'{reason} {number:,}' for reason, number in sorted(rejects.items()))}"


def _split(split: SplitInfo) -> str:
    sizes = [shard.bytes for shard in split.shards]
    shards = count(len(sizes), "shard")
    return f"{split.name}: {count(split.records, 'record')} in {shards} of {size_range(min(sizes), max(sizes))}"


def _elsewhere(info: DatasetInfo) -> str:
    """The folders of the shards that aren't beside the manifest, "" if all are."""
    files = [shard.file for split in info.splits.values() for shard in split.shards]
    folders = sorted({file.rpartition("/")[0] for file in files if info.path(file) == file})
    more = f" and {count(len(folders) - 1, 'more folder')}" if len(folders) > 1 else ""
    return f"{folders[0]}{more}" if folders else ""


INFO = Command(
    "info",
    ("DATASET",),
    "Say what a dataset holds: counts, classes, shards, sizes.",
    "With --hash, print one SHA-256 over every file instead, which reads every byte: equal hashes, equal datasets.",
    "datasets/photos/1.0.0 --hash",
    "0 done, 1 the dataset or its storage can't be read, or a file is missing",
    _info,
    (Flag("--hash", "", "Print one SHA-256 over all files but run.json and report.html.", False),),
)
