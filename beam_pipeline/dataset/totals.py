"""The sums of all shards: what the manifest and run.json say of them, and whether they may be published."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from beam_pipeline import schema
from beam_pipeline.config import Config
from beam_pipeline.dataset.base import reused_from_base
from beam_pipeline.errors import UNPUBLISHED, ImageShardsError
from beam_pipeline.images import PASSTHROUGH
from beam_pipeline.schema import ENVIRONMENT_REASONS, ShardName
from beam_pipeline.schema.job import Counts, Plan, ReferenceSum, Run, Sidecar
from beam_pipeline.schema.manifest import FORMAT_VERSION, Content, Cuts, FileSums, Image, Rejects, Shard, Source, Split


class DatasetTotals:
    """The sidecars of all shards, joined for the manifest, in under 4 kB per shard.

    Attributes:
        index_sums: of the text indexes.
    """

    def __init__(self, config: Config, plan: Plan) -> None:
        self._config = config
        self._plan = plan
        self._total = Counts()
        self._listing, self._content = ReferenceSum(), ReferenceSum()
        self._splits: dict[str, Counts] = defaultdict(Counts)
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        self._runs: dict[str, list[np.ndarray[Any, Any]]] = defaultdict(list)
        self.index_sums: dict[str, FileSums] = {}

    def add(self, name: ShardName, sidecar: Sidecar) -> None:
        """Add one shard."""
        shard = sidecar.shard
        self._total.merge(sidecar.counts)
        self._listing.merge(ReferenceSum.of_hex(shard.images, shard.listing_fingerprint))
        self._content.merge(ReferenceSum.of_hex(shard.images, shard.content_fingerprint))
        self._splits[name.split].merge(sidecar.counts)
        self._shards[name.split].append(shard)
        self._runs[name.split].append(run_rows_array(sidecar.runs))
        if sidecar.index:
            self.index_sums[name.index_file] = sidecar.index

    def check(self) -> None:
        """Check that a dataset may be published.

        Raises:
            ImageShardsError: an image is unaccounted for, too many are rejected, or train has no record.
        """
        total, images, max_reject_fraction = self._total, self._listing.count, self._config.max_reject_fraction
        if not total.records + total.rejected == images == self._plan.images:
            counts = f"{total.records} records + {total.rejected} rejects, but {self._plan.images} images were listed"
            raise ImageShardsError(f"{counts}: {UNPUBLISHED}")
        if total.rejected > Fraction(str(max_reject_fraction)) * images:
            by_reason = ", ".join(f"{reason} {count}" for reason, count in sorted(total.rejects.items()))
            raise ImageShardsError(
                f"{total.rejected} of {images} images rejected ({by_reason}), --max_reject_fraction is "
                f"{max_reject_fraction:g}: nothing is published; see imageshards rejects {self._config.dataset_url}, "
                "remove them or raise --max_reject_fraction"
            )
        if not self._splits["train"].records:
            raise ImageShardsError("split train got no record: every image of it was rejected; nothing is published")

    def run_indexes(self) -> dict[str, bytes]:
        """`.runs.npy` of each split by file name; none for compressed shards, which can't be read from the middle."""
        if self._config.compression != "none":
            return {}
        return {schema.runs_file(split): run_index(rows) for split, rows in self._runs.items()}

    def manifest(self) -> Content:
        """The manifest without the hashes of files and its own."""
        total, plan, environment = self._total, self._plan, ENVIRONMENT_REASONS
        return Content(
            format_version=FORMAT_VERSION,
            self_sha256="",
            name=self._config.name,
            version=self._config.version,
            configuration=plan.configuration,
            classes=plan.classes,
            features=plan.features,
            image=Image(
                **msgspec.structs.asdict(plan.statistics),
                format=self._config.image_format,
                channels=3 if self._config.channels == 3 else 1,
                min_size=total.min_size,
                max_size=total.max_size,
                passed_through={way: total.passed_through.get(way, 0) for way in PASSTHROUGH},
            ),
            source=Source(total.source_formats, total.source_min_size, total.source_max_size),
            images=self._listing.count,
            records=total.records,
            listing_fingerprint=self._listing.hex,
            content_fingerprint=self._content.hex,
            plan=Cuts(plan.splits),
            codec=plan.codec,
            rejects=Rejects(total.rejects, sum(total.rejects.get(reason, 0) for reason in environment)),
            splits={split: self._split(split, counts) for split, counts in self._splits.items()},
            files={},
        )

    def _split(self, split: str, counts: Counts) -> Split:
        shards = tuple(self._shards[split])
        by_class = tuple(counts.class_counts.get(number, 0) for number in range(len(self._plan.classes)))
        return Split(counts.records, sum(shard.bytes for shard in shards), by_class, shards)

    def run(self, run: Run) -> Run:
        """The content of run.json: what is known of the run, and how much work was done."""
        total = self._total
        return msgspec.structs.replace(
            run,
            inputs=self._plan.inputs,
            images=self._listing.count,
            source_bytes=total.source_bytes,
            shard_bytes=sum(shard.bytes for shards in self._shards.values() for shard in shards),
            cpu_s=total.cpu_s,
            bits_used=total.bits_used,
            base=reused_from_base(self._config, total),
        )


def run_rows_array(rows: Iterable[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Rows of one shard's runs as an array of `RUN_DTYPE`: 18 bytes per run."""
    return np.array([tuple(row) for row in rows], schema.RUN_DTYPE)


def run_index(shards: list[np.ndarray[Any, Any]]) -> bytes:
    """The bytes of a `.runs.npy`: the rows of each shard of a split, in order."""
    out = io.BytesIO()
    np.lib.format.write_array(out, np.concatenate(shards), version=(1, 0), allow_pickle=False)
    return out.getvalue()
