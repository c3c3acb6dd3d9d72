"""A dataset's files by the manifest: their sizes, and the hash over all of them."""

from __future__ import annotations

import hashlib
import os

from beam_pipeline import schema, storage
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.text import plural
from reader.info import DatasetInfo, load_info


def checked_sizes(info: DatasetInfo) -> dict[str, int]:
    """Path → bytes of a dataset's files. Raises ImageShardsError if one is missing or has another size."""
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
    return sizes


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
