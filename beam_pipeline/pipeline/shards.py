"""What is done with the references of each shard: they are written and published, or compared with a version."""

import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import apache_beam as beam
import msgspec
from apache_beam.metrics import Metrics
from apache_beam.pvalue import AsSingleton
from apache_beam.transforms.window import GlobalWindows

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.dataset import answers
from beam_pipeline.dataset.compare import read_and_compare, shard_of
from beam_pipeline.dataset.publish import publish
from beam_pipeline.dataset.shard_queue import ShardQueue, WrittenShard
from beam_pipeline.dataset.writer import ClaimedPlan
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.inputs.folders import ListingSummary
from beam_pipeline.pipeline import elements
from beam_pipeline.pipeline.elements import Page, Pages, ShardId, by_key, counter, merge_all, reports_errors
from beam_pipeline.schema import MANIFEST_FILE
from beam_pipeline.schema.job import ComparedInputs, Run
from beam_pipeline.schema.manifest import Content, parse_manifest


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


# --- comparing


@dataclasses.dataclass
class CompareShards(beam.PTransform):  # type: ignore[misc]
    """Compares each shard of a published version with the images that are listed for it now; writes nothing.

    With `--repair` images and shards are read.

    Input: (key, iterable of `Page`). Output: one `ComparedInputs`.

    `published`: `self_sha256` of the version's manifest, which each worker process reads.
    """

    config: Config
    published: str

    def expand(self, pages: beam.PCollection[Pages]) -> beam.PCollection[ComparedInputs]:
        some = self.config, self.published
        listed = pages | "AssignShards" >> beam.FlatMap(_assign_published, *some)
        every = pages.pipeline | "Start" >> beam.Impulse() | "EveryShard" >> beam.FlatMap(_every_shard, *some)
        # One without images has a page without references.
        shards = (listed, every) | "AllShards" >> beam.Flatten() | "GroupByShard" >> beam.GroupByKey()
        parts = shards | "CompareShard" >> beam.Map(_compare_shard, *some)
        return parts | "MergeParts" >> beam.CombineGlobally(merge_all, ComparedInputs).without_defaults()


def _assign_published(pages: Pages, config: Config, published: str) -> Iterable[tuple[ShardId, Page]]:
    manifest = _manifest(config, published)
    return by_key(chain.from_iterable(pages[1]), lambda ref: shard_of(manifest, ref)).items()


@reports_errors
def _every_shard(_: Any, config: Config, published: str) -> Iterator[tuple[ShardId, Page]]:
    yield from ((key, Page()) for key in _manifest(config, published).shards)


@reports_errors
def _compare_shard(shard: tuple[ShardId, Iterable[Page]], config: Config, published: str) -> ComparedInputs:
    return read_and_compare(config, _manifest(config, published), shard[0], chain.from_iterable(shard[1]))


@reports_errors
def save_comparison(compared: ComparedInputs, config: Config, summary: ListingSummary) -> None:
    """Leave the result for the launcher."""
    compared.references = str(summary.references)
    answers.leave(config, compared)


def _manifest(config: Config, published: str) -> Content:
    return _read_manifest(config.dataset_url, published, config.io_deadline)


@functools.lru_cache(maxsize=1)
def _read_manifest(version_url: str, published: str, deadline_s: float) -> Content:
    url = storage.join(version_url, MANIFEST_FILE)
    manifest = parse_manifest(storage.open_storage(url, deadline_s).read(url), url)[1]
    if manifest.self_sha256 != published:
        raise ImageShardsError(f"{version_url} was published again while it was compared: run the same command again")
    return manifest
