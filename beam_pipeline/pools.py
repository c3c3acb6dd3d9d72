"""Process-wide threads that fetch and decode: many requests in flight, a few decoders, bounded payload bytes.

All shards that a process writes at the same time share one pool, so a Dataflow worker with 12 bundle threads keeps the
same number of requests, decoders and payload bytes as a laptop with one.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# Source bytes in flight in one process; with 32 requests it is 8 MiB each, above which nothing is gained.
_PAYLOAD_BYTES = 256 << 20
# 4 gives a 2.1 % shorter job than 1, 16 one of 2.9 % (benchmarks/write.py); a batch of large photos is one photo.
_BATCH_ITEMS = 8
_BATCH_BYTES = 4 << 20


class Pool:
    """Threads of one process.

    Args:
        fetch_concurrency: requests in flight; 0 if files are local: neighbours are then read and decoded in one go.
        decode_threads: images being decoded.

    Attributes:
        decoding: what a thread holds while it computes.
    """

    def __init__(self, fetch_concurrency: int, decode_threads: int) -> None:
        threads = fetch_concurrency or decode_threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="convert")
        self._batch_items = 1 if fetch_concurrency else _BATCH_ITEMS
        self._window = 2 * (threads + decode_threads)  # batches
        self._budget = _Budget(_PAYLOAD_BYTES)
        self.decoding = threading.Semaphore(decode_threads)

    def map(
        self, items: Iterable[Item], work: Callable[[Item], Result], cost: Callable[[Item], int]
    ) -> Iterator[Result]:
        """`work(item)` of every item, in order, a bounded window of them at work.

        Args:
            items: consumed as the window moves.
            work: waits for storage, then computes holding `decoding`.
            cost: payload bytes of an item while it is in the window.

        Raises:
            What `work` raised first, in order; the rest of the window is abandoned.
        """
        window: deque[tuple[Future[list[Result]], int]] = deque()

        def finish() -> list[Result]:
            results = window[0][0].result()
            self._budget.give(window.popleft()[1])
            return results

        try:
            for batch, size in self._batches(items, cost):
                while len(window) >= self._window or not self._budget.take(size, wait=not window):
                    yield from finish()
                window.append((self._threads.submit(lambda batch: [work(item) for item in batch], batch), size))
            while window:
                yield from finish()
        finally:
            for future, size in window:
                future.cancel()
                self._budget.give(size)

    def _batches(self, items: Iterable[Item], cost: Callable[[Item], int]) -> Iterator[tuple[list[Item], int]]:
        """Neighbours that one thread takes in one go, and their bytes: waking a thread for each image costs 2 %."""
        batch: list[Item] = []
        size = 0
        for item in items:
            item_bytes = cost(item)
            if batch and (len(batch) == self._batch_items or size + item_bytes > _BATCH_BYTES):
                yield batch, size
                batch, size = [], 0
            batch.append(item)
            size += item_bytes
        if batch:
            yield batch, size


class _Budget:
    """Bytes that may be in flight; a caller that holds none always gets some, so that none waits for its own."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, size: int, wait: bool) -> bool:
        """Take `size` bytes if they fit; with `wait` (the caller holds none) wait for them, however large."""
        with self._changed:
            while self._taken and self._taken + size > self._limit:
                if not wait:
                    return False
                self._changed.wait()
            self._taken += size
            return True

    def give(self, size: int) -> None:
        with self._changed:
            self._taken -= size
            self._changed.notify_all()


@functools.cache
def shared_pool(fetch_concurrency: int, decode_threads: int) -> Pool:
    """The pool of this process."""
    return Pool(fetch_concurrency, decode_threads)
