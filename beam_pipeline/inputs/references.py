"""An image as the job carries it: a reference with its split and order key, and what identifies it in fingerprints."""

from __future__ import annotations

import hashlib
import math
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np

from beam_pipeline import storage
from beam_pipeline.config import BY_NAME, Config
from beam_pipeline.errors import UsageError
from beam_pipeline.schema import is_utf8, normal_path_bytes, relative_path_bytes
from beam_pipeline.schema.table import order_key
from beam_pipeline.storage import Etag, Part, etag_text

KEY_BITS = 64
MAX_SAMPLE = 512
_SPLIT_SALT = b"imageshards split"  # part of the format: changing it moves images between splits
_BELOW_FIRST_FOLDER = re.compile(r"\A(?!\w+://)[^/]+/(.+)", re.DOTALL)  # --split_by name


class ImageRef(NamedTuple):
    """One listed image: what is shuffled instead of its pixels.

    Attributes:
        path: relative to the input, `/` separators, as listed; the full URL if a manifest's row is outside the input.
        source_bytes: size of the source file.
        etag: `ListedFile.etag`, or the MD5 of a manifest's row.
        label: class name.
        split: `train`, `validation`, …
        order_key: 64-bit position in the global order; ties go by `path`.
        features: serialized `tf.train.Feature`s of a manifest's columns, in the order of the columns' names.
        part: where it is, if that is in an archive.
    """

    path: str
    source_bytes: int
    etag: Etag
    label: str
    split: str
    order_key: int
    features: tuple[bytes, ...] = ()
    part: Part | None = None

    @property
    def md5(self) -> bytes | None:
        """The MD5 that the listing or the manifest gives; None without one."""
        return self.etag if isinstance(self.etag, bytes) else None


def split_hash(group: str) -> int:
    """64-bit hash that decides the split of the images with this path or `--split_by` group."""
    return int.from_bytes(hashlib.blake2b(normal_path_bytes(group), digest_size=8, key=_SPLIT_SALT).digest(), "big")


def split_hasher(config: Config) -> Callable[[str], int]:
    """A function from a path to its split hash, by `--split_by`; a path without a match is a group by itself."""
    if config.split_by is None:
        return split_hash
    pattern = re.compile(_BELOW_FIRST_FOLDER if config.split_by == BY_NAME else config.split_by)

    def hash_of(path: str) -> int:
        match = pattern.search(path)
        return split_hash((match and match[1]) or path)

    return hash_of


def split_chooser(fractions: Mapping[str, Fraction]) -> Callable[[int], str]:
    """A function from a split hash to its split: no seed, version or other image matters.

    Args:
        fractions: split name → share; they sum to 1. Their order decides which hashes each gets.
    """
    names, limits = tuple(fractions), [int(total * (1 << KEY_BITS)) for total in accumulate(fractions.values())]
    return lambda split_hash: names[bisect_right(limits, split_hash)]


def listing_fields(ref: ImageRef) -> list[bytes]:
    """The fields of an image in the listing fingerprint: only what is the same on every storage."""
    path, label = relative_path_bytes(ref.path), relative_path_bytes(ref.label)
    return [path, str(ref.source_bytes).encode(), label, ref.split.encode(), *ref.features]


def reference_fields(ref: ImageRef) -> list[bytes]:
    """The same with the etag or mtime, which shows within one storage whether an image is unchanged."""
    return [*listing_fields(ref), etag_text(ref.etag).encode()]


def content_fields(ref: ImageRef, md5: bytes) -> list[bytes]:
    """The fields of an image in the content fingerprint; `md5` is b"" if it could not be read."""
    return [relative_path_bytes(ref.path), md5, relative_path_bytes(ref.label), ref.split.encode(), *ref.features]


def sample_size(images: int) -> int:
    """How many images are measured before the plan: all of a small input, 2 % and at most 512 of a larger one."""
    return images if images <= MAX_SAMPLE else max(64, min(MAX_SAMPLE, images // 50))


def ref_maker(config: Config) -> Callable[..., ImageRef]:
    """A function that makes references: with the order key of the path, and its split unless the input names one.

    With `--stratify` the split is "" until all images are listed: see `split_stratified`.
    """
    seed, hash_of = config.seed, split_hasher(config)
    split_of = split_chooser(config.split_fractions or {"train": Fraction(1)})

    def make(
        path: str,
        byte_count: int,
        etag: Etag,
        label: str,
        split: str | None,
        features: tuple[bytes, ...] = (),
        part: Part | None = None,
    ) -> ImageRef:
        if split is None:
            split = "" if config.stratify else split_of(hash_of(path))
        return ImageRef(path, byte_count, etag, label, split, order_key(path, seed), features, part)

    return make


def image_url(config: Config, path: str) -> str:
    """Path or URL of an image; a manifest's rows may name files outside the input."""
    outside = config.layout == "manifest" and (not storage.is_local(path) or path.startswith("/"))
    return path if outside else storage.join(config.input, path)


def class_name(value: object, what: str = "class folder") -> str:
    """A class name, from a folder's name or a manifest's row.

    Raises:
        UsageError: readers of the dataset would change it.
    """
    name = str(value) if isinstance(value, str | int | float) and value == value else ""  # NaN is no name
    if name != name.strip() or len(name.splitlines()) != 1 or not is_utf8(name):
        raise UsageError(f"{what} {value!r}: write a name in UTF-8 without line breaks or white space around it")
    return name


def labels_spelling(config: Config) -> Callable[[str], str]:
    """A function from a class name to the same in the labels file's Unicode form."""
    listed = {normal_path_bytes(label): label for label in config.labels or ()}
    return lambda name: listed.get(normal_path_bytes(name), name)


def check_forms(names: Iterable[str]) -> None:
    """Raise a UsageError if two class names differ by their Unicode form alone, as Linux and macOS write file names."""
    seen: dict[bytes, str] = {}
    for name in sorted(names):
        if (other := seen.setdefault(normal_path_bytes(name), name)) != name:
            fault = f"classes {other!a} and {name!a} are one name in two Unicode forms"
            raise UsageError(f"{fault}: rename one, or merge the two")


# --- `--stratify`: exact shares within each class, by the rank of an image's split hash among those of its class

Hashes: TypeAlias = "array[int]"  # 8 bytes per image
Limits = tuple[int, ...]


def class_hashes(refs: Iterable[ImageRef], config: Config) -> dict[str, Hashes]:
    """Class → split hashes of its images."""
    hash_of = split_hasher(config)
    hashes: dict[str, Hashes] = {}
    for ref in refs:
        hashes.setdefault(ref.label, array("Q")).append(hash_of(ref.path))
    return hashes


def limits(hashes: Hashes, config: Config) -> Limits:
    """For each split the first split hash after it, in one class: its images are cut at the exact ranks.

    The first k splits together get their share of the n images, rounded: one more image moves each cut by at most one
    image. Equal hashes, of two spellings of one name, are not separated.
    """
    ranked = np.sort(np.frombuffer(hashes, np.uint64))
    shares = accumulate((config.split_fractions or {}).values())
    ends = [math.floor(len(ranked) * share + Fraction(1, 2)) for share in shares]
    return tuple(int(ranked[end]) if end < len(ranked) else 1 << KEY_BITS for end in ends)


def split_stratified(refs: Iterable[ImageRef], limits_of: Mapping[str, Limits], config: Config) -> Iterator[ImageRef]:
    """The references with their splits, by the limits of each class."""
    hash_of, names = split_hasher(config), tuple(config.split_fractions or {})
    for ref in refs:
        # A class without limits was added between two listings, whose comparison fails whatever its split is.
        yield ref._replace(split=names[bisect_right(limits_of.get(ref.label, ()), hash_of(ref.path))])
