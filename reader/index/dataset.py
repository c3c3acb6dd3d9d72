"""`index`: makes anybody's plain TFRecord files of images a dataset like ours, without moving a byte of them.

One pass over the files finds where the records lie, what the images are and how many each class has. A run index and a
manifest that say so go into a folder of their own: from then on `load_info`, `train_dataset`, `verify` and the other
tools work on that folder. Needs no TensorFlow.
"""

from __future__ import annotations

import io
import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, UsageError
from reader.index.names import class_names, read_names
from reader.index.scan import RecordKeys, Scan, find_keys, scan
from reader.info import DatasetInfo, load_info
from reader.limits import cpu_count
from reader.patterns import PathLike, Pattern, find_files
from reader.storage import normalize

_LOG = logging.getLogger("reader")

VERSION = "1.0.0"

_SPLIT = re.compile(r"(?:^|[^a-z0-9])(train|training|validation|valid|val|dev|eval|test)(?![a-z])")
# Images that mean and std come from, dealt evenly to the files of `train`: as many as the write side samples.
_SAMPLED_IMAGES = 512


def index(
    pattern: Pattern,
    out: PathLike,
    *,
    image_key: str | None = None,
    class_key: str | None = None,
    labels_file: PathLike | None = None,
    threads: int | None = None,
    on_error: Literal["raise", "skip"] = "raise",
) -> DatasetInfo:
    """Index some TFRecord files into a folder; the files stay where they are.

    A file's split is the word train, validation, val, test … in its name; files without one are `train`.

    Args:
        pattern: files, such as `gs://any/where/*.tfrec`, or a list of patterns; a file that several match counts once.
        out: a new local folder, or one that `index` made.
        image_key, class_key: features that hold the encoded image and the class id; None to look for the usual names.
        labels_file: class names, each once, one a line, line number from 0 = id; None for the names in the records,
            else the ids.
        threads: files read at once; None for one a core.
        on_error: `raise`, or `skip` damaged records: they are logged, and keep their places, which a reader has to skip
            as well.

    Raises:
        UsageError: no file, GZIP, images of another format, no feature for image or class, or `out` or `labels_file`
            can't be used.
        CorruptRecordError: a record is damaged, or lacks image or class.
    """
    if on_error not in ("raise", "skip"):
        raise UsageError(f"on_error={on_error!r}: raise or skip")
    folder = _folder(os.fspath(out))
    given = None if labels_file is None else read_names(os.fspath(labels_file))
    files = find_files(pattern)
    keys = next(filter(None, (find_keys(file, image_key, class_key, on_error) for file in files)), None)
    if keys is None:
        raise ImageShardsError(f"{files[0]}: no record in {len(files)} files")
    splits: dict[str, list[str]] = {}
    for file in files:
        splits.setdefault(_split_of(file), []).append(file)
    sampled = -(-_SAMPLED_IMAGES // len(splits.get("train", files)))
    with ThreadPoolExecutor(threads or cpu_count(), "reader-index") as executor:
        scans = {
            split: list(executor.map(partial(scan, keys, sampled, on_error), range(len(names)), names))
            for split, names in splits.items()
        }
    every = [one for found in scans.values() for one in found]
    for error in (error for one in every for error in one.damaged):
        _LOG.warning("%s: it keeps its place in the index; read with on_error='skip'", error)
    if not any(one.records for one in every):
        raise ImageShardsError(f"{files[0]}: no record that is right in {len(files)} files")
    classes = class_names(every, given, labels_file)
    _write(folder, scans, classes, keys)
    return load_info(str(folder))


def _folder(out: str) -> Path:
    if "://" in out and not out.startswith("file://"):
        raise UsageError(f"--out {out}: give a local folder; the index is small and can be copied anywhere")
    folder = Path(normalize(out))
    manifest = folder / schema.MANIFEST_FILE
    if manifest.exists() and schema.FOREIGN_KEY not in schema.open_manifest(manifest.read_bytes(), str(manifest)):
        raise UsageError(f"--out {out}: a dataset is published there; choose another folder")
    return folder


def _split_of(file: str) -> str:
    found = _SPLIT.search(file.rpartition("/")[2].lower())
    return found[1] if found else "train"


def _write(folder: Path, scans: dict[str, list[Scan]], classes: list[str], keys: RecordKeys) -> None:
    """Write the index, the manifest last."""
    contents = {schema.LABELS_FILE: "".join(f"{name}\n" for name in classes).encode()}
    for split, found in scans.items():
        buffer = io.BytesIO()
        np.save(buffer, np.array([row for one in found for row in one.runs], schema.RUN_DTYPE))
        contents[schema.runs_file(split)] = buffer.getvalue()
    manifest = _manifest(folder, scans, classes, keys)
    manifest["files"] = {path: schema.sha256(data) for path, data in contents.items()}
    contents[schema.MANIFEST_FILE] = schema.seal_manifest(manifest)
    for path, data in contents.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.tmp")
        temporary.write_bytes(data)
        os.replace(temporary, target)


def _manifest(folder: Path, scans: dict[str, list[Scan]], classes: list[str], keys: RecordKeys) -> dict[str, Any]:
    every = [one for found in scans.values() for one in found]
    records = sum(one.records + len(one.damaged) for one in every)
    sizes = sum((one.sizes for one in every), Counter[tuple[int, int]]())
    formats = sum((one.formats for one in every), Counter[str]())
    channels = max(sum((one.channels for one in every), Counter[int]()))
    image_format = next(iter(formats)) if len(formats) == 1 else "mixed"
    mean, std, sampled = _statistics(scans.get("train", every), channels)
    fingerprint = f"{sum(one.fingerprint for one in every) % (1 << 128):032x}"
    return {
        "format_version": schema.FORMAT_VERSION,
        "name": _dataset_name(every[0].file),
        "version": VERSION,
        schema.FOREIGN_KEY: {"image": keys.image, "class": keys.label},
        "configuration": {"compression": "none", "image_format": image_format, "one_hot": False},
        "classes": classes,
        "features": _features(every),
        "image": {
            "format": image_format,
            "channels": channels,
            "min_size": [min(size[axis] for size in sizes) for axis in (0, 1)],
            "max_size": [max(size[axis] for size in sizes) for axis in (0, 1)],
            "mean": mean,
            "std": std,
            "sampled_images": sampled,
        },
        "images": records,
        "records": records,
        "content_fingerprint": fingerprint,
        "listing_fingerprint": fingerprint,
        "plan": {},
        "codec": {},
        "rejects": {"by_reason": {}, "environment": 0},
        "splits": {split: _split(folder, found, len(classes)) for split, found in scans.items()},
    }


def _features(scans: Sequence[Scan]) -> list[dict[str, Any]]:
    """Name and type of what lies beside image and class; a list, unless each record of all files has one value.

    Without the features that TensorFlow refuses in some records, as lists of another type that have no value.
    """
    types: dict[str, tuple[str, str]] = {}
    for one in scans:
        for key, kind in one.types.items():
            first, file = types.setdefault(key, (kind, one.file))
            if kind != first:
                raise ImageShardsError(f"feature {key!r} is {first} in {file} and {kind} in {one.file}")
    for one in scans:
        for (key, kind), number in one.empty.items():
            if key in types and types[key][0] != kind:
                _LOG.warning(
                    "%s: record %d: its %r is an empty list of %s, in others it is of %s: the index leaves this "
                    "feature out, since TensorFlow can't read it",
                    *(one.file, number, key, kind, types.pop(key)[0]),
                )
    records, singles = sum(one.records for one in scans), sum((one.singles for one in scans), Counter[str]())
    return [{"name": key, "dtype": kind, "list": singles[key] < records} for key, (kind, _) in sorted(types.items())]


def _split(folder: Path, scans: Sequence[Scan], classes: int) -> dict[str, Any]:
    counts = sum((one.classes for one in scans), Counter[int]())
    shards = [
        {
            "file": one.file.removeprefix(f"{folder}/"),
            "records": one.records + len(one.damaged),
            "bytes": one.bytes,
            "crc32c": one.crc32c,
            "images": one.records + len(one.damaged),
            "listing_fingerprint": f"{one.fingerprint:032x}",
            "content_fingerprint": f"{one.fingerprint:032x}",
        }
        for one in scans
    ]
    return {
        "records": sum(one.records + len(one.damaged) for one in scans),
        "bytes": sum(one.bytes for one in scans),
        "class_counts": [counts[number] for number in range(classes)],
        "shards": shards,
    }


def _statistics(scans: Sequence[Scan], channels: int) -> tuple[list[str], list[str], int]:
    """Mean and standard deviation a channel of pixels in [0, 1] as decimal strings, and of how many images."""
    histograms = [histogram for one in scans for histogram in one.histograms]
    counts = np.array(histograms, np.int64).sum(0).reshape(3, 256)[:channels]
    values = np.arange(256) / 255
    mean = (counts * values).sum(1) / counts.sum(1)
    std = np.sqrt(np.maximum((counts * values**2).sum(1) / counts.sum(1) - mean**2, 0))
    return [f"{value:.6f}" for value in mean], [f"{value:.6f}" for value in std], len(histograms)


def _dataset_name(file: str) -> str:
    """A name that TFDS would take, from what a file's name begins with."""
    words = re.match(r"[a-z][a-z0-9_]*", file.rpartition("/")[2].lower().replace("-", "_"))
    name = re.sub(r"_?(train|training|validation|valid|val|dev|eval|test)?(_?\d+.*)?$", "", words[0]) if words else ""
    return name.strip("_") or "foreign"
