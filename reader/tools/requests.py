"""Requests to storage that wait, and are recorded: what a bucket's latency costs, tried on files that are here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from beam_pipeline.storage import ListedFile, Storage
from beam_pipeline.storage.objects import PAGE_NAMES


class Request(NamedTuple):
    """One request: when it began and when its answer was there, in seconds of `time.perf_counter`.

    Attributes:
        name: the method of `Storage`.
        bytes_read: of a file's content.
    """

    name: str
    begin: float
    end: float
    bytes_read: int


def _request(name: str) -> Callable[..., Any]:
    """The method of this name, sent as one request."""

    def method(self: SlowStorage, *arguments: Any, **named: Any) -> Any:
        return self.send(name, getattr(self.store, name), *arguments, **named)

    return method


class SlowStorage(Storage):
    """A storage whose requests wait before they are sent, as those to a bucket do.

    Args:
        store: where they are sent.
        latency_s: how long each waits, in seconds.
        on_read: called with each request when it is answered; from any thread.
    """

    def __init__(
        self, store: Storage, latency_s: float, on_read: Callable[[Request], object] = lambda one: None
    ) -> None:
        self.store, self._latency_s, self._on_read = store, latency_s, on_read
        self.is_remote = store.is_remote or latency_s > 0

    def send(self, name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call after the wait."""
        begin = time.perf_counter()
        time.sleep(self._latency_s)
        result = call(*arguments, **named)
        self._on_read(Request(name, begin, time.perf_counter(), len(result) if name == "read_range" else 0))
        return result

    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        for number, file in enumerate(self.store.files(url, every_name)):
            if number % PAGE_NAMES == 0:
                self.send("files", lambda: None)  # the next page
            yield file

    names, sizes, stat, read_range = _request("names"), _request("sizes"), _request("stat"), _request("read_range")
    write, publish = _request("write"), _request("publish")
    delete = _request("delete")
