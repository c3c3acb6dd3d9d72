"""AssignShards, WriteShards and PublishDataset: from references to a published version."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.pvalue import AsIter, AsSingleton

from beam_pipeline.config import Config
from beam_pipeline.dataset.duplicates import SavedGroups
from beam_pipeline.dataset.publish import publish
from beam_pipeline.dataset.writer import Promised, ShardWriter
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.pipeline import elements
from beam_pipeline.pipeline.elements import Page, ShardId, counter
from beam_pipeline.planning.plan import JobPlan


class AssignShards(beam.PTransform):  # type: ignore[misc]
    """Input: (key, iterable of `Page`). Output: (`ShardId`, `Page`): the pages parted by shard, in no order."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        self._plan = plan

    def expand(self, pages: Any) -> Any:
        parted = beam.FlatMap(_part_by_shard, AsSingleton(self._plan))
        return pages | "BisectKeys" >> parted.with_output_types(tuple[tuple[str, int], Page])


def _part_by_shard(pages: tuple[int, Iterable[Page]], plan: JobPlan) -> Iterable[tuple[ShardId, Page]]:
    parts: dict[ShardId, Page] = {}
    for ref in chain.from_iterable(pages[1]):
        shard = ref.split, plan.splits[ref.split].shard_of(ref.order_key)
        parts.setdefault(shard, Page()).append(ref)
    return parts.items()


class WriteShards(beam.PTransform):  # type: ignore[misc]
    """Input: (`ShardId`, iterable of `Page`). Output: the `ShardId` of each, finished; a retry writes the same bytes.

    `promised`: of `ShardWriter`, for a repair.
    """

    def __init__(self, config: Config, plan: Any, promised: Promised | None = None) -> None:
        super().__init__()
        self._config = config
        self._plan = plan
        self._promised = promised

    def expand(self, shards: Any) -> Any:
        write = beam.ParDo(_WriteShardFn(self._config, self._promised), AsSingleton(self._plan))
        return shards | "WriteShard" >> write


class _WriteShardFn(beam.DoFn):  # type: ignore[misc]
    def __init__(self, config: Config, promised: Promised | None) -> None:
        self._config = config
        self._promised = promised
        self._records = counter(elements.RECORDS_WRITTEN)
        self._rejected = counter(elements.IMAGES_REJECTED)
        self._source_bytes = counter(elements.SOURCE_BYTES)
        self._written_bytes = counter(elements.WRITTEN_BYTES)
        self._shards = {False: counter(elements.SHARDS_WRITTEN), True: counter(elements.SHARDS_KEPT)}
        self._msec = Metrics.distribution(elements.NAMESPACE, elements.SHARD_MSEC)

    def process(self, shard: tuple[ShardId, Iterable[Page]], plan: JobPlan) -> Iterator[ShardId]:
        (split, index), pages = shard
        start = time.monotonic()
        result = ShardWriter(self._config, plan, self._promised).write(split, index, chain.from_iterable(pages))
        self._shards[result.kept].inc()
        if not result.kept:
            self._records.inc(result.records)
            self._source_bytes.inc(result.source_bytes)
            self._written_bytes.inc(result.bytes)
            self._msec.update(int((time.monotonic() - start) * 1000))
        self._rejected.inc(result.rejects.total())
        yield split, index


class PublishDataset(beam.PTransform):  # type: ignore[misc]
    """Publishes once every shard is written.

    Input: one `JobPlan`. Output: the URL of the version.

    `written`: the `ShardId`s of `WriteShards`; `saved`: `SavedGroups` of `SaveDuplicates`, or None if no duplicates are
    looked for.
    """

    def __init__(self, config: Config, written: Any, saved: Any, run: dict[str, Any]) -> None:
        super().__init__()
        self._config = config
        self._written = written
        self._saved = saved
        self._run = run

    def expand(self, plan: Any) -> Any:
        saved = None if self._saved is None else AsIter(self._saved)
        return plan | "Publish" >> beam.Map(_publish, self._config, AsIter(self._written), saved, self._run)


def _publish(
    plan: JobPlan,
    config: Config,
    written: Iterable[ShardId],
    saved: Iterable[SavedGroups] | None,
    run: dict[str, Any],
) -> str:
    distinct, planned = len(set(written)), plan.shards
    if distinct != planned:
        raise ImageShardsError(f"{distinct} of {planned} shards were written: run the same command again")
    finished = time.time()
    publish(
        config,
        plan,
        {**run, "finished_unix_s": int(finished), "seconds": round(finished - run["started_unix_s"], 3)},
        None if saved is None else list(saved),  # one a bucket of 10,000 images
    )
    return config.dataset_url
