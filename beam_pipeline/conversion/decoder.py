"""How a worker decodes: here, under a watchdog; or isolated in a child process, if an earlier attempt died of it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import threading
import time

from beam_pipeline import images
from beam_pipeline.conversion.attempts import Attempts
from beam_pipeline.conversion.isolation import DEATHS, IsolatedDecoder, program_error
from beam_pipeline.conversion.pool import MemoryBudget
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.images import EncodedImage, ImageOptions

# Pillow decodes and resizes a permitted pixel in about 0.02 µs; 50 times that, for a machine that is busy with more.
LEAST_S = 60.0
SECONDS_A_PIXEL = 1e-6
_LOOK_EVERY_S = 1.0
# Large images share what one may take at the default --max_pixels; one that takes more has it alone.
_MEMORY = MemoryBudget(1 << 30)


class Decoder:
    """Decodes the images of one shard, or of a part of the sample.

    Args:
        options: what to make of them.
        attempts: the job's markers; None for a decoder that neither reads nor writes any.
        isolated: whether to use a child process.
        with_sums: whether to sum up the pixels of each image.
    """

    def __init__(
        self, options: ImageOptions, attempts: Attempts | None, isolated: bool, with_sums: bool = False
    ) -> None:
        self._options = options
        self._attempts = attempts
        self._with_sums = with_sums
        self._limit_s = limit_s(options)
        self._isolated = IsolatedDecoder(options, self._limit_s) if isolated else None
        self._rejects = attempts.rejects("sample" if with_sums else "shards") if attempts else {}

    def convert(self, path: str, data: bytes, md5: bytes) -> EncodedImage:
        """`images.convert`; `path` and `md5` say which image it is. Safe from any thread.

        Raises:
            Reject: as `images.convert`; also if its decoder dies, or died in an earlier attempt.
            ImageShardsError: this program fails on it.
        """
        if self._rejects and (known := self._rejects.get(self._image(md5))):
            raise Reject(known.reason, known.detail)
        if self._isolated is None:
            return self._convert_here(path, data)
        try:
            return self._isolated.convert(path, data)
        except Reject as reject:
            if reject.reason in DEATHS and self._attempts:
                self._rejects[self._image(md5)] = reject  # for exact duplicates in other shards of this process, too
                self._attempts.add_reject(self._image(md5), reject)
            raise

    def _convert_here(self, path: str, data: bytes) -> EncodedImage:
        with contextlib.ExitStack() as held:

            def reserve(size: int) -> None:
                _unwatch()  # a thread that waits for memory doesn't hang
                try:
                    _MEMORY.reserve(size)
                    held.callback(_MEMORY.release, size)
                finally:
                    _watch(path, self._limit_s)

            _watch(path, self._limit_s)
            try:
                return images.convert(data, self._options, reserve, self._with_sums)
            except (Reject, ImageShardsError):
                raise
            except Exception as error:
                raise ImageShardsError(program_error(path, error)) from error
            finally:
                _unwatch()

    def _image(self, md5: bytes) -> str:
        """What identifies an image and what is to be made of it."""
        return hashlib.blake2b(md5 + json.dumps(self._options).encode(), digest_size=16).hexdigest()


# --- the watchdog: nothing but the end of the process stops a thread that hangs inside a C library

_watched: dict[int, tuple[float, float, str]] = {}  # thread → since when, seconds it may take, path


def limit_s(options: ImageOptions) -> float:
    """Seconds after which the decoder of an image counts as hanging: 239 with the default `--max_pixels`."""
    return LEAST_S + options.max_pixels * SECONDS_A_PIXEL


def _watch(path: str, seconds: float) -> None:
    """The process ends if this thread isn't done with an image in time; the next attempt decodes it isolated."""
    _start_watchdog()
    _watched[threading.get_ident()] = (time.monotonic(), seconds, path)


def _unwatch() -> None:
    del _watched[threading.get_ident()]


@functools.cache
def _start_watchdog() -> None:
    threading.Thread(target=_look, name="watchdog", daemon=True).start()


def _look() -> None:
    while True:
        time.sleep(_LOOK_EVERY_S)
        now = time.monotonic()
        for start, seconds, path in list(_watched.values()):
            if now - start > seconds:
                line = f"error: {path!r} has been decoded for {now - start:.0f} s and more: this process ends"
                sys.stderr.write(f"\n{line}; the same command resumes, and decodes it in one of its own\n")
                sys.stderr.flush()
                os._exit(1)
