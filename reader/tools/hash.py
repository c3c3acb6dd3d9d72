"""One hash over all files of a dataset that its manifest names."""

from __future__ import annotations

import hashlib
import os

from beam_pipeline import schema, storage
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.text import plural
from reader.info import DatasetInfo, load_info


def dataset_hash(url: DatasetInfo | str | os.PathLike[str]) -> str:
    """SHA-256 of a version as 64 hexadecimal digits; reads every byte, a piece at a time.

    Over the manifest and each file in its folder that the manifest names, in order of the relative path as UTF-8: path,
    NUL, size in decimal, NUL, content.

    Raises:
        StorageError: the storage can't be reached.
        ImageShardsError: a file is missing, so the hash would be of something else.
    """
    info, digest = load_info(url), hashlib.sha256()
    shards = {shard.file for split in info.splits.values() for shard in split.shards}
    named = {schema.MANIFEST_FILE, *info.manifest["files"], *info.tables, *shards}
    files = {schema.relative_path_bytes(file.path): file for file in info.storage.files(info.url) if file.path in named}
    if missing := [file for file in sorted(named - {file.path for file in files.values()}) if info.path(file) != file]:
        more = f" (and {plural(len(missing) - 1, 'more file')})" if len(missing) > 1 else ""
        raise ImageShardsError(f"{info.path(missing[0])} is missing{more}: run the job again with --repair")
    for path, file in sorted(files.items()):
        digest.update(path + b"\0" + str(file.bytes).encode() + b"\0")
        for piece in storage.pieces(info.storage, info.path(file.path), file.bytes):
            digest.update(piece)
    return digest.hexdigest()
