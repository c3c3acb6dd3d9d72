"""`info`: what a dataset holds, in a few lines, and one hash over all of its files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from beam_pipeline import schema, storage
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.text import first_few, name_line, plural, size_text
from reader.info import DatasetInfo, load_info

_SHOWN_CLASSES = 20


def describe(info: DatasetInfo) -> str:
    """A few lines on counts, classes, shards and sizes."""
    return "\n".join([f"{info.name} {info.version} at {info.url}", *(f"  {name_line(line)}" for line in _lines(info))])


def _lines(info: DatasetInfo) -> Iterator[str]:
    image, manifest = info.image, info.manifest
    classes = plural(info.num_classes, "class")
    yield f"{plural(manifest['records'], 'record')} of {plural(manifest['images'], 'image')}, {classes}"
    pixels = " to ".join(
        f"{height}x{width}" for height, width in sorted({*filter(None, (image.min_size, image.max_size))})
    )
    yield f"{image.format}, {plural(image.channels, 'channel')}, {pixels or 'no image'} (height x width)"
    if manifest["features"]:
        columns = (f"{one['name']} ({'list of ' * one['list']}{one['dtype']})" for one in manifest["features"])
        yield f"columns: {', '.join(columns)}"
    for split in info.splits.values():
        sizes = [shard.bytes for shard in split.shards]
        range_ = " to ".join(dict.fromkeys(map(size_text, (min(sizes), max(sizes)))))
        yield f"{split.name}: {plural(split.records, 'record')} in {plural(len(sizes), 'shard')} of {range_}"
    files = [shard.file for split in info.splits.values() for shard in split.shards]
    folders = sorted({file.rpartition("/")[0] for file in files if info.path(file) == file})
    if folders:
        yield f"this is an index: the shards are in {first_few(folders)}"
    for number, label in enumerate(info.classes[:_SHOWN_CLASSES]):
        counts = ", ".join(f"{split.name} {split.class_counts[number]:,}" for split in info.splits.values())
        yield f"class {number} {label!r}: {counts}"
    if info.num_classes > _SHOWN_CLASSES:
        yield f"… and {plural(info.num_classes - _SHOWN_CLASSES, 'more class')}; --json names them all"
    if image.mean:
        mean, std = (" ".join(f"{value:.4f}" for value in values) for values in (image.mean, image.std))
        yield f"mean {mean}, std {std} (of [0, 1], from {plural(manifest['image']['sampled_images'], 'image')})"
    rejects = manifest["rejects"]["by_reason"]
    if rejects:
        name = "left out" if info.is_index else "rejected"
        yield f"{name}: {', '.join(f'{reason} {number:,}' for reason, number in sorted(rejects.items()))}"


def check_sizes(info: DatasetInfo) -> None:
    """Raise ImageShardsError if a file is missing or has another size: its hash would be of something else."""
    sizes = {file.path: file.bytes for file in info.storage.files(info.url)}
    published = info.manifest.get("file_sizes", {}) | {file: {"bytes": one.bytes} for file, one in info.tables.items()}
    wrong = [line for split in info.splits.values() if split.records for line in info.wrong_sizes(split.name)]
    files = info.manifest["files"].keys() | info.tables.keys()
    wrong += [f"{info.path(file)} is missing" for file in sorted(files) if file not in sizes]
    for file in sorted(published.keys() & sizes.keys()):
        if sizes[file] != published[file]["bytes"]:
            says = f"has {sizes[file]} bytes, the manifest says {published[file]['bytes']}"
            wrong.append(f"{info.path(file)} {says}")
    if wrong:
        more = f" (and {plural(len(wrong) - 1, 'more file')})" if len(wrong) > 1 else ""
        raise ImageShardsError(f"{wrong[0]}{more}: run the job again with --repair")


def dataset_hash(url: DatasetInfo | str | os.PathLike[str]) -> str:
    """SHA-256 of a version as 64 hexadecimal digits; reads every byte, a piece at a time.

    Over the manifest and each file in its folder that the manifest names, in order of the relative path as UTF-8: path,
    NUL, size in decimal, NUL, content. Raises StorageError.
    """
    info, digest = load_info(url), hashlib.sha256()
    shards = {shard.file for split in info.splits.values() for shard in split.shards}
    named = {schema.MANIFEST_FILE, *info.manifest["files"], *info.tables, *shards}
    files = {schema.relative_path_bytes(file.path): file for file in info.storage.files(info.url) if file.path in named}
    for path, file in sorted(files.items()):
        digest.update(path + b"\0" + str(file.bytes).encode() + b"\0")
        for piece in storage.pieces(info.storage, info.path(file.path), file.bytes):
            digest.update(piece)
    return digest.hexdigest()
