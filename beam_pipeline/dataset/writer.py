"""Writes one shard: fetch, decode, encode its images in order, frame the records, publish the file, its sidecar last.

Nothing holds a shard in memory: a bounded window of images is at work, records go to a local temporary file, and the
finished file gets its final name in one step. An exception on the way leaves no object.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.decoder import Decoder
from beam_pipeline.conversion.fetch import convert_all
from beam_pipeline.dataset.progress import report
from beam_pipeline.dataset.result import ShardResult, SummedFile
from beam_pipeline.dataset.state import JobState
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.images import EncodedImage
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.planning.plan import JobPlan
from beam_pipeline.schema import ShardName, canonical_json, example

_GZIP_LEVEL = 6
Promised = Mapping[tuple[str, int], tuple[int, int]]


class ShardWriter:
    """Writes the shards of one plan.

    Args:
        config: of the job.
        plan: of the job.
        promised: for a repair, (split, index) → (bytes, CRC-32C) of the published shards: others are not published.
    """

    def __init__(self, config: Config, plan: JobPlan, promised: Promised | None = None) -> None:
        self._config = config
        self._plan = plan
        self._plan_hash = plan.sha256
        self._promised = promised
        self._class_ids = {label: number for number, label in enumerate(plan.classes)}
        self._target = storage.open_storage(config.output, config.io_deadline)
        self._state = JobState(config)

    def write(self, split: str, index: int, refs: Iterable[ImageRef]) -> ShardResult:
        """Write one shard, unless it is finished already.

        Args:
            split, index: which.
            refs: its images, in any order.

        Raises:
            ImageShardsError: two images have one path, or storage failed for good.
        """
        with self._state.owner.refreshed():
            name = ShardName(self._config.name, split, index, self._plan.splits[split].shards)
            result = self._finished(name)
            if result is None:
                result = self._write(name, sorted(refs, key=lambda ref: (ref.order_key, ref.path, ref.label)))
            report(shards=1, images=result.images if result.kept else 0)
            return result

    def _finished(self, name: ShardName) -> ShardResult | None:
        """What an earlier attempt at this plan wrote, or None."""
        sidecar = self._state.sidecar(name)
        if sidecar is None or sidecar["plan"] != self._plan_hash or not self._state.is_kept(sidecar):
            return None
        for file, promised in ((name.index_file, sidecar["index"]), (name.file, sidecar)):
            if promised:  # a compressed shard has no index
                url = storage.join(self._config.dataset_url, file)
                found = self._target.stat(url)
                if not storage.is_whole(self._target, url, found, promised["bytes"], promised["crc32c"]):
                    return None
        return ShardResult.from_json({**sidecar, "kept": True})

    def _write(self, name: ShardName, refs: list[ImageRef]) -> ShardResult:
        decoder = self._begin(name)
        _refuse_repeated_paths(refs)
        result = ShardResult(plan=self._plan_hash, file=name.file)
        record_bytes: list[int] = []
        reject_lines: list[bytes] = []

        def convert(ref: ImageRef, data: bytes, md5: bytes) -> EncodedImage:
            image = decoder.convert(ref.path, data, md5)
            return image._replace(data=schema.frame(self._record(ref, image)))

        with self._state.temporary_file() as file:
            out = SummedFile(file, with_sha256=False)
            with self._compressed(out) as records:
                for one in convert_all(self._config, refs, convert):
                    result.add(one, self._class_ids.get(one.ref.label, -1))
                    if isinstance(one.result, Reject):
                        reject = {"path": one.ref.path, "reason": one.result.reason, "detail": one.result.detail}
                        reject_lines.append(canonical_json(reject))
                    else:
                        record_bytes.append(records.write(one.result.data))
                    report(images=1)
                    self._state.owner.keep()
            file.close()
            result.bytes, result.crc32c = out.bytes, out.crc32c
            if self._promised is not None and self._promised[name.split, name.index] != (out.bytes, out.crc32c):
                raise ImageShardsError(
                    f"shard {name.file} comes out with other bytes than were published: an image of it has changed; "
                    "use --overwrite"
                )
            self._state.owner.check()
            url = storage.join(self._config.dataset_url, name.file)
            self._target.publish(file.name, url)
        written = self._target.stat(url)
        result.etag = written.etag if written else ""
        if self._config.compression == "none":  # else there is no index: records can't be read from the middle
            index = index_text(record_bytes)
            self._target.write(storage.join(self._config.dataset_url, name.index_file), index)
            result.runs, result.index = schema.run_rows(name.index, record_bytes), schema.file_sums(index)
        self._state.save_sidecar(name, result.to_json(), b"".join(reject_lines))
        return result

    def _begin(self, name: ShardName) -> Decoder:
        if self._promised is not None:  # a repair's attempts share no plan: no marker tells what an earlier one died of
            return Decoder(self._config.image_options, None, isolated=True)
        attempts = self._state.attempts
        return Decoder(self._config.image_options, attempts, isolated=attempts.begin_shard(name))

    def _record(self, ref: ImageRef, image: EncodedImage) -> bytes:
        return example.image_example(
            image=image.data,
            size=(image.height, image.width),
            class_id=self._class_ids[ref.label],
            label=ref.label,
            path=ref.path,
            one_hot_classes=len(self._class_ids) if self._config.one_hot else 0,
            extra=dict(zip((column["name"] for column in self._plan.columns), ref.features, strict=True)),
        )

    @contextmanager
    def _compressed(self, out: SummedFile) -> Iterator[Any]:
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
