"""Images with the same bytes: groups of them by MD5, what `duplicates.jsonl` says of each, what `--duplicates` does.

Images go to buckets by the first bits of their MD5: each is grouped and sorted in memory, and the buckets one after the
other are in order of the MD5. Empty files are no duplicates of each other: they have no content to share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.fetch import convert_all
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.inputs.references import UNCONFIRMED_MD5, ImageRef, listed_md5
from beam_pipeline.schema import canonical_json, relative_path_bytes

_BUCKET_IMAGES = 10_000  # a bucket's references are 5 MB


class Group(NamedTuple):
    """Images with the same bytes.

    Attributes:
        md5: of the bytes.
        images: (path, label, split), at least two, in order of the path as bytes: with `drop` the first one stays.
    """

    md5: bytes
    images: tuple[tuple[bytes, str, str], ...]

    @property
    def classes(self) -> int:
        """How many classes the images are in."""
        return len({label for _, label, _ in self.images})

    @property
    def splits(self) -> int:
        """How many splits the images are in."""
        return len({split for _, _, split in self.images})

    @property
    def line(self) -> bytes:
        """Its line of `duplicates.jsonl`."""
        images = [
            {"path": path.decode("utf-8", "surrogateescape"), "label": label, "split": split}
            for path, label, split in self.images
        ]
        return canonical_json({"md5": self.md5.hex(), "classes": self.classes, "splits": self.splits, "images": images})


def with_md5s(config: Config, refs: Iterable[ImageRef]) -> Iterator[ImageRef]:
    """References with MD5s as etags; images whose MD5 isn't known are read.

    The MD5s of a store's listing are believed. A manifest's are not: if one is wrong, an image could be dropped that
    has no duplicate.
    """
    unknown: list[ImageRef] = []
    for ref in refs:
        if listed_md5(ref) and "md5" not in config.header:
            yield ref
        else:
            unknown.append(ref)
    for ref, result, md5, *_ in convert_all(config, unknown, lambda *_: None):
        is_rejected = isinstance(result, Reject)  # as it will be again when its shard is written
        yield ref._replace(etag=ref.etag.replace("md5:", UNCONFIRMED_MD5) if is_rejected else f"md5:{md5.hex()}")


def buckets_for(images: int) -> int:
    """How many buckets an input of this many images has."""
    return max(1, images // _BUCKET_IMAGES)


def bucket_of(ref: ImageRef, buckets: int) -> int:
    """The bucket of an image: ascending with its MD5; of its path if it has none."""
    md5 = listed_md5(ref)
    key = int.from_bytes(md5[:8], "big") if md5 else ref.order_key
    return key * buckets >> 64


def find_groups(refs: Iterable[ImageRef], most_bytes: int) -> list[Group]:
    """Contents that several images have, in order of their MD5.

    Args:
        refs: with MD5s as etags, if known.
        most_bytes: larger images have no duplicates: a local one wasn't read.
    """
    known = ((listed_md5(ref), ref) for ref in refs if 0 < ref.source_bytes <= most_bytes)
    ordered = sorted((md5, relative_path_bytes(ref.path), ref.label, ref.split) for md5, ref in known if md5)
    grouped = [(md5, tuple(image[1:] for image in same)) for md5, same in groupby(ordered, key=lambda image: image[0])]
    return [Group(md5, images) for md5, images in grouped if len(images) > 1]


def marked(refs: Iterable[ImageRef], groups: Iterable[Group]) -> Iterator[ImageRef]:
    """References, those of a group's images but its first with `duplicate_of`."""
    first = {path: group.images[0][0] for group in groups for path, _, _ in group.images[1:]}
    for ref in refs:
        kept = first.get(relative_path_bytes(ref.path))
        yield ref._replace(duplicate_of=kept) if kept is not None else ref


def check_duplicates(config: Config, groups: Iterable[Group]) -> None:
    """End the job if it may not have these groups: any with `--duplicates fail`, with `drop` one of several classes.

    Raises:
        ImageShardsError: names two images of the first such group by path, with several classes one of another class.
    """
    if config.duplicates not in ("drop", "fail"):
        return
    bad = sorted(group.images for group in groups if config.duplicates == "fail" or group.classes > 1)
    if not bad:
        return
    path, label, _ = bad[0][0]
    other_path, other_label, _ = next((image for image in bad[0] if image[1] != label), bad[0][1])
    names = [image.decode("utf-8", "surrogateescape") for image in (path, other_path)]
    classes = f", but their classes are {label!r} and {other_label!r}" if label != other_label else ""
    raise ImageShardsError(
        f"--duplicates {config.duplicates}: {names[0]!r} and {names[1]!r} hold the same bytes{classes}; "
        "take files away, or list them with --duplicates report"
    )


def reads_twice_notice(config: Config) -> str | None:
    """What a user should know before the job runs, or None."""
    if config.duplicates == "keep":
        return None
    all_are_read = storage.is_local(config.input) or "md5" in config.header
    which = "every image" if all_are_read else "each image that is listed without an MD5"
    return f"--duplicates {config.duplicates} reads {which} once more, before planning"
