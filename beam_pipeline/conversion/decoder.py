"""How a worker decodes: here, under a watchdog, or in child processes if an earlier attempt crashed or hung."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from beam_pipeline import images
from beam_pipeline.config import Config
from beam_pipeline.conversion.attempts import Attempts
from beam_pipeline.conversion.isolation import DEATHS, IsolatedDecoder
from beam_pipeline.errors import Reject, StorageError
from beam_pipeline.images import EncodedImage, ImageOptions
from beam_pipeline.images.memory import SHARED
from beam_pipeline.text import print_line

# With the default --max_pixels a decoder is taken to hang after 239 s. Pillow decodes and resizes a pixel in about
# 0.02 µs; the limit is 50 times that, for a busy machine.
LEAST_S = 60.0
SECONDS_PER_PIXEL = 1e-6
_LOOK_EVERY_S = 1.0


@functools.cache  # parts of the sample follow each other, and starting a process takes as long as 100 images
def _isolated(options: ImageOptions, limit_s: float, with_sums: bool) -> IsolatedDecoder:
    return IsolatedDecoder(options, limit_s, with_sums)


class Decoder:
    """Decodes the images of one shard, or of a part of the sample.

    Args:
        options: how to convert them.
        attempts: the job's markers; None for a decoder that neither reads nor writes any.
        isolated: whether to use child processes.
        with_sums: whether to compute the channel sums of each image.
    """

    def __init__(
        self, options: ImageOptions, attempts: Attempts | None, isolated: bool, with_sums: bool = False
    ) -> None:
        self._options = options
        self._attempts = attempts
        self._with_sums = with_sums
        self._limit_s = LEAST_S + options.max_pixels * SECONDS_PER_PIXEL
        self._isolated = _isolated(options, self._limit_s, with_sums) if isolated else None
        self._rejects = attempts.rejects() if attempts else {}

    def convert(self, path: str, data: bytes, md5: bytes) -> EncodedImage:
        """`images.convert` of the image at `path` with this MD5. Thread-safe.

        Raises:
            Reject: as `images.convert`; also if its decoder crashes or hangs, or did in an earlier attempt.
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
                _unwatch()  # waiting for memory isn't hanging
                held.enter_context(SHARED.held(size))
                _watch(path, self._limit_s)

            _watch(path, self._limit_s)
            try:
                return images.convert(data, self._options, reserve, self._with_sums)
            finally:
                _unwatch()

    def _image(self, md5: bytes) -> str:
        """A hash of an image and its options."""
        return hashlib.blake2b(md5 + json.dumps(self._options).encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def decoding(config: Config, marker: str, with_sums: bool = False) -> Iterator[Callable[[], Decoder]]:
    """What gives the decoder of some images, which is made while the first of them are fetched.

    An exception removes the marker, for the process lives: no decoder is to blame. What ends well is the caller's.

    Args:
        config: of the job.
        marker: of `attempts`; "" if nothing tells what an earlier attempt died of, which decodes in child processes.
        with_sums: whether to compute the channel sums of each image.
    """
    attempts = Attempts(config) if marker else None

    def begin() -> tuple[bool, Decoder]:
        is_first = attempts is not None and attempts.begin(marker)
        return is_first, Decoder(config.image_options, attempts, not is_first, with_sums)

    with ThreadPoolExecutor(1) as thread:
        begun = thread.submit(begin)
        try:
            yield lambda: begun.result()[1]
        except StorageError:  # deleting the marker would fail as well, after as many attempts
            raise
        except Exception:
            if attempts and begun.result()[0]:
                attempts.end(marker)
            raise


# --- the watchdog: nothing but the end of the process stops a thread that hangs inside a C library

_watched: dict[int, tuple[float, float, str]] = {}  # thread → start, limit in seconds, path


def _watch(path: str, limit_s: float) -> None:
    """End the process if this thread takes longer for an image; the next attempt decodes it in a child process."""
    _start_watchdog()
    _watched[threading.get_ident()] = (time.monotonic(), limit_s, path)


def _unwatch() -> None:
    _watched.pop(threading.get_ident(), None)


@functools.cache
def _start_watchdog() -> None:
    threading.Thread(target=_watchdog_loop, name="watchdog", daemon=True).start()


def _watchdog_loop() -> None:
    while True:
        time.sleep(_LOOK_EVERY_S)
        now = time.monotonic()
        for start, limit_s, path in list(_watched.values()):
            if now - start > limit_s:
                line = f"error: {path!r} is still being decoded after {now - start:.0f} s: exiting"
                print_line(f"\n{line}; the same command resumes, and decodes it in a child process", sys.stderr)
                os._exit(1)
