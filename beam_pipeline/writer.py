"""Writes one shard: fetch, decode, encode its images in order, frame the records, publish the file, its sidecar last.

Nothing holds a shard in memory: a bounded window of images is at work, records go to a local temporary file, and the
finished file gets its final name in one step. An exception on the way leaves no object.
"""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import IO, Any

import google_crc32c

from beam_pipeline import duplicates, examples, images, schema, storage
from beam_pipeline.decoding import Decoding
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.fetching import check_unchanged, fail_if_strict, fetch
from beam_pipeline.listing import image_url
from beam_pipeline.options import Config
from beam_pipeline.pools import shared_pools
from beam_pipeline.progress import report
from beam_pipeline.schema import RejectReason, ShardName
from beam_pipeline.sharding import ImageRef
from beam_pipeline.state import JobPlan, JobState
from beam_pipeline.tally import Converted, Tally

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
        with self._state.owner.refreshed():
            return self._write_or_keep(split, index, refs, seen)

    def _write_or_keep(
        self, split: str, index: int, refs: Iterable[ImageRef], seen: Callable[[ImageRef, bytes], None] | None
    ) -> ShardSummary:
        start = time.monotonic()
        name = ShardName(self._config.name, split, index, self._shards[split])
        kept = self.finished(name)
        ordered = sorted(refs, key=lambda ref: (ref.order_key, ref.path, ref.label))
        sidecar = kept or self._write(name, ordered)
        if seen is not None:
            for ref, md5 in zip(ordered, duplicates.unpack(self._state.digests(name)), strict=True):
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
        if sidecar is None or sidecar["plan"] != self._plan_hash or not self._state.is_kept(sidecar):
            return None
        promised = [(name.index_file, sidecar["index"]), (name.file, sidecar)]
        return sidecar if all(self._is_whole(file, one) for file, one in promised if one) else None

    def _is_whole(self, file: str, promised: dict[str, Any]) -> bool:
        url = storage.join(self._config.dataset_url, file)
        return storage.is_whole(self._target, url, self._target.stat(url), promised["bytes"], promised["crc32c"])

    def _write(self, name: ShardName, refs: list[ImageRef]) -> dict[str, Any]:
        decoding = self._begin(name)
        _refuse_repeated_paths(refs)
        tally = Tally()
        with self._state.temporary_file() as file:
            out = _ChecksummedFile(file)
            with self._compressed(out) as records:
                for ref, converted in zip(refs, self._convert_all(refs, decoding), strict=True):
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
        digests = duplicates.pack(tally.digests) if self._keeps_digests else b""
        self._state.save_sidecar(name, sidecar, tally.reject_lines(), digests)
        return sidecar

    def _convert_all(self, refs: list[ImageRef], decoding: Decoding) -> Iterator[Converted]:
        remote = not storage.is_local(self._config.input or "")
        convert = partial(self._convert, decoding)
        return self._pools.map(refs, self._fetch, convert, lambda ref: ref.source_bytes, fetch_apart=remote)

    def _fetch(self, ref: ImageRef) -> bytes | Reject:
        if ref.duplicate_of:
            kept = ref.duplicate_of.decode("utf-8", "surrogateescape")
            return Reject(RejectReason.DUPLICATE, f"the same bytes as {kept!r}")
        return fetch(self._source, image_url(self._config, ref.path), ref, self._options)

    def _convert(self, decoding: Decoding, ref: ImageRef, data: bytes | Reject) -> Converted:
        if isinstance(data, Reject):
            fail_if_strict(self._config, ref, data)
            return Converted(b"", (0, 0), data, (ref.duplicate_of and duplicates.listed_md5(ref)) or b"", 0)
        md5 = hashlib.md5(data, usedforsecurity=False).digest()
        try:
            check_unchanged(ref, md5, data)
            image = decoding.convert(ref.path, data, md5)
        except Reject as reject:
            fail_if_strict(self._config, ref, reject)
            return Converted(b"", (0, 0), reject, md5, len(data))
        record = schema.frame(self._record(ref, image))
        return Converted(record, (image.height, image.width), None, md5, len(data), image.source, image.passed)

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


def _refuse_repeated_paths(refs: list[ImageRef]) -> None:
    for first, second in pairwise(refs):
        if first.path == second.path:
            raise ImageShardsError(
                f"input {first.path!r} is given twice, with label {first.label!r} and with label {second.label!r}: "
                "keep one of the two"
            )


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
