"""What a shard's sidecar says of its images, counted one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from beam_pipeline import images
from beam_pipeline.errors import Reject
from beam_pipeline.schema import canonical_json
from beam_pipeline.sharding import ImageRef, ReferenceSum, content_fields, listing_fields


class Converted(NamedTuple):
    """One image's framed record, or why there is none; the MD5 of the bytes it was made from; what it was."""

    record: bytes
    size: tuple[int, int]
    reject: Reject | None
    md5: bytes
    source_bytes: int
    source: images.Source | None = None
    passed: str | None = None


class Tally:
    """Counts and sums over the images of one shard, in their order."""

    def __init__(self) -> None:
        self.record_bytes: list[int] = []
        self.digests: list[bytes] = []  # MD5s
        self._listing = ReferenceSum()
        self._content = ReferenceSum()
        self._class_counts: Counter[str] = Counter()
        self._rejects: list[tuple[str, Reject]] = []
        self._source_bytes = 0
        self._sizes = SizeRange()
        self._source_sizes = SizeRange()
        self._source_formats: Counter[str] = Counter()
        self._passed: Counter[str] = Counter()

    def add(self, ref: ImageRef, converted: Converted) -> None:
        """Count one image."""
        self._listing.add(listing_fields(ref))
        self._content.add(content_fields(ref, converted.md5))
        self.digests.append(converted.md5)
        self._source_bytes += converted.source_bytes
        if converted.reject is not None:
            self._rejects.append((ref.path, converted.reject))
            return
        self.record_bytes.append(len(converted.record))
        self._class_counts[ref.label] += 1
        self._sizes.add(converted.size)
        if converted.source is not None:
            self._source_sizes.add((converted.source.height, converted.source.width))
            self._source_formats[converted.source.format] += 1
        if converted.passed is not None:
            self._passed[converted.passed] += 1

    def document(self, class_ids: dict[str, int]) -> dict[str, Any]:
        """The sidecar's part of it."""
        return {
            "images": self._listing.count,
            "records": len(self.record_bytes),
            "source_bytes": self._source_bytes,
            "rejects": dict(Counter(str(reject.reason) for _, reject in self._rejects)),
            "listing_fingerprint": self._listing.hex,
            "content_fingerprint": self._content.hex,
            "class_counts": {str(class_ids[label]): count for label, count in self._class_counts.items()},
            "min_size": self._sizes.least,
            "max_size": self._sizes.greatest,
            "source_min_size": self._source_sizes.least,
            "source_max_size": self._source_sizes.greatest,
            "source_formats": dict(self._source_formats),
            "passed_through": dict(self._passed),
        }

    def reject_lines(self) -> bytes:
        """The shard's part of `rejects.jsonl`."""
        return b"".join(
            canonical_json({"path": path, "reason": reject.reason, "detail": reject.detail})
            for path, reject in self._rejects
        )


class SizeRange:
    """Least height and width, and greatest height and width, of some (height, width); None where there were none."""

    def __init__(self) -> None:
        self.least: tuple[int, int] | None = None
        self.greatest: tuple[int, int] | None = None

    def add(self, size: Sequence[int] | None) -> None:
        """Take in one size."""
        if size is None:
            return
        height, width = size
        least, greatest = self.least or size, self.greatest or size
        self.least = (min(least[0], height), min(least[1], width))
        self.greatest = (max(greatest[0], height), max(greatest[1], width))
