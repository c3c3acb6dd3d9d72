"""Blocks of records → decoded images, labels and features, in threads, some batches ahead of who takes them.

Pillow releases the interpreter while it decodes: two threads on two cores give 1.95 times the images.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from beam_pipeline.errors import ImageShardsError, UsageError
from reader.damage import Block
from reader.features import Feature, read_features
from reader.info import DatasetInfo
from reader.picking import pick
from reader.pillow import RandomResizedCrop, decode, resize, to_array
from reader.sizes import check_resize_mode
from reader.stream import EvalStream, RecordStream

Transform = Callable[[Image.Image, int], Any]

# Batches being decoded while one is trained on.
_BATCHES_AHEAD = 2


class Sample(NamedTuple):
    """One record of a batch.

    Attributes:
        image: uint8 [height, width, channels], or what the transform returns.
        label: class id.
        features: as `read_features` returns them.
    """

    image: Any
    label: int
    features: tuple[Any, ...]


class BatchDecoder:
    """Decodes, resizes and transforms the images of a dataset's records; holds no thread, so it pickles.

    Args:
        info: of the dataset.
        image_size: side or (height, width) in pixels; None for the stored size.
        resize_mode: `crop`, `stretch` or `pad`.
        transform: `f(image, seed)` after resizing; or a `RandomResizedCrop`, in place of it.
        features: what is wanted beside image and label.

    Raises:
        UsageError: an argument has no such value.
    """

    def __init__(
        self,
        info: DatasetInfo,
        image_size: int | tuple[int, int] | None,
        resize_mode: str,
        transform: Transform | RandomResizedCrop | None,
        features: Mapping[str, Feature],
    ) -> None:
        check_resize_mode(resize_mode)
        if transform is not None and not callable(transform):
            raise UsageError(f"transform={transform!r}: a function f(image, seed), such as reader.pillow.flip")
        if isinstance(transform, RandomResizedCrop) and image_size is None:
            raise UsageError("random_resized_crop resizes its crops: give image_size")
        self._keys = info.image_key.encode(), info.class_key.encode()
        self._channels = info.image.channels
        self._classes = info.num_classes
        self._size = (image_size, image_size) if isinstance(image_size, int) else image_size
        self._resize_mode = resize_mode
        self._transform = transform
        self._features = features

    def batches(self, stream: RecordStream | EvalStream, sizes: Sequence[int], threads: int) -> Iterator[list[Sample]]:
        """The next records of a stream, in order.

        Args:
            sizes: records of each batch.

        Yields:
            As many samples, but for those that are skipped and not replaced (weight 0).

        Raises:
            CorruptRecordError: a record is damaged or its content is wrong, unless the stream skips damage.
        """
        executor = ThreadPoolExecutor(threads, "reader-decode")
        pending: deque[tuple[Block, list[Future[list[Sample]]]]] = deque()
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

    def _submit(self, executor: ThreadPoolExecutor, block: Block, threads: int) -> list[Future[list[Sample]]]:
        """Begin to decode a block, in a part for each thread."""
        bounds = [len(block.records) * i // threads for i in range(threads + 1)]
        return [executor.submit(self._decode, block, begin, end) for begin, end in pairwise(bounds) if begin < end]

    def _finish(
        self, stream: RecordStream | EvalStream, block: Block, parts: list[Future[list[Sample]]]
    ) -> list[Sample]:
        try:
            return [sample for part in parts for sample in part.result()]
        except _WrongContent:
            mended = stream.mender.mend(stream.mender.check(block, self._fault), self._fault)
            return self._decode(mended, 0, len(mended.records))

    def _decode(self, block: Block, begin: int, end: int) -> list[Sample]:
        """Records [begin, end) of a block, but for places that hold none (weight 0)."""
        seeds = np.ascontiguousarray(block.seeds).view(np.int64)[:, 0].tolist()
        samples = []
        for place in range(begin, end):
            if block.weights[place]:
                image, label, features = self._decode_record(block.records[place])
                changed = self._transformed(image, seeds[place])
                pixels = to_array(changed) if isinstance(changed, Image.Image) else changed
                samples.append(Sample(pixels, label, features))
        return samples

    def _transformed(self, image: Image.Image, seed: int) -> Any:
        """The image at the size that is wanted, and changed by its seed."""
        if isinstance(self._transform, RandomResizedCrop):
            assert self._size is not None
            return self._transform(image, seed, self._size)
        if self._size is not None:
            image = resize(image, *self._size, self._resize_mode)
        return image if self._transform is None else self._transform(image, seed)

    def _decode_record(self, record: bytes) -> Sample:
        """A record at its stored size. Raises _WrongContent, with what `train_dataset` would say."""
        try:
            encoded, label = pick(record, *self._keys)
            features = read_features(record, self._features)
        except (ImageShardsError, ValueError) as error:
            raise _WrongContent(f"it isn't an Example with the dataset's features ({error})") from None
        try:
            image = decode(encoded, self._channels)
        except MemoryError:
            raise  # no fault of the record
        except Exception as error:  # Pillow raises a dozen types for broken images
            raise _WrongContent(f"the image doesn't decode ({type(error).__name__})") from None
        if not 0 <= label < self._classes:
            raise _WrongContent(f"class {label}: there are {self._classes}")
        return Sample(image, label, features)

    def _fault(self, record: bytes) -> str | None:
        """What is wrong with a record's content, None if nothing is."""
        try:
            self._decode_record(record)
        except _WrongContent as error:
            return str(error)
        return None


class _WrongContent(Exception):
    """A record's CRCs are right and its content isn't."""
