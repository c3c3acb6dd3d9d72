"""What the manifest says, joined from the sidecars of all shards: under 4 kB a shard stay in memory."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import IO, Any

import google_crc32c
import numpy as np

from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.images import WHOLE, WITHOUT_METADATA
from beam_pipeline.options import Config
from beam_pipeline.schema import ENVIRONMENT_REASONS, RejectReason, ShardName
from beam_pipeline.sharding import ReferenceSum
from beam_pipeline.state import JobPlan, JobState, split_documents
from beam_pipeline.tally import SizeRange


class LineFile:
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


class Joined:
    """What the manifest says, joined from sidecars; reject lines go to a file as they come."""

    def __init__(self, config: Config, plan: JobPlan, reject_file: LineFile) -> None:
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
                f"{max_reject_fraction:g}: nothing is published; see {JobState(self._config).url}/rejects/, "
                "remove them or raise --max_reject_fraction"
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


def run_rows_array(rows: Iterable[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Rows of one shard's runs as an array of `RUN_DTYPE`: 18 bytes a run."""
    return np.array([tuple(row) for row in rows], schema.RUN_DTYPE)


def run_index(shards: list[np.ndarray[Any, Any]]) -> bytes:
    """The bytes of a `.runs.npy`: the rows of each shard of a split, in order."""
    out = io.BytesIO()
    np.lib.format.write_array(out, np.concatenate(shards), version=(1, 0), allow_pickle=False)
    return out.getvalue()
