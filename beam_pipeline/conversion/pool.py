"""The fetch and decode threads of a worker process.

All shards that it writes at the same time share them, so a Dataflow worker with 12 bundle threads keeps the same number
of requests, decoders and payload bytes as a laptop with one.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from beam_pipeline.images.memory import MemoryBudget

# Source bytes in flight in one process; with 32 requests it is 8 MiB each, above which nothing is gained.
_PAYLOAD_BYTES = 256 << 20
# 4 gives a 2.1 % shorter job than 1, 16 one of 2.9 % (benchmarks/write.py); a batch of large photos is one photo.
_BATCH_ITEMS = 8
_BATCH_BYTES = 4 << 20

Item = TypeVar("Item")
Payload = TypeVar("Payload")
Result = TypeVar("Result")


class Pool:
    """Fetch and decode threads.

    Few threads decode, however many fetch: each decoder keeps the memory that its largest image took. With 32 of them
    24 photos of 12 megapixels took 800 MB, with two 240.

    Args:
        fetch_concurrency: requests in flight; 0 if files are local: handing them over costs more than reading them.
        decode_threads: images being decoded.
    """

    def __init__(self, fetch_concurrency: int, decode_threads: int) -> None:
        self.fetchers = ThreadPoolExecutor(fetch_concurrency, "fetch") if fetch_concurrency else None
        self.decoders = ThreadPoolExecutor(decode_threads, "decode")
        self.most_decoding = 2 * decode_threads  # batches
        self.most_batches = self.most_decoding + -(-fetch_concurrency // _BATCH_ITEMS)
        self.budget = MemoryBudget(_PAYLOAD_BYTES)

    def map(
        self,
        items: Iterable[Item],
        fetch: Callable[[Item], Payload],
        convert: Callable[[Item, Callable[[], Payload]], Result],
        cost: Callable[[Item], int],
    ) -> Iterator[Result]:
        """`convert(item, fetched)` of every item, in order, a bounded window of them at a time.

        Args:
            items: consumed as the window moves.
            fetch: blocks on storage.
            convert: computes, releases the GIL for most of its time; `fetched()` returns or raises what `fetch` did.
            cost: payload bytes of an item while it is in the window.

        Raises:
            What `convert` raised first, in order; the rest of the window is abandoned.
        """
        window = _Window(self, fetch, convert)
        try:
            for batch, size in _batches(items, cost):
                while not window.fill(batch, size):
                    yield from window.step()
                if not self.fetchers:
                    yield from window.step()
            while window.batches:
                yield from window.step()
        finally:
            window.abandon()


@dataclass(slots=True)
class _Batch(Generic[Item, Payload, Result]):
    """Items that one thread converts in one go: their payload bytes, their requests, and then their results."""

    items: list[Item]
    size: int
    requests: list[Future[Payload]]
    results: Future[list[Result]] | None = None


class _Window(Generic[Item, Payload, Result]):
    """The batches of one `Pool.map` that are in progress.

    Attributes:
        batches: the oldest first; the first `_decoding` of them are with the decoders, the others are fetched.
    """

    def __init__(
        self, pool: Pool, fetch: Callable[[Item], Payload], convert: Callable[[Item, Callable[[], Payload]], Result]
    ) -> None:
        self._pool, self._fetch, self._convert = pool, fetch, convert
        self.batches: deque[_Batch[Item, Payload, Result]] = deque()
        self._decoding = 0

    def fill(self, items: list[Item], size: int) -> bool:
        """Start fetching a batch if there is room, and memory, for it; returns whether there was."""
        pool = self._pool
        if len(self.batches) >= pool.most_batches or not pool.budget.reserve(size, wait=not self.batches):
            return False
        requests = [pool.fetchers.submit(self._fetch, item) for item in items] if pool.fetchers else []
        self.batches.append(_Batch(items, size, requests))
        return True

    def step(self) -> list[Result]:
        """Hand a batch to the decoders, or wait for the oldest one that they have and return its results."""
        if self._decoding < min(len(self.batches), self._pool.most_decoding):
            batch = self.batches[self._decoding]
            wait(batch.requests)  # here, not in a decoder
            fetched = [request.result for request in batch.requests]
            fetched = fetched or [functools.partial(self._fetch, item) for item in batch.items]
            batch.requests = []  # from now on only the decoder keeps the payloads
            batch.results = self._pool.decoders.submit(lambda: list(map(self._convert, batch.items, fetched)))
            self._decoding += 1
            return []
        batch = self.batches[0]
        assert batch.results is not None
        results = batch.results.result()
        self.batches.popleft()
        self._decoding -= 1
        self._pool.budget.release(batch.size)
        return results

    def abandon(self) -> None:
        """Cancel what hasn't started, and release the memory of all batches."""
        for batch in self.batches:
            self._pool.budget.release(batch.size)
            for future in (*batch.requests, batch.results):
                if future:
                    future.cancel()


def _batches(items: Iterable[Item], cost: Callable[[Item], int]) -> Iterator[tuple[list[Item], int]]:
    """Batches and their payload bytes: waking a thread for each image would cost 2 % of its time."""
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
