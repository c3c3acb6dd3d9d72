"""From references to a published version: they are assigned to shards, these are written, then all is published."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import chain
from typing import Any

import apache_beam as beam
import msgspec
from apache_beam.metrics import Metrics
from apache_beam.pvalue import AsSingleton
from apache_beam.transforms.window import GlobalWindows

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.duplicates import SavedGroups
from beam_pipeline.dataset.publish import publish
from beam_pipeline.dataset.writer import ClaimedPlan, Finished, ShardWriter
from beam_pipeline.errors import plural, size
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.pipeline import elements
from beam_pipeline.pipeline.elements import Page, ShardId, by_key, counter, grouped, reports_errors
from beam_pipeline.schema.job import Run
from beam_pipeline.schema.manifest import Content

_LOGGER = logging.getLogger("imageshards")
_COUNT_EVERY_S = 5.0  # a shard takes minutes, and those of a job may all be in work at once
_AT_A_TIME = 2  # shards in work in a bundle, unless all is local: their threads would only take each other's time


def assign_shards(pages: tuple[int, Iterable[Page]], claimed: ClaimedPlan) -> Iterable[tuple[ShardId, Page]]:
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

    def expand(self, pages: Any) -> Any:
        write = beam.ParDo(_WriteShardFn(self.config, self.repaired), AsSingleton(self.plan))
        return grouped(pages, "GroupByShard", tuple[str, int]) | "WriteShard" >> write


class _WriteShardFn(beam.DoFn):  # type: ignore[misc]
    """Has two shards in work if storage is remote: while one waits for it, the other's images are converted."""

    def __init__(self, config: Config, repaired: Content | None) -> None:
        self._config = config
        self._repaired = repaired

    def start_bundle(self) -> None:
        self._in_work: dict[Future[tuple[ShardId, Finished, float]], ShardWriter] = {}
        is_local = storage.is_local(self._config.input) and storage.is_local(self._config.output)
        self._most = 1 if is_local else _AT_A_TIME
        self._threads = ThreadPoolExecutor(self._most, "shard")
        self._stopped = threading.Event()

    @reports_errors
    def process(self, shard: tuple[ShardId, Iterable[Page]], plan: ClaimedPlan) -> Iterator[ShardId]:
        writer = ShardWriter(self._config, plan, self._repaired, self._stopped)
        with self._all_or_none():
            refs = list(chain.from_iterable(shard[1]))
            self._in_work[self._threads.submit(_write, writer, shard[0], refs)] = writer
            finished = [self._finish_one()] if len(self._in_work) == self._most else []
        yield from finished

    @reports_errors
    def finish_bundle(self) -> Iterator[Any]:
        with self._all_or_none():
            finished = [self._finish_one() for _ in range(len(self._in_work))]
        self._threads.shutdown()
        yield from map(GlobalWindows.windowed_value_at_end_of_window, finished)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """If anything fails, what is in work stops at its next image, or before it is published."""
        try:
            yield
        except BaseException as error:
            self._stopped.set()
            # A remote request may be retried for long yet; the error needn't wait for it.
            is_soon = storage.is_local(self._config.output) and isinstance(error, Exception)
            self._threads.shutdown(wait=is_soon, cancel_futures=True)
            raise

    def _finish_one(self) -> ShardId:
        while not (finished := wait(self._in_work, _COUNT_EVERY_S, FIRST_COMPLETED).done):
            self._count_images()
        self._count_images()
        done = finished.pop()
        del self._in_work[done]
        shard, (sidecar, was_finished), seconds = done.result()
        if sidecar is None or was_finished:
            counter(elements.SHARDS_KEPT).inc()
        else:
            counter(elements.SHARDS_WRITTEN).inc()
            counter(elements.RECORDS_WRITTEN).inc(sidecar.counts.records)
            counter(elements.SOURCE_BYTES).inc(sidecar.counts.source_bytes)
            counter(elements.WRITTEN_BYTES).inc(sidecar.shard.bytes)
            Metrics.distribution(elements.NAMESPACE, elements.SHARD_MSEC).update(int(seconds * 1000))
        counter(elements.IMAGES_REJECTED).inc(sidecar.counts.rejected if sidecar else 0)
        return shard

    def _count_images(self) -> None:
        """Count what was done since the last time: counters are of the bundle's thread, not of the shards'."""
        counter(elements.IMAGES_DONE).inc(sum(writer.newly_done() for writer in self._in_work.values()))


def _write(writer: ShardWriter, shard: ShardId, refs: list[ImageRef]) -> tuple[ShardId, Finished, float]:
    start = time.monotonic()
    _LOGGER.info("shard %s-%05d: begun, %s", *shard, plural(len(refs), "image"))
    finished = writer.write(*shard, refs)
    seconds, outcome = time.monotonic() - start, "was finished already"
    if finished.sidecar and not finished.was_finished:
        counts, written = finished.sidecar.counts, size(finished.sidecar.shard.bytes)
        outcome = f"published, {plural(counts.records, 'record')}, {plural(counts.rejected, 'reject')}, {written}"
    _LOGGER.info("shard %s-%05d: %s, %.1f s", *shard, outcome, seconds)
    return shard, finished, seconds


@reports_errors
def publish_dataset(
    claimed: ClaimedPlan,
    config: Config,
    _: Iterable[ShardId],
    saved: Iterable[SavedGroups] | None,
    run: Run,
) -> str:
    """Publish once every shard is written; returns the version's URL.

    Args:
        claimed, config: of the job.
        saved: of `duplicates.save`, one a bucket of 10,000 images; None if no duplicates are looked for.
        run: content of run.json, but for the end.
    """
    now = time.time()
    run = msgspec.structs.replace(run, finished_unix_s=int(now), seconds=round(now - run.started_unix_s, 3))
    publish(config, claimed, run, None if saved is None else list(saved))
    return config.dataset_url
