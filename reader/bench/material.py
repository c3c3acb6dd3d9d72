"""What is measured: the same images as records in memory, as single files, and as shards of other kinds."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from beam_pipeline import schema
from beam_pipeline.errors import UsageError
from reader.info import DatasetInfo
from reader.picking import check_shards, pick
from reader.runs import RunReader

_SHARDS = 8
_READ_AT_ONCE = 4096
_PNG = b"\x89PNG"


@dataclass(frozen=True, slots=True)
class Material:
    """Some records of a dataset in every form that is compared.

    Attributes:
        info: of the dataset.
        split: the split string that names these records.
        images: encoded, in memory.
        records: serialized Examples, in memory.
        files: folder of class folders with an image file for each, or the originals that the user named.
        gzip_shards, plain_shards: patterns of TFRecord files that hold the records.
    """

    info: DatasetInfo
    split: str
    images: Sequence[bytes]
    records: Sequence[bytes]
    files: str
    gzip_shards: str
    plain_shards: str


def prepare(info: DatasetInfo, split: str, count: int, against: str | None, scratch: Path) -> Material:
    """Read up to `count` records of a split and write them in the other forms into `scratch`.

    Raises:
        UsageError: no such split, or it is too small to measure.
    """
    table = info.run_table(split)
    check_shards(info, split)
    count = min(count, table.total)
    reader = RunReader(info.shard_storage, table)
    records = [
        record
        for start in range(0, count, _READ_AT_ONCE)
        for record in reader.read(np.arange(start, min(start + _READ_AT_ONCE, count)))
    ]
    if not records:
        raise UsageError(f"--split {split}: no record")
    picked = [pick(record, info.image_key.encode(), info.class_key.encode()) for record in records]
    files = against
    if files is None:
        files = str(scratch / "files")
        for number, (image, label) in enumerate(picked):
            suffix = "png" if image.startswith(_PNG) else "jpg"
            path = scratch / "files" / f"{label:06d}" / f"{number:08d}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image)
    for number in range(_SHARDS):
        data = b"".join(map(schema.frame, records[number::_SHARDS]))
        (scratch / f"plain-{number:05d}").write_bytes(data)
        packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
        (scratch / f"gzip-{number:05d}").write_bytes(packer.compress(data) + packer.flush())
    images = [image for image, _ in picked]
    return Material(info, split, images, records, files, str(scratch / "gzip-*"), str(scratch / "plain-*"))
