"""Storage with a request latency, for measuring on one machine what a bucket far away would do.

`delayed:///path` is the local file after a sleep for each request (a read, a listing, a size). It costs no CPU, where a
real client's HTTP and TLS cost 0.2 to 2 ms a request; a run of 64 images is one request, a file of its own each.

TensorFlow's own readers open no such URL: where they are measured, each shard waits as long as the requests would take
that TensorFlow's client of gs:// makes for it, one for its size and one for each 64 MiB.
"""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

import fsspec
import tensorflow as tf
from fsspec.implementations.local import LocalFileSystem

PROTOCOL = "delayed"
_BLOCK_BYTES = 64 << 20  # TensorFlow's GCS_READ_CACHE_BLOCK_SIZE_MB, unless it is set


class DelayedFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Local files; each request sleeps `latency_s` first."""

    protocol = PROTOCOL
    latency_s: ClassVar[float] = 0.0

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.removeprefix(f"{PROTOCOL}://"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        time.sleep(self.latency_s)
        return super().cat_file(path, start, end, **options)

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        time.sleep(self.latency_s)
        return super().ls(path, detail=detail, **options)

    def info(self, path: Any, **options: Any) -> Any:
        time.sleep(self.latency_s)
        return super().info(path, **options)


def delayed(folder: str, latency_s: float) -> str:
    """The URL of a local folder with that latency for each request (one latency at a time in a process)."""
    DelayedFileSystem.latency_s = latency_s
    fsspec.register_implementation(PROTOCOL, DelayedFileSystem, clobber=True)
    return f"{PROTOCOL}://{folder}"


def slow_names(names: Any, latency_s: float) -> Any:
    """A dataset of shards' names whose readers wait for TensorFlow's requests before they open each."""
    if not latency_s:
        return names

    def wait(name: bytes) -> bytes:
        requests = 1 - (-os.path.getsize(name) // _BLOCK_BYTES)
        time.sleep(requests * latency_s)
        return name

    def slowed(name: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(wait, [name], tf.string), [])

    return names.map(slowed, num_parallel_calls=tf.data.AUTOTUNE)
