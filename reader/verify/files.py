"""What `verify` checks beside the shards: which files there are, their hashes, and what they say."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import one_line
from reader.hashing import hash_file
from reader.info import DatasetInfo, SplitInfo
from reader.verify.faults import Fault, of_file


def check_files(info: DatasetInfo, sizes: Mapping[str, int]) -> list[Fault]:
    """Files that are missing, don't belong there or aren't the published ones; shards and `.idx` are read later.

    Args:
        info: of the dataset.
        sizes: file → bytes, of every file there is.
    """
    published: Mapping[str, str] = info.manifest["files"]
    shards = {shard.file for split in info.splits.values() for shard in split.shards}
    indexes = {name.index_file for name in map(schema.ShardName.parse, shards) if name is not None}
    faults = [of_file(info.path(file), "the file is missing") for file in sorted({*published, *shards} - set(sizes))]
    for file, sha256 in sorted(published.items()):
        if file in indexes or file not in sizes:
            continue
        if hash_file(info.storage, info.path(file), sizes[file]) != sha256:
            faults.append(of_file(info.path(file), "its SHA-256 isn't the one that was published"))
        else:
            faults += [of_file(info.path(file), what) for what in _contradictions(info, file)]
    for file in sorted(set(sizes) - {*published, *shards}):
        if schema.ShardName.parse(file) or file.startswith(f"{schema.INDEX_FOLDER}/"):
            faults.append(
                of_file(info.path(file), "the file doesn't belong to the dataset; move it away if --repair leaves it")
            )
    return faults


def check_sums(info: DatasetInfo) -> list[Fault]:
    """Sums that don't add up in the manifest itself."""
    found = []
    rejects = sum(info.manifest["rejects"]["by_reason"].values())
    records = sum(split.records for split in info.splits.values())
    if not records == info.manifest["records"] == info.manifest["images"] - rejects:
        found.append("records + rejects isn't the number of images listed")
    for split in info.splits.values():
        sums = (sum(shard.records for shard in split.shards), sum(split.class_counts))
        if sums != (split.records, split.records) or split.bytes != sum(shard.bytes for shard in split.shards):
            found.append(f"the shards or classes of {split.name} don't add up to its records and bytes")
    return [of_file(info.path(schema.MANIFEST_FILE), what) for what in found]


class RunIndex:
    """A split's run index, as far as there is one.

    Attributes:
        faults: of the file; that its hash is wrong is found with all other files.
    """

    def __init__(self, info: DatasetInfo, split: SplitInfo, sizes: Mapping[str, int]) -> None:
        self.faults: list[Fault] = []
        self._rows: npt.NDArray[np.void] | None = None
        runs = [-(-shard.records // schema.RUN_RECORDS) for shard in split.shards]
        self._starts = np.cumsum([0, *runs]).tolist()
        file = schema.runs_file(split.name)
        if info.compression != "none" or file not in sizes:
            return  # not to be there, or a fault already
        data = info.storage.read(info.path(file))
        if schema.sha256(data) != info.manifest["files"].get(file):
            return  # which `check_files` tells
        try:
            rows = np.load(io.BytesIO(data), allow_pickle=False)
            if rows.dtype != schema.RUN_DTYPE or rows.ndim != 1:
                raise ValueError(f"dtype {rows.dtype}, {rows.ndim} dimensions")
        except Exception as error:  # NumPy raises a dozen types for broken headers
            self.faults.append(of_file(info.path(file), f"it isn't a run index: {one_line(error)}"))
            return
        if len(rows) != self._starts[-1]:
            what = f"it has {len(rows)} runs, the shards of {split.name} have {self._starts[-1]}"
            self.faults.append(of_file(info.path(file), what))
            return
        self._rows = rows

    def rows_of(self, index: int) -> npt.NDArray[np.void] | None:
        """The rows that belong to one shard, or None."""
        return None if self._rows is None else self._rows[self._starts[index] : self._starts[index + 1]]


def _contradictions(info: DatasetInfo, file: str) -> Iterator[str]:
    """What a file with the published hash says that the manifest doesn't: the writer erred, or both were edited."""
    check = {
        schema.LABELS_FILE: _check_labels,
        schema.FEATURES_FILE: _check_features,
        schema.DATASET_INFO_FILE: _check_dataset_info,
        schema.REJECTS_FILE: _check_rejects,
        schema.DUPLICATES_FILE: _check_duplicates,
    }.get(file)
    if check is None:
        return
    try:
        yield from check(info, info.storage.read(info.path(file)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
    classes = features[schema.CLASS_KEY]["classLabel"]["numClasses"]
    if classes != str(info.num_classes):
        yield f"it has {classes} classes, the manifest {info.num_classes}"
    image = features[schema.IMAGE_KEY]["image"]
    if (image["encodingFormat"], image["shape"]["dimensions"][2]) != (info.image.format, str(info.image.channels)):
        yield f"its images aren't {info.image.format} of {info.image.channels} channels"


def _check_dataset_info(info: DatasetInfo, data: bytes) -> Iterator[str]:
    document = json.loads(data)
    if (document["name"], document["version"]) != (info.name, info.version):
        yield f"it is of {document['name']} {document['version']}"
    found = {split["name"]: (split["numBytes"], split["shardLengths"]) for split in document["splits"]}
    wanted = {
        split.name: (str(split.bytes), [str(shard.records) for shard in split.shards]) for split in info.splits.values()
    }
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
