"""From a folder or URL to image references, in pages: class folders first, then the images of each.

What is no image by its name is skipped and counted by kind; no name is changed.
"""

from __future__ import annotations

import dataclasses
import heapq
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from beam_pipeline import storage
from beam_pipeline.errors import UsageError
from beam_pipeline.images.files import EXTENSIONS
from beam_pipeline.manifest_rows import Row, read_rows
from beam_pipeline.options import Config
from beam_pipeline.schema import NAME_PATTERN, is_utf8
from beam_pipeline.sharding import LARGEST_SAMPLE, ImageRef, Splits, order_key

# What is skipped, as run.json names it.
HIDDEN, HIDDEN_IMAGES, HIDDEN_FOLDERS = "hidden", "hidden_images", "hidden_folders"
OUTSIDE_CLASSES = "outside_classes"
OTHER_SUFFIX = "suffixes"
_MOST_SUFFIXES = 20  # that are told apart: there may be a different one for each file
Skip = Callable[[str, str], None]  # which of the five, and the path


@dataclasses.dataclass
class ListingSummary:
    """What a listing holds as a whole, or a part of one.

    Attributes:
        class_counts: images by class; 0 for a class folder without any.
        smallest: the references with the smallest order keys, sorted: the sample.
        skipped_counts: what is no image, or none of a class, by kind.
        suffixes: of the files with another suffix, as they are written.
        classes: class names, sorted or in the labels file's order; of a whole listing only.
    """

    class_counts: Counter[str] = dataclasses.field(default_factory=Counter)
    smallest: list[ImageRef] = dataclasses.field(default_factory=list)
    skipped_counts: Counter[str] = dataclasses.field(default_factory=Counter)
    suffixes: Counter[str] = dataclasses.field(default_factory=Counter)
    classes: tuple[str, ...] = ()

    @property
    def images(self) -> int:
        """How many are listed."""
        return self.class_counts.total()

    @property
    def hidden(self) -> int:
        """How many files and folders of classes have names that begin with a dot."""
        return sum(self.skipped_counts[kind] for kind in (HIDDEN, HIDDEN_IMAGES, HIDDEN_FOLDERS))

    @property
    def skipped(self) -> dict[str, Any]:
        """What is no part of the dataset, as run.json holds it."""
        kinds = (HIDDEN, HIDDEN_IMAGES, HIDDEN_FOLDERS, OUTSIDE_CLASSES)
        return {**{kind: self.skipped_counts[kind] for kind in kinds}, OTHER_SUFFIX: dict(self.suffixes)}

    def add(self, refs: list[ImageRef]) -> None:
        """Count listed images."""
        self.class_counts.update(ref.label for ref in refs)
        self.smallest = smallest(chain(self.smallest, refs))

    def skip(self, why: str, path: str) -> None:
        """Count what is skipped."""
        if why == OTHER_SUFFIX:
            self._count_suffix(os.path.splitext(path)[1] or "none", 1)
        else:
            self.skipped_counts[why] += 1

    def _count_suffix(self, suffix: str, files: int) -> None:
        known = suffix in self.suffixes or len(self.suffixes) < _MOST_SUFFIXES
        self.suffixes[suffix if known else "others"] += files

    @classmethod
    def total(cls, parts: Iterable[ListingSummary]) -> ListingSummary:
        """Several parts together."""
        total = cls()
        for part in parts:
            total.class_counts.update(part.class_counts)
            total.smallest = smallest(chain(total.smallest, part.smallest))
            total.skipped_counts.update(part.skipped_counts)
            for suffix, files in part.suffixes.items():
                total._count_suffix(suffix, files)
        return total


def smallest(refs: Iterable[ImageRef]) -> list[ImageRef]:
    """The references with the smallest order keys, sorted: the largest sample that is ever taken of them."""
    return heapq.nsmallest(LARGEST_SAMPLE, refs, key=lambda ref: (ref.order_key, ref.path))


class ClassFolder(NamedTuple):
    """One folder whose images share a class.

    Attributes:
        prefix: its path relative to the input, with a slash at the end.
        label: class name.
        split: its split, or None where images are dealt.
    """

    prefix: str
    label: str
    split: str | None


def class_folders(config: Config, skip: Skip = lambda why, path: None) -> list[ClassFolder]:
    """The class folders of an input, by delimiter listings.

    Args:
        config: input and layout.
        skip: called for each file beside a class folder or a folder of a split, and each hidden folder.

    Raises:
        FileNotFoundError: there is no such bucket.
        UsageError: a folder's name can't be a split or a class.
    """
    if config.layout == "class_folders":
        return [ClassFolder(f"{name}/", class_name(name), None) for name in _folders(config, "", skip)]
    found = []
    for split in _folders(config, "", skip):
        if not NAME_PATTERN.fullmatch(split):
            raise UsageError(f"--input: folder {split!r} can't be a split: rename it to a-z, 0-9 and _, a letter first")
        for name in _folders(config, f"{split}/", skip):
            found.append(ClassFolder(f"{split}/{name}/", class_name(name), split))
    return found


def _folders(config: Config, prefix: str, skip: Skip) -> list[str]:
    """Names of the folders right below one of the input, sorted, hidden ones left out."""
    assert config.input is not None
    url = storage.join(config.input, prefix[:-1]) if prefix else config.input
    found = []
    for name in storage.open_storage(url, config.io_deadline).names(url):
        if not name.endswith("/"):
            skip(why_skipped(name, config.suffixes) or OUTSIDE_CLASSES, prefix + name)
        elif name.startswith("."):
            skip(HIDDEN_FOLDERS, prefix + name)
        else:
            found.append(name[:-1])
    return sorted(found)


def class_name(name: str) -> str:
    """A folder's name as a class name.

    Raises:
        UsageError: readers of the dataset would change it.
    """
    if not name.strip() or name != name.strip() or len(name.splitlines()) != 1:
        raise UsageError(
            f"class folder {name!r}: rename it, white space around a class name and line breaks are lost by TFDS"
        )
    if not is_utf8(name):
        raise UsageError(f"class folder {name!r}: rename it, a class name must be UTF-8")
    return name


class RefMaker:
    """Makes references: the keys that decide an image's split and place in the order."""

    def __init__(self, config: Config) -> None:
        self._seed = config.seed
        self._pattern = config.split_pattern
        self._splits: Splits = config.dealt_splits

    def make(
        self, path: str, byte_count: int, etag: str, label: str, split: str | None, features: tuple[bytes, ...] = ()
    ) -> ImageRef:
        """The reference of one image; `split` None deals it by its path."""
        return ImageRef(path, byte_count, etag, label, split or self._deal(path), order_key(path, self._seed), features)

    def _deal(self, path: str) -> str:
        match = self._pattern.search(path) if self._pattern else None
        return self._splits.of((match and match[1]) or path)


def list_images(config: Config, folder: ClassFolder, skip: Skip) -> Iterator[ImageRef]:
    """The images below one class folder, nested folders included, streamed.

    Args:
        config: input, seed and splits.
        folder: one of `class_folders`.
        skip: called for each file that is skipped.
    """
    assert config.input is not None
    maker, suffixes = RefMaker(config), config.suffixes
    store = storage.open_storage(config.input, config.io_deadline)
    # Every name: an image whose link leads nowhere must not go unseen. It becomes a reject when it is read.
    for file in store.files(storage.join(config.input, folder.prefix.rstrip("/")), every_name=True):
        why = why_skipped(file.path, suffixes)
        if why:
            skip(why, file.path)
        else:
            yield maker.make(folder.prefix + file.path, file.bytes, file.etag, folder.label, folder.split)


def all_images(config: Config) -> Iterator[ImageRef]:
    """Every image of the input in this process, streamed, folders one after the other."""
    if config.layout == "manifest":
        yield from _all_rows(config)
        return
    for folder in class_folders(config):
        yield from list_images(config, folder, lambda why, path: None)


def manifest_rows(config: Config) -> Iterator[Row]:
    """The rows of `--manifest`."""
    return read_rows(config.manifest or "", config.header, config.io_deadline, config.input or "")


def needs_sizes(config: Config) -> bool:
    """Whether a manifest's images must be listed to know their sizes: remote ones without a column `bytes`.

    Local files are asked one by one, which is no request.
    """
    return "bytes" not in config.header and not storage.is_local(config.input or "")


def image_url(config: Config, path: str) -> str:
    """Where an image is read from, by its path as listed; a manifest's rows may lie outside the input."""
    outside = config.layout == "manifest" and (not storage.is_local(path) or path.startswith("/"))
    return path if outside else storage.join(config.input or "", path)


def size_prefix(config: Config, url: str) -> str:
    """The folder that is listed to know the size of an image: few of them, whatever the number of rows.

    The first folder below the input, or below the bucket for an image elsewhere.
    """
    base = config.input or ""
    if not url.startswith(f"{base}/"):
        base = "/".join(url.split("/", 3)[:3])
    folder, slash, _ = url[len(base) + 1 :].partition("/")
    return storage.join(base, folder) if slash else base


def row_refs(config: Config) -> Iterator[ImageRef]:
    """References of a manifest's rows, streamed; a size that isn't in the row is -1 until `sized`."""
    maker = RefMaker(config)
    for row in manifest_rows(config):
        # Relative also where the row holds the whole URL.
        path = image_url(config, row.path).removeprefix(f"{config.input}/")
        size, etag = -1 if row.byte_count is None else row.byte_count, f"md5:{row.md5}" if row.md5 else ""
        yield maker.make(path, size, etag, row.label, row.split, row.features)


def sized(config: Config, ref: ImageRef, listed: ImageRef | None = None) -> ImageRef:
    """The reference of a row with its size; an image that isn't there becomes a reject when it is read.

    Args:
        config: of the job.
        ref: of `row_refs`.
        listed: of `listed_refs`, where `needs_sizes`.
    """
    if ref.source_bytes >= 0:
        return ref
    size, etag = (listed.source_bytes, listed.etag) if listed else (0, "")
    if storage.is_local(url := image_url(config, ref.path)) and (file := storage.open_storage(url).stat(url)):
        size, etag = file.bytes, file.etag
    return ref._replace(source_bytes=size, etag=ref.etag or etag)


def listed_refs(config: Config, prefix: str) -> Iterator[ImageRef]:
    """Everything below a folder, with sizes and etags; without labels, which tells it from a row."""
    store = storage.open_storage(prefix, config.io_deadline)
    for file in store.files(prefix):
        path = storage.join(prefix, file.path).removeprefix(f"{config.input}/")
        yield ImageRef(path, file.bytes, file.etag, "", "", order_key(path, config.seed))


def _all_rows(config: Config) -> Iterator[ImageRef]:
    listed: dict[str, ImageRef] = {}
    prefixes: set[str] = set()
    for ref in row_refs(config):
        if needs_sizes(config) and (prefix := size_prefix(config, image_url(config, ref.path))) not in prefixes:
            prefixes.add(prefix)
            listed |= {other.path: other for other in listed_refs(config, prefix)}
        yield sized(config, ref, listed.get(ref.path))


def why_skipped(path: str, suffixes: Collection[str] = EXTENSIONS) -> str | None:
    """Why a listed file is no image by its name, or None for one that is; suffixes in lower case, without dots."""
    stem, dot, suffix = path.rpartition("/")[2].rpartition(".")
    is_image = dot and stem and suffix.strip().lower() in suffixes
    if path.startswith(".") or "/." in path:
        return HIDDEN_IMAGES if is_image else HIDDEN
    return None if is_image else OTHER_SUFFIX
