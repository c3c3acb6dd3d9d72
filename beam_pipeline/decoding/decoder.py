"""How a worker decodes: here, watched; or in subprocesses, where an earlier attempt at the same images ended badly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from PIL import Image

from beam_pipeline import images
from beam_pipeline.decoding import careful, watchdog
from beam_pipeline.decoding.inflight import Inflight
from beam_pipeline.decoding.pixel_sums import ChannelSums, channel_sums
from beam_pipeline.decoding.room import ROOM
from beam_pipeline.errors import ImageShardsError, Reject, one_line
from beam_pipeline.images import EncodedImage, ImageOptions


class Decoding:
    """Decodes the images of one shard, or of a part of the sample.

    Args:
        options: what to make of them.
        inflight: the job's notes; None to go by none and leave none.
        is_careful: whether to use subprocesses.
        plan: the job's hash, or "" while there is none.
    """

    def __init__(self, options: ImageOptions, inflight: Inflight | None, is_careful: bool, plan: str) -> None:
        self._options = options
        self._inflight = inflight
        self._is_careful = is_careful
        self._rejected = inflight.rejected(plan) if inflight else {}
        self._limit_s = watchdog.limit_s(options)

    def convert(self, path: str, data: bytes, md5: bytes) -> EncodedImage:
        """`images.convert`; `path` and `md5` tell which image it is.

        Raises:
            Reject: as `images.convert`; also where its decoder dies.
            ImageShardsError: this program fails on it.
        """
        self._refuse_known(md5)
        return self._elsewhere(path, data, md5)[0] if self._is_careful else self._here(path, data)

    def measure(self, path: str, data: bytes, md5: bytes) -> tuple[EncodedImage, ChannelSums]:
        """As `convert`, and the sums of the image's pixels."""
        self._refuse_known(md5)
        if self._is_careful:
            return self._elsewhere(path, data, md5)
        sums: list[ChannelSums] = []
        image = self._here(path, data, look=lambda pixels: sums.append(channel_sums(pixels)))
        return image, sums[0]

    def _here(self, path: str, data: bytes, look: Callable[[Image.Image], None] | None = None) -> EncodedImage:
        claimed = 0

        def claim(count: int) -> None:
            nonlocal claimed
            with watchdog.WATCHDOG.paused():
                ROOM.take(count)
            claimed = count

        try:
            with watchdog.WATCHDOG.watching(path, self._limit_s):
                return images.convert(data, self._options, look, claim)
        except Reject:
            raise
        except Exception as error:
            raise _failure(path, f"{type(error).__name__}: {one_line(error)}") from error
        finally:
            if claimed:
                ROOM.give(claimed)

    def _elsewhere(self, path: str, data: bytes, md5: bytes) -> tuple[EncodedImage, ChannelSums]:
        try:
            return careful.shared_decoders().convert(data, self._options)
        except careful.Died as died:
            if self._inflight:
                self._inflight.reject(self._content(md5), path, died)
            raise
        except careful.Failed as failed:
            raise _failure(path, str(failed)) from failed

    def _refuse_known(self, md5: bytes) -> None:
        """Raises Reject for an image that an earlier attempt found to end its decoder."""
        if self._rejected and (noted := self._rejected.get(self._content(md5))):
            raise noted.reject

    def _content(self, md5: bytes) -> str:
        """What tells an image, and what is to be made of it."""
        return hashlib.blake2b(md5 + json.dumps(self._options).encode(), digest_size=16).hexdigest()


def _failure(path: str, what: str) -> ImageShardsError:
    """An error of this program is no image's fault: it ends the job with a line that names the image."""
    return ImageShardsError(f"{path!r} makes this program fail, please report it: {what}")
