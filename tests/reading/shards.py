"""Makes small published datasets by the contract of `beam_pipeline.schema`, without running the pipeline."""

from __future__ import annotations

import io
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from PIL import Image

from beam_pipeline import schema
from beam_pipeline.schema.example import image_example
from beam_pipeline.schema.manifest import FORMAT_VERSION, builtins_of, file_sums, seal_manifest
from beam_pipeline.schema.table import COLUMNS, column_name, name_hash, table_bytes
from reader.tools.read import filename_of
from tests import make

CLASSES = ("bird", "cat", "dog")
Size = tuple[int, int]
Columns = Sequence[tuple[str, str, bool, Callable[..., bytes], Callable[[int], Sequence[Any]]]]


def draw(number: int, size: Size, image_format: str = "jpeg", channels: int = 3) -> bytes:
    """A smooth picture that tells record numbers apart."""
    height, width = size
    y, x = np.mgrid[0:height, 0:width]
    planes = [
        (x * (1 + number % 3) + y * (1 + number % 5) + number * 37 + plane * 60) % 256 for plane in range(channels)
    ]
    pixels = np.stack(planes, -1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels if channels == 3 else pixels[:, :, 0]).save(buffer, image_format.upper(), quality=90)
    return buffer.getvalue()


def make_record(
    number: int,
    size: Size,
    image_format: str = "jpeg",
    channels: int = 3,
    one_hot: bool = False,
    split: str = "train",
    columns: Columns = (),
) -> bytes:
    """One serialized Example; its file name holds its number in the split."""
    label = number % len(CLASSES)
    folder = CLASSES[label] if split == "train" else f"{CLASSES[label]}/{split}"
    return image_example(
        image=draw(number, size, image_format, channels),
        size=size,
        class_id=label,
        label=CLASSES[label],
        path=f"{folder}/{number:06d}.jpg",
        one_hot_classes=len(CLASSES) if one_hot else 0,
        extra={name: encode(*values(number)) for name, _, _, encode, values in columns},
    )


def offsets(folder: str | Path, shard: str) -> list[int]:
    """Where each record of a shard begins."""
    return [int(line.split()[0]) for line in Path(folder, "index", f"{shard}.idx").read_text().splitlines()]


def numbers_in(batches: Iterable[Any]) -> list[int]:
    """The record numbers of batches with `features=["filename"]`, of any framework."""
    return [int(name[-10:-4]) for inputs, *_ in batches for name in np.asarray(inputs["filename"]).ravel()]


def each_record(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The records of an evaluation with `features=`, in its order and without padding: features, image, class."""
    for inputs, labels, weights in batches:
        for row in np.flatnonzero(weights):
            yield {**{name: values[row] for name, values in inputs.items()}, "class": int(labels[row])}


def flipped(folder: Path, counts: Sequence[int], record: int, **options: Any) -> tuple[str, str]:
    """A dataset with a flipped bit in a record of its last shard, and what readers say of that."""
    url = make_dataset(folder, {"train": counts}, **options)
    shard = schema.ShardName("photos", "train", len(counts) - 1, len(counts)).file
    offset = offsets(url, shard)[record]
    make.flip_byte(folder / shard, offset + 100)
    return url, f"{shard}: record {record} at byte {offset}: the CRC of the data is wrong"


def make_dataset(
    folder: Path,
    splits: Mapping[str, Sequence[int]],
    *,
    size: Size = (16, 24),
    size_of: Callable[[int], Size] | None = None,
    image_format: str = "jpeg",
    channels: int = 3,
    compression: str = "none",
    one_hot: bool = False,
    columns: Columns = (),
    classes: Sequence[str] = CLASSES,
    record: Callable[[str, int], tuple[int, bytes]] | None = None,
    with_names: bool = False,
) -> str:
    """Write a dataset whose shards hold the given numbers of records, and return its folder.

    Its record tables have order key, bytes, class, and the columns that hold one number.

    Args:
        folder: new folder of the version.
        splits: split → records of each shard.
        size, size_of: (height, width) of every image, or of each by its number in the split.
        columns: further features: name, dtype, whether it is a list, encoder, and a record's values by its number.
        record: makes a record's class and bytes from its split and its number there, in place of `make_record`.
        with_names: whether the record tables have the hashes of the paths, too.
    """

    def drawn(split: str, number: int) -> tuple[int, bytes]:
        of_this_size = size_of(number) if size_of else size
        made = make_record(number, of_this_size, image_format, channels, one_hot, split, columns)
        return number % len(classes), made

    (folder / schema.INDEX_FOLDER).mkdir(parents=True)
    files: dict[str, bytes] = {
        schema.LABELS_FILE: "".join(f"{name}\n" for name in classes).encode(),
        schema.REJECTS_FILE: b"",
    }
    manifest_splits = {}
    sizes = []
    for split, counts in splits.items():
        shards, rows, number, class_counts = [], [], 0, [0] * len(classes)
        for index, count in enumerate(counts):
            name = schema.ShardName("photos", split, index, len(counts))
            records, rows_of = [], defaultdict[str, list[Any]](list)
            for _ in range(count):
                sizes.append(size_of(number) if size_of else size)
                label, made = (record or drawn)(split, number)
                records.append(schema.frame(made))
                class_counts[label] += 1
                values = {column_name(one): of(number)[0] for one, _, is_list, _, of in columns if not is_list}
                row = {"order_key": number, "bytes": len(records[-1]), "class": label, **values}
                if with_names:
                    row["name"] = name_hash(filename_of(made).decode())
                for key, value in row.items():
                    rows_of[key].append(value)
                number += 1
            data = b"".join(records)
            if compression == "none":
                rows += schema.run_rows(index, map(len, records))
                begins = np.cumsum([0, *map(len, records)])
                lines = [f"{begin} {len(one)}\n" for begin, one in zip(begins, records, strict=False)]
                files[name.index_file] = "".join(lines).encode()
            else:
                packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
                data = packer.compress(data) + packer.flush()
            (folder / name.file).write_bytes(data)
            entry = {"file": name.file, "records": count, "bytes": len(data), "crc32c": google_crc32c.value(data)}
            numbers = [(one, kind) for one, kind, is_list, *_ in columns if kind != "bytes" and not is_list]
            kinds = {key: COLUMNS[key] for key in ("order_key", "bytes", "class", *["name"] * with_names)}
            kinds |= {column_name(one): np.dtype(kind).str for one, kind in numbers}
            table = table_bytes(kinds, {key: rows_of[key] for key in kinds})
            (folder / schema.table_file(name.file)).write_bytes(table)
            entry["table"] = builtins_of(file_sums(table))
            shards.append({**entry, "images": count, "listing_fingerprint": "0" * 32, "content_fingerprint": "0" * 32})
        if compression == "none":
            buffer = io.BytesIO()
            np.save(buffer, np.array(rows, schema.RUN_DTYPE))
            files[schema.runs_file(split)] = buffer.getvalue()
        total = sum(shard["bytes"] for shard in shards)
        manifest_splits[split] = {"records": number, "bytes": total, "class_counts": class_counts, "shards": shards}
    for path, data in files.items():
        (folder / path).write_bytes(data)
    records = sum(split["records"] for split in manifest_splits.values())
    manifest = {
        "format_version": FORMAT_VERSION,
        "name": "photos",
        "version": "1.0.0",
        "configuration": {"image_format": image_format, "compression": compression, "one_hot": one_hot, "seed": 0},
        "classes": list(classes),
        "features": [{"name": name, "dtype": dtype, "list": is_list} for name, dtype, is_list, *_ in columns],
        "image": {
            "format": image_format,
            "channels": channels,
            "min_size": [min(h for h, _ in sizes), min(w for _, w in sizes)] if sizes else None,
            "max_size": [max(h for h, _ in sizes), max(w for _, w in sizes)] if sizes else None,
            "mean": ["0.5"] * channels,
            "std": ["0.25"] * channels,
            "sampled_images": records,
        },
        "images": records,
        "records": records,
        "content_fingerprint": "a" * 32,
        "listing_fingerprint": "b" * 32,
        "plan": {},
        "codec": {"pillow": "12.3.0"},
        "rejects": {"by_reason": {}, "environment": 0},
        "splits": manifest_splits,
        "files": {path: schema.sha256(data) for path, data in files.items()},
    }
    (folder / schema.MANIFEST_FILE).write_bytes(seal_manifest(manifest))
    (folder / schema.RUN_FILE).write_text("{}\n")
    return str(folder)
