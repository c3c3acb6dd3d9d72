"""`index`: makes third-party plain TFRecord files of images a dataset like ours, without moving a byte of them.

One pass over the files finds where the records are, decodes every image, and counts the classes. A run index and a
manifest that say so go into a folder of their own: `load_info`, the readers and the other tools work on that folder.
A record that is corrupt or doesn't decode is in no run, so no reader meets it.
"""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from beam_pipeline import schema, storage
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, StorageError, UsageError
from reader.example import Value
from reader.info import DatasetInfo, load_info
from reader.record_files import FileScan, Frame, PathLike, Pattern, features_of, find_files, is_gzip
from reader.tools.scan import Contents, RecordKeys, Scanners, type_name

_LOG = logging.getLogger("reader")

VERSION = "1.0.0"

# Names in use for the image, its class id and its class name: ours and the TFRecord tutorial's, TFDS', TF-Slim's and
# the object detection API's, then what people write by hand. The first that a file has is taken.
IMAGE_KEYS = (schema.IMAGE_KEY, "image/encoded", "image_raw", "image_bytes", "img", "jpeg", "jpg", "png")
CLASS_KEYS = (schema.CLASS_KEY, "label", "image/class/label", "class_id", "label_id", "cls", "target")
NAME_KEYS = (schema.LABEL_KEY, "image/class/text", "class_name", "label_name", schema.CLASS_KEY)

_SPLIT = re.compile(r"(?:^|[^a-z0-9])(train|training|validation|valid|val|dev|eval|test)(?![a-z])")
_SAMPLED_IMAGES = 512  # that mean and std come from: as many as the write side samples
_SEARCHED_RECORDS = 100  # in which the names are looked for: a first one may lack its class
_MAX_CLASSES = 1_000_000


@dataclass(frozen=True, slots=True)
class Indexed:
    """What `index` did.

    Attributes:
        info: the dataset, as `load_info` returns it for the new folder.
        records: in the index.
        left_out: how many records aren't, by reason: `corrupt_record`, `not_an_example`, `no_image_or_class`,
            `decode_error`.
    """

    info: DatasetInfo
    records: int
    left_out: Mapping[str, int]


def index(
    patterns: Pattern,
    out: PathLike,
    *,
    image_key: str | None = None,
    class_key: str | None = None,
    labels_file: PathLike | None = None,
    on_error: Literal["raise", "skip"] = "skip",
) -> Indexed:
    """Index some TFRecord files into a folder; the files stay where they are. Every image is decoded once.

    A file's split is the word train, validation, val, test … in its name; files without one are `train`.

    Args:
        patterns: files, such as `gs://any/where/*.tfrec`, or a list of patterns; a file that several match counts once.
        out: a new local folder, or one that `index` made.
        image_key, class_key: features that hold the encoded image and the class id; None to look for the usual names.
        labels_file: class names, each once, one a line, line number from 0 = id; None for the names in the records,
            else the ids.
        on_error: `skip` leaves out records that are corrupt or don't decode, counts and logs them; `raise` stops at
            the first. Behind a corrupt length the rest of its file is lost.

    Raises:
        UsageError: no file, GZIP, no feature for image or class, or `out` or `labels_file` can't be used.
        CorruptRecordError: a record is corrupt, and `on_error` is `raise`.
        ImageShardsError: no valid record.
    """
    if on_error not in ("raise", "skip"):
        raise UsageError(f"on_error={on_error!r}: raise or skip")
    folder = _folder(os.fspath(out))
    given = None if labels_file is None else _read_names(os.fspath(labels_file))
    files = find_files(patterns)
    for file in filter(is_gzip, files):
        raise UsageError(
            f"{file} is GZIP, so no record can be found by its offset: read it with reader.record_dataset, or write "
            "it without compression"
        )
    keys = _find_keys(files, image_key, class_key)
    splits: dict[str, list[str]] = {}
    for file in files:
        splits.setdefault(_split_of(file), []).append(file)
    sampled = -(-_SAMPLED_IMAGES // len(splits.get("train", files)))
    with Scanners(len(files)) as scanners:
        scan = partial(_scan_file, keys, sampled, on_error, scanners)
        scans = {split: list(scanners.files(scan, names)) for split, names in splits.items()}
    total = _sum(one for found in scans.values() for one in found)
    if not total.records:
        raise ImageShardsError(str(total.errors[0]) if total.errors else f"{files[0]}: no record in {len(files)} files")
    _write(folder, scans, total, _class_names(files[0], total, given, labels_file), keys)
    return Indexed(load_info(str(folder)), total.records, dict(total.left_out))


def _folder(out: str) -> Path:
    if not storage.is_local(out):
        raise UsageError(f"--out {out}: give a local folder; the index is small and can be copied anywhere")
    folder = Path(storage.normalize(out))
    manifest = folder / schema.MANIFEST_FILE
    if manifest.exists() and schema.FOREIGN_KEY not in schema.open_manifest(manifest.read_bytes(), str(manifest)):
        raise UsageError(f"--out {out}: a dataset is published there; choose another folder")
    return folder


def _split_of(file: str) -> str:
    found = _SPLIT.search(file.rpartition("/")[2].lower())
    return found[1] if found else "train"


# --- which features


def _find_keys(files: Sequence[str], image_key: str | None, class_key: str | None) -> RecordKeys:
    """The keys of image and class in the first record that has both."""
    first: tuple[str, dict[str, Value]] | None = None
    error: CorruptRecordError | None = None
    for file in files:
        for frame in islice(FileScan(file), _SEARCHED_RECORDS):
            try:
                features = features_of(file, frame)
            except CorruptRecordError as wrong:
                error = error or wrong
                continue
            first = first or (file, features)
            image, label, texts = _keys_in(features, image_key, class_key)
            if image and label:
                return RecordKeys(image, label, next((key for key in NAME_KEYS if key in texts and key != image), ""))
    if first is None:
        raise error or ImageShardsError(f"{files[0]}: no record in {len(files)} files")
    file, features = first
    image, *_ = _keys_in(features, image_key, class_key)
    missing = "a class id (one int64 value)" if image else "an image (one bytes value)"
    flag = "--class_key" if image else "--image_key"
    there = ", ".join(f"{key} ({type_name(value)}, {len(value)})" for key, value in sorted(features.items()))
    raise UsageError(f"{file}: no feature is known to hold {missing}; name it by {flag} among: {there or 'nothing'}")


def _keys_in(features: Mapping[str, Value], image_key: str | None, class_key: str | None) -> tuple[str, str, set[str]]:
    """The image's and the class id's feature, "" if there is none; and the features of one text."""
    single = {key: type_name(value) for key, value in features.items() if len(value) == 1}
    texts = {key for key, kind in single.items() if kind == "bytes"}
    numbers = {key for key, kind in single.items() if kind == "int64"}
    image = next((key for key in ([image_key] if image_key else IMAGE_KEYS) if key in texts), "")
    label = next((key for key in ([class_key] if class_key else CLASS_KEYS) if key in numbers), "")
    return image, label, texts


def _class_names(file: str, total: Contents, given: list[str] | None, labels_file: PathLike | None) -> list[str]:
    """A name for each id from 0 to the highest."""
    count = 1 + max(total.classes)
    if given is not None:
        if len(given) < count:
            found = f"{len(given)} names, and class id {count - 1} is in the records"
            raise UsageError(f"--labels_file {labels_file}: {found}")
        return given
    if count > _MAX_CLASSES:
        raise UsageError(f"{file} and others: class id {count - 1} is too large; give another --class_key")
    names = {number: name.decode("utf-8", "replace") for number, name in total.names}
    # Else the feature doesn't hold class names.
    is_named = len(total.names) == len(names) == len(set(names.values())) and all(
        name and name == name.strip() and len(name.splitlines()) == 1 for name in names.values()
    )
    return [names.get(number, str(number)) if is_named else str(number) for number in range(count)]


def _read_names(labels_file: str) -> list[str]:
    """The lines of a labels file, without empty ones at its end."""
    try:
        text = storage.open_storage(labels_file).read(storage.normalize(labels_file)).decode("utf-8-sig")
    except (StorageError, UnicodeDecodeError) as error:
        why = error.reason if isinstance(error, StorageError) else "not UTF-8"
        raise UsageError(f"--labels_file {labels_file}: {why}; give a text file, one class a line") from None
    names = [line.strip() for line in text.rstrip().splitlines()]
    first: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if not name:
            raise UsageError(f"--labels_file {labels_file}: line {number} is empty; the line's number is the class id")
        if first.setdefault(name, number) != number:
            lines = f"{first[name]} and {number}"
            raise UsageError(f"--labels_file {labels_file}: class {name!r} is in lines {lines}; write each once")
    return names


# --- one pass over the files


@dataclass
class _File:
    """What the pass over a file found; `runs` are rows of `schema.RUN_DTYPE` without the shard's number."""

    path: str
    bytes: int
    crc32c: int
    contents: Contents
    runs: list[tuple[int, int, int]]


def _scan_file(keys: RecordKeys, sampled: int, on_error: str, scanners: Scanners, path: str) -> _File:
    """Read a file from end to end; the pixels of its first `sampled` records are counted."""
    scan, contents = FileScan(path), Contents()
    runs: list[tuple[int, int, int]] = []
    for block in scanners.blocks(partial(_read_block, path, keys, sampled), scan.blocks()):
        if block.errors and on_error == "raise":
            raise block.errors[0]
        contents.add(block)
        for offset, size in block.spans:  # a run also ends before a record that is left out
            begin, run_bytes, records = runs[-1] if runs else (0, -1, 0)
            if begin + run_bytes == offset and records < schema.RUN_RECORDS:
                runs[-1] = begin, run_bytes + size, records + 1
            else:
                runs.append((offset, size, 1))
    for error in contents.errors:
        _LOG.warning("left out: %s", error)
    if contents.left_out.total() > len(contents.errors):
        _LOG.warning("%s: %d records are left out", path, contents.left_out.total())
    return _File(path, storage.open_storage(path).size(path), scan.crc32c, contents, runs)


def _read_block(path: str, keys: RecordKeys, sampled: int, block: Iterable[Frame]) -> Contents:
    """What the records of a block hold; CRCs are checked and images decoded here, by any thread."""
    contents = Contents()
    for number, offset, record in block:
        reason, details = contents.take(record, keys, number < sampled)
        if reason:
            contents.left_out[reason] += 1
            contents.errors.append(CorruptRecordError(path, number, offset, details))
        else:
            contents.spans.append((offset, len(record) + schema.FRAME_BYTES))  # type: ignore[arg-type]
    return contents


def _sum(files: Iterable[_File]) -> Contents:
    total = Contents()
    for file in files:
        total.add(file.contents)
    return total


# --- what is written


def _write(folder: Path, scans: dict[str, list[_File]], total: Contents, classes: list[str], keys: RecordKeys) -> None:
    """Write the index, the manifest last."""
    manifest = _manifest(folder, scans, total, classes, keys)
    contents = {schema.LABELS_FILE: "".join(f"{name}\n" for name in classes).encode()}
    for split, found in scans.items():
        rows = [(number, *run) for number, one in enumerate(found) for run in one.runs]
        buffer = io.BytesIO()
        np.save(buffer, np.array(rows, schema.RUN_DTYPE))
        contents[schema.runs_file(split)] = buffer.getvalue()
    manifest["files"] = {path: schema.sha256(data) for path, data in contents.items()}
    contents[schema.MANIFEST_FILE] = schema.seal_manifest(manifest)
    for path, data in contents.items():
        storage.open_storage(str(folder)).write(f"{folder}/{path}", data)


def _manifest(
    folder: Path, scans: dict[str, list[_File]], total: Contents, classes: list[str], keys: RecordKeys
) -> dict[str, Any]:
    every = [one for found in scans.values() for one in found]
    formats, greys, heights, widths = (set(kinds) for kinds in zip(*total.images, strict=True))
    channels, image_format = 1 if greys == {True} else 3, formats.pop() if len(formats) == 1 else "mixed"
    mean, std, sampled = _statistics(_sum(scans.get("train", every)), channels)
    fingerprint = f"{total.digest:032x}"
    return {
        "format_version": schema.FORMAT_VERSION,
        "name": _dataset_name(every[0].path),
        "version": VERSION,
        schema.FOREIGN_KEY: {"image": keys.image, "class": keys.label},
        "configuration": {"compression": "none", "image_format": image_format, "one_hot": False},
        "classes": classes,
        "features": _features(every, total),
        "image": {
            "format": image_format,
            "channels": channels,
            "min_size": [min(heights), min(widths)],
            "max_size": [max(heights), max(widths)],
            "mean": mean,
            "std": std,
            "sampled_images": sampled,
        },
        "images": total.records + total.left_out.total(),
        "records": total.records,
        "content_fingerprint": fingerprint,
        "listing_fingerprint": fingerprint,
        "plan": {},
        "codec": {},
        "rejects": {"by_reason": dict(total.left_out), "environment": 0},
        "splits": {split: _split(folder, found, len(classes)) for split, found in scans.items()},
    }


def _features(files: Sequence[_File], total: Contents) -> list[dict[str, Any]]:
    """Name and type of what is beside image and class; a list, unless each record of all files has one value.

    A feature that some records have in another type, also without a value, is left out: TensorFlow refuses it.
    """
    features = []
    for key in sorted({key for key, _, values in total.features if values}):
        first, *others = sorted({kind for name, kind, _ in total.features if name == key})
        if others:
            where = {kind: one.path for one in files[::-1] for name, kind, _ in one.contents.features if name == key}
            types = " and ".join(f"{kind} in records of {where[kind]}" for kind in (first, *others))
            _LOG.warning("the index leaves out feature %r, which is %s", key, types)
        else:
            features.append({"name": key, "dtype": first, "list": total.features[key, first, 1] < total.records})
    return features


def _split(folder: Path, files: Sequence[_File], classes: int) -> dict[str, Any]:
    total = _sum(files)
    shards = [
        {
            "file": one.path.removeprefix(f"{folder}/"),
            "records": one.contents.records,
            "bytes": one.bytes,
            "crc32c": one.crc32c,
            "images": one.contents.records + one.contents.left_out.total(),
            "listing_fingerprint": f"{one.contents.digest:032x}",
            "content_fingerprint": f"{one.contents.digest:032x}",
        }
        for one in files
    ]
    return {
        "records": total.records,
        "bytes": sum(one.bytes for one in files),
        "class_counts": [total.classes[number] for number in range(classes)],
        "shards": shards,
    }


def _statistics(contents: Contents, channels: int) -> tuple[list[str], list[str], int]:
    """Mean and standard deviation a channel of pixels in [0, 1] as decimal strings, and of how many images."""
    counts, values = contents.histogram[:channels], np.arange(256) / 255
    if not contents.sampled:
        return [], [], 0
    mean = (counts * values).sum(1) / counts.sum(1)
    std = np.sqrt(np.maximum((counts * values**2).sum(1) / counts.sum(1) - mean**2, 0))
    return [f"{value:.6f}" for value in mean], [f"{value:.6f}" for value in std], contents.sampled


def _dataset_name(file: str) -> str:
    """A name that TFDS would take, from what a file's name begins with."""
    words = re.match(r"[a-z][a-z0-9_]*", file.rpartition("/")[2].lower().replace("-", "_"))
    name = re.sub(r"_?(train|training|validation|valid|val|dev|eval|test)?(_?\d+.*)?$", "", words[0]) if words else ""
    return name.strip("_") or "foreign"
