"""From references to converted images: fetched in one request each, compared with the listing, decoded and encoded.

Sample, shards and repair all take their images from `convert_all`.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Generic, NamedTuple

import google_crc32c

from beam_pipeline import images, storage
from beam_pipeline.archives.zip import read_part
from beam_pipeline.config import Config
from beam_pipeline.conversion.pool import Result, shared_pool
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.images import EncodedImage
from beam_pipeline.inputs.references import ImageRef, image_url
from beam_pipeline.schema import RejectReason, example
from beam_pipeline.schema.manifest import Column


class Stored(NamedTuple):
    """An image of the base version, found by its path.

    Attributes:
        md5: of the source file that it was made from.
        image: as it is stored; None if it can't be used.
        is_unchanged: whether the listing gives the same MD5, so that the source needn't be read.
    """

    md5: bytes
    image: EncodedImage | None
    is_unchanged: bool


class Converted(NamedTuple, Generic[Result]):
    """The result for one image.

    Attributes:
        ref: the image.
        result: what `convert` returned, or why the image gets no record.
        md5: of the bytes that were read; b"" if none were.
        source_bytes: how many were read.
        stored: the image in the base version.
        cpu_s: CPU seconds of the decode thread; fetching a remote image isn't included.
    """

    ref: ImageRef
    result: Result | Reject
    md5: bytes
    source_bytes: int
    stored: Stored | None = None
    cpu_s: float = 0.0


def convert_all(
    config: Config, refs: Iterable[ImageRef], convert: Callable[..., Result], base: Iterable[Stored | None] = ()
) -> Iterator[Converted[Result]]:
    """Fetch, check and convert listed images, a bounded window of them at a time; results come in order.

    Args:
        config: of the job.
        refs: consumed as the window moves.
        convert: called in threads with a reference, the file's bytes and their MD5, and with the stored image if the
            base version has one of the same MD5; may raise `Reject`.
        base: for each reference the image of the base version; may end early.

    Raises:
        ImageShardsError: with `--strict`, an image is not as it was listed; or storage failed for good.
    """
    options = config.image_options
    is_local = storage.is_local(config.input) and config.layout != "manifest"  # whose rows may be anywhere
    pool = shared_pool(0 if is_local else config.fetch_concurrency, config.threads)

    def fetch(item: tuple[ImageRef, Stored | None]) -> bytes:
        ref, stored = item
        return b"" if stored and stored.is_unchanged else _fetch(config, options, ref)

    def timed(item: tuple[ImageRef, Stored | None], fetched: Callable[[], bytes]) -> Converted[Result]:
        start = time.thread_time()
        again = functools.partial(_fetch, config, options, item[0])
        reads = (fetched, again, again)  # a bit may have flipped in transit
        return _converted(config, *item, reads, convert)._replace(cpu_s=time.thread_time() - start)

    items = zip(refs, chain(base, repeat(None)), strict=False)
    return pool.map(items, fetch, timed, cost=lambda item: item[0].source_bytes)


def _converted(
    config: Config,
    ref: ImageRef,
    stored: Stored | None,
    reads: Iterable[Callable[[], bytes]],
    convert: Callable[..., Result],
) -> Converted[Result]:
    """Convert one image; each of `reads` gives its bytes, the next if they aren't those that were listed."""
    md5 = data = b""
    try:
        if stored and stored.is_unchanged:
            return Converted(ref, convert(ref, b"", stored.md5, stored.image), stored.md5, 0, stored)
        for read in reads:
            data = read()
            md5 = hashlib.md5(data, usedforsecurity=False).digest()
            if not (change := _change(ref, md5, data)):
                break
        else:
            raise Reject(RejectReason.CHANGED, change)
        reusable = [stored.image] if stored and stored.md5 == md5 and stored.image else []
        return Converted(ref, convert(ref, data, md5, *reusable), md5, len(data), stored)
    except Reject as reject:
        if config.strict and reject.reason in (RejectReason.VANISHED, RejectReason.CHANGED):
            what = f"--strict: {ref.path!r} is not as it was listed ({reject.reason}: {reject.detail})"
            raise ImageShardsError(f"{what}; run the same command again, which lists them again") from None
        # Re-create it: the traceback of the caught one keeps the image's bytes alive.
        return Converted(ref, Reject(reject.reason, reject.detail), md5, len(data), stored)


def _fetch(config: Config, options: images.ImageOptions, ref: ImageRef) -> bytes:
    """The bytes of a listed image.

    Raises:
        Reject: it is too large or missing.
    """
    images.check_size(ref.source_bytes, options)
    url = ref.part.url if ref.part else image_url(config, ref.path)
    try:
        if ref.part:
            images.check_size(ref.part.stop - ref.part.start, options)
            return read_part(storage.open_storage(url, config.io_deadline), ref.part, ref.source_bytes)
        return storage.open_storage(url, config.io_deadline).read(url)  # a manifest's row may be in another store
    except (FileNotFoundError, IsADirectoryError):
        raise Reject(RejectReason.VANISHED, "not found") from None


def record_of(
    ref: ImageRef, image: EncodedImage, class_id: int, one_hot_classes: int, columns: Sequence[Column]
) -> bytes:
    """The serialized `tf.train.Example` of a converted image.

    Args:
        ref, image, class_id: its reference, the encoded image, the number of its class.
        one_hot_classes: length of `one_hot_class`; 0 for none.
        columns: of the manifest, in the order of the reference's features.
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
    if ref.md5 and ref.md5 != md5:
        return f"listed with MD5 {ref.md5.hex()}, read {md5.hex()}"
    if isinstance(ref.etag, int) and ref.etag != google_crc32c.value(data):
        return f"listed with CRC-32C {ref.etag:08x}, read {google_crc32c.value(data):08x}"
    return ""
