"""Records of a dataset in the other forms that `experiment.py` reads: single files, shards, GZIP shards."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from beam_pipeline import schema
from beam_pipeline.errors import StorageError
from reader.example import ImageFinder
from reader.info import DatasetInfo

_SHARDS = 8
_PNG = b"\x89PNG"


class Forms(NamedTuple):
    """The same images in several forms.

    Attributes:
        images: encoded, in memory.
        files: folder of class folders with a file an image.
        plain, zipped: shards.
    """

    images: list[bytes]
    files: Path
    plain: list[Path]
    zipped: list[Path]


def write_forms(info: DatasetInfo, records: Sequence[bytes], scratch: Path) -> Forms:
    """Write records of a dataset into an empty folder, in other forms."""
    found = [(bytes(image), label) for image, label in map(ImageFinder(info.image_key, info.class_key), records)]
    for number, (image, label) in enumerate(found):
        suffix = "png" if image.startswith(_PNG) else "jpg"
        write_temporary(scratch / "files" / f"{label:06d}" / f"{number:08d}.{suffix}", image)
    plain = [scratch / f"plain-{number:05d}" for number in range(min(_SHARDS, len(records)))]
    zipped = [scratch / f"gzip-{number:05d}" for number in range(len(plain))]
    for number in range(len(plain)):
        data = b"".join(map(schema.frame, records[number::_SHARDS]))
        write_temporary(plain[number], data)
        write_temporary(zipped[number], gzip.compress(data, 6))
    return Forms([image for image, _ in found], scratch / "files", plain, zipped)


def write_temporary(path: Path, data: bytes) -> None:
    """Write a file that `experiment.py` reads, and its folder. Raises StorageError if it can't, as on a full disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        full = f"{tempfile.gettempdir()}: a temporary file can't be written ({error.strerror})"
        raise StorageError(full, "free space there, or set TMPDIR to another folder") from None
