"""From references to a published version: they are assigned to shards, these are written, then all is published."""

import dataclasses
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import apache_beam as beam
import msgspec
from apache_beam.metrics import Metrics
from apache_beam.pvalue import AsSingleton
from apache_beam.transforms.window import GlobalWindows

from beam_pipeline.config import Config
from beam_pipeline.dataset.publish import publish
from beam_pipeline.dataset.shard_queue import ShardQueue, WrittenShard
from beam_pipeline.dataset.writer import ClaimedPlan
from beam_pipeline.pipeline import elements
from beam_pipeline.pipeline.elements import Page, Pages, ShardId, by_key, counter, reports_errors
from beam_pipeline.schema.job import Run
from beam_pipeline.schema.manifest import Content


def assign_shards(pages: Pages, claimed: ClaimedPlan) -> Iterable[tuple[ShardId, Page]]:
    """(key, iterable of `Page`) → (`ShardId`, `Page`): the references by the shard that they belong to, in no order."""
    refs, splits = chain.from_iterable(pages[1]), claimed.plan.splits
    return by_key(refs, lambda ref: (ref.split, splits[ref.split].shard_of(ref.order_key))).items()


@dataclasses.dataclass
class WriteShards(beam.PTransform):  # type: ignore[misc]
    """Input: (`ShardId`, `Page`). Output: the `ShardId` of each, finished; a retry writes the same bytes.

    `repaired`: for a repair, see `ShardWriter`.
    """

    config: Config
    plan: Any
    repaired: Content | None = None

    def expand(self, pages: beam.PCollection[tuple[ShardId, Page]]) -> beam.PCollection[ShardId]:
        write = beam.ParDo(_WriteShardFn(self.config, self.repaired), AsSingleton(self.plan))
        return pages | "GroupByShard" >> beam.GroupByKey() | "WriteShard" >> write


class _WriteShardFn(beam.DoFn):  # type: ignore[misc]
    def __init__(self, config: Config, repaired: Content | None) -> None:
        self._config = config
        self._repaired = repaired

    def start_bundle(self) -> None:
        self._queue = ShardQueue(self._config, self._repaired, counter(elements.IMAGES_DONE).inc)

    @reports_errors
    def process(self, shard: tuple[ShardId, Iterable[Page]], claimed: ClaimedPlan) -> Iterator[ShardId]:
        refs = list(chain.from_iterable(shard[1]))
        yield from map(_counted, self._queue.submit(claimed, *shard[0], refs))

    @reports_errors
    def finish_bundle(self) -> Iterator[Any]:
        yield from map(GlobalWindows.windowed_value_at_end_of_window, map(_counted, self._queue.drain()))


def _counted(written: WrittenShard) -> ShardId:
    split, number, (sidecar, was_finished), seconds = written
    if sidecar is None or was_finished:
        counter(elements.SHARDS_KEPT).inc()
    else:
        counter(elements.SHARDS_WRITTEN).inc()
        counter(elements.RECORDS_WRITTEN).inc(sidecar.counts.records)
        counter(elements.SOURCE_BYTES).inc(sidecar.counts.source_bytes)
        counter(elements.WRITTEN_BYTES).inc(sidecar.shard.bytes)
        Metrics.distribution(elements.NAMESPACE, elements.SHARD_MSEC).update(int(seconds * 1000))
    counter(elements.IMAGES_REJECTED).inc(sidecar.counts.rejected if sidecar else 0)
    return split, number


@reports_errors
def publish_dataset(claimed: ClaimedPlan, config: Config, _: Iterable[ShardId], run: Run) -> str:
    """Publish once every shard is written; returns the version's URL.

    Args:
        claimed, config: of the job.
        run: content of run.json, but for the end.
    """
    now = time.time()
    run = msgspec.structs.replace(run, finished_unix_s=int(now), seconds=round(now - run.started_unix_s, 3))
    publish(config, claimed, run)
    return config.dataset_url
