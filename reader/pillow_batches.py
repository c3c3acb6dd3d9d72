"""Blocks of records → decoded images and labels, in threads, some batches ahead of who takes them.

Pillow releases the interpreter while it decodes: two threads on two cores give 1.95 times the images.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from PIL import Image

from reader.damage import Block
from reader.info import DatasetInfo
from reader.picking import pick
from reader.pillow import check_resize_mode, decode, resize, to_array
from reader.stream import EvalStream, RecordStream

Transform = Callable[[Image.Image, int], Any]
Decoded = tuple[list[Any], list[int]]

# Batches being decoded while one is trained on.
_BATCHES_AHEAD = 2


class BatchDecoder:
    """Decodes, resizes and transforms the images of a dataset's records; holds no thread, so it pickles.

    Args:
        info: of the dataset.
        image_size: side or (height, width) in pixels; None for the stored size.
        resize_mode: `crop`, `stretch` or `pad`.
        transform: `f(image, seed)` after resizing.

    Raises:
        UsageError: no such mode.
    """

    def __init__(
        self,
        info: DatasetInfo,
        image_size: int | tuple[int, int] | None,
        resize_mode: str,
        transform: Transform | None,
    ) -> None:
        check_resize_mode(resize_mode)
        self._keys = info.image_key.encode(), info.class_key.encode()
        self._channels = info.image.channels
        self._size = (image_size, image_size) if isinstance(image_size, int) else image_size
        self._resize_mode = resize_mode
        self._transform = transform

    def batches(self, stream: RecordStream | EvalStream, sizes: Sequence[int], threads: int) -> Iterator[Decoded]:
        """The images and labels of the next records of a stream, in order.

        Args:
            sizes: records of each batch.

        Yields:
            uint8 [height, width, channels] images (or what the transform returns), and as many class ids.

        Raises:
            CorruptRecordError: a record is damaged or its image doesn't decode, unless the stream skips damage.
        """
        executor = ThreadPoolExecutor(threads, "reader-decode")
        pending: deque[tuple[Block, list[Future[Decoded]]]] = deque()
        try:
            for size in sizes:
                block = stream.take(size)
                pending.append((block, self._submit(executor, block, threads)))
                if len(pending) > _BATCHES_AHEAD:
                    yield self._finish(stream, *pending.popleft())
            while pending:
                yield self._finish(stream, *pending.popleft())
        finally:
            executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, executor: ThreadPoolExecutor, block: Block, threads: int) -> list[Future[Decoded]]:
        """Begin to decode a block, in a part for each thread."""
        bounds = [len(block.records) * i // threads for i in range(threads + 1)]
        return [executor.submit(self._decode, block, begin, end) for begin, end in pairwise(bounds) if begin < end]

    def _finish(self, stream: RecordStream | EvalStream, block: Block, parts: list[Future[Decoded]]) -> Decoded:
        try:
            results = [part.result() for part in parts]
        except _Undecodable:
            mended = stream.mender.mend(stream.mender.check(block, self._fault), self._fault)
            results = [self._decode(mended, 0, len(mended.records))]
        return [image for images, _ in results for image in images], [
            label for _, labels in results for label in labels
        ]

    def _decode(self, block: Block, begin: int, end: int) -> Decoded:
        """Records [begin, end) of a block, but for places that hold none (weight 0)."""
        seeds = np.ascontiguousarray(block.seeds).view(np.int64)[:, 0].tolist()
        images, labels = [], []
        for place in range(begin, end):
            if not block.weights[place]:
                continue
            image, label = self._decode_image(block.records[place])
            if self._size is not None:
                image = resize(image, *self._size, self._resize_mode)
            changed = image if self._transform is None else self._transform(image, seeds[place])
            images.append(to_array(changed) if isinstance(changed, Image.Image) else changed)
            labels.append(label)
        return images, labels

    def _decode_image(self, record: bytes) -> tuple[Image.Image, int]:
        try:
            encoded, label = pick(record, *self._keys)
            return decode(encoded, self._channels), label
        except Exception as error:  # Pillow raises a dozen types for broken images
            raise _Undecodable(f"its image doesn't decode: {type(error).__name__}") from None

    def _fault(self, record: bytes) -> str | None:
        """What is wrong with a record's image, None if nothing is."""
        try:
            self._decode_image(record)
        except _Undecodable as error:
            return str(error)
        return None


class _Undecodable(Exception):
    """A record's CRC is right and its image doesn't decode."""
