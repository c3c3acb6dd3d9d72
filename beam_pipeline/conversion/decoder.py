"""How a worker decodes: here, under a watchdog; or isolated in a child process, if an earlier attempt died of it.

Attempt markers in the state folder tell what was being decoded when an attempt died. A shard's marker is created before
its first image is decoded, and its sidecar makes it obsolete: one request a shard. An attempt that finds one decodes
the shard's images isolated. An image that kills child processes too is rejected in all later attempts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterable

from beam_pipeline import images, storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.isolation import DEATHS, IsolatedDecoder
from beam_pipeline.errors import Reject
from beam_pipeline.images import EncodedImage, ImageOptions
from beam_pipeline.images.memory import LEAST_BOUND, MemoryBudget
from beam_pipeline.schema import RejectReason, ShardName, canonical_json

# The decoder of an image hangs after 239 s with the default --max_pixels. Pillow decodes and resizes a pixel in about
# 0.02 µs; 50 times that, for a machine that is busy with more.
LEAST_S = 60.0
SECONDS_A_PIXEL = 1e-6
_LOOK_EVERY_S = 1.0
# Large images share what one may take at the default --max_pixels; one that takes more has it alone.
_MEMORY = MemoryBudget(LEAST_BOUND)
_local_markers: set[str] = set()  # made by this process


def take_back_markers() -> None:
    """For the end of this process by a signal: no decoder is to blame. A child process costs an image a tenth."""
    for path in list(_local_markers):
        with contextlib.suppress(OSError):
            os.unlink(path)


@functools.cache  # parts of the sample follow each other: starting a process takes as long as 100 images
def _isolated(options: ImageOptions, limit_s: float, with_sums: bool) -> IsolatedDecoder:
    return IsolatedDecoder(options, limit_s, _MEMORY, with_sums)


class Attempts:
    """The attempt markers of one version: of shards, of parts of the sample, of images that kill decoders."""

    def __init__(self, config: Config) -> None:
        self._store = storage.open_storage(config.output, config.io_deadline)
        self._url = storage.join(config.state_url, "inflight")

    def begin_shard(self, name: ShardName) -> bool:
        """Mark that a shard's images are decoded from now on; returns whether an earlier attempt did."""
        return self._mark(f"shards/{name.short}")

    def end_shard(self, name: ShardName) -> None:
        """Take the marker back: the attempt ended, and not by its decoder."""
        self._store.delete(storage.join(self._url, f"shards/{name.short}"))

    def begin_sampling(self, paths: Iterable[str]) -> bool:
        """Mark that a part of the sample, the images at `paths`, is decoded; returns whether an earlier attempt did."""
        return self._mark(_sample_marker(paths))

    def end_sampling(self, paths: Iterable[str]) -> None:
        """Take the marker back, and the folders that are empty then: a pipeline that only samples leaves nothing."""
        self._store.delete(storage.join(self._url, _sample_marker(paths)))
        above = [self._url]
        while len(above) < 4:  # that of all markers, of the version's state, of all states, of the dataset
            above.append(os.path.dirname(above[-1]))
        self._store.delete_empty_folders(storage.join(self._url, "sampling"), *above)

    def add_reject(self, image: str, reject: Reject) -> None:
        """Save that an image, with what was to be made of it, killed its decoder in a child process too."""
        document = canonical_json({"reason": reject.reason, "detail": reject.detail})
        self._store.write(storage.join(self._url, f"rejected/{image}.json"), document)

    def rejects(self) -> dict[str, Reject]:
        """The images that were saved by `add_reject`."""
        found, folder = {}, storage.join(self._url, "rejected")
        with contextlib.suppress(FileNotFoundError):
            for file in self._store.files(folder):
                # A power cut may leave half a file: its image is decoded in a child process once more.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    document = json.loads(self._store.read(storage.join(folder, file.path)))
                    reject = Reject(RejectReason(document["reason"]), document["detail"])
                    found[file.path.removesuffix(".json")] = reject
        return found

    def _mark(self, name: str) -> bool:
        url = storage.join(self._url, name)
        while True:
            try:
                is_first = self._store.create(url, uuid.uuid4().hex.encode())
                if is_first and not self._store.is_remote:
                    _local_markers.add(url)
                return not is_first
            except FileNotFoundError:  # its folder went in between, with another marker
                if self._store.is_remote:
                    raise


def _sample_marker(paths: Iterable[str]) -> str:
    content = "\0".join(sorted(paths)).encode("utf-8", "surrogateescape")
    return f"sampling/{hashlib.blake2b(content, digest_size=8).hexdigest()}"


class Decoder:
    """Decodes the images of one shard, or of a part of the sample.

    Args:
        options: what to make of them.
        attempts: the job's markers; None for a decoder that neither reads nor writes any.
        isolated: whether to use child processes.
        with_sums: whether to sum up the pixels of each image.
    """

    def __init__(
        self, options: ImageOptions, attempts: Attempts | None, isolated: bool, with_sums: bool = False
    ) -> None:
        self._options = options
        self._attempts = attempts
        self._with_sums = with_sums
        self._limit_s = LEAST_S + options.max_pixels * SECONDS_A_PIXEL
        self._isolated = _isolated(options, self._limit_s, with_sums) if isolated else None
        self._rejects = attempts.rejects() if attempts else {}

    def convert(self, path: str, data: bytes, md5: bytes) -> EncodedImage:
        """`images.convert`; `path` and `md5` say which image it is. Safe from any thread.

        Raises:
            Reject: as `images.convert`; also if its decoder dies, or died in an earlier attempt.
        """
        if self._rejects and (known := self._rejects.get(self._image(md5))):
            raise Reject(known.reason, known.detail)
        if self._isolated is None:
            return self._convert_here(path, data)
        try:
            return self._isolated.convert(data)
        except Reject as reject:
            if reject.reason in DEATHS and self._attempts:
                self._rejects[self._image(md5)] = reject  # for exact duplicates
                self._attempts.add_reject(self._image(md5), reject)
            raise

    def _convert_here(self, path: str, data: bytes) -> EncodedImage:
        with contextlib.ExitStack() as held:

            def reserve(size: int) -> None:
                _unwatch()  # a thread that waits for memory doesn't hang
                held.enter_context(_MEMORY.held(size))
                _watch(path, self._limit_s)

            _watch(path, self._limit_s)
            try:
                return images.convert(data, self._options, reserve, self._with_sums)
            finally:
                _unwatch()

    def _image(self, md5: bytes) -> str:
        """What identifies an image and what is to be made of it."""
        return hashlib.blake2b(md5 + json.dumps(self._options).encode(), digest_size=16).hexdigest()


# --- the watchdog: nothing but the end of the process stops a thread that hangs inside a C library

_watched: dict[int, tuple[float, float, str]] = {}  # thread → since when, seconds it may take, path


def _watch(path: str, seconds: float) -> None:
    """The process ends if this thread isn't done with an image in time; the next attempt decodes it isolated."""
    _start_watchdog()
    _watched[threading.get_ident()] = (time.monotonic(), seconds, path)


def _unwatch() -> None:
    _watched.pop(threading.get_ident(), None)


@functools.cache
def _start_watchdog() -> None:
    threading.Thread(target=_look, name="watchdog", daemon=True).start()


def _look() -> None:
    while True:
        time.sleep(_LOOK_EVERY_S)
        now = time.monotonic()
        for start, seconds, path in list(_watched.values()):
            if now - start > seconds:
                line = f"error: {path!r} is still being decoded after {now - start:.0f} s: exiting"
                sys.stderr.write(f"\n{line}; the same command resumes, and decodes it in a child process\n")
                sys.stderr.flush()
                os._exit(1)
