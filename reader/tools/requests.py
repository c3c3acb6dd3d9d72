"""Requests to storage, counted and made to wait: what a bucket costs, tried on files that are here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import IO, Any, NamedTuple, TypeVar

from beam_pipeline.storage import Data, ListedFile, Storage

T = TypeVar("T")
_PAGE_NAMES = 1000  # that one request lists, as Cloud Storage and S3 do


class Count(NamedTuple):
    """Requests so far: those that list or write (class A of a price list), those that read (class B), bytes read."""

    lists: int = 0
    reads: int = 0
    bytes: int = 0

    def since(self, before: Count) -> Count:
        """What came after an earlier count."""
        return Count(*(now - then for now, then in zip(self, before, strict=True)))


class Requests:
    """What a `SlowStorage` adds to. Thread-safe.

    Args:
        saw: is told of each read: when it began and when its bytes were there, in seconds of `time.perf_counter`.
    """

    def __init__(self, saw: Callable[[float, float], None] = lambda begin, end: None) -> None:
        self.count = Count()
        self._saw, self._lock = saw, threading.Lock()

    def add(self, is_read: bool, result: object, begin: float) -> None:
        """Count a request that began then and has ended now."""
        if is_read:
            self._saw(begin, time.perf_counter())
        size = len(result) if isinstance(result, bytes | memoryview) else 0
        with self._lock:
            lists, reads, read_bytes = self.count
            self.count = Count(lists + (not is_read), reads + is_read, read_bytes + size)


class SlowStorage(Storage):
    """A storage whose requests are counted, and wait before they are sent, as those to a bucket do."""

    def __init__(self, store: Storage, latency_s: float, requests: Requests) -> None:
        self._store, self._latency_s, self._requests = store, latency_s, requests
        self.is_remote = store.is_remote or latency_s > 0

    def _slow(self, is_read: bool, call: Callable[..., T], *arguments: Any) -> T:
        begin = time.perf_counter()
        time.sleep(self._latency_s)
        result = call(*arguments)
        self._requests.add(is_read, result, begin)
        return result

    def names(self, url: str) -> list[str]:
        return self._slow(False, self._store.names, url)

    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        for number, file in enumerate(self._store.files(url, every_name)):
            if number % _PAGE_NAMES == 0:
                self._slow(False, lambda: None)  # the next page
            yield file

    def stat(self, url: str) -> ListedFile | None:
        return self._slow(True, self._store.stat, url)

    def sizes(self, urls: Sequence[str]) -> list[int | None]:
        return self._slow(False, self._store.sizes, urls)

    def read_range(self, url: str, start: int, stop: int | None, out: memoryview | None = None) -> Data:
        return self._slow(True, self._store.read_range, url, start, stop, out)

    def write(self, url: str, data: bytes, generation: str | None = None) -> bool:
        return self._slow(False, self._store.write, url, data, generation)

    def publish(self, file: IO[bytes], url: str, generation: str | None = None) -> bool:
        return self._slow(False, self._store.publish, file, url, generation)

    def delete(self, url: str, generation: str = "") -> None:
        self._slow(False, self._store.delete, url, generation)

    def delete_tree(self, url: str, keep: Collection[str] = ()) -> None:
        self._slow(False, self._store.delete_tree, url, keep)
