"""What is in a folder that holds no dataset, and what its user should do: a version, images, a typing mistake."""

from __future__ import annotations

import re
from collections.abc import Sequence

from beam_pipeline import schema
from beam_pipeline.errors import some
from beam_pipeline.storage import Storage

_SEARCHED_FOLDERS = 3
_MISTYPED_URL = re.compile(r"(?P<scheme>gs|gcs|s3|az|abfs|https?):?/+(?P<rest>[^/].*)")
_IMAGE_FILE = re.compile(r".*\.(jpe?g|jfif|png|webp|gif|bmp|tiff?|heic|heif|avif)", re.IGNORECASE)


def what_is_there(storage: Storage, url: str, given: str) -> str:
    """Why a folder without a manifest is no dataset, and what to do about it."""
    names = storage.names(url)
    missing = f"{url} holds no {schema.MANIFEST_FILE}, so no dataset is published there"
    mistyped = None if "://" in given else _MISTYPED_URL.fullmatch(given)
    if not names and mistyped:
        return f"there is no folder {given}: did you mean {mistyped['scheme']}://{mistyped['rest']}?"
    parent, _, name = url.rpartition("/")
    if not names and name in storage.names(parent):
        return f"{url} is a file: name the folder {parent}"
    versions = [f"{url}/{name.rstrip('/')}" for name in names if schema.VERSION_PATTERN.fullmatch(name.rstrip("/"))]
    if not names:
        return f"{missing}: there is no such folder, or it is empty"
    if versions:
        return f"{missing}; name a version: {some(versions)}"
    if any(schema.ShardName.parse(name) for name in names):
        return f"{missing}, only an unfinished job's files: {some(names)}; run the same beam_pipeline command again"
    images = _images_in(storage, url, names)
    if images:
        write = f"python -m beam_pipeline --input {given} --output DIR --name NAME"
        return f"{url} holds {images}, not a dataset: write one first: {write}"
    return f"{missing}; found {some(names)}"


def _images_in(storage: Storage, url: str, names: Sequence[str], depth: int = 2) -> str:
    """`image files` or `folders of image files`, "" if there are none; looks into the first few folders only."""
    if any(_IMAGE_FILE.fullmatch(name) for name in names):
        return "image files"
    folders = [f"{url}/{name.rstrip('/')}" for name in names if name.endswith("/")][:_SEARCHED_FOLDERS] if depth else []
    found = any(_images_in(storage, folder, storage.names(folder), depth - 1) for folder in folders)
    return "folders of image files" if found else ""
