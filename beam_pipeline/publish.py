"""Publishes a finished job: joins the sidecars into indexes, metadata and the manifest, which is the commit point.

Sidecars are read shard by shard; what stays in memory is under 4 kB a shard. Order of writing: run index, labels,
features.json, rejects.jsonl, run.json, dataset_info.json, manifest.json. Until the last one there is no dataset.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import IO, Any

import google_crc32c
import numpy as np

from beam_pipeline import schema, storage
from beam_pipeline.duplicates import Counts, SavedGroups, saved_lines
from beam_pipeline.errors import ImageShardsError, NotPublishedError
from beam_pipeline.images import WHOLE, WITHOUT_METADATA
from beam_pipeline.options import Config
from beam_pipeline.schema import ENVIRONMENT_REASONS, RejectReason, ShardName, canonical_json
from beam_pipeline.sharding import ReferenceSum
from beam_pipeline.state import JobPlan, JobState, split_documents
from beam_pipeline.tfds_metadata import dataset_info_document, features_document
from beam_pipeline.writer import SizeRange

_SIDECARS_IN_FLIGHT = 32


def publish(
    config: Config, plan: JobPlan, run: dict[str, Any], saved: Sequence[SavedGroups] | None = None
) -> dict[str, Any]:
    """Write everything that a dataset has beside its shards, the manifest last.

    Args:
        config, plan: of the job.
        run: content of run.json.
        saved: groups of duplicates in the state, or None where none were looked for.

    Returns:
        The manifest.

    Raises:
        ImageShardsError: a shard is missing, images are unaccounted for, or too many were rejected; nothing is
            published.
    """
    state = JobState(config)
    store = storage.open_storage(config.output, config.io_deadline)
    published = _of_an_earlier_attempt(config, plan, store)
    if published is not None:
        state.clear()
        return published
    state.owner.check()
    found = {file.path: file for file in store.files(config.dataset_url)}

    def put(file: str, data: bytes) -> None:
        store.write(storage.join(config.dataset_url, file), data)

    with state.temporary_file() as reject_file, state.temporary_file() as duplicate_file:
        joined = _Joined(config, plan, _LineFile(reject_file))
        for name, sidecar in _sidecars(config, plan, state):
            state.owner.keep()
            _check_shard(config, store, name, sidecar, found)
            joined.add(name, sidecar, state.rejects(name) if sidecar["rejects"] else b"")
        joined.check(config.max_reject_fraction)
        reject_file.close()
        manifest = joined.manifest()
        run_indexes = joined.run_indexes()
        metadata = metadata_files(manifest)
        sums = joined.file_sums() | {file: schema.file_sums(data) for file, data in {**run_indexes, **metadata}.items()}
        if saved is not None:
            lines = _LineFile(duplicate_file)
            for part in saved_lines(config, saved):
                lines.write(part)
            duplicate_file.close()
            sums[schema.DUPLICATES_FILE] = lines.sums
            manifest["duplicates"] = Counts.total(one.counts for one in saved)._asdict()
        manifest["files"] = {file: one["sha256"] for file, one in sums.items()}
        manifest["file_sizes"] = {file: {"bytes": one["bytes"], "crc32c": one["crc32c"]} for file, one in sums.items()}
        for file, data in run_indexes.items():
            put(file, data)
        dataset_info = metadata.pop(schema.DATASET_INFO_FILE, None)
        for file, data in metadata.items():
            put(file, data)
        store.publish(reject_file.name, storage.join(config.dataset_url, schema.REJECTS_FILE))
        if saved is not None:
            store.publish(duplicate_file.name, storage.join(config.dataset_url, schema.DUPLICATES_FILE))
    put(schema.RUN_FILE, canonical_json({**run, **joined.run_totals()}))
    if dataset_info is not None:
        put(schema.DATASET_INFO_FILE, dataset_info)
    state.owner.check()
    if not store.create(storage.join(config.dataset_url, schema.MANIFEST_FILE), schema.seal_manifest(manifest)):
        raise ImageShardsError(f"{config.dataset_url} was published by another job meanwhile; run the command again")
    state.clear()
    return manifest


def _of_an_earlier_attempt(config: Config, plan: JobPlan, store: storage.Storage) -> dict[str, Any] | None:
    """The manifest, where this plan is published: a runner repeats the step whose success it didn't hear of."""
    url = storage.join(config.dataset_url, schema.MANIFEST_FILE)
    try:
        manifest = schema.open_manifest(store.read(url), url)
    except (FileNotFoundError, NotPublishedError):
        return None
    ours = json.loads(canonical_json([plan.configuration, {"splits": split_documents(plan.splits)}]))
    return manifest if [manifest["configuration"], manifest["plan"]] == ours else None


def _check_shard(
    config: Config,
    store: storage.Storage,
    name: ShardName,
    sidecar: dict[str, Any],
    found: dict[str, storage.ListedFile],
) -> None:
    """Hold a shard's file against its sidecar; it is read where neither CRC nor time of change tell that it is whole.

    Raises:
        ImageShardsError: something else has written it since.
    """
    file = found.get(name.file)
    whole = file is not None and file.bytes == sidecar["bytes"]
    if whole and file is not None and (file.crc32c is not None or file.etag != sidecar.get("etag")):
        read = file.crc32c is None
        crc32c = storage.crc32c_of(store, storage.join(config.dataset_url, name.file)) if read else file.crc32c
        whole = crc32c == sidecar["crc32c"]
    if not whole:
        raise ImageShardsError(
            f"shard {name.file} is not what this job wrote: nothing is published; run the same command again"
        )


def metadata_files(manifest: dict[str, Any]) -> dict[str, bytes]:
    """Labels and TFDS metadata by file name, all of it from the manifest, in order of writing."""
    files = {schema.LABELS_FILE: "".join(f"{label}\n" for label in manifest["classes"]).encode()}
    if manifest["configuration"]["compression"] != "none":
        return files  # TFDS can't read compressed shards
    image = manifest["image"]
    uniform = image["min_size"] is not None and list(image["min_size"]) == list(image["max_size"])
    features = features_document(
        image["format"],
        (*(image["min_size"] if uniform else (None, None)), image["channels"]),
        len(manifest["classes"]),
        manifest["configuration"]["one_hot"],
        manifest["features"],
    )
    splits = {
        split: (content["bytes"], [shard["records"] for shard in content["shards"]])
        for split, content in manifest["splits"].items()
    }
    files[schema.FEATURES_FILE] = canonical_json(features)
    files[schema.DATASET_INFO_FILE] = canonical_json(
        dataset_info_document(manifest["name"], manifest["version"], splits)
    )
    return files


def run_rows_array(rows: Iterable[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Rows of one shard's runs as an array of `RUN_DTYPE`: 18 bytes a run."""
    return np.array([tuple(row) for row in rows], schema.RUN_DTYPE)


def run_index(shards: list[np.ndarray[Any, Any]]) -> bytes:
    """The bytes of a `.runs.npy`: the rows of each shard of a split, in order."""
    out = io.BytesIO()
    np.lib.format.write_array(out, np.concatenate(shards), version=(1, 0), allow_pickle=False)
    return out.getvalue()


def _sidecars(config: Config, plan: JobPlan, state: JobState) -> Iterator[tuple[ShardName, dict[str, Any]]]:
    """Every planned shard's sidecar, in order of split and number, some requests ahead."""
    names = [
        ShardName(config.name, split, index, split_plan.shards)
        for split, split_plan in sorted(plan.splits.items())
        for index in range(split_plan.shards)
    ]
    plan_hash = plan.sha256
    with ThreadPoolExecutor(_SIDECARS_IN_FLIGHT) as pool:
        for start in range(0, len(names), _SIDECARS_IN_FLIGHT):
            batch = names[start : start + _SIDECARS_IN_FLIGHT]
            for name, sidecar in zip(batch, pool.map(state.sidecar, batch), strict=True):
                if sidecar is None or sidecar["plan"] != plan_hash:
                    raise ImageShardsError(f"shard {name.file} was not written: run the same command again")
                yield name, sidecar


class _LineFile:
    """Sums over lines on their way into a file, however many there are."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._crc32c = 0

    def write(self, lines: bytes) -> None:
        """Add some lines."""
        self._file.write(lines)
        self._hash.update(lines)
        self._bytes += len(lines)
        self._crc32c = google_crc32c.extend(self._crc32c, lines)

    @property
    def sums(self) -> dict[str, Any]:
        """`schema.file_sums` of all lines."""
        return {"sha256": self._hash.hexdigest(), "bytes": self._bytes, "crc32c": self._crc32c}


class _Joined:
    """What the manifest says, joined from sidecars; reject lines go to a file as they come."""

    def __init__(self, config: Config, plan: JobPlan, reject_file: _LineFile) -> None:
        self._config = config
        self._plan = plan
        self._splits: dict[str, dict[str, Any]] = {}
        self._runs: dict[str, list[np.ndarray[Any, Any]]] = {}
        self._reject_file = reject_file
        self._rejects: Counter[str] = Counter()
        self._listing = ReferenceSum()
        self._content = ReferenceSum()
        self._sizes = SizeRange()
        self._source_sizes = SizeRange()
        self._source_formats: Counter[str] = Counter()
        self._passed: Counter[str] = Counter()
        self._source_bytes = 0
        self._index_sums: dict[str, dict[str, Any]] = {}

    def add(self, name: ShardName, sidecar: dict[str, Any], reject_lines: bytes) -> None:
        """Add one shard."""
        new = {"records": 0, "bytes": 0, "class_counts": [0] * len(self._plan.classes), "shards": []}
        split = self._splits.setdefault(name.split, new)
        split["records"] += sidecar["records"]
        split["bytes"] += sidecar["bytes"]
        for class_id, count in sidecar["class_counts"].items():
            split["class_counts"][int(class_id)] += count
        kept = ("file", "records", "bytes", "crc32c", "images", "listing_fingerprint", "content_fingerprint")
        split["shards"].append({key: sidecar[key] for key in kept})
        self._runs.setdefault(name.split, []).append(run_rows_array(sidecar["runs"]))
        if sidecar["index"]:
            self._index_sums[name.index_file] = sidecar["index"]
        self._reject_file.write(reject_lines)
        self._rejects.update(sidecar["rejects"])
        self._listing.merge(ReferenceSum(sidecar["images"], int(sidecar["listing_fingerprint"], 16)))
        self._content.merge(ReferenceSum(sidecar["images"], int(sidecar["content_fingerprint"], 16)))
        self._source_bytes += sidecar["source_bytes"]
        for end in ("min_size", "max_size"):
            self._sizes.add(sidecar[end])
            self._source_sizes.add(sidecar[f"source_{end}"])
        self._source_formats.update(sidecar["source_formats"])
        self._passed.update(sidecar["passed_through"])

    @property
    def _records(self) -> int:
        return sum(split["records"] for split in self._splits.values())

    def check(self, max_reject_fraction: float) -> None:
        """Every image accounted for, and not too many rejected.

        Raises:
            ImageShardsError: otherwise.
        """
        listed, rejected = self._listing.count, sum(self._rejects.values())
        planned = sum(split.images for split in self._plan.splits.values())
        if not self._records + rejected == listed == planned:
            raise ImageShardsError(
                f"{self._records} records + {rejected} rejects are not the {planned} images listed: "
                "nothing is published; run the same command again"
            )
        failures = rejected - self._rejects[RejectReason.DUPLICATE]
        if failures > Fraction(str(max_reject_fraction)) * listed:
            by_reason = ", ".join(f"{reason} {count}" for reason, count in sorted(self._rejects.items()))
            raise ImageShardsError(
                f"{failures} of {listed} images rejected ({by_reason}), --max_reject_fraction is "
                f"{max_reject_fraction:g}: nothing is published; see {JobState(self._config).url}/rejects/"
            )
        if not self._splits["train"]["records"]:
            raise ImageShardsError("split train got no record: every image of it was rejected; nothing is published")

    def run_indexes(self) -> dict[str, bytes]:
        """`.runs.npy` of each split by file name; none for compressed shards, which can't be read from the middle."""
        if self._config.compression != "none":
            return {}
        return {schema.runs_file(split): run_index(rows) for split, rows in self._runs.items()}

    def manifest(self) -> dict[str, Any]:
        """The manifest, but for its own hash and what it says of the other files."""
        environment = sum(self._rejects[reason] for reason in ENVIRONMENT_REASONS)
        return {
            "format_version": schema.FORMAT_VERSION,
            "name": self._config.name,
            "version": self._config.version,
            "configuration": self._plan.configuration,
            "classes": list(self._plan.classes),
            "features": list(self._plan.columns),
            "image": {
                "format": self._config.image_format,
                "channels": self._config.channels,
                "min_size": self._sizes.least,
                "max_size": self._sizes.greatest,
                "passed_through": {way: self._passed[way] for way in (WHOLE, WITHOUT_METADATA)},
                **self._plan.statistics,
            },
            "source": {
                "formats": dict(self._source_formats),
                "min_size": self._source_sizes.least,
                "max_size": self._source_sizes.greatest,
            },
            "images": self._listing.count,
            "records": self._records,
            "listing_fingerprint": self._listing.hex,
            "content_fingerprint": self._content.hex,
            "plan": {"splits": split_documents(self._plan.splits)},
            "codec": self._plan.codec,
            "rejects": {"by_reason": dict(self._rejects), "environment": environment},
            "splits": self._splits,
        }

    def file_sums(self) -> dict[str, dict[str, Any]]:
        """`schema.file_sums` of the text indexes and rejects.jsonl."""
        return {**self._index_sums, schema.REJECTS_FILE: self._reject_file.sums}

    def run_totals(self) -> dict[str, Any]:
        """What run.json says of the amount of work."""
        written = sum(split["bytes"] for split in self._splits.values())
        return {"images": self._listing.count, "source_bytes": self._source_bytes, "shard_bytes": written}
