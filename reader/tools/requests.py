"""Requests to storage that wait, and are counted by `usage`: what a bucket costs, tried on files that are here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from beam_pipeline.storage import ListedFile, Storage, usage
from beam_pipeline.storage.objects import FREE, LIST_OR_WRITE, PAGE_NAMES, READ


def _request(name: str, billed: Mapping[str, int]) -> Callable[..., Any]:
    """The method of this name, sent as one request."""

    def method(self: SlowStorage, *arguments: Any, **named: Any) -> Any:
        return self.send(billed, getattr(self.store, name), *arguments, **named)

    return method


class SlowStorage(Storage):
    """A storage whose requests wait before they are sent, as those to a bucket do.

    Args:
        store: where they are sent. If it is local they are counted here, else by the store itself.
        latency_s: how long each waits, in seconds.
        saw: is told of each read: when it began and when its bytes were there, in seconds of `time.perf_counter`.
    """

    def __init__(
        self, store: Storage, latency_s: float, saw: Callable[[float, float], None] = lambda begin, end: None
    ) -> None:
        self.store, self._latency_s, self._saw = store, latency_s, saw
        self.is_remote = store.is_remote or latency_s > 0

    def send(self, billed: Mapping[str, int], call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call after the wait."""
        begin = time.perf_counter()
        if not self.store.is_remote:
            usage.count(**billed)
        time.sleep(self._latency_s)
        result = call(*arguments, **named)
        if billed is READ:
            self._saw(begin, time.perf_counter())
        return result

    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        for number, file in enumerate(self.store.files(url, every_name)):
            if number % PAGE_NAMES == 0:
                self.send(LIST_OR_WRITE, lambda: None)  # the next page
            yield file

    names, sizes = _request("names", LIST_OR_WRITE), _request("sizes", LIST_OR_WRITE)
    stat, read_range = _request("stat", READ), _request("read_range", READ)
    write, publish = _request("write", LIST_OR_WRITE), _request("publish", LIST_OR_WRITE)
    delete = _request("delete", FREE)
