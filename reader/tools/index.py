"""`index`: makes third-party plain TFRecord files of images a dataset like ours, without moving a byte of them.

One pass over the files finds where the records are, decodes every image, and counts the classes. A run index and a
manifest that say so go into a folder of their own: `load_info`, the readers and the other tools work on that folder.
A record that is corrupt or doesn't decode is in no run, so no reader meets it.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shlex
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from glob import has_magic
from itertools import chain, combinations, islice, takewhile
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema, storage
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, StorageError, UsageError
from beam_pipeline.schema.manifest import (
    FOREIGN_KEY,
    FORMAT_VERSION,
    builtins_of,
    file_sums,
    parse_manifest,
    seal_manifest,
)
from beam_pipeline.schema.table import COLUMNS, table_bytes
from beam_pipeline.storage.causes import translating_os_errors
from beam_pipeline.text import first_few, name_line, plural
from reader.example import Value, class_id, parse_example
from reader.info import DatasetInfo, load_info
from reader.runs import InvalidRecordError
from reader.tfrecord_files import Example, FileScan, Frame, PathLike, Pattern, find_files, is_gzip, read_examples
from reader.tools.checks import Scanners, check_image, single_bytes, type_name

_LOG = logging.getLogger("reader")

VERSION = "1.0.0"

_SPLIT_WORDS = "train|training|validation|valid|val|dev|evaluation|eval|testing|test|holdout"
_SPLIT = re.compile(rf"(?:^|[^a-z0-9])({_SPLIT_WORDS})(?![a-z])")
_SAMPLED_IMAGES = 512  # that mean and std come from: as many as the write side samples
_MAX_CLASSES = 1_000_000
_NOT_ONE_HOT = "not_one_hot"  # why the index fails, where other reasons leave a record out
_KEPT_ERRORS = 10  # of a file's records that are left out

# Names in use for the image, its class id and its class name: ours and the TFRecord tutorial's, TFDS', TF-Slim's and
# the object detection API's, then what people write by hand. The first that a file has is taken.
IMAGE_KEYS = (schema.IMAGE_KEY, "image/encoded", "image_raw", "image_bytes", "img", "jpeg", "jpg", "png")
CLASS_KEYS = (schema.CLASS_KEY, "label", "image/class/label", "class_id", "label_id", "cls", "target")
NAME_KEYS = (schema.LABEL_KEY, "image/class/text", "class_name", "label_name", schema.CLASS_KEY)
_SEARCHED_RECORDS = 100  # in which the names are looked for: a first one may lack its class


@dataclass(frozen=True, slots=True)
class IndexResult:
    """What `index` did.

    Attributes:
        info: the dataset, as `load_info` returns it for the new folder.
        records: in the index.
        left_out: how many records aren't, by reason: `corrupt_record`, `not_an_example`, `no_image_or_class`,
            `decode_error`.
        sources: a line for each split: how many files it has, and what named it.
    """

    info: DatasetInfo
    records: int
    left_out: Mapping[str, int]
    sources: Sequence[str]


def index(
    patterns: Pattern,
    out: PathLike,
    *,
    image_key: str | None = None,
    class_key: str | None = None,
    labels_file: PathLike | None = None,
) -> IndexResult:
    """Index some TFRecord files into a folder; the files stay where they are. Every image is decoded once.

    A file's split is the word train, validation, val, test … in its name, else in the nearest folder, else `train`.
    What is corrupt or doesn't decode is left out, counted and logged. After a corrupt length the rest of its file is
    lost.

    Args:
        patterns: files, such as `gs://any/where/*.tfrec`, or a list of patterns; a file that several match counts once.
        out: a new local folder, or one that `index` made.
        image_key, class_key: features of the encoded image and the class, an integer or one-hot; None for usual names.
        labels_file: class names, each once, one a line, line number from 0 = id; None for the names in the records,
            else the ids.

    Raises:
        UsageError: no file, GZIP, no feature for image or class, or `out` or `labels_file` can't be used.
        ImageShardsError: no valid record.
    """
    folder = _folder(os.fspath(out))
    given = None if labels_file is None else _read_names(os.fspath(labels_file))
    files = find_files(patterns)
    for file in filter(is_gzip, files):
        raise UsageError(
            f"{file} is GZIP, so no record can be found by its offset: uncompress such files (zcat < "
            f"{shlex.quote(file)} > NEW), or read them with imageshards.record_dataset"
        )
    keys = find_keys(files, image_key, class_key)
    splits, sources = _splits(patterns, files)
    sampled = -(-_SAMPLED_IMAGES // len(splits.get("train", files)))
    with Scanners(len(files)) as scanners:
        scan = partial(_scan_file, folder, keys, sampled, scanners)
        scans = {split: list(scanners.files(scan, names)) for split, names in splits.items()}
    total = _sum(one for found in scans.values() for one in found)
    if not total.records:
        raise ImageShardsError(str(total.errors[0]))  # at least that of the record that has the keys
    total.classes[max(0, keys.one_hot - 1)] += 0  # a list has its last class, even if no record is of it
    _write(folder, scans, total, _class_names(files[0], total, given, labels_file), keys)
    return IndexResult(load_info(str(folder)), total.records, dict(total.left_out), sources)


def _folder(out: str) -> Path:
    if not storage.is_local(out):
        raise UsageError(f"--out {out}: give a local folder; the index is small and can be copied anywhere")
    folder = Path(storage.normalize(out))
    manifest = folder / schema.MANIFEST_FILE
    if manifest.exists() and FOREIGN_KEY not in parse_manifest(manifest.read_bytes(), str(manifest))[0]:
        raise UsageError(f"--out {out}: a dataset is published there; choose another folder")
    return folder


# --- which split a file is in


def _splits(patterns: Pattern, files: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Split → its files, and a line for each split that says what named it."""
    each = [patterns] if isinstance(patterns, str | os.PathLike) else patterns
    levels = zip(*(storage.normalize(os.fspath(one)).split("/")[:-1] for one in each), strict=False)
    fixed = [names[0] for names in takewhile(lambda names: len({*names}) == 1 and not has_magic(names[0]), levels)]
    # The folder that all are in must be the word alone; no other folder above decides, which may have any name.
    outer, found = [folder for folder in fixed[-1:] if _SPLIT.fullmatch(folder.lower())], {}
    for file in files:
        *folders, name = file.split("/")[len(fixed) :]
        places = [(name, "file name"), *((one, f"folder {one!r}") for one in reversed([*outer, *folders]))]
        named = ((word[1], why) for place, why in places if (word := _SPLIT.search(place.lower())))
        found[file] = next(named, ("train", "no split in the name"))
    unnamed = [file for file in files if found[file][1].startswith("no ")]
    if 0 < len(unnamed) < len(files) or len({file.rpartition("/")[0] for file in unnamed}) > 1:
        which = f"{len(unnamed):,} of {plural(len(files), 'file')} and their folders, all are train"
        fix = "if some are held out, name them or their folder val or test, or index them by themselves"
        _LOG.warning("no split in the names of %s: %s; %s", which, name_line(first_few(unnamed)), fix)
    splits = {split: [file for file in files if found[file][0] == split] for split, _ in found.values()}
    why = {split: first_few(dict.fromkeys(found[file][1] for file in names)) for split, names in splits.items()}
    return splits, [f"{split}: {plural(len(names), 'file')} ({why[split]})" for split, names in splits.items()]


# --- which features hold the image, its class id and its class name


class Keys(NamedTuple):
    """Which features hold an image, its class, and its class name ("" if none does)."""

    image: str
    label: str
    name: str
    one_hot: int = 0  # values of the list that the class is; 0 if it is an integer


def find_keys(files: Sequence[str], image_key: str | None, class_key: str | None) -> Keys:
    """The keys of image and class in the first record that has both."""
    first: Example | None = None
    errors: list[CorruptRecordError] = []
    for file in files:
        for one in islice(read_examples(file, errors.append), _SEARCHED_RECORDS):
            keys = _keys_in(one.features, image_key, class_key)
            if keys.image and keys.label:
                numbers = [key for key, value in one.features.items() if class_id(value) is not None]
                if not class_key and (others := [key for key in CLASS_KEYS if key in numbers and key != keys.label]):
                    which = f"{keys.label!r}, not from {first_few([*map(repr, others)])}"
                    _LOG.warning("%s: classes are read from %s; --class_key chooses", name_line(file), which)
                return keys
            first = first or one
    if first is None:
        raise errors[0] if errors else ImageShardsError(f"{files[0]}: no record in {plural(len(files), 'file')}")
    features = first.features
    shown = {key: f"{key} ({type_name(value)}, {len(value)})" for key, value in sorted(features.items())}
    flag, key, what = "--image_key", image_key, "an image (one bytes value)"
    fitting = [key for key in shown if single_bytes(features, key) is not None]
    if _keys_in(features, image_key, class_key).image:
        flag, key, what = "--class_key", class_key, "a class id (one integer, or a one-hot list)"
        fitting = [key for key in shown if class_id(features[key]) is not None]
        lists = [key for key in shown if type_name(features[key]) == "int64" and key not in fitting]
        what += f"; {shown[lists[0]]} is a list, as detection sets have: an index needs one per image" if lists else ""
    isnt = f"{shown.get(key, repr(key))} isn't" if key else "no feature is known to hold"
    choices = ", ".join(shown[key] for key in fitting)
    fix = f"name it by {flag} among: {choices}" if choices else f"the features are {', '.join(shown.values())}"
    raise UsageError(f"{first.name}: {isnt} {what}; {fix}; imageshards.record_dataset reads all features")


def _keys_in(features: Mapping[str, Value], image_key: str | None, class_key: str | None) -> Keys:
    """The features that hold these things in one record, "" for those that it lacks."""
    texts = [key for key in features if single_bytes(features, key) is not None]
    numbers = [key for key, value in features.items() if class_id(value) is not None]
    image = next((key for key in ([image_key] if image_key else IMAGE_KEYS) if key in texts), "")
    label = next((key for key in ([class_key] if class_key else CLASS_KEYS) if key in numbers), "")
    name = next((key for key in NAME_KEYS if key in texts and key != image), "")
    return Keys(image, label, name, len(features[label]) if label and len(features[label]) > 1 else 0)


# --- class names


def _class_names(file: str, total: _Contents, given: list[str] | None, labels_file: PathLike | None) -> list[str]:
    """A name for each id from 0 to the highest."""
    count = 1 + max(total.classes)
    if given is not None:
        if len(given) < count:
            found = f"{len(given)} names, and class id {count - 1} is in the records"
            raise UsageError(f"--labels_file {labels_file}: {found}; name every class")
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
        url = storage.normalize(labels_file)  # a local one may be a pipe, which our storage doesn't read
        with translating_os_errors(url):
            data = Path(url).read_bytes() if storage.is_local(url) else storage.open_storage(url).read(url)
        text = data.decode("utf-8-sig")
    except (StorageError, UnicodeDecodeError) as error:
        why = error.reason if isinstance(error, StorageError) else "not UTF-8"
        raise UsageError(f"--labels_file {labels_file}: {why}; give a text file, one class a line") from None
    names = [line.strip() for line in text.rstrip().splitlines()]
    repeated = next((name for name, times in Counter(names).items() if times > 1 or not name), None)
    if repeated is not None:
        fault = f"{repeated!r} is empty or repeated"
        raise UsageError(f"--labels_file {labels_file}: {fault}; write each class once, one a line")
    return names


# --- one pass over the files


@dataclass
class _Contents:
    """What some records hold; the counters count records.

    Attributes:
        left_out: those that aren't indexed, by reason.
        errors: the first of these.
        places: (offset, framed bytes, class id) of each, of a block only.
        names: (class id, class name) of some.
        features: by (name, type, number of values: 0, 1 or 2 for more) of the features other than image and class.
        images: (format, whether it is grey, height, width) of some.
        moments: of the sampled pixels: their number, sum, and sum of squares; int64 [3, channels].
        sampled: images that these are of.
        digest: sum over the records of a hash of their bytes.
    """

    left_out: Counter[str] = field(default_factory=Counter)
    errors: list[CorruptRecordError] = field(default_factory=list)
    classes: Counter[int] = field(default_factory=Counter)
    places: list[tuple[int, int, int]] = field(default_factory=list)
    names: set[tuple[int, bytes]] = field(default_factory=set)
    features: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    images: set[tuple[str, bool, int, int]] = field(default_factory=set)
    moments: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((3, 3), np.int64))
    sampled: int = 0
    digest: int = 0

    @property
    def records(self) -> int:
        """How many are indexed."""
        return self.classes.total()

    def take(self, frame: Frame, keys: Keys, is_sampled: bool) -> tuple[str, str]:
        """Decode a record's image and count what the record holds, or say why it is left out: a reason, and details."""
        record = frame.record
        if isinstance(record, CorruptRecordError):
            return "corrupt_record", record.reason
        try:
            features = parse_example(record)
        except ValueError as error:
            return "not_an_example", str(error)
        encoded, value = single_bytes(features, keys.image), features.get(keys.label, [])
        label = class_id(value)
        if encoded is None:
            return "no_image_or_class", f"its {keys.image!r} isn't one image"
        if keys.one_hot and np.any(value) and (label is None or len(value) != keys.one_hot):
            found = f"{np.count_nonzero(value)} of {plural(len(value), 'value')} of {keys.label!r} aren't 0"
            return _NOT_ONE_HOT, f"{found}, and another record has one 1 in {keys.one_hot}: give another --class_key"
        if not keys.one_hot and label is not None and len(value) > 1:
            found = f"{len(value)} values are in {keys.label!r}, and another record has one class id"
            return _NOT_ONE_HOT, f"{found}: give another --class_key"
        if label is None or label < 0:
            return "no_image_or_class", f"its {keys.label!r} isn't one class id"
        try:
            image = check_image(encoded, with_sums=is_sampled)
        except InvalidRecordError as error:
            return "decode_error", _raw_pixels(features, len(encoded)) or str(error)
        self.classes[label] += 1
        self.places.append((frame.offset, len(record) + schema.FRAME_BYTES, label))
        if name := single_bytes(features, keys.name):
            self.names.add((label, name))
        own = (keys.image, keys.label)
        self.features.update((key, type_name(one), min(len(one), 2)) for key, one in features.items() if key not in own)
        self.images.add((image.format, image.is_grey, image.height, image.width))
        if sums := image.sums:
            self.moments += [np.broadcast_to(one, 3) for one in (sums.count, sums.totals, sums.squares)]
            self.sampled += 1
        self.digest += int.from_bytes(hashlib.blake2b(record, digest_size=16).digest(), "big")
        return "", ""

    def add(self, other: _Contents) -> None:
        """Add what other records hold."""
        for name in ("left_out", "classes", "names", "features", "images"):
            getattr(self, name).update(getattr(other, name))
        self.errors = (self.errors + other.errors)[:_KEPT_ERRORS]
        self.moments += other.moments
        self.sampled += other.sampled
        self.digest = (self.digest + other.digest) % (1 << 128)


@dataclass
class _File:
    """What the pass over a file found.

    Attributes:
        name: as the manifest has it: full, or below the index's folder.
        size: in bytes.
        runs: rows of `schema.RUN_DTYPE` without the shard's number.
        record_table: with what is known of records that we didn't write.
    """

    name: str
    size: int
    crc32c: int
    contents: _Contents
    runs: list[tuple[int, int, int]]
    record_table: bytes


def _scan_file(folder: Path, keys: Keys, sampled: int, scanners: Scanners, path: str) -> _File:
    """Read a file from start to end; mean and std come from its first `sampled` records."""
    scan, contents = FileScan(path), _Contents()
    runs: list[tuple[int, int, int]] = []
    columns = {"bytes": array("q"), "class": array("q")}
    for block in scanners.blocks(partial(_read_block, path, keys, sampled), scan.blocks()):
        contents.add(block)
        for offset, size, label in block.places:  # a run also ends before a record that is left out
            columns["bytes"].append(size)
            columns["class"].append(label)
            begin, run_bytes, records = runs[-1] if runs else (0, -1, 0)
            if begin + run_bytes == offset and records < schema.RUN_RECORDS:
                runs[-1] = begin, run_bytes + size, records + 1
            else:
                runs.append((offset, size, 1))
    for error in contents.errors:
        _LOG.warning("left out: %s", name_line(str(error)))
    if contents.left_out.total() > len(contents.errors):
        _LOG.warning("%s: %d records are left out", name_line(path), contents.left_out.total())
    table = table_bytes({name: COLUMNS[name] for name in columns}, columns)
    size = storage.open_storage(path).size(path)
    return _File(path.removeprefix(f"{folder}/"), size, scan.crc32c, contents, runs, table)


def _read_block(path: str, keys: Keys, sampled: int, block: Iterable[Frame]) -> _Contents:
    """What a block holds; any thread checks CRCs and decodes here."""
    contents = _Contents()
    for frame in block:
        reason, details = contents.take(frame, keys, frame.number < sampled)
        if reason == _NOT_ONE_HOT:
            raise UsageError(f"{path}: record {frame.number}: {details}")
        if reason:
            contents.left_out[reason] += 1
            contents.errors.append(CorruptRecordError(path, frame.number, frame.offset, details))
    return contents


def _raw_pixels(features: Mapping[str, Value], size: int) -> str:
    """That an image which doesn't decode is pixels, if two or three integers of its record multiply to its bytes."""
    numbers = [int(one) for value in features.values() if type_name(value) == "int64" for one in value[:3]]
    for chosen in chain(combinations(numbers[:12], 3), combinations(numbers[:12], 2)):
        if size and prod(chosen) in (size, size / 4):  # uint8, or float32
            return f"its {size:,} bytes are raw pixels, {' × '.join(map(str, chosen))}: write them as JPEG or PNG"
    return ""


def _sum(files: Iterable[_File]) -> _Contents:
    total = _Contents()
    for file in files:
        total.add(file.contents)
    return total


# --- what is written


def _write(folder: Path, scans: dict[str, list[_File]], total: _Contents, classes: list[str], keys: Keys) -> None:
    """Write the index, the manifest last."""
    contents = {schema.LABELS_FILE: "".join(f"{name}\n" for name in classes).encode()}
    for split, found in scans.items():
        rows = [(number, *run) for number, one in enumerate(found) for run in one.runs]
        buffer = io.BytesIO()
        np.save(buffer, np.array(rows, schema.RUN_DTYPE))
        contents[schema.runs_file(split)] = buffer.getvalue()
    manifest = _manifest(scans, total, classes, keys)
    manifest["files"] = {path: schema.sha256(data) for path, data in contents.items()}
    contents |= {schema.table_file(one.name): one.record_table for found in scans.values() for one in found}
    contents[schema.MANIFEST_FILE] = seal_manifest(manifest)
    for path, data in contents.items():
        storage.open_storage(str(folder)).write(f"{folder}/{path}", data)


def _manifest(scans: dict[str, list[_File]], total: _Contents, classes: list[str], keys: Keys) -> dict[str, Any]:
    every = [one for found in scans.values() for one in found]
    formats, greys, heights, widths = (set(kinds) for kinds in zip(*total.images, strict=True))
    channels, image_format = 1 if greys == {True} else 3, formats.pop() if len(formats) == 1 else "mixed"
    sample = _sum(scans.get("train", every))
    mean, std = _mean_and_std(sample.moments[:, :channels]) if sample.sampled else ([], [])
    fingerprint = f"{total.digest:032x}"
    return {
        "format_version": FORMAT_VERSION,
        "name": _dataset_name(every[0].name),
        "version": VERSION,
        FOREIGN_KEY: {"image": keys.image, "class": keys.label, **({"one_hot": keys.one_hot} if keys.one_hot else {})},
        "configuration": {"compression": "none", "image_format": image_format, "one_hot": False},
        "classes": classes,
        "features": _features(total),
        "image": {
            "format": image_format,
            "channels": channels,
            "min_size": [min(heights), min(widths)],
            "max_size": [max(heights), max(widths)],
            "mean": mean,
            "std": std,
            "sampled_images": sample.sampled,
        },
        "images": total.records + total.left_out.total(),
        "records": total.records,
        "content_fingerprint": fingerprint,
        "listing_fingerprint": fingerprint,
        "plan": {},
        "codec": {},
        "rejects": {"by_reason": dict(total.left_out), "environment": 0},
        "splits": {split: _split(found, len(classes)) for split, found in scans.items()},
    }


def _features(total: _Contents) -> list[dict[str, Any]]:
    """Name and type of the features other than image and class; a list, unless each record of all files has one value.

    A feature that some records have in another type, also without a value, is left out: TensorFlow refuses it.
    """
    features = []
    for key in sorted({key for key, _, values in total.features if values}):
        first, *others = sorted({kind for name, kind, _ in total.features if name == key})
        if others:
            _LOG.warning("the index leaves out feature %r: it is %s", key, " or ".join((first, *others)))
        else:
            features.append({"name": key, "dtype": first, "list": total.features[key, first, 1] < total.records})
    return features


def _split(files: Sequence[_File], classes: int) -> dict[str, Any]:
    total = _sum(files)
    shards = [
        {
            "file": one.name,
            "records": one.contents.records,
            "bytes": one.size,
            "crc32c": one.crc32c,
            "images": one.contents.records + one.contents.left_out.total(),
            "listing_fingerprint": f"{one.contents.digest:032x}",
            "content_fingerprint": f"{one.contents.digest:032x}",
            "table": builtins_of(file_sums(one.record_table)),
        }
        for one in files
    ]
    return {
        "records": total.records,
        "bytes": sum(one.size for one in files),
        "class_counts": [total.classes[number] for number in range(classes)],
        "shards": shards,
    }


def _mean_and_std(moments: npt.NDArray[np.int64]) -> tuple[list[str], list[str]]:
    """Of pixels in [0, 1], a decimal string per channel, from their number, sum and sum of squares."""
    count, total, squares = moments.astype(np.float64)
    mean = total / count / 255
    std = np.sqrt(np.maximum(squares / count / 255**2 - mean**2, 0))
    return [f"{value:.6f}" for value in mean], [f"{value:.6f}" for value in std]


def _dataset_name(file: str) -> str:
    """A name that TFDS would take, from what a file's name begins with."""
    words = re.match(r"[a-z][a-z0-9_]*", file.rpartition("/")[2].lower().replace("-", "_"))
    name = re.sub(rf"_?({_SPLIT_WORDS})?(_?\d+.*)?$", "", words[0]) if words else ""
    return name.strip("_") or "foreign"
