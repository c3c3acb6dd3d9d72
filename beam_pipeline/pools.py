"""Process-wide threads that fetch and decode: many requests in flight, a few decoders, bounded payload bytes.

All shards that a process writes at the same time share one pool, so a Dataflow worker with 12 bundle threads keeps the
same number of requests, decoders and payload bytes as a laptop with one.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Payload = TypeVar("Payload")
Result = TypeVar("Result")

# Source bytes in flight in one process; with 32 requests it is 8 MiB each, above which nothing is gained.
_PAYLOAD_BYTES = 256 << 20
# 4 gives a 2.1 % shorter job than 1, 16 one of 2.9 % (benchmarks/write.py); a batch of large photos is one photo.
_BATCH_ITEMS = 8
_BATCH_BYTES = 4 << 20


class Pools:
    """Fetch and decode threads of one process.

    Args:
        fetch_concurrency: requests in flight.
        decode_threads: images being decoded.
    """

    def __init__(self, fetch_concurrency: int, decode_threads: int) -> None:
        self._fetchers = ThreadPoolExecutor(fetch_concurrency, thread_name_prefix="fetch")
        self._decoders = ThreadPoolExecutor(decode_threads, thread_name_prefix="decode")
        self._window = -(-fetch_concurrency // _BATCH_ITEMS) + 2 * decode_threads  # batches
        self._budget = _Budget(_PAYLOAD_BYTES)

    def map(
        self,
        items: Iterable[Item],
        fetch: Callable[[Item], Payload],
        convert: Callable[[Item, Payload], Result],
        cost: Callable[[Item], int],
        fetch_apart: bool = True,
    ) -> Iterator[Result]:
        """`convert(item, fetch(item))` of every item, in order, a bounded window of them at work in batches.

        Args:
            items: consumed as the window moves.
            fetch: blocks on storage.
            convert: computes, releases the GIL for most of its time.
            cost: payload bytes of an item while it is in the window.
            fetch_apart: fetch in threads of its own; False for local files, where handing over costs more than reading.

        Raises:
            What `fetch` or `convert` raised first, in order; the rest of the window is abandoned.
        """
        window: deque[tuple[Future[list[Result]], int]] = deque()
        start = self._start if fetch_apart else self._start_together
        try:
            for batch, size in _batches(items, cost):
                while len(window) >= self._window or not self._budget.take(size, wait=not window):
                    yield from self._finish(window)
                window.append((start(batch, fetch, convert), size))
            while window:
                yield from self._finish(window)
        finally:
            for future, size in window:
                future.cancel()
                self._budget.give(size)

    def _start(
        self, batch: list[Item], fetch: Callable[[Item], Payload], convert: Callable[[Item, Payload], Result]
    ) -> Future[list[Result]]:
        result: Future[list[Result]] = Future()
        fetched = [self._fetchers.submit(fetch, item) for item in batch]
        arrivals = itertools.count(1)

        def arrived(_: Future[Payload]) -> None:
            if next(arrivals) == len(batch):
                self._decoders.submit(decode)

        def decode() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result([convert(item, one.result()) for item, one in zip(batch, fetched, strict=True)])
                except BaseException as error:
                    result.set_exception(error)

        def abandon(done: Future[list[Result]]) -> None:
            if done.cancelled():  # else requests that nobody waits for would hold up the end of the process
                for one in fetched:
                    one.cancel()

        # Chained rather than waited for: a slow fetch never holds a decoder.
        for one in fetched:
            one.add_done_callback(arrived)
        result.add_done_callback(abandon)
        return result

    def _start_together(
        self, batch: list[Item], fetch: Callable[[Item], Payload], convert: Callable[[Item, Payload], Result]
    ) -> Future[list[Result]]:
        return self._decoders.submit(lambda: [convert(item, fetch(item)) for item in batch])

    def _finish(self, window: deque[tuple[Future[list[Result]], int]]) -> list[Result]:
        future, size = window[0]
        values = future.result()
        window.popleft()
        self._budget.give(size)
        return values


def _batches(items: Iterable[Item], cost: Callable[[Item], int]) -> Iterator[tuple[list[Item], int]]:
    """Neighbours that one thread decodes in one go, and their bytes: waking a thread for each image costs 2 % of it."""
    batch: list[Item] = []
    size = 0
    for item in items:
        item_bytes = cost(item)
        if batch and (len(batch) == _BATCH_ITEMS or size + item_bytes > _BATCH_BYTES):
            yield batch, size
            batch, size = [], 0
        batch.append(item)
        size += item_bytes
    if batch:
        yield batch, size


class _Budget:
    """Bytes that may be in flight; who holds nothing always gets some, so nobody waits for himself."""

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
def shared_pools(fetch_concurrency: int, decode_threads: int) -> Pools:
    """The pools of this process."""
    return Pools(fetch_concurrency, decode_threads)
