"""AssignShards, WriteShards and PublishDataset: from references to a published version."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.pvalue import AsIter, AsSingleton

from beam_pipeline import duplicates, metrics
from beam_pipeline.duplicates import Digest, SavedGroups
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.options import Config
from beam_pipeline.publish import publish
from beam_pipeline.state import JobPlan, JobState
from beam_pipeline.transforms.elements import Page, ShardId, counter
from beam_pipeline.writer import Promised, ShardSummary, ShardWriter


class AssignShards(beam.PTransform):  # type: ignore[misc]
    """Input: (key, iterable of `Page`). Output: (`ShardId`, `Page`): the pages parted by shard, in no order."""

    def __init__(self, config: Config, plan: Any) -> None:
        super().__init__()
        self._config = config
        self._plan = plan

    def expand(self, pages: Any) -> Any:
        parted = beam.FlatMap(_part_and_keep, AsSingleton(self._plan), self._config).with_output_types(
            tuple[tuple[str, int], Page]
        )
        return pages | "BisectKeys" >> parted


def _part_and_keep(pages: tuple[int, Iterable[Page]], plan: JobPlan, config: Config) -> Iterable[tuple[ShardId, Page]]:
    JobState(config).owner.keep()  # of very many images, the first shard is begun long after the plan
    return _part_by_shard(pages, plan)


def _part_by_shard(pages: tuple[int, Iterable[Page]], plan: JobPlan) -> Iterable[tuple[ShardId, Page]]:
    parts: dict[ShardId, Page] = {}
    for ref in chain.from_iterable(pages[1]):
        shard = ref.split, plan.splits[ref.split].shard_of(ref.order_key)
        parts.setdefault(shard, Page()).append(ref)
    return parts.items()


class WriteShards(beam.PTransform):  # type: ignore[misc]
    """Input: (`ShardId`, iterable of `Page`). Output: a `ShardSummary` each; a retry writes the same bytes.

    With `--duplicates report` a second output: (bucket, `Digest`s) of all that was read; else None in its place.

    `promised`: of `ShardWriter`, for a repair.
    """

    def __init__(self, config: Config, plan: Any, promised: Promised | None = None) -> None:
        super().__init__()
        self._config = config
        self._plan = plan
        self._promised = promised

    def expand(self, shards: Any) -> tuple[Any, Any]:
        write = beam.ParDo(_WriteShardFn(self._config, self._promised), AsSingleton(self._plan))
        if self._config.duplicates != "report":
            return shards | "WriteShard" >> write, None
        written = shards | "WriteShard" >> write.with_outputs(_DIGESTS, main=_SUMMARIES)
        written[_DIGESTS].element_type = beam.typehints.KV[int, Any]
        return written[_SUMMARIES], written[_DIGESTS]


_SUMMARIES, _DIGESTS = "summaries", "digests"


class _WriteShardFn(beam.DoFn):  # type: ignore[misc]
    def __init__(self, config: Config, promised: Promised | None) -> None:
        self._config = config
        self._promised = promised
        self._records = counter(metrics.RECORDS_WRITTEN)
        self._rejected = counter(metrics.IMAGES_REJECTED)
        self._source_bytes = counter(metrics.SOURCE_BYTES)
        self._written_bytes = counter(metrics.WRITTEN_BYTES)
        self._shards = {False: counter(metrics.SHARDS_WRITTEN), True: counter(metrics.SHARDS_KEPT)}
        self._msec = Metrics.distribution(metrics.NAMESPACE, metrics.SHARD_MSEC)

    def process(self, shard: tuple[ShardId, Iterable[Page]], plan: JobPlan) -> Iterator[Any]:
        (split, index), pages = shard
        digests: list[Digest | None] = []
        note = None
        if self._config.duplicates == "report":
            note = lambda ref, md5: digests.append(duplicates.digest_of(ref, md5))  # noqa: E731
        summary = ShardWriter(self._config, plan, self._promised).write(split, index, chain.from_iterable(pages), note)
        self._shards[summary.kept].inc()
        if not summary.kept:
            self._records.inc(summary.records)
            self._source_bytes.inc(summary.source_bytes)
            self._written_bytes.inc(summary.bytes)
            self._msec.update(summary.msec)
        self._rejected.inc(sum(summary.rejects.values()))
        yield summary
        buckets = duplicates.buckets_for(plan.images)
        for bucketed in duplicates.by_bucket(digests, buckets):
            yield beam.pvalue.TaggedOutput(_DIGESTS, bucketed)


class PublishDataset(beam.PTransform):  # type: ignore[misc]
    """Publishes once every shard is written.

    Input: one `JobPlan`. Output: the URL of the version.

    `saved`: `SavedGroups` of `SaveDuplicates`, or None where no duplicates are looked for.
    """

    def __init__(self, config: Config, summaries: Any, saved: Any, run: dict[str, Any]) -> None:
        super().__init__()
        self._config = config
        self._summaries = summaries
        self._saved = saved
        self._run = run

    def expand(self, plan: Any) -> Any:
        saved = None if self._saved is None else AsIter(self._saved)
        return plan | "Publish" >> beam.Map(_publish, self._config, AsIter(self._summaries), saved, self._run)


def _publish(
    plan: JobPlan,
    config: Config,
    summaries: Iterable[ShardSummary],
    saved: Iterable[SavedGroups] | None,
    run: dict[str, Any],
) -> str:
    written, planned = len({(one.split, one.index) for one in summaries}), plan.shards
    if written != planned:
        raise ImageShardsError(f"{written} of {planned} shards were written: run the same command again")
    finished = time.time()
    publish(
        config,
        plan,
        {**run, "finished_unix_s": int(finished), "seconds": round(finished - run["started_unix_s"], 3)},
        None if saved is None else list(saved),  # one a bucket of 10,000 images
    )
    return config.dataset_url
