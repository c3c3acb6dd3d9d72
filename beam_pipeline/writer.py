"""Writes one shard: fetch, decode, encode its images in order, frame the records, publish the file, its sidecar last.

Nothing holds a shard in memory: a bounded window of images is at work, records go to a local temporary file, and the
finished file gets its final name in one step. An exception on the way leaves no object.
"""

from __future__ import annotations

import gzip
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any, NamedTuple

import google_crc32c

from beam_pipeline import duplicates, examples, images, schema, storage
from beam_pipeline.decoding import Decoding
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.listing import image_url
from beam_pipeline.options import Config
from beam_pipeline.pools import shared_pools
from beam_pipeline.progress import report
from beam_pipeline.schema import RejectReason, ShardName, canonical_json
from beam_pipeline.sharding import ImageRef, ReferenceSum, content_fields, listing_fields
from beam_pipeline.state import JobPlan, JobState

_GZIP_LEVEL = 6
Promised = Mapping[tuple[str, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """What became of one shard; all else is in its sidecar.

    Attributes:
        images, records: listed and written.
        bytes: of the shard's file.
        source_bytes: fetched.
        rejects: reason → images.
        kept: it was finished already.
        msec: time spent on it.
    """

    split: str
    index: int
    images: int
    records: int
    bytes: int
    source_bytes: int
    rejects: dict[str, int]
    kept: bool
    msec: int


class _Converted(NamedTuple):
    """One image's framed record, or why there is none; the MD5 of the bytes it was made from; what it was."""

    record: bytes
    size: tuple[int, int]
    reject: Reject | None
    md5: bytes
    source_bytes: int
    source: images.Source | None = None
    passed: str | None = None


class _SampleCache:
    """Images that this process converted for the sample, by the MD5 of their bytes: they needn't be converted again.

    In a job of one process it halves the work of a small input. What doesn't fit is converted again.
    """

    _MOST_BYTES = 64 << 20

    def __init__(self) -> None:
        self._images: dict[tuple[bytes, images.ImageOptions], images.EncodedImage] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, key: tuple[bytes, images.ImageOptions], image: images.EncodedImage) -> None:
        """Keep a converted image, if there is room."""
        with self._lock:
            if key not in self._images and self._bytes + len(image.data) <= self._MOST_BYTES:
                self._images[key] = image
                self._bytes += len(image.data)

    def get(self, key: tuple[bytes, images.ImageOptions]) -> images.EncodedImage | None:
        """A kept image; it isn't kept any longer."""
        with self._lock:
            image = self._images.pop(key, None)
            self._bytes -= len(image.data) if image else 0
            return image


SAMPLED = _SampleCache()


class ShardWriter:
    """Writes the shards of one plan.

    Args:
        config: of the job.
        plan: of the job.
        promised: (split, number) → (bytes, CRC-32C) of shards that a manifest promises: others are not published.
    """

    def __init__(self, config: Config, plan: JobPlan, promised: Promised | None = None) -> None:
        self._config = config
        self._promised = promised or {}
        self._plan_hash = plan.sha256
        self._shards = {split: split_plan.shards for split, split_plan in plan.splits.items()}
        self._options = config.image_options
        self._class_ids = {label: number for number, label in enumerate(plan.classes)}
        self._column_names = [column["name"] for column in plan.columns]
        self._pools = shared_pools(config.fetch_concurrency, config.threads)
        self._source = storage.open_storage(config.input or "", config.io_deadline)
        self._target = storage.open_storage(config.output, config.io_deadline)
        self._state = JobState(config)
        self._keeps_digests = config.duplicates == "report"

    def write(
        self, split: str, index: int, refs: Iterable[ImageRef], seen: Callable[[ImageRef, bytes], None] | None = None
    ) -> ShardSummary:
        """Write one shard, unless it is finished already.

        Args:
            split, index: which.
            refs: its images, in any order.
            seen: with `--duplicates report`, called with each image and the MD5 of what was read of it, b"" for none.

        Raises:
            ImageShardsError: two images have one path, or storage failed for good.
        """
        start = time.monotonic()
        name = ShardName(self._config.name, split, index, self._shards[split])
        kept = self.finished(name)
        if kept is None:
            self._decoding = self._begin(name)
        ordered = sorted(refs, key=lambda ref: (ref.order_key, ref.path, ref.label))
        sidecar = kept or self._write(name, ordered)
        if seen is not None:
            for ref, md5 in zip(ordered, duplicates.unpack(self._state.digests(name) or b""), strict=True):
                seen(ref, md5)
        report(shards=1, images=len(ordered) if kept else 0)
        return ShardSummary(
            split,
            index,
            sidecar["images"],
            sidecar["records"],
            sidecar["bytes"],
            sidecar["source_bytes"],
            sidecar["rejects"],
            kept is not None,
            int((time.monotonic() - start) * 1000),
        )

    def _begin(self, name: ShardName) -> Decoding:
        if self._promised:  # a repair: its attempts share no plan, so no note tells what an earlier one died of
            return Decoding(self._options, None, True, self._plan_hash)
        inflight = self._state.inflight
        return Decoding(self._options, inflight, inflight.begin_shard(name), self._plan_hash)

    def finished(self, name: ShardName) -> dict[str, Any] | None:
        """The sidecar of a shard that an earlier attempt at this plan finished, or None."""
        sidecar = self._state.sidecar(name)
        if sidecar is None or sidecar.get("plan") != self._plan_hash:
            return None
        url = storage.join(self._config.dataset_url, name.file)
        found = self._target.stat(url)
        if found is None or found.bytes != sidecar["bytes"]:
            return None
        if self._keeps_digests and self._state.digests(name) is None:
            return None
        crc32c = storage.crc32c_of(self._target, url) if found.crc32c is None else found.crc32c
        return sidecar if crc32c == sidecar["crc32c"] else None

    def _write(self, name: ShardName, refs: list[ImageRef]) -> dict[str, Any]:
        _refuse_repeated_paths(refs)
        tally = _Tally()
        with self._state.temporary_file() as file:
            out = _ChecksummedFile(file)
            with self._compressed(out) as records:
                for ref, converted in zip(refs, self._convert_all(refs), strict=True):
                    tally.add(ref, converted)
                    records.write(converted.record)
                    report(images=1)
                    self._state.owner.keep()
            file.close()
            if self._promised.get((name.split, name.index), (out.bytes, out.crc32c)) != (out.bytes, out.crc32c):
                raise ImageShardsError(
                    f"shard {name.file} comes out with other bytes than were published: an image of it has changed; "
                    "use --overwrite"
                )
            self._state.owner.check()
            url = storage.join(self._config.dataset_url, name.file)
            self._target.publish(file.name, url)
        written = self._target.stat(url)
        sidecar = {
            "plan": self._plan_hash,
            "file": name.file,
            "bytes": out.bytes,
            "crc32c": out.crc32c,
            "etag": written.etag if written else "",
            **tally.document(self._class_ids),
            **self._write_index(name, tally.record_bytes),
        }
        if self._keeps_digests:
            self._state.save_digests(name, duplicates.pack(tally.digests))
        self._state.save_sidecar(name, sidecar, tally.reject_lines())
        return sidecar

    def _convert_all(self, refs: list[ImageRef]) -> Iterator[_Converted]:
        remote = not storage.is_local(self._config.input or "")
        return self._pools.map(refs, self._fetch, self._convert, lambda ref: ref.source_bytes, fetch_apart=remote)

    def _fetch(self, ref: ImageRef) -> bytes | Reject:
        if ref.duplicate_of:
            kept = ref.duplicate_of.decode("utf-8", "surrogateescape")
            return Reject(RejectReason.DUPLICATE, f"the same bytes as {kept!r}")
        return fetch(self._source, image_url(self._config, ref.path), ref, self._options)

    def _convert(self, ref: ImageRef, data: bytes | Reject) -> _Converted:
        if isinstance(data, Reject):
            fail_if_strict(self._config, ref, data)
            return _Converted(b"", (0, 0), data, (ref.duplicate_of and duplicates.listed_md5(ref)) or b"", 0)
        md5 = hashlib.md5(data, usedforsecurity=False).digest()
        try:
            check_unchanged(ref, md5, data)
            image = SAMPLED.get((md5, self._options)) or self._decoding.convert(ref.path, data, md5)
        except Reject as reject:
            fail_if_strict(self._config, ref, reject)
            return _Converted(b"", (0, 0), reject, md5, len(data))
        record = schema.frame(self._record(ref, image))
        return _Converted(record, (image.height, image.width), None, md5, len(data), image.source, image.passed)

    def _record(self, ref: ImageRef, image: images.EncodedImage) -> bytes:
        return examples.image_example(
            image=image.data,
            size=(image.height, image.width),
            class_id=self._class_ids[ref.label],
            label=ref.label,
            path=ref.path,
            one_hot_classes=len(self._class_ids) if self._config.one_hot else 0,
            extra=dict(zip(self._column_names, ref.features, strict=True)),
        )

    def _write_index(self, name: ShardName, record_bytes: list[int]) -> dict[str, Any]:
        """Write the text index of a plain shard; the run index is joined from the sidecars by the publisher."""
        if self._config.compression != "none":
            return {"runs": [], "index": None}
        data = index_text(record_bytes)
        self._target.write(storage.join(self._config.dataset_url, name.index_file), data)
        return {"runs": schema.run_rows(name.index, record_bytes), "index": schema.file_sums(data)}

    @contextmanager
    def _compressed(self, out: _ChecksummedFile) -> Iterator[Any]:
        if self._config.compression == "none":
            yield out
            return
        # No name and no time in the header: the same records give the same bytes.
        with gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=out, mtime=0) as file:
            yield file


def index_text(record_bytes: Iterable[int]) -> bytes:
    """The bytes of an `.idx`: `offset length` a record, from the framed length of each."""
    lines = []
    offset = 0
    for length in record_bytes:
        lines.append(f"{offset} {length}\n")
        offset += length
    return "".join(lines).encode()


def fetch(store: storage.Storage, url: str, ref: ImageRef, options: images.ImageOptions) -> bytes | Reject:
    """The bytes of one listed image in one request, or why there are none."""
    try:
        images.check_size(ref.source_bytes, options)
        return store.read(url)
    except FileNotFoundError:
        return Reject(RejectReason.VANISHED, "not found")
    except Reject as reject:
        return reject


def fail_if_strict(config: Config, ref: ImageRef, reject: Reject) -> None:
    """With `--strict`, an image that isn't as it was listed ends the job.

    Raises:
        ImageShardsError: then.
    """
    if config.strict and reject.reason in (RejectReason.VANISHED, RejectReason.CHANGED):
        raise ImageShardsError(
            f"--strict: {ref.path!r} is not as it was listed ({reject.reason}: {reject.detail}); "
            "run the same command again, which lists anew"
        )


def check_unchanged(ref: ImageRef, md5: bytes, data: bytes) -> None:
    """Compare what was read with what was listed.

    Raises:
        Reject: `changed`.
    """
    if len(data) != ref.source_bytes:
        raise Reject(RejectReason.CHANGED, f"listed with {ref.source_bytes} bytes, read {len(data)}")
    kind, _, listed = ref.etag.partition(":")
    if kind == "md5" and listed != md5.hex():
        raise Reject(RejectReason.CHANGED, f"listed with MD5 {listed}, read {md5.hex()}")
    if kind == "crc32c" and int(listed, 16) != google_crc32c.value(data):
        raise Reject(RejectReason.CHANGED, f"listed with CRC-32C {listed}, read {google_crc32c.value(data):08x}")


def _refuse_repeated_paths(refs: list[ImageRef]) -> None:
    for first, second in pairwise(refs):
        if first.path == second.path:
            raise ImageShardsError(
                f"input {first.path!r} is given twice, with label {first.label!r} and with label {second.label!r}: "
                "keep one of the two"
            )


class _Tally:
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

    def add(self, ref: ImageRef, converted: _Converted) -> None:
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


class _ChecksummedFile:
    """Counts bytes and their CRC-32C on the way into a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.bytes = 0
        self.crc32c = 0

    def write(self, data: bytes) -> int:
        self.crc32c = google_crc32c.extend(self.crc32c, bytes(data))
        self.bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()
