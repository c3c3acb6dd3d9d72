"""An image as the job carries it: a reference, its keys, and sums that tell whether images are the same."""

from __future__ import annotations

import hashlib
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.schema import relative_path_bytes

KEY_BITS = 64
# Up to here every key is a bin of its own: cuts fall exactly between images.
LARGEST_SAMPLE = 512
_SPLIT_SALT = b"imageshards split"  # part of the format: changing it moves images between splits
_SUM_MODULUS = 1 << 128


class ImageRef(NamedTuple):
    """One listed image: what is shuffled instead of its pixels.

    Attributes:
        path: relative to the input, `/` separators, as listed; the full URL for a manifest's row outside the input.
        source_bytes: size of the source file.
        etag: `ListedFile.etag`, or "".
        label: class name.
        split: `train`, `validation`, …
        order_key: 64-bit place in the global order; ties go by `path`.
        features: serialized `tf.train.Feature`s of a manifest's columns, in the order of their names.
        duplicate_of: path of the image with the same bytes that gets the record, with `--duplicates drop`; else b"".
    """

    path: str
    source_bytes: int
    etag: str
    label: str
    split: str
    order_key: int
    features: tuple[bytes, ...] = ()
    duplicate_of: bytes = b""


def hash_text(path: str) -> bytes:
    """What of a relative path is hashed: UTF-8 of its NFC form, so that both normal forms of a name agree."""
    return relative_path_bytes(path if path.isascii() else unicodedata.normalize("NFC", path))


def order_key(path: str, seed: int) -> int:
    """64-bit key of an image's place in the order: BLAKE2b of its path keyed by the seed."""
    return int.from_bytes(hashlib.blake2b(hash_text(path), digest_size=8, key=str(seed).encode()).digest(), "big")


class Splits:
    """Deals images to splits by a hash of their path that no seed, version or other image has part in.

    Args:
        fractions: split name → share; they sum to 1. Shares are dealt in this order.
    """

    def __init__(self, fractions: Mapping[str, Fraction]) -> None:
        self._names = tuple(fractions)
        total = Fraction(0)
        self._limits = []
        for fraction in fractions.values():
            total += fraction
            self._limits.append(int(total * (1 << KEY_BITS)))

    def of(self, group: str) -> str:
        """The split of all images with this path, or with this `--split_by` group."""
        digest = hashlib.blake2b(hash_text(group), digest_size=8, key=_SPLIT_SALT).digest()
        return self._names[bisect_right(self._limits, int.from_bytes(digest, "big"))]


class ReferenceSum:
    """Count and order-free sum (mod 2^128) of hashes: equal for equal sets of images, in whatever order they come."""

    __slots__ = ("count", "total")

    def __init__(self, count: int = 0, total: int = 0) -> None:
        self.count = count
        self.total = total

    def add(self, fields: Iterable[bytes]) -> None:
        """Add one image, told by these fields."""
        digest = hashlib.blake2b(digest_size=16)
        for field in fields:
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
        self.count += 1
        self.total = (self.total + int.from_bytes(digest.digest(), "big")) % _SUM_MODULUS

    def merge(self, other: ReferenceSum) -> None:
        """Add all images of `other`."""
        self.count += other.count
        self.total = (self.total + other.total) % _SUM_MODULUS

    @property
    def hex(self) -> str:
        """The sum as 32 hexadecimal digits."""
        return f"{self.total:032x}"

    def __str__(self) -> str:
        return f"{self.count}-{self.hex}"


def listing_fields(ref: ImageRef) -> list[bytes]:
    """What the listing fingerprint sees of an image: nothing that differs from one storage to another."""
    fields = [
        relative_path_bytes(ref.path),
        str(ref.source_bytes).encode(),
        relative_path_bytes(ref.label),
        ref.split.encode(),
    ]
    return [*fields, *ref.features]


def reference_fields(ref: ImageRef) -> list[bytes]:
    """What tells a touched image from one as it was, within one storage: etag or mtime, and all else of a listing."""
    return [*listing_fields(ref), ref.etag.encode()]


def content_fields(ref: ImageRef, md5: bytes) -> list[bytes]:
    """What the content fingerprint sees of an image; `md5` is b"" for one that could not be read."""
    return [relative_path_bytes(ref.path), md5, relative_path_bytes(ref.label), ref.split.encode(), *ref.features]


def sample_size(images: int) -> int:
    """How many images are measured before the plan: all of a small input, 2 % up to 512 of a larger one."""
    return images if images <= LARGEST_SAMPLE else max(64, min(LARGEST_SAMPLE, images // 50))


def ref_maker(config: Config) -> Callable[..., ImageRef]:
    """Makes references, with the keys that decide an image's split and place in the order."""
    seed, pattern, splits = config.seed, config.split_by, Splits(config.split_fractions or {"train": Fraction(1)})

    def make(
        path: str, byte_count: int, etag: str, label: str, split: str | None, features: tuple[bytes, ...] = ()
    ) -> ImageRef:
        if split is None:  # dealt by its path
            match = pattern.search(path) if pattern else None
            split = splits.of((match and match[1]) or path)
        return ImageRef(path, byte_count, etag, label, split, order_key(path, seed), features)

    return make


def image_url(config: Config, path: str) -> str:
    """Where an image is read from, by its path as listed; a manifest's rows may lie outside the input."""
    outside = config.layout == "manifest" and (not storage.is_local(path) or path.startswith("/"))
    return path if outside else storage.join(config.input or "", path)
