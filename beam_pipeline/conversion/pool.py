"""Process-wide threads that fetch and decode: many requests in flight, a few decoders, bounded payload bytes.

All shards that a process writes at the same time share one pool, so a Dataflow worker with 12 bundle threads keeps the
same number of requests, decoders and payload bytes as a laptop with one.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Payload = TypeVar("Payload")
Result = TypeVar("Result")

# Source bytes in flight in one process; with 32 requests it is 8 MiB each, above which nothing is gained.
_PAYLOAD_BYTES = 256 << 20
# 4 gives a 2.1 % shorter job than 1, 16 one of 2.9 % (benchmarks/write.py); a batch of large photos is one photo.
_BATCH_ITEMS = 8
_BATCH_BYTES = 4 << 20


class MemoryBudget:
    """Bytes that threads may hold together; more than all of it is given when nobody else holds any.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reserved = 0
        self._changed = threading.Condition()

    def reserve(self, size: int, wait: bool = True) -> bool:
        """Reserve bytes; returns whether they were free. A caller that holds some mustn't wait, maybe for itself."""
        with self._changed:
            while self._reserved and self._reserved + size > self._limit:
                if not wait:
                    return False
                self._changed.wait()
            self._reserved += size
            return True

    def release(self, size: int) -> None:
        """Give bytes back."""
        with self._changed:
            self._reserved -= size
            self._changed.notify_all()


class Pool:
    """Fetch and decode threads of one process.

    Few threads decode, however many fetch: each that does keeps what its largest image took. With 32 of them 24 photos
    of 12 megapixels took 800 MB where two take 240.

    Args:
        fetch_concurrency: requests in flight; 0 if files are local: handing them over costs more than reading them.
        decode_threads: images being decoded.
    """

    def __init__(self, fetch_concurrency: int, decode_threads: int) -> None:
        self._fetchers = ThreadPoolExecutor(fetch_concurrency, "fetch") if fetch_concurrency else None
        self._decoders = ThreadPoolExecutor(decode_threads, "decode")
        self._most_decoding = 2 * decode_threads  # batches
        self._most_batches = self._most_decoding + -(-fetch_concurrency // _BATCH_ITEMS)
        self._budget = MemoryBudget(_PAYLOAD_BYTES)

    def map(
        self,
        items: Iterable[Item],
        fetch: Callable[[Item], Payload],
        convert: Callable[[Item, Callable[[], Payload]], Result],
        cost: Callable[[Item], int],
    ) -> Iterator[Result]:
        """`convert(item, fetched)` of every item, in order, a bounded window of them at work in batches.

        Args:
            items: consumed as the window moves.
            fetch: blocks on storage.
            convert: computes, releases the GIL for most of its time; `fetched()` returns or raises what `fetch` did.
            cost: payload bytes of an item while it is in the window.

        Raises:
            What `convert` raised first, in order; the rest of the window is abandoned.
        """
        fetching: deque[tuple[list[Item], list[Future[Payload]], int]] = deque()
        decoding: deque[tuple[Future[list[Result]], int]] = deque()

        def advance() -> list[Result]:
            """Hand a batch to the decoders, or wait for one that they have."""
            if fetching and len(decoding) < self._most_decoding:
                batch, futures, size = fetching[0]
                wait(futures)  # here: a slow request holds up those who need it, and no decoder
                fetched = [one.result for one in futures] or [functools.partial(fetch, item) for item in batch]
                decoding.append((self._decoders.submit(lambda: list(map(convert, batch, fetched))), size))
                fetching.popleft()
                return []
            results = decoding[0][0].result()
            self._budget.release(decoding.popleft()[1])
            return results

        try:
            for batch, size in _batches(items, cost):
                while len(fetching) + len(decoding) >= self._most_batches or not self._budget.reserve(
                    size, wait=not (fetching or decoding)
                ):
                    yield from advance()
                futures = [self._fetchers.submit(fetch, item) for item in batch] if self._fetchers else []
                fetching.append((batch, futures, size))
                if not self._fetchers:
                    yield from advance()
            while fetching or decoding:
                yield from advance()
        finally:
            for _, futures, size in fetching:
                self._budget.release(size)
                for request in futures:
                    request.cancel()
            for future, size in decoding:
                self._budget.release(size)
                future.cancel()


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


@functools.cache
def shared_pool(fetch_concurrency: int, decode_threads: int) -> Pool:
    """The pool of this process."""
    return Pool(fetch_concurrency, decode_threads)
