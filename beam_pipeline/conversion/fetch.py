"""From references to converted images: fetched in one request each, compared with the listing, decoded and encoded.

Sample, shards, duplicates and repair all take their images from `convert_all`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import google_crc32c

from beam_pipeline import images, storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.pool import shared_pool
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.images import EncodedImage
from beam_pipeline.inputs.references import ImageRef, image_url
from beam_pipeline.schema import RejectReason, example

_UNCONFIRMED = "unconfirmed-"
# Of an etag: an MD5 that a manifest gives, and that the image didn't have when it was looked at.
UNCONFIRMED_MD5 = f"{_UNCONFIRMED}md5:"

Result = TypeVar("Result")


class Converted(NamedTuple, Generic[Result]):
    """What became of one image.

    Attributes:
        ref: the image.
        result: what was made of it, or why it gets no record.
        md5: of the bytes that were read; b"" if none were.
        source_bytes: how many were read.
    """

    ref: ImageRef
    result: Result | Reject
    md5: bytes
    source_bytes: int


def convert_all(
    config: Config, refs: Iterable[ImageRef], convert: Callable[[ImageRef, bytes, bytes], Result]
) -> Iterator[Converted[Result]]:
    """Fetch, check and convert listed images, a bounded window of them at a time; results come in order.

    Args:
        config: of the job.
        refs: consumed as the window moves.
        convert: from an image, its bytes and their MD5 to a result, in threads; may raise `Reject`.

    Raises:
        ImageShardsError: with `--strict`, an image is not as it was listed; or storage failed for good.
    """
    options = config.image_options
    is_local = storage.is_local(config.input) and config.layout != "manifest"  # whose rows may be anywhere
    pool = shared_pool(0 if is_local else config.fetch_concurrency, config.threads)

    def converted(ref: ImageRef, fetched: Callable[[], bytes]) -> Converted[Result]:
        data, md5 = b"", (ref.duplicate_of and listed_md5(ref)) or b""
        try:
            data = fetched()
            md5 = hashlib.md5(data, usedforsecurity=False).digest()
            _check_unchanged(ref, md5, data)
            return Converted(ref, convert(ref, data, md5), md5, len(data))
        except Reject as reject:
            if config.strict and reject.reason in (RejectReason.VANISHED, RejectReason.CHANGED):
                raise ImageShardsError(
                    f"--strict: {ref.path!r} is not as it was listed ({reject.reason}: {reject.detail}); "
                    "run the same command again, which lists them again"
                ) from None
            # Another one, since the frames of this one's traceback hold the image's bytes.
            return Converted(ref, Reject(reject.reason, reject.detail), md5, len(data))

    return pool.map(refs, lambda ref: _fetch(config, options, ref), converted, cost=lambda ref: ref.source_bytes)


def _fetch(config: Config, options: images.ImageOptions, ref: ImageRef) -> bytes:
    """The bytes of a listed image.

    Raises:
        Reject: it needn't, can't or mustn't be read.
    """
    if ref.duplicate_of:
        raise Reject(RejectReason.DUPLICATE, f"the same bytes as {ref.duplicate_of.decode(errors='surrogateescape')!r}")
    images.check_size(ref.source_bytes, options)
    url = image_url(config, ref.path)
    try:
        return storage.open_storage(url, config.io_deadline).read(url)  # a manifest's row may be in another store
    except (FileNotFoundError, IsADirectoryError):
        raise Reject(RejectReason.VANISHED, "not found") from None


def record_of(
    ref: ImageRef, image: EncodedImage, class_id: int, one_hot_classes: int, columns: Sequence[Mapping[str, Any]]
) -> bytes:
    """The serialized `tf.train.Example` of a converted image.

    Args:
        ref, image: which, and what was made of it.
        class_id: its class.
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
        extra=dict(zip((column["name"] for column in columns), ref.features, strict=True)),
    )


def _check_unchanged(ref: ImageRef, md5: bytes, data: bytes) -> None:
    """Compare what was read with what was listed.

    Raises:
        Reject: `changed`.
    """
    if len(data) != ref.source_bytes:
        raise Reject(RejectReason.CHANGED, f"listed with {ref.source_bytes} bytes, read {len(data)}")
    kind, _, listed = ref.etag.removeprefix(_UNCONFIRMED).partition(":")
    if kind == "md5" and listed != md5.hex():
        raise Reject(RejectReason.CHANGED, f"listed with MD5 {listed}, read {md5.hex()}")
    if kind == "crc32c" and int(listed, 16) != google_crc32c.value(data):
        raise Reject(RejectReason.CHANGED, f"listed with CRC-32C {listed}, read {google_crc32c.value(data):08x}")


def listed_md5(ref: ImageRef) -> bytes | None:
    """The MD5 that a listing, a manifest or an earlier step gives of an image, or None."""
    return bytes.fromhex(ref.etag[4:]) if ref.etag.startswith("md5:") else None
