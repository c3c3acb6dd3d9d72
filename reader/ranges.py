"""Many ranges of files: local ones one by one, remote ones at once, into one buffer that the next ones use again."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import accumulate, chain

from reader.limits import cpu_count
from reader.retries import unless_missing
from reader.storage import Range, Storage

# Threads that wait for requests, of all datasets of a process. Each costs its switches and, since it spreads the
# process' allocations over more heaps (glibc's arenas), up to 5 MB: few for large ranges on few cores, whose decoders
# they outrun at 50 ms a request; many for small ones, where the latency is all.
_MOST_THREADS, _FEWEST_THREADS, _THREADS_PER_CORE = 32, 8, 4
_SMALL_BYTES = 256 << 10

# A page that is touched for the first time costs 3 µs on a virtual machine, so that a MB in fresh memory costs as much
# as receiving it; and many replies that are freed one by one leave holes in the heaps of the threads that received
# them. Of two datasets that are read in turns (training, evaluation) each finds the buffer of the other.
_SPARE: deque[memoryview] = deque(maxlen=2)
_MOST_SPARE_BYTES = 64 << 20  # windows of full-sized photos: not kept
_STEP_BYTES = 1 << 20


def read_ranges(storage: Storage, ranges: Sequence[Range]) -> Iterator[bytes | memoryview | None]:
    """The bytes of each range in turn, fewer where its file ends before; None where the file is missing.

    A view of remote bytes is valid until the iteration ends.

    Raises:
        StorageError: a file can't be read.
    """
    if not storage.is_remote:
        for one in ranges:
            yield unless_missing(partial(storage.read, *one))
    elif ranges:
        yield from _read_at_once(storage, ranges)


def _read_at_once(storage: Storage, ranges: Sequence[Range]) -> Iterator[memoryview | None]:
    ends = list(accumulate(stop - start for _, start, stop in ranges))
    buffer = _take_buffer(ends[-1])
    parts = [buffer[end - (stop - start) : end] for (_, start, stop), end in zip(ranges, ends, strict=True)]

    pool = _request_pool(_threads(ends[-1] // len(ranges)))

    def receive(first: int) -> list[int | None]:
        some = slice(first, first + storage.ranges_at_once)
        return storage.read_into(ranges[some], parts[some])

    received = pool.map(receive, range(0, len(ranges), storage.ranges_at_once))
    for part, size in zip(parts, chain.from_iterable(received), strict=True):
        yield None if size is None else part[:size]
    if len(buffer) <= _MOST_SPARE_BYTES:
        _SPARE.append(buffer)  # not after an error: other requests may still be writing


def _take_buffer(size: int) -> memoryview:
    try:
        spare = _SPARE.pop()
    except IndexError:
        spare = memoryview(b"")
    if len(spare) >= size:
        return spare
    # Not by malloc: once a block of this size was freed, each thread's heap would keep twice as much (mallopt(3) on its
    # dynamic M_MMAP_THRESHOLD). Private, so that a forked child reads into pages of its own.
    rounded = -(-size // _STEP_BYTES) * _STEP_BYTES
    return memoryview(mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _threads(range_bytes: int) -> int:
    if range_bytes < _SMALL_BYTES:
        return _MOST_THREADS
    return min(_MOST_THREADS, max(_FEWEST_THREADS, _THREADS_PER_CORE * cpu_count()))


@cache
def _request_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "reader-request")


if hasattr(os, "register_at_fork"):  # a forked child (a PyTorch worker) has none of its parent's threads
    os.register_at_fork(after_in_child=_request_pool.cache_clear)
