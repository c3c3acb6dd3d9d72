"""Small published datasets whose bytes never change, made by `docs/format.md` alone: saved positions name them."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c

# 8×8 pixels, the left side not the right one's mirror image. Constants: no release of an encoder changes them.
IMAGES = {
    "jpeg": base64.b64decode(
        "/9j/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxOUlNSMj5aYVpQYEpRUk//2wBDAQ4ODhMREyYVFS"
        "ZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT0//wAARCAAIAAgDASIAAhEBAxEB/8QAFQABAQAAAAAA"
        "AAAAAAAAAAAAAAb/xAAdEAABBAIDAAAAAAAAAAAAAAABAAIDBAURISJB/8QAFQEBAQAAAAAAAAAAAAAAAAAABAX/xAAbEQACAwADAAAAAAAAAAAAAA"
        "ABAwACBAURQf/aAAwDAQACEQMRAD8AnK2Nu5bNuqUHV2yCsJHGYuA0Ha8B57IiKW7l9eYhSrdACL1qrZ9iR7P/2Q=="
    ),
    "png": base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAMklEQVR42mM8ISfHwMDAwMBg8eiRiMYdBhhgYsABcEqwIHPe3FAhUQcDA8OHDzbkWg"
        "4AYwwIMMfOQJ4AAAAASUVORK5CYII="
    ),
}
CLASSES = ("ant", "bee", "cat", "dog", "eel")
# name → image format, and split → records in each shard.
DATASETS: dict[str, tuple[str, dict[str, list[int]]]] = {
    "large": ("jpeg", {"train": [1100, 37, 963, 800], "validation": [70, 60]}),
    "medium": ("png", {"train": [65, 0, 65], "validation": [20]}),
    "small": ("jpeg", {"train": [37], "validation": [5]}),
}
RUN_RECORDS = 64


def make_dataset(folder: Path, name: str) -> str:
    """Write one of `DATASETS` into a new folder and return that. A record's file name is its number.

    Numbers of the split `validation` begin at 100,000.
    """
    image_format, splits = DATASETS[name]
    (folder / "index").mkdir(parents=True)
    files: dict[str, bytes] = {
        "class.labels.txt": "".join(f"{label}\n" for label in CLASSES).encode(),
        "rejects.jsonl": b"",
    }
    described = {}
    for split, counts in splits.items():
        shards, runs, number = [], [], 100_000 * (split != "train")
        class_counts = [0] * len(CLASSES)
        for shard, count in enumerate(counts):
            records = []
            for _ in range(count):
                class_id = (number * 40503 >> 7) % len(CLASSES)
                class_counts[class_id] += 1
                records.append(_frame(_example(number, class_id, IMAGES[image_format])))
                number += 1
            file, data = f"{name}-{split}.tfrecord-{shard:05d}-of-{len(counts):05d}", b"".join(records)
            (folder / file).write_bytes(data)
            lines, begin = [], 0
            for first in range(0, count, RUN_RECORDS):
                run = records[first : first + RUN_RECORDS]
                runs.append(struct.pack("<IQIH", shard, begin, sum(map(len, run)), len(run)))
                for record in run:
                    lines.append(f"{begin} {len(record)}\n")
                    begin += len(record)
            files[f"index/{file}.idx"] = "".join(lines).encode()
            sums = {"bytes": len(data), "crc32c": google_crc32c.value(data), "records": count, "images": count}
            shards.append({"file": file, **sums, "listing_fingerprint": "0" * 32, "content_fingerprint": "0" * 32})
        files[f"index/{split}.runs.npy"] = _runs_file(runs)
        sizes = {"records": sum(counts), "bytes": sum(shard["bytes"] for shard in shards)}
        described[split] = {**sizes, "class_counts": class_counts, "shards": shards}
    for path, data in files.items():
        (folder / path).write_bytes(data)
    (folder / "run.json").write_text("{}\n")
    (folder / "manifest.json").write_bytes(_sealed(_manifest(name, image_format, described, files)))
    return str(folder)


def _manifest(name: str, image_format: str, splits: dict[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    records = sum(split["records"] for split in splits.values())
    image = {"format": image_format, "channels": 3, "min_size": [8, 8], "max_size": [8, 8]}
    return {
        "format_version": 1,
        "name": name,
        "version": "1.0.0",
        "configuration": {"image_format": image_format, "compression": "none", "one_hot": False, "seed": 0},
        "classes": list(CLASSES),
        "features": [],
        "image": {**image, "mean": ["0.5"] * 3, "std": ["0.25"] * 3, "sampled_images": records},
        "images": records,
        "records": records,
        "content_fingerprint": "a" * 32,
        "listing_fingerprint": "b" * 32,
        "plan": {},
        "codec": {"pillow": "12.3.0"},
        "rejects": {"by_reason": {}, "environment": 0},
        "splits": splits,
        "files": {path: hashlib.sha256(data).hexdigest() for path, data in files.items()},
        "file_sizes": {path: {"bytes": len(data), "crc32c": google_crc32c.value(data)} for path, data in files.items()},
    }


def _sealed(manifest: dict[str, Any]) -> bytes:
    body = _canonical_json(manifest)
    return _canonical_json({**manifest, "self_sha256": hashlib.sha256(body).hexdigest()})


def _canonical_json(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


def _runs_file(rows: Iterable[bytes]) -> bytes:
    """A `.npy` file, version 1.0: its hash must not depend on NumPy's release, so not by `np.save`."""
    rows = list(rows)
    fields = [("shard", "<u4"), ("offset", "<u8"), ("bytes", "<u4"), ("records", "<u2")]
    header = f"{{'descr': {fields}, 'fortran_order': False, 'shape': ({len(rows)},), }}".ljust(181).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"".join(rows)


def _frame(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return length + _masked_crc(length) + record + _masked_crc(record)


def _masked_crc(data: bytes) -> bytes:
    crc: int = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _example(number: int, class_id: int, image: bytes) -> bytes:
    """A serialized `tf.train.Example`; integers below 128 only."""
    features = {
        "class": _field(3, _field(1, bytes([class_id]))),
        "filename": _field(1, _field(1, str(number).encode())),
        "image": _field(1, _field(1, image)),
        "label": _field(1, _field(1, CLASSES[class_id].encode())),
        "size": _field(3, _field(1, bytes([8, 8]))),
    }
    entries = (_field(1, _field(1, key.encode()) + _field(2, features[key])) for key in sorted(features))
    return _field(1, b"".join(entries))


def _field(number: int, value: bytes) -> bytes:
    length, varint = len(value), bytearray()
    while length > 0x7F:
        varint.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([number << 3 | 2, *varint, length]) + value
