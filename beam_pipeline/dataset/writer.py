"""Writes one shard: fetch, decode, encode its images in order, frame the records, publish the file, its sidecar last.

Nothing holds a shard in memory: a bounded window of images is at work, records go to a local temporary file, and the
finished file gets its final name in one step. After an exception the shard has no sidecar, so it is written again.
"""

from __future__ import annotations

import gzip
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import IO, Any, NamedTuple

import numpy as np

from beam_pipeline import images, schema, storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.attempts import shard_marker
from beam_pipeline.conversion.decoder import Decoder, decoding
from beam_pipeline.conversion.fetch import Converted, convert_all, record_of
from beam_pipeline.conversion.versions import check_versions
from beam_pipeline.dataset.base import stored_images
from beam_pipeline.dataset.claim import SupersededError
from beam_pipeline.dataset.progress import report
from beam_pipeline.dataset.shard_files import ShardFiles
from beam_pipeline.dataset.state import JobState, run_concurrently
from beam_pipeline.dataset.version import withdraw
from beam_pipeline.errors import UNPUBLISHED, ImageShardsError, Reject
from beam_pipeline.images import EncodedImage
from beam_pipeline.inputs.references import ImageRef, content_fields, listing_fields
from beam_pipeline.schema import ShardName, example, table
from beam_pipeline.schema.job import Counts, Plan, ReferenceSum, RejectLine, Sidecar, add_counts
from beam_pipeline.schema.manifest import ChecksumWriter, Column, Content, Shard, file_sums, seal_manifest

_GZIP_LEVEL = 6


class ClaimedPlan(NamedTuple):
    """A plan, and the run whose claim it is carried out under; "" for a repair, which follows the manifest."""

    plan: Plan
    run: str = ""


class Finished(NamedTuple):
    """A finished shard; `sidecar` is None if another job of the same plan has published the version meanwhile."""

    sidecar: Sidecar | None
    was_finished: bool


class ShardWriter:
    """Writes the shards of one plan.

    Args:
        config: of the job.
        claimed: the plan, under its claim.
        repaired: the manifest that a repair follows; shards with other bytes than it says are not published.
        cancelled: set to cancel.

    Raises:
        ImageShardsError: this worker has other versions than the launcher.
    """

    def __init__(
        self,
        config: Config,
        claimed: ClaimedPlan,
        repaired: Content | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        check_versions(config)
        self._config = config
        self._plan = plan = claimed.plan
        self._repaired = repaired
        self._shards = repaired.shards if repaired else {}
        self._cancelled = cancelled or threading.Event()
        self._class_ids = {label: number for number, label in enumerate(plan.classes)}
        self._target = storage.open_storage(config.output, config.io_deadline)
        self._state = JobState(config, claimed.run)
        self._done = self._counted_before = 0

    def write(self, split: str, index: int, refs: Iterable[ImageRef]) -> Finished:
        """Write one shard, unless it is finished already.

        Args:
            split, index: which.
            refs: its images, in any order.

        Raises:
            ImageShardsError: storage failed for good, or the right to write is lost.
        """
        name = ShardName(self._config.name, split, index, self._plan.splits[split].shards)
        files = ShardFiles(self._config, name)
        try:
            sidecar = files.look(self._check)
            is_planned = sidecar and sidecar.plan == self._plan.sha256  # by an earlier attempt at this plan
            was_finished = bool(sidecar and is_planned and not files.difference(sidecar, reads=True))
            if sidecar is None or not was_finished:
                in_order = sorted(refs, key=lambda ref: (ref.order_key, ref.path, ref.label))
                if twice := next((ref.path for ref, following in pairwise(in_order) if ref.path == following.path), ""):
                    raise ImageShardsError(f"{twice!r} is listed twice: {UNPUBLISHED}")
                # A repair's attempts share no plan: no marker tells what an earlier one died of.
                marker = shard_marker(name) if self._repaired is None else ""
                with decoding(self._config, marker) as decoder:
                    sidecar = self._convert(files, in_order, decoder)
        except SupersededError:
            if self._repaired is not None or not self._state.has_published(self._plan):
                withdraw(self._config, self._state, self._plan)
                raise
            sidecar, was_finished = None, True
        kept = sidecar.shard.images if sidecar and was_finished else 0
        self._done += kept
        report(shards=1, images=kept)
        return Finished(sidecar, was_finished)

    def newly_done(self) -> int:
        """How many images got a record or a reject since the last call; one thread may ask while another writes."""
        before, self._counted_before = self._counted_before, self._done
        return self._counted_before - before

    def _convert(self, files: ShardFiles, refs: list[ImageRef], decoder: Callable[[], Decoder]) -> Sidecar:
        contents = _Contents(self._plan, self._class_ids)
        one_hot_classes = len(self._class_ids) if self._config.one_hot else 0

        def convert(ref: ImageRef, data: bytes, md5: bytes, stored: EncodedImage | None = None) -> EncodedImage:
            image = stored or decoder().convert(ref.path, data, md5)
            record = record_of(ref, image, self._class_ids[ref.label], one_hot_classes, self._plan.features)
            return image._replace(data=schema.frame(record))

        with self._state.temporary_file() as file:
            out = ChecksumWriter(file, with_sha256=False)
            with self._compressed(out) as records:
                for converted in convert_all(self._config, refs, convert, stored_images(self._config, refs)):
                    self._check_cancelled()
                    contents.add(converted, records)
                    self._done += 1
                    report(images=1)
            published = self._shards.get((files.name.split, files.name.index))
            if published and (published.bytes, published.crc32c) != (out.bytes, out.crc32c):
                what = f"shard {files.name.file} comes out with other bytes than were published"
                raise ImageShardsError(f"{what}: {self._why_changed()}; use --overwrite")
            self._check()  # an upload to s3:// or az:// replaces whatever is there
            there = files.seen[files.shard]
            is_repair = self._repaired is not None  # of what is corrupt, whatever checksum is listed for it
            if is_repair or there is None or (there.bytes, there.crc32c) != (out.bytes, out.crc32c):
                self._put(files, files.shard, file)
        return self._finish(files, contents, out)

    def _finish(self, files: ShardFiles, contents: _Contents, out: ChecksumWriter) -> Sidecar:
        """Write the files of a shard that is there, its sidecar last."""
        columns, index_sums = contents.rows.table(), None
        small = {files.table: columns}
        if self._config.compression == "none":  # else there is no index: records can't be read from the middle
            index = small[files.index] = index_text(contents.rows.bytes)
            index_sums = file_sums(index)
        writes = (partial(self._put, files, url, content) for url, content in small.items())
        listed = run_concurrently(partial(self._target.stat, files.shard), self._check, *writes)[0]
        sidecar = Sidecar(
            plan=self._plan.sha256,
            shard=Shard(
                file=files.name.file,
                records=contents.counts.records,
                bytes=out.bytes,
                crc32c=out.crc32c,
                images=contents.listing.count,
                listing_fingerprint=contents.listing.hex,
                content_fingerprint=contents.content.hex,
                table=file_sums(columns),
            ),
            etag=storage.etag_text(listed.etag) if listed else "",
            index=index_sums,
            runs=tuple(schema.run_rows(files.name.index, contents.rows.bytes)) if index_sums else (),
            counts=contents.counts,
            rejected=tuple(contents.rejected),
        )
        self._put(files, files.sidecar, seal_manifest(sidecar))
        if self._cancelled.is_set():  # no later step finds that the claim is lost
            self._check()
        return sidecar

    def _why_changed(self) -> str:
        then, now = self._plan.codec, images.codec_versions()
        others = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
        versions = ", ".join(f"{name} was {then.get(name)}, is {now.get(name)}" for name in others)
        return versions or "an image of it has changed"

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise ImageShardsError("another shard failed, or the job was interrupted")

    def _check(self) -> None:
        self._state.check(self._repaired.self_sha256 if self._repaired else "")
        self._check_cancelled()

    def _put(self, files: ShardFiles, url: str, content: bytes | IO[bytes]) -> None:
        self._state.put(url, content, files.seen[url], self._check)

    @contextmanager
    def _compressed(self, out: ChecksumWriter) -> Iterator[Any]:
        if self._config.compression == "none":
            yield out
            return
        # No name and no time in the header: the same records give the same bytes.
        with gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=out, mtime=0) as file:
            yield file


class _Contents:
    """What a shard holds, as its images come: their counts, sums, rows of its record table, and rejects."""

    def __init__(self, plan: Plan, class_ids: Mapping[str, int]) -> None:
        self._class_ids = class_ids
        self.counts, self.listing, self.content = Counts(), ReferenceSum(), ReferenceSum()
        self.rows = TableRows(plan.features)
        self.rejected: list[RejectLine] = []

    def add(self, converted: Converted[EncodedImage], records: Any) -> None:
        """Write the framed record of an image to `records`, or note its reject."""
        ref, image = converted.ref, converted.result
        class_id = self._class_ids.get(ref.label, -1)
        self.listing.add(listing_fields(ref))
        self.content.add(content_fields(ref, converted.md5))
        count_image(self.counts, converted, class_id)
        if isinstance(image, Reject):
            self.rejected.append(RejectLine(ref.path, str(image.reason), image.detail))
        else:
            self.rows.add(ref, image, converted.md5, class_id, records.write(image.data))


def count_image(counts: Counts, converted: Converted[EncodedImage], class_id: int) -> None:
    """Count what became of one image."""
    image, stored = converted.result, converted.stored
    counts.source_bytes += converted.source_bytes
    counts.cpu_s += converted.cpu_s
    counts.matched += stored is not None
    if isinstance(image, Reject):
        add_counts(counts.rejects, {str(image.reason): 1})
        return
    source = image.source
    counts.records += 1
    counts.reused += stored is not None and stored.image is not None and stored.md5 == converted.md5
    add_counts(counts.class_counts, {class_id: 1})
    add_counts(counts.source_formats, {source.format: 1})
    if image.passthrough is not None:
        add_counts(counts.passed_through, {image.passthrough: 1})
    if image.bits_used is not None:
        add_counts(counts.bits_used, {image.bits_used: 1})
    counts.add_sizes((image.height, image.width), (source.height, source.width))


class TableRows:
    """The rows of a shard's record table, 60 bytes each.

    Args:
        features: the manifest's columns.
    """

    def __init__(self, features: Sequence[Column]) -> None:
        self._types = types = table.COLUMNS | table.numeric(features)
        self._columns: dict[str, array[Any]] = {name: array(np.dtype(kind).base.char) for name, kind in types.items()}
        self._features = [table.column_name(feature.name) for feature in features]
        self.bytes = self._columns["bytes"]

    def add(self, ref: ImageRef, image: EncodedImage, md5: bytes, class_id: int, record_bytes: int) -> None:
        """Add the record of an image, of so many framed bytes."""
        source, passthrough = image.source, image.passthrough
        self._columns["source_md5"].frombytes(md5)
        values: dict[str, Any] = {
            "order_key": ref.order_key,
            "bytes": record_bytes,
            "class": class_id,
            "source_bytes": ref.source_bytes,
            "source_height": source.height,
            "source_width": source.width,
            "source_format": table.SOURCE_FORMATS.index(source.format),
            "passthrough": table.PASSTHROUGH.index(passthrough) + 1 if passthrough else 0,
            "name": table.name_hash(ref.path),
        }
        for name, feature in zip(self._features, ref.features, strict=True):
            if name in self._columns:
                values[name] = example.numbers_of(feature)[0]
        for name, value in values.items():
            self._columns[name].append(value)

    def table(self) -> bytes:
        """The bytes of the table."""
        return table.table_bytes(self._types, self._columns)


def index_text(record_bytes: Iterable[int]) -> bytes:
    """The bytes of an `.idx`: `offset length` per record, from the framed length of each."""
    lines = []
    offset = 0
    for length in record_bytes:
        lines.append(f"{offset} {length}\n")
        offset += length
    return "".join(lines).encode()
