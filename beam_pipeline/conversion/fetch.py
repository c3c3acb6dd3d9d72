"""From references to converted images: fetched in one request each, compared with the listing, decoded and encoded.

Sample, shards, duplicates and repair all take their images from `convert_all`. The threads are the process's: all
shards that it writes at the same time share them, so a Dataflow worker with 12 bundle threads keeps the same number of
requests, decoders and payload bytes as a laptop with one.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain, repeat
from typing import Generic, NamedTuple, TypeVar

import google_crc32c

from beam_pipeline import images, storage
from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.images import EncodedImage
from beam_pipeline.images.memory import MemoryBudget
from beam_pipeline.inputs.references import ImageRef, image_url
from beam_pipeline.schema import RejectReason, example
from beam_pipeline.schema.manifest import Column

_UNCONFIRMED = "unconfirmed-"
# Of an etag: an MD5 that a manifest gives, and that the image didn't have when it was looked at.
UNCONFIRMED_MD5 = f"{_UNCONFIRMED}md5:"
# Source bytes in flight in one process; with 32 requests it is 8 MiB each, above which nothing is gained.
_PAYLOAD_BYTES = 256 << 20
# 4 gives a 2.1 % shorter job than 1, 16 one of 2.9 % (benchmarks/write.py); a batch of large photos is one photo.
_BATCH_ITEMS = 8
_BATCH_BYTES = 4 << 20

Item = TypeVar("Item")
Payload = TypeVar("Payload")
Result = TypeVar("Result")


class Stored(NamedTuple):
    """What a base version has of an image, found by its path.

    Attributes:
        md5: of the source that was converted then.
        image: as it is stored; None if it can't be used.
        is_unchanged: by the MD5 of today's listing, so the source needn't be read.
    """

    md5: bytes
    image: EncodedImage | None
    is_unchanged: bool


class Converted(NamedTuple, Generic[Result]):
    """What became of one image.

    Attributes:
        ref: the image.
        result: what was made of it, or why it gets no record.
        md5: of the bytes that were read; b"" if none were.
        source_bytes: how many were read.
        stored: what the base has of it.
        cpu_s: of the thread that made the result, fetching a remote image not included.
    """

    ref: ImageRef
    result: Result | Reject
    md5: bytes
    source_bytes: int
    stored: Stored | None = None
    cpu_s: float = 0.0


def convert_all(
    config: Config,
    refs: Iterable[ImageRef],
    convert: Callable[..., Result],
    base: Iterable[Stored | None] = (),
) -> Iterator[Converted[Result]]:
    """Fetch, check and convert listed images, a bounded window of them at a time; results come in order.

    Args:
        config: of the job.
        refs: consumed as the window moves.
        convert: from an image, its bytes and their MD5 to a result, in threads; may raise `Reject`. If the base has
            an image of the same MD5, that comes as the fourth argument.
        base: what a base version has of each image; may end early.

    Raises:
        ImageShardsError: with `--strict`, an image is not as it was listed; or storage failed for good.
    """
    options = config.image_options
    is_local = storage.is_local(config.input) and config.layout != "manifest"  # whose rows may be anywhere
    pool = _shared_pool(0 if is_local else config.fetch_concurrency, config.threads)

    def fetch(item: tuple[ImageRef, Stored | None]) -> bytes:
        ref, stored = item
        return b"" if stored and stored.is_unchanged else _fetch(config, options, ref)

    def converted(item: tuple[ImageRef, Stored | None], fetched: Callable[[], bytes]) -> Converted[Result]:
        ref, stored = item
        md5 = (ref.duplicate_of and listed_md5(ref)) or b""
        data = b""
        again = functools.partial(_fetch, config, options, ref)
        try:
            if stored and stored.is_unchanged:
                return Converted(ref, convert(ref, b"", stored.md5, stored.image), stored.md5, 0, stored)
            for read in (fetched, again, again):  # a bit may have flipped on its way
                data = read()
                md5 = hashlib.md5(data, usedforsecurity=False).digest()
                if not (change := _change(ref, md5, data)):
                    break
            else:
                raise Reject(RejectReason.CHANGED, change)
            known = [stored.image] if stored and stored.md5 == md5 and stored.image else []
            return Converted(ref, convert(ref, data, md5, *known), md5, len(data), stored)
        except Reject as reject:
            if config.strict and reject.reason in (RejectReason.VANISHED, RejectReason.CHANGED):
                raise ImageShardsError(
                    f"--strict: {ref.path!r} is not as it was listed ({reject.reason}: {reject.detail}); "
                    "run the same command again, which lists them again"
                ) from None
            # Another one, since the frames of this one's traceback hold the image's bytes.
            return Converted(ref, Reject(reject.reason, reject.detail), md5, len(data), stored)

    def timed(item: tuple[ImageRef, Stored | None], fetched: Callable[[], bytes]) -> Converted[Result]:
        start = time.thread_time()
        return converted(item, fetched)._replace(cpu_s=time.thread_time() - start)

    return pool.map(
        zip(refs, chain(base, repeat(None)), strict=False), fetch, timed, cost=lambda item: item[0].source_bytes
    )


def _fetch(config: Config, options: images.ImageOptions, ref: ImageRef) -> bytes:
    """The bytes of a listed image, or a `Reject` if it needn't, can't or mustn't be read."""
    if ref.duplicate_of:
        raise Reject(RejectReason.DUPLICATE, f"the same bytes as {ref.duplicate_of.decode(errors='surrogateescape')!r}")
    images.check_size(ref.source_bytes, options)
    url = image_url(config, ref.path)
    try:
        return storage.open_storage(url, config.io_deadline).read(url)  # a manifest's row may be in another store
    except (FileNotFoundError, IsADirectoryError):
        raise Reject(RejectReason.VANISHED, "not found") from None


def record_of(
    ref: ImageRef, image: EncodedImage, class_id: int, one_hot_classes: int, columns: Sequence[Column]
) -> bytes:
    """The serialized `tf.train.Example` of a converted image.

    Args:
        ref, image, class_id: which, what was made of it, and its class.
        one_hot_classes: length of `one_hot_class`, 0 for none.
        columns: a manifest's features, in the order of the reference's.
    """
    return example.image_example(
        image=image.data,
        size=(image.height, image.width),
        class_id=class_id,
        label=ref.label,
        path=ref.path,
        one_hot_classes=one_hot_classes,
        extra=dict(zip((column.name for column in columns), ref.features, strict=True)),
    )


def _change(ref: ImageRef, md5: bytes, data: bytes) -> str:
    """How an image differs from what was listed; "" if it doesn't."""
    if len(data) != ref.source_bytes:
        return f"listed with {ref.source_bytes} bytes, read {len(data)}"
    kind, _, listed = ref.etag.removeprefix(_UNCONFIRMED).partition(":")
    if kind == "md5" and listed != md5.hex():
        return f"listed with MD5 {listed}, read {md5.hex()}"
    if kind == "crc32c" and int(listed, 16) != google_crc32c.value(data):
        return f"listed with CRC-32C {listed}, read {google_crc32c.value(data):08x}"
    return ""


def listed_md5(ref: ImageRef) -> bytes | None:
    """The MD5 that a listing, a manifest or an earlier step gives of an image, or None."""
    return bytes.fromhex(ref.etag[4:]) if ref.etag.startswith("md5:") else None


# --- the threads


class Pool:
    """Fetch and decode threads of one process.

    Few threads decode, however many fetch: each that does keeps what its largest image took. With 32 of them 24 photos
    of 12 megapixels took 800 MB where two take 240.

    Args:
        fetch_concurrency: requests in flight; 0 if files are local: handing them over costs more than reading them.
        decode_threads: images being decoded.
    """

    def __init__(self, fetch_concurrency: int, decode_threads: int) -> None:
        self._fetchers = ThreadPoolExecutor(fetch_concurrency, "fetch") if fetch_concurrency else None
        self._decoders = ThreadPoolExecutor(decode_threads, "decode")
        self._most_decoding = 2 * decode_threads  # batches
        self._most_batches = self._most_decoding + -(-fetch_concurrency // _BATCH_ITEMS)
        self._budget = MemoryBudget(_PAYLOAD_BYTES)

    def map(
        self,
        items: Iterable[Item],
        fetch: Callable[[Item], Payload],
        convert: Callable[[Item, Callable[[], Payload]], Result],
        cost: Callable[[Item], int],
    ) -> Iterator[Result]:
        """`convert(item, fetched)` of every item, in order, a bounded window of them at work in batches.

        Args:
            items: consumed as the window moves.
            fetch: blocks on storage.
            convert: computes, releases the GIL for most of its time; `fetched()` returns or raises what `fetch` did.
            cost: payload bytes of an item while it is in the window.

        Raises:
            What `convert` raised first, in order; the rest of the window is abandoned.
        """
        fetching: deque[tuple[list[Item], list[Future[Payload]], int]] = deque()
        decoding: deque[tuple[Future[list[Result]], int]] = deque()

        def advance() -> list[Result]:
            """Hand a batch to the decoders, or wait for one that they have."""
            if fetching and len(decoding) < self._most_decoding:
                batch, futures, size = fetching[0]
                wait(futures)  # here: a slow request holds up those who need it, and no decoder
                fetched = [one.result for one in futures] or [functools.partial(fetch, item) for item in batch]
                decoding.append((self._decoders.submit(lambda: list(map(convert, batch, fetched))), size))
                fetching.popleft()
                return []
            results = decoding[0][0].result()
            self._budget.release(decoding.popleft()[1])
            return results

        try:
            for batch, size in _batches(items, cost):
                while len(fetching) + len(decoding) >= self._most_batches or not self._budget.reserve(
                    size, wait=not (fetching or decoding)
                ):
                    yield from advance()
                futures = [self._fetchers.submit(fetch, item) for item in batch] if self._fetchers else []
                fetching.append((batch, futures, size))
                if not self._fetchers:
                    yield from advance()
            while fetching or decoding:
                yield from advance()
        finally:
            for _, futures, size in fetching:
                self._budget.release(size)
                for request in futures:
                    request.cancel()
            for future, size in decoding:
                self._budget.release(size)
                future.cancel()


def _batches(items: Iterable[Item], cost: Callable[[Item], int]) -> Iterator[tuple[list[Item], int]]:
    """Neighbours that one thread decodes in one go, and their bytes: waking a thread for each image costs 2 % of it."""
    batch: list[Item] = []
    size = 0
    for item in items:
        item_bytes = cost(item)
        if batch and (len(batch) == _BATCH_ITEMS or size + item_bytes > _BATCH_BYTES):
            yield batch, size
            batch, size = [], 0
        batch.append(item)
        size += item_bytes
    if batch:
        yield batch, size


@functools.cache
def _shared_pool(fetch_concurrency: int, decode_threads: int) -> Pool:
    return Pool(fetch_concurrency, decode_threads)
