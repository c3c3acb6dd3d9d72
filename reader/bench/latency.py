"""Storage with a request latency, for measuring on one machine what a bucket far away would do.

`delayed:///path` is the local file after a sleep for each request (a read, a listing, a size). It costs no CPU, where a
real client's HTTP and TLS cost 0.2 to 2 ms a request; a run of 64 images is one request, a file of its own each.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

PROTOCOL = "delayed"


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
