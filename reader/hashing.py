"""One hash for a whole version: equal hashes mean equal bytes in every file that isn't about the run itself."""

from __future__ import annotations

import hashlib

from beam_pipeline.schema import UNHASHED_FILES, relative_path_bytes
from reader.storage import Storage, chunks, normalize, open_storage


def dataset_hash(url: str) -> str:
    """SHA-256 of a version's folder as 64 hexadecimal digits; reads every byte, a chunk at a time.

    Over, for each file in order of its relative path as UTF-8: path, NUL, size in decimal, NUL, content; without
    run.json and report.html.

    Args:
        url: folder of one version.

    Raises:
        StorageError: a file can't be read.
    """
    url = normalize(url)
    storage = open_storage(url)
    digest = hashlib.sha256()
    for path, size in storage.files(url):
        if path not in UNHASHED_FILES:
            digest.update(relative_path_bytes(path) + b"\0" + str(size).encode() + b"\0")
            for chunk in chunks(storage, f"{url}/{path}", size):
                digest.update(chunk)
    return digest.hexdigest()


def hash_file(storage: Storage, path: str, size: int) -> str:
    """SHA-256 of one file's first `size` bytes, as 64 hexadecimal digits; memory stays flat."""
    digest = hashlib.sha256()
    for chunk in chunks(storage, path, size):
        digest.update(chunk)
    return digest.hexdigest()
