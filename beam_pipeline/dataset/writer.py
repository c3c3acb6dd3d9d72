"""Writes one shard: fetch, decode, encode its images in order, frame the records, publish the file, its sidecar last.

Nothing holds a shard in memory: a bounded window of images is at work, records go to a local temporary file, and the
finished file gets its final name in one step. An exception on the way leaves no object.
"""

from __future__ import annotations

import gzip
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from beam_pipeline import images, schema, storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.decoder import Decoder
from beam_pipeline.conversion.fetch import convert_all, record_of
from beam_pipeline.conversion.versions import check_versions
from beam_pipeline.dataset.base import stored_images
from beam_pipeline.dataset.progress import report
from beam_pipeline.dataset.published import shards_of
from beam_pipeline.dataset.result import ShardResult, SummedFile
from beam_pipeline.dataset.state import JobState, at_once
from beam_pipeline.errors import ImageShardsError, Reject, StorageError
from beam_pipeline.images import EncodedImage
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.planning.plan import JobPlan
from beam_pipeline.schema import ShardName, example, table
from beam_pipeline.schema.manifest import seal_manifest
from beam_pipeline.storage import ListedFile, usage

_GZIP_LEVEL = 6

Seen = Mapping[str, ListedFile | None]  # URL → what was there before the claim was looked at


class ShardWriter:
    """Writes the shards of one plan.

    Args:
        config: of the job.
        plan: of the job.
        repaired: the manifest that a repair follows; shards with other bytes than it says are not published.
        stopped: set if nothing of this is wanted any more.

    Raises:
        ImageShardsError: this worker has other versions than the launcher.
    """

    def __init__(
        self,
        config: Config,
        plan: JobPlan,
        repaired: dict[str, Any] | None = None,
        stopped: threading.Event | None = None,
    ) -> None:
        check_versions(config)
        self._config = config
        self._plan = plan
        self._plan_hash = plan.sha256
        self._repaired = repaired
        self._shards = shards_of(repaired) if repaired else {}
        self._stopped = stopped or threading.Event()
        self._class_ids = {label: number for number, label in enumerate(plan.classes)}
        self._target = storage.open_storage(config.output, config.io_deadline)
        self._state = JobState(config)
        self._done = self._told = 0

    def write(self, split: str, index: int, refs: Iterable[ImageRef]) -> ShardResult:
        """Write one shard, unless it is finished already.

        Args:
            split, index: which.
            refs: its images, in any order.

        Raises:
            ImageShardsError: storage failed for good, or the right to write is lost.
        """
        name = ShardName(self._config.name, split, index, self._plan.splits[split].shards)
        try:
            files = (name.file, name.index_file, name.table_file)
            urls = [*map(self._url, files), self._state.sidecar_url(name)]
            looks = (partial(self._target.stat, url) for url in urls)
            sidecar, _, *stats = at_once(partial(self._state.sidecar, name), self._check, *looks)
            result = self._finished(name, sidecar)
            if result is None:
                in_order = sorted(refs, key=lambda ref: (ref.order_key, ref.path, ref.label))
                result = self._write(name, in_order, dict(zip(urls, stats, strict=True)))
        except ImageShardsError as error:
            if self._repaired is not None or self._state.published_manifest(self._plan, after=error) is None:
                raise
            result = ShardResult(kept=True)  # another job of this plan has written and published it
        kept = result.images if result.kept else 0
        self._done += kept
        report(shards=1, images=kept)
        return result

    def newly_done(self) -> int:
        """How many images got a record or a reject since the last call; one thread may ask while another writes."""
        before, self._told = self._told, self._done
        return self._told - before

    def _finished(self, name: ShardName, sidecar: dict[str, Any] | None) -> ShardResult | None:
        """What an earlier attempt at this plan wrote, or None."""
        if sidecar is None or sidecar["plan"] != self._plan_hash:
            return None
        is_different = self._state.difference(
            name, sidecar, lambda file: self._target.stat(self._url(file)), reads=True
        )
        return None if is_different else ShardResult.from_json({**sidecar, "kept": True})

    def _write(self, name: ShardName, refs: list[ImageRef], seen: Seen) -> ShardResult:
        # A repair's attempts share no plan: no marker tells what an earlier one died of.
        attempts = self._state.attempts if self._repaired is None else None

        def begin() -> tuple[bool, Decoder]:
            is_first = attempts is not None and not attempts.begin_shard(name)
            return is_first, Decoder(self._config.image_options, attempts, isolated=not is_first)

        with ThreadPoolExecutor(1) as thread:
            begun = thread.submit(begin)  # while the first images are fetched
            try:
                return self._convert(name, refs, seen, lambda: begun.result()[1])
            except StorageError:
                raise
            except Exception:
                if begun.result()[0]:  # the process lives: no decoder is to blame
                    self._state.attempts.end_shard(name)
                raise

    def _convert(
        self, name: ShardName, refs: list[ImageRef], seen: Seen, decoder: Callable[[], Decoder]
    ) -> ShardResult:
        url, sidecar_url = self._url(name.file), self._state.sidecar_url(name)
        result = ShardResult(plan=self._plan_hash, file=name.file)
        one_hot_classes = len(self._class_ids) if self._config.one_hot else 0
        rows = TableRows(self._plan.columns)
        rejected: list[dict[str, str]] = []

        def convert(ref: ImageRef, data: bytes, md5: bytes, stored: EncodedImage | None = None) -> EncodedImage:
            image = stored or decoder().convert(ref.path, data, md5)
            record = record_of(ref, image, self._class_ids[ref.label], one_hot_classes, self._plan.columns)
            return image._replace(data=schema.frame(record))

        with self._state.temporary_file() as file:
            out = SummedFile(file, with_sha256=False)
            with self._compressed(out) as records:
                for one in convert_all(self._config, refs, convert, stored_images(self._config, refs)):
                    self._check_stopped()
                    class_id = self._class_ids.get(one.ref.label, -1)
                    result.add(one, class_id)
                    if isinstance(one.result, Reject):
                        reject = one.result
                        rejected.append({"path": one.ref.path, "reason": reject.reason, "detail": reject.detail})
                    else:
                        rows.add(one.ref, one.result, one.md5, class_id, records.write(one.result.data))
                    self._done += 1
                    report(images=1)
            result.bytes, result.crc32c = out.bytes, out.crc32c
            published = self._shards.get((name.split, name.index))
            if published and (published["bytes"], published["crc32c"]) != (out.bytes, out.crc32c):
                raise ImageShardsError(
                    f"shard {name.file} comes out with other bytes than were published: {self._why_changed()}; "
                    "use --overwrite"
                )
            self._check()
            there = seen[url]
            if there is None or (there.bytes, there.crc32c) != (out.bytes, out.crc32c):
                self._state.put(url, file, there, self._check)
        small: dict[str, bytes] = {}
        if self._config.compression == "none":  # else there is no index: records can't be read from the middle
            index = small[name.index_file] = index_text(rows.bytes)
            result.runs, result.index = schema.run_rows(name.index, rows.bytes), schema.file_sums(index)
        if published is None or "table" in published:
            columns = small[name.table_file] = rows.table()
            result.table = schema.file_sums(columns)
        urls = {self._url(file): content for file, content in small.items()}
        writes = [partial(self._state.put, url, content, seen[url], self._check) for url, content in urls.items()]
        written = at_once(partial(self._target.stat, url), self._check, *writes)[0]
        result.etag = written.etag if written else ""
        result.used = usage.take()
        content = seal_manifest({**result.to_json(), "rejected": rejected})
        self._state.put(sidecar_url, content, seen[sidecar_url], self._check)
        return result

    def _why_changed(self) -> str:
        then, now = self._plan.codec, images.codec_versions()
        others = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
        return (
            ", ".join(f"{name} was {then.get(name)}, is {now.get(name)}" for name in others)
            or "an image of it has changed"
        )

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise ImageShardsError("another shard failed, or the job was interrupted")

    def _check(self) -> None:
        self._check_stopped()
        self._state.check(self._plan, self._repaired["self_sha256"] if self._repaired else "")

    def _url(self, file: str) -> str:
        return storage.join(self._config.dataset_url, file)

    @contextmanager
    def _compressed(self, out: SummedFile) -> Iterator[Any]:
        if self._config.compression == "none":
            yield out
            return
        # No name and no time in the header: the same records give the same bytes.
        with gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=out, mtime=0) as file:
            yield file


class TableRows:
    """The rows of a shard's record table, 60 bytes each.

    Args:
        features: the manifest's columns.
    """

    def __init__(self, features: Sequence[Mapping[str, Any]]) -> None:
        self._types = table.COLUMNS | table.numeric(features)
        self._columns: dict[str, array[Any]] = {
            name: array(np.dtype(kind).base.char) for name, kind in self._types.items()
        }
        self._features = [table.column_name(one["name"]) for one in features]
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
    """The bytes of an `.idx`: `offset length` a record, from the framed length of each."""
    lines = []
    offset = 0
    for length in record_bytes:
        lines.append(f"{offset} {length}\n")
        offset += length
    return "".join(lines).encode()
