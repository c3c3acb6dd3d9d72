"""Bytes of listed images: one request each, held against the listing."""

from __future__ import annotations

import google_crc32c

from beam_pipeline import images, storage
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.options import Config
from beam_pipeline.schema import RejectReason
from beam_pipeline.sharding import ImageRef

_UNCONFIRMED = "unconfirmed-"
# Of an etag: an MD5 that a manifest gives, and that the image didn't have when it was looked at.
UNCONFIRMED_MD5 = f"{_UNCONFIRMED}md5:"


def fetch(store: storage.Storage, url: str, ref: ImageRef, options: images.ImageOptions) -> bytes | Reject:
    """The bytes of one listed image in one request, or why there are none."""
    try:
        images.check_size(ref.source_bytes, options)
        return store.read(url)
    except (FileNotFoundError, IsADirectoryError):
        return Reject(RejectReason.VANISHED, "not found")
    except Reject as reject:
        return reject


def fail_if_strict(config: Config, ref: ImageRef, reject: Reject) -> None:
    """With `--strict`, an image that isn't as it was listed ends the job.

    Raises:
        ImageShardsError: then.
    """
    if config.strict and reject.reason in (RejectReason.VANISHED, RejectReason.CHANGED):
        raise ImageShardsError(
            f"--strict: {ref.path!r} is not as it was listed ({reject.reason}: {reject.detail}); "
            "run the same command again, which lists anew"
        )


def check_unchanged(ref: ImageRef, md5: bytes, data: bytes) -> None:
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
