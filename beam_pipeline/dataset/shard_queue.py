"""The shards that a worker thread has in progress: two if storage is remote, so that one converts while one waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.writer import ClaimedPlan, Finished, ShardWriter
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.schema.manifest import Content
from beam_pipeline.text import plural, size_text

_LOGGER = logging.getLogger("imageshards")
_COUNT_EVERY_S = 5.0  # a shard takes minutes, and those of a job may all be in progress at once
_IN_PROGRESS = 2  # 1 if everything is local, where a second only competes for the CPU


class WrittenShard(NamedTuple):
    """A shard that is finished: which, what is in it, and how long that took."""

    split: str
    number: int
    finished: Finished
    seconds: float


class ShardQueue:
    """Shards in progress: while one waits for storage, the images of the other are converted.

    Args:
        config: of the job.
        repaired: see `ShardWriter`.
        count: called with a number of images that got a record or a reject, from the thread that calls this.
    """

    def __init__(self, config: Config, repaired: Content | None, count: Callable[[int], None]) -> None:
        self._config, self._repaired, self._count = config, repaired, count
        is_local = storage.is_local(config.input) and storage.is_local(config.output)
        self._most = 1 if is_local else _IN_PROGRESS
        self._threads = ThreadPoolExecutor(self._most, "shard")
        self._in_progress: dict[Future[WrittenShard], ShardWriter] = {}
        self._cancelled = threading.Event()

    def submit(self, claimed: ClaimedPlan, split: str, number: int, refs: list[ImageRef]) -> list[WrittenShard]:
        """Begin a shard; returns one that is finished if no more may be in progress.

        Args:
            claimed: the plan.
            split, number: which shard.
            refs: its images, in any order.

        Raises:
            ImageShardsError: a shard couldn't be written.
        """
        with self._cancelling():
            writer = ShardWriter(self._config, claimed, self._repaired, self._cancelled)
            self._in_progress[self._threads.submit(_write, writer, split, number, refs)] = writer
            return [self._next()] if len(self._in_progress) == self._most else []

    def drain(self) -> list[WrittenShard]:
        """The shards that are still in progress, once they are finished."""
        with self._cancelling():
            finished = [self._next() for _ in range(len(self._in_progress))]
        self._threads.shutdown()
        return finished

    @contextmanager
    def _cancelling(self) -> Iterator[None]:
        """On failure, cancel shards in progress: at their next image, or before they publish."""
        try:
            yield
        except BaseException as error:
            self._cancelled.set()
            # A remote request may be retried for long yet; the error needn't wait for it.
            is_soon = storage.is_local(self._config.output) and isinstance(error, Exception)
            self._threads.shutdown(wait=is_soon, cancel_futures=True)
            raise

    def _next(self) -> WrittenShard:
        while not (done := wait(self._in_progress, _COUNT_EVERY_S, FIRST_COMPLETED).done):
            self._count_images()
        self._count_images()
        future = done.pop()
        del self._in_progress[future]
        return future.result()

    def _count_images(self) -> None:
        self._count(sum(writer.newly_done() for writer in self._in_progress.values()))


def _write(writer: ShardWriter, split: str, number: int, refs: list[ImageRef]) -> WrittenShard:
    start = time.monotonic()
    _LOGGER.info("shard %s-%05d: begun, %s", split, number, plural(len(refs), "image"))
    finished = writer.write(split, number, refs)
    seconds, outcome = time.monotonic() - start, "was finished already"
    if finished.sidecar and not finished.was_finished:
        counts, shard_size = finished.sidecar.counts, size_text(finished.sidecar.shard.bytes)
        outcome = f"published, {plural(counts.records, 'record')}, {plural(counts.rejected, 'reject')}, {shard_size}"
    _LOGGER.info("shard %s-%05d: %s, %.1f s", split, number, outcome, seconds)
    return WrittenShard(split, number, finished, seconds)
