"""Individual image files in class folders, listed without any framework."""

from __future__ import annotations

import os

from beam_pipeline import storage
from beam_pipeline.errors import UsageError

_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png")


def list_images(root: str) -> list[tuple[str, int]]:
    """(path below `root`, bytes) of every image in a class folder, sorted. Raises UsageError if there is none."""
    folder, files = storage.normalize(root), []
    if os.path.isdir(folder) or not storage.is_local(root):
        files = [(file.path, file.bytes) for file in storage.open_storage(root).files(folder)]
    if not files and not os.path.isdir(folder):  # object stores have no empty ones
        raise UsageError(f"{root}: no such folder")
    images = sorted(file for file in files if "/" in file[0] and file[0].lower().endswith(_SUFFIXES))
    if not images:
        raise UsageError(f"{root}: no image in class folders there; images end in {', '.join(_SUFFIXES)}")
    return images
