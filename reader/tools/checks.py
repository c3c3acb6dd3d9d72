"""What `verify` checks in each record, and what the small files of a dataset have to say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from beam_pipeline import schema
from reader.example import Value
from reader.info import DatasetInfo
from reader.records import InvalidRecordError
from reader.tools.scan import decode_image


def check_record(info: DatasetInfo, features: Mapping[str, Value], decode: bool) -> Iterator[str]:
    """What is wrong with the features of a record; nothing if it is valid.

    Args:
        decode: whether its image is decoded.
    """
    if schema.FOREIGN_KEY in info.manifest:
        yield from _check_foreign(info, features, decode)
        return
    one_hot = bool(info.manifest["configuration"]["one_hot"])
    missing = [key for key in schema.RECORD_KEYS[: None if one_hot else -1] if not len(features.get(key, ()))]
    if missing:
        yield f"it lacks {', '.join(missing)}"
        return
    label = first_integer(features, schema.CLASS_KEY)
    if not 0 <= label < info.num_classes:
        yield f"class {label} is out of range: there are {info.num_classes}"
    elif features[schema.LABEL_KEY] != [schema.relative_path_bytes(info.classes[label])]:
        yield f"label {features[schema.LABEL_KEY]!r} isn't the name of class {label}, {info.classes[label]!r}"
    yield from _check_columns(info, features)
    if one_hot and not np.array_equal(np.asarray(features[schema.ONE_HOT_KEY]), np.arange(info.num_classes) == label):
        yield f"{schema.ONE_HOT_KEY} isn't class {label}"
    value = features[schema.SIZE_KEY]
    size = [] if isinstance(value, list) or value.dtype != np.int64 else value.tolist()
    if not _is_within(info, size):
        yield f"size {size} isn't within the manifest's {_size_range(info)}"
    if decode:
        yield from _check_image(info, first_bytes(features, schema.IMAGE_KEY), size)


def _check_image(info: DatasetInfo, encoded: bytes, size: Sequence[int]) -> Iterator[str]:
    try:
        image = decode_image(encoded, info.image.channels)
    except InvalidRecordError as error:
        yield str(error)
        return
    found, expected = (*image.size, image.bands, image.format), (*size, info.image.channels, info.image.format)
    if found != expected:
        yield f"the image is {found} (height, width, channels, format), expected {expected}"


def _check_foreign(info: DatasetInfo, features: Mapping[str, Value], decode: bool) -> Iterator[str]:
    """The same for a record that `index` found: an Example with an image and a class id."""
    image, label = features.get(info.image_key, []), features.get(info.class_key, [])
    if not isinstance(image, list) or len(image) != 1 or isinstance(label, list) or len(label) != 1:
        yield f"it lacks {info.image_key} or {info.class_key}, or has several"
        return
    if not 0 <= label[0] < info.num_classes:
        yield f"class {int(label[0])} is out of range: there are {info.num_classes}"
    if not decode:
        return
    try:
        found = decode_image(image[0], info.image.channels)
    except InvalidRecordError as error:
        yield str(error)
        return
    if not _is_within(info, found.size):
        yield f"the image is {'x'.join(map(str, found.size))}, the manifest says {_size_range(info)}"
    if info.image.format not in (found.format, "mixed"):
        yield f"the image is {found.format}, the manifest says {info.image.format}"


def _check_columns(info: DatasetInfo, features: Mapping[str, Value]) -> Iterator[str]:
    """The features of a manifest's columns: each there, of its type, one value unless it is a list."""
    for column in info.manifest["features"]:
        value = features.get(column["name"])
        if value is None:
            yield f"it lacks {column['name']}"
            continue
        kind = "bytes" if isinstance(value, list) else str(value.dtype)
        if len(value) and (kind != column["dtype"] or (len(value) > 1 and not column["list"])):
            yield f"{column['name']} has {len(value)} values of {kind}, not {column['dtype']}"


def _is_within(info: DatasetInfo, size: Sequence[int]) -> bool:
    least, most = info.image.min_size or (0, 0), info.image.max_size or (0, 0)
    return len(size) == 2 and all(low <= side <= high for low, side, high in zip(least, size, most, strict=True))


def _size_range(info: DatasetInfo) -> str:
    return f"{list(info.image.min_size or (0, 0))} to {list(info.image.max_size or (0, 0))}"


def first_bytes(features: Mapping[str, Value], key: str) -> bytes:
    """The first value of a feature of bytes, b"" if it has none."""
    value = features.get(key, [])
    return value[0] if isinstance(value, list) and value else b""


def first_integer(features: Mapping[str, Value], key: str) -> int:
    """The first value of a feature of integers, -1 if it has none."""
    value = features.get(key, [])
    return -1 if isinstance(value, list) or value.dtype != np.int64 or not len(value) else int(value[0])


def check_small_file(info: DatasetInfo, file: str, data: bytes) -> Iterator[str]:
    """What a file with the published hash says that the manifest doesn't: the writer erred, or both were edited."""
    check = _SMALL_FILES.get(file)
    try:
        yield from check(info, data) if check else ()
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        yield f"it can't be read: {type(error).__name__}"


def _check_labels(info: DatasetInfo, data: bytes) -> Iterator[str]:
    if data != b"".join(schema.relative_path_bytes(f"{label}\n") for label in info.classes):
        yield "its lines aren't the classes of the manifest"


def _check_features(info: DatasetInfo, data: bytes) -> Iterator[str]:
    features = json.loads(data)["featuresDict"]["features"]
    wanted = set(schema.RECORD_KEYS) | {column["name"] for column in info.manifest["features"]}
    if not info.manifest["configuration"]["one_hot"]:
        wanted.remove(schema.ONE_HOT_KEY)
    if features.keys() != wanted:
        yield f"its features are {', '.join(sorted(features))}, those of the records {', '.join(sorted(wanted))}"
        return
    classes, image = features[schema.CLASS_KEY]["classLabel"]["numClasses"], features[schema.IMAGE_KEY]["image"]
    if classes != str(info.num_classes):
        yield f"it has {classes} classes, the manifest {info.num_classes}"
    if (image["encodingFormat"], image["shape"]["dimensions"][2]) != (info.image.format, str(info.image.channels)):
        yield f"its images aren't {info.image.format} of {info.image.channels} channels"


def _check_dataset_info(info: DatasetInfo, data: bytes) -> Iterator[str]:
    document = json.loads(data)
    if (document["name"], document["version"]) != (info.name, info.version):
        yield f"it is of {document['name']} {document['version']}"
    found = {split["name"]: (split["numBytes"], split["shardLengths"]) for split in document["splits"]}
    wanted = {one.name: (str(one.bytes), [str(shard.records) for shard in one.shards]) for one in info.splits.values()}
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            yield f"its split {name} isn't the manifest's: bytes or records of the shards differ"


def _check_rejects(info: DatasetInfo, data: bytes) -> Iterator[str]:
    reasons: Counter[Any] = Counter(json.loads(line)["reason"] for line in data.splitlines())
    published = info.manifest["rejects"]["by_reason"]
    if reasons != Counter(published):
        yield f"it has {dict(sorted(reasons.items()))}, the manifest {dict(sorted(published.items()))}"


def _check_duplicates(info: DatasetInfo, data: bytes) -> Iterator[str]:
    groups = [json.loads(line) for line in data.splitlines()]
    found = {
        "groups": len(groups),
        "images": sum(len(group["images"]) for group in groups),
        "across_classes": sum(group["classes"] > 1 for group in groups),
        "across_splits": sum(group["splits"] > 1 for group in groups),
    }
    if found != info.manifest.get("duplicates"):
        yield f"it has {found}, the manifest {info.manifest.get('duplicates')}"


_SMALL_FILES = {
    schema.LABELS_FILE: _check_labels,
    schema.FEATURES_FILE: _check_features,
    schema.DATASET_INFO_FILE: _check_dataset_info,
    schema.REJECTS_FILE: _check_rejects,
    schema.DUPLICATES_FILE: _check_duplicates,
}
