"""How a worker decodes: here, watched; or in a child process, if an earlier attempt at the same images ended badly."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator

from PIL import Image

from beam_pipeline import images
from beam_pipeline.conversion import isolation, watchdog
from beam_pipeline.conversion.attempts import Inflight
from beam_pipeline.errors import ImageShardsError, Reject, one_line
from beam_pipeline.images import EncodedImage, ImageOptions
from beam_pipeline.images.statistics import ChannelSums, channel_sums

# Large images share 1 GiB, which is what one may take at the default --max_pixels: one that takes more has it alone.
_PART_BYTES = 32 << 20
_PARTS = 32
_free_parts = threading.Semaphore(_PARTS)
_first_in_line = threading.Lock()  # of those who wait: two that have some parts each would wait for each other


@contextlib.contextmanager
def memory_for(count: int) -> Iterator[None]:
    """So many bytes of what the large images of this process share; waits until they are free."""
    parts = min(-(-count // _PART_BYTES), _PARTS)
    with _first_in_line:
        for _ in range(parts):
            _free_parts.acquire()
    try:
        yield
    finally:
        _free_parts.release(parts)


class Decoding:
    """Decodes the images of one shard, or of a part of the sample.

    Args:
        options: what to make of them.
        inflight: the job's notes; None to go by none and leave none.
        is_careful: whether to use a child process.
        plan: the job's hash, or "" while there is none.
    """

    def __init__(self, options: ImageOptions, inflight: Inflight | None, is_careful: bool, plan: str) -> None:
        self._options = options
        self._inflight = inflight
        self._isolated = isolation.IsolatedDecoder(options) if is_careful else None
        self._rejected = inflight.rejected(plan) if inflight else {}
        self._limit_s = watchdog.limit_s(options)

    def convert(self, path: str, data: bytes, md5: bytes) -> EncodedImage:
        """`images.convert`; `path` and `md5` tell which image it is.

        Raises:
            Reject: as `images.convert`; also if its decoder dies, or died of it in an earlier attempt.
            ImageShardsError: this program fails on it.
        """
        return self._convert(path, data, md5)

    def measure(self, path: str, data: bytes, md5: bytes) -> tuple[EncodedImage, ChannelSums]:
        """As `convert`, and the sums of the image's pixels."""
        sums: list[ChannelSums] = []
        return self._convert(path, data, md5, sums), sums[0]

    def _convert(self, path: str, data: bytes, md5: bytes, sums: list[ChannelSums] | None = None) -> EncodedImage:
        if self._rejected and (noted := self._rejected.get(self._content(md5))):
            raise Reject(*noted)
        try:
            if self._isolated is None:
                return self._here(path, data, sums)
            image, found = self._isolated.convert(data)
        except isolation.Died as died:
            if self._inflight:
                self._inflight.reject(self._content(md5), died.reason, died.detail)
            raise
        except (Reject, ImageShardsError):
            raise
        except Exception as error:  # no image's fault: it ends the job with a line that names the image
            text = str(error) if isinstance(error, isolation.Failed) else f"{type(error).__name__}: {one_line(error)}"
            raise ImageShardsError(f"{path!r} makes this program fail, please report it: {text}") from error
        if sums is not None:
            sums.append(found)
        return image

    def _here(self, path: str, data: bytes, sums: list[ChannelSums] | None) -> EncodedImage:
        with contextlib.ExitStack() as held:

            def claim(count: int) -> None:
                watchdog.end()  # who waits doesn't hang
                try:
                    held.enter_context(memory_for(count))
                finally:
                    watchdog.begin(path, self._limit_s)

            def look(pixels: Image.Image) -> None:
                assert sums is not None
                sums.append(channel_sums(pixels))

            watchdog.begin(path, self._limit_s)
            try:
                return images.convert(data, self._options, None if sums is None else look, claim)
            finally:
                watchdog.end()

    def _content(self, md5: bytes) -> str:
        """What tells an image, and what is to be made of it."""
        return hashlib.blake2b(md5 + json.dumps(self._options).encode(), digest_size=16).hexdigest()
