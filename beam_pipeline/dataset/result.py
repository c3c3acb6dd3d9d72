"""What became of a shard's images: counted one by one, kept as its sidecar, merged with others for the manifest."""

from __future__ import annotations

import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import IO, Any

import google_crc32c
import numpy as np

from beam_pipeline import schema
from beam_pipeline.config import Config
from beam_pipeline.conversion.fetch import Converted
from beam_pipeline.dataset.base import base_facts
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.images import PASSTHROUGH, EncodedImage
from beam_pipeline.inputs.references import ReferenceSum, content_fields, listing_fields
from beam_pipeline.planning.plan import JobPlan, split_documents
from beam_pipeline.schema import ENVIRONMENT_REASONS, RejectReason, ShardName
from beam_pipeline.schema.manifest import FORMAT_VERSION
from beam_pipeline.storage.prices import dollars
from beam_pipeline.storage.usage import Usage

Size = Sequence[int]  # height, width
_COUNTS = ("rejects", "class_counts", "source_formats", "passed_through")
_SIZES = {"min_size": min, "max_size": max, "source_min_size": min, "source_max_size": max}
_SHARD_KEYS = ("file", "records", "bytes", "crc32c", "images", "listing_fingerprint", "content_fingerprint", "table")


class SummedFile:
    """Counts bytes and their sums on the way into a file of any size.

    Args:
        file: is written to.
        with_sha256: whether their SHA-256 is wanted, too.
    """

    def __init__(self, file: IO[bytes], with_sha256: bool = True) -> None:
        self._file = file
        self._hash = hashlib.sha256() if with_sha256 else None
        self.bytes = 0
        self.crc32c = 0

    def write(self, data: bytes) -> int:
        """Add some bytes."""
        self.crc32c = google_crc32c.extend(self.crc32c, bytes(data))
        self.bytes += len(data)
        if self._hash:
            self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """`gzip` calls it."""
        self._file.flush()

    @property
    def sums(self) -> dict[str, Any]:
        """`schema.file_sums` of all bytes."""
        assert self._hash
        return {"sha256": self._hash.hexdigest(), "bytes": self.bytes, "crc32c": self.crc32c}


@dataclass
class ShardResult:
    """What became of one shard and its images; merged with others, of a split or of all.

    Attributes:
        kept: it was finished already.
        plan: the plan's hash.
        file, bytes, crc32c, etag: of the shard's file.
        runs, index: of its records: `schema.run_rows`, and `schema.file_sums` of the text index; none if compressed.
        table: `schema.file_sums` of its record table.
        listing, content: sums over all listed images, and over what was read of them.
        records, class_counts: written, by class id as JSON has it.
        rejects: reason → images.
        source_bytes: read.
        min_size, …: least or greatest height and width of records and of their sources; None without records.
        source_formats, passed_through: format, and `EncodedImage.passthrough` → records.
        in_base, taken: images whose path the base has, and those that were taken from it.
        used: by the process that wrote it, since it finished its last shard.
    """

    kept: bool = False
    plan: str = ""
    file: str = ""
    bytes: int = 0
    crc32c: int = 0
    etag: str = ""
    runs: Sequence[Sequence[int]] = ()
    index: dict[str, Any] | None = None
    table: dict[str, Any] | None = None
    listing: ReferenceSum = field(default_factory=ReferenceSum)
    content: ReferenceSum = field(default_factory=ReferenceSum)
    records: int = 0
    source_bytes: int = 0
    rejects: Counter[str] = field(default_factory=Counter)
    class_counts: Counter[str] = field(default_factory=Counter)
    source_formats: Counter[str] = field(default_factory=Counter)
    passed_through: Counter[str] = field(default_factory=Counter)
    min_size: Size | None = None
    max_size: Size | None = None
    source_min_size: Size | None = None
    source_max_size: Size | None = None
    in_base: int = 0
    taken: int = 0
    used: Usage = field(default_factory=Usage)

    @property
    def images(self) -> int:
        """How many images were listed."""
        return self.listing.count

    def add(self, converted: Converted[EncodedImage], class_id: int) -> None:
        """Count one image."""
        ref, image, md5, source_bytes, stored, _ = converted
        self.listing.add(listing_fields(ref))
        self.content.add(content_fields(ref, md5))
        self.source_bytes += source_bytes
        self.in_base += stored is not None
        if isinstance(image, Reject):
            self.rejects[str(image.reason)] += 1
            return
        self.records += 1
        self.taken += stored is not None and stored.image is not None and stored.md5 == md5
        self.class_counts[str(class_id)] += 1
        self.source_formats[image.source.format] += 1
        if image.passthrough is not None:
            self.passed_through[image.passthrough] += 1
        size, source_size = (image.height, image.width), (image.source.height, image.source.width)
        self._extend(dict(zip(_SIZES, (size, size, source_size, source_size), strict=True)))

    def merge(self, other: ShardResult) -> None:
        """Count all that another one counted."""
        self.listing.merge(other.listing)
        self.content.merge(other.content)
        self.records += other.records
        self.bytes += other.bytes
        self.source_bytes += other.source_bytes
        self.in_base += other.in_base
        self.taken += other.taken
        self.used.merge(other.used)
        for counts in _COUNTS:
            getattr(self, counts).update(getattr(other, counts))
        self._extend(vars(other))

    def _extend(self, sizes: Mapping[str, Any]) -> None:
        """Take the lesser or greater of each pair of sizes, height and width apart."""
        for name, choose in _SIZES.items():
            one, other = getattr(self, name), sizes[name]
            setattr(self, name, tuple(map(choose, one, other)) if one and other else one or other)

    def to_json(self) -> dict[str, Any]:
        """The shard's sidecar."""
        document = {key: value for key, value in vars(self).items() if key not in ("kept", "listing", "content")}
        sums = {"listing_fingerprint": self.listing.hex, "content_fingerprint": self.content.hex}
        return {**document, **sums, "images": self.images, "used": vars(self.used)}

    @classmethod
    def from_json(cls, sidecar: dict[str, Any]) -> ShardResult:
        """The inverse of `to_json`."""
        result = cls(**{one.name: sidecar[one.name] for one in fields(cls) if one.name in sidecar})
        for counts in _COUNTS:
            setattr(result, counts, Counter(sidecar[counts]))
        result.used = Usage(**sidecar.get("used", {}))
        result.listing = ReferenceSum(sidecar["images"], int(sidecar["listing_fingerprint"], 16))
        result.content = ReferenceSum(sidecar["images"], int(sidecar["content_fingerprint"], 16))
        return result


class DatasetTotals:
    """The results of all shards, joined for the manifest, in under 4 kB a shard.

    Attributes:
        index_sums: `schema.file_sums` of the text indexes.
    """

    def __init__(self, config: Config, plan: JobPlan) -> None:
        self._config = config
        self._plan = plan
        self._total = ShardResult()
        self._splits: dict[str, ShardResult] = defaultdict(ShardResult)
        self._shards: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._runs: dict[str, list[np.ndarray[Any, Any]]] = defaultdict(list)
        self.index_sums: dict[str, dict[str, Any]] = {}

    def add(self, name: ShardName, sidecar: dict[str, Any]) -> None:
        """Add one shard."""
        result = ShardResult.from_json(sidecar)
        self._total.merge(result)
        self._splits[name.split].merge(result)
        self._shards[name.split].append({key: sidecar[key] for key in _SHARD_KEYS})
        self._runs[name.split].append(run_rows_array(result.runs))
        if result.index:
            self.index_sums[name.index_file] = result.index

    def check(self) -> None:
        """Check that a dataset may be published.

        Raises:
            ImageShardsError: an image is unaccounted for, too many are rejected, or train has no record.
        """
        total, max_reject_fraction = self._total, self._config.max_reject_fraction
        rejected = total.rejects.total()
        if not total.records + rejected == total.images == self._plan.images:
            raise ImageShardsError(
                f"{total.records} records + {rejected} rejects are not the {self._plan.images} images listed: "
                "nothing is published; run the same command again"
            )
        failures = rejected - total.rejects[RejectReason.DUPLICATE]
        if failures > Fraction(str(max_reject_fraction)) * total.images:
            by_reason = ", ".join(f"{reason} {count}" for reason, count in sorted(total.rejects.items()))
            raise ImageShardsError(
                f"{failures} of {total.images} images rejected ({by_reason}), --max_reject_fraction is "
                f"{max_reject_fraction:g}: nothing is published; see {self._config.state_url}/{schema.REJECTS_FILE}, "
                "remove them or raise --max_reject_fraction"
            )
        if not self._splits["train"].records:
            raise ImageShardsError("split train got no record: every image of it was rejected; nothing is published")

    def run_indexes(self) -> dict[str, bytes]:
        """`.runs.npy` of each split by file name; none for compressed shards, which can't be read from the middle."""
        if self._config.compression != "none":
            return {}
        return {schema.runs_file(split): run_index(rows) for split, rows in self._runs.items()}

    def manifest(self) -> dict[str, Any]:
        """The manifest without its own hash and those of other files."""
        total, plan = self._total, self._plan
        return {
            "format_version": FORMAT_VERSION,
            "name": self._config.name,
            "version": self._config.version,
            "configuration": plan.configuration,
            "classes": list(plan.classes),
            "features": list(plan.columns),
            "image": {
                "format": self._config.image_format,
                "channels": self._config.channels,
                "min_size": total.min_size,
                "max_size": total.max_size,
                "passed_through": {way: total.passed_through[way] for way in PASSTHROUGH},
                **plan.statistics,
            },
            "source": {
                "formats": total.source_formats,
                "min_size": total.source_min_size,
                "max_size": total.source_max_size,
            },
            "images": total.images,
            "records": total.records,
            "listing_fingerprint": total.listing.hex,
            "content_fingerprint": total.content.hex,
            "plan": {"splits": split_documents(plan.splits)},
            "codec": plan.codec,
            "rejects": {
                "by_reason": total.rejects,
                "environment": sum(total.rejects[reason] for reason in ENVIRONMENT_REASONS),
            },
            "splits": {
                split: {
                    "records": result.records,
                    "bytes": result.bytes,
                    "class_counts": [result.class_counts[str(number)] for number in range(len(plan.classes))],
                    "shards": self._shards[split],
                }
                for split, result in self._splits.items()
            },
        }

    def run_totals(self, used: Usage, prices: Mapping[str, Any]) -> dict[str, Any]:
        """How much work was done, for run.json.

        Args:
            used: by the job, but for what wrote the shards.
            prices: of the launcher; empty if they aren't known.
        """
        total = self._total
        total.used.merge(used)
        run = {
            "images": total.images,
            "source_bytes": total.source_bytes,
            "shard_bytes": total.bytes,
            "used": vars(total.used),
            "dollars": dollars(total.used, prices),
        }
        return run | base_facts(self._config, total.records, total.in_base, total.taken)


def run_rows_array(rows: Iterable[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Rows of one shard's runs as an array of `RUN_DTYPE`: 18 bytes a run."""
    return np.array([tuple(row) for row in rows], schema.RUN_DTYPE)


def run_index(shards: list[np.ndarray[Any, Any]]) -> bytes:
    """The bytes of a `.runs.npy`: the rows of each shard of a split, in order."""
    out = io.BytesIO()
    np.lib.format.write_array(out, np.concatenate(shards), version=(1, 0), allow_pickle=False)
    return out.getvalue()
