"""From a folder or URL to image references: class folders first, then the images of each; skipped files are counted."""

from __future__ import annotations

import dataclasses
import heapq
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.errors import UsageError
from beam_pipeline.images.formats import EXTENSIONS
from beam_pipeline.inputs.manifest_rows import rows_with_sizes
from beam_pipeline.inputs.references import (
    LARGEST_SAMPLE,
    ImageRef,
    class_name,
    ref_maker,
    reference_fields,
)
from beam_pipeline.inputs.stratify import class_hashes, limits, split_stratified
from beam_pipeline.schema import NAME_PATTERN
from beam_pipeline.schema.job import ReferenceSum, Skipped, Usage

# Kinds of skipped files, as `Skipped` names them.
HIDDEN, HIDDEN_IMAGES, HIDDEN_FOLDERS = "hidden", "hidden_images", "hidden_folders"
OUTSIDE_CLASSES, OTHER_SUFFIX = "outside_classes", "suffixes"
_MOST_SUFFIXES = 20  # counted one by one: each file may have a different one


@dataclasses.dataclass
class ListingSummary:
    """What a listing, or a part of one, found and skipped.

    Attributes:
        class_counts: images by class; 0 for a class folder without any.
        smallest: the references with the smallest order keys, sorted: the sample.
        counts: skipped files by kind, other suffixes apart.
        suffixes: files that were skipped for their suffix, by suffix.
        references: count and order-free sum of all images, etags included, as run.json keeps it.
        source_bytes: of all images.
        used: by the listing.
        classes: class names, sorted or in the labels file's order; of a complete listing only.
    """

    class_counts: Counter[str] = dataclasses.field(default_factory=Counter)
    smallest: list[ImageRef] = dataclasses.field(default_factory=list)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    suffixes: Counter[str] = dataclasses.field(default_factory=Counter)
    references: ReferenceSum = dataclasses.field(default_factory=ReferenceSum)
    source_bytes: int = 0
    used: Usage = dataclasses.field(default_factory=Usage, compare=False)
    classes: tuple[str, ...] = ()

    @property
    def images(self) -> int:
        """How many images are listed."""
        return self.references.count

    @property
    def hidden(self) -> int:
        """How many files and class folders are hidden: a dot begins their name or that of a folder above."""
        return self.counts.total() - self.counts[OUTSIDE_CLASSES]

    @property
    def skipped(self) -> Skipped:
        """The skipped files by kind."""
        kinds = (HIDDEN, HIDDEN_IMAGES, HIDDEN_FOLDERS, OUTSIDE_CLASSES)
        return Skipped(**{kind: self.counts[kind] for kind in kinds}, suffixes=dict(self.suffixes))

    def add(self, refs: list[ImageRef]) -> None:
        """Count listed images."""
        self.class_counts.update(ref.label for ref in refs)
        self.smallest = smallest(chain(self.smallest, refs))
        for ref in refs:
            self.references.add(reference_fields(ref))
            self.source_bytes += ref.source_bytes

    def skip(self, kind: str, path: str) -> None:
        """Count a file that is skipped, for a reason of `why_skipped`."""
        if kind == OTHER_SUFFIX:
            self._count_suffix(os.path.splitext(path)[1] or "none", 1)
        else:
            self.counts[kind] += 1

    def _count_suffix(self, suffix: str, files: int) -> None:
        known = suffix in self.suffixes or len(self.suffixes) < _MOST_SUFFIXES
        self.suffixes[suffix if known else "others"] += files

    def merge(self, other: ListingSummary) -> None:
        """Add all that another part found and skipped."""
        self.class_counts.update(other.class_counts)
        if other.smallest:
            self.smallest = smallest(chain(self.smallest, other.smallest))
        self.counts.update(other.counts)
        self.references.merge(other.references)
        self.source_bytes += other.source_bytes
        self.used.merge(other.used)
        for suffix, files in other.suffixes.items():
            self._count_suffix(suffix, files)


def smallest(refs: Iterable[ImageRef]) -> list[ImageRef]:
    """The references with the smallest order keys, sorted: the largest sample that is ever taken of them."""
    return heapq.nsmallest(LARGEST_SAMPLE, refs, key=lambda ref: (ref.order_key, ref.path))


class ClassFolder(NamedTuple):
    """One folder whose images share a class.

    Attributes:
        prefix: its path relative to the input, with a slash at the end.
        label: class name.
        split: its split, or None if a hash decides.
    """

    prefix: str
    label: str
    split: str | None


def class_folders(config: Config, summary: ListingSummary) -> list[ClassFolder]:
    """The class folders of an input, by delimiter listings; files outside them are counted in `summary` as skipped.

    Raises:
        FileNotFoundError: there is no such bucket.
        UsageError: a folder's name can't be a split or a class.
    """
    if config.layout == "class_folders":
        return [ClassFolder(f"{name}/", class_name(name), None) for name in _folders(config, "", summary)]
    found = []
    for split in _folders(config, "", summary):
        if not NAME_PATTERN.fullmatch(split):
            raise UsageError(f"--input: folder {split!r} can't be a split: rename it to a-z, 0-9 and _, a letter first")
        for name in _folders(config, f"{split}/", summary):
            found.append(ClassFolder(f"{split}/{name}/", class_name(name), split))
    return found


def _folders(config: Config, prefix: str, summary: ListingSummary) -> list[str]:
    """Names of the folders directly inside one of the input, sorted, hidden ones left out."""
    url = storage.join(config.input, prefix[:-1]) if prefix else config.input
    found = []
    for name in storage.open_storage(url, config.io_deadline).names(url):
        if not name.endswith("/"):
            summary.skip(why_skipped(name, config.extensions) or OUTSIDE_CLASSES, name)
        elif name.startswith("."):
            summary.skip(HIDDEN_FOLDERS, name)
        else:
            found.append(name[:-1])
    return sorted(found)


def list_images(config: Config, folder: ClassFolder, summary: ListingSummary) -> Iterator[ImageRef]:
    """The images below one class folder, nested folders included, streamed; others are counted in `summary`."""
    make, suffixes = ref_maker(config), config.extensions
    store = storage.open_storage(config.input, config.io_deadline)
    # Every name: a broken link becomes a reject when it is read, rather than being left out in silence.
    for file in store.files(storage.join(config.input, folder.prefix.rstrip("/")), every_name=True):
        if why := why_skipped(file.path, suffixes):
            summary.skip(why, file.path)
        else:
            yield make(folder.prefix + file.path, file.bytes, file.etag, folder.label, folder.split)


def all_images(config: Config) -> Iterator[ImageRef]:
    """Every image of the input, listed in this process and streamed; with `--stratify` listed twice."""
    if not config.stratify:
        return _listed_images(config)
    of_class = {label: limits(hashes, config) for label, hashes in class_hashes(_listed_images(config), config).items()}
    return split_stratified(_listed_images(config), of_class, config)


def _listed_images(config: Config) -> Iterator[ImageRef]:
    if config.layout == "manifest":
        yield from rows_with_sizes(config)
        return
    skipped = ListingSummary()
    for folder in class_folders(config, skipped):
        yield from list_images(config, folder, skipped)


def why_skipped(path: str, suffixes: Collection[str] = EXTENSIONS) -> str | None:
    """Why a listed file isn't taken for an image, by its name; None if it is. Suffixes in lower case, without dots."""
    stem, dot, suffix = path.rpartition("/")[2].rpartition(".")
    is_image = dot and stem and suffix.strip().lower() in suffixes
    if path.startswith(".") or "/." in path:
        return HIDDEN_IMAGES if is_image else HIDDEN
    return None if is_image else OTHER_SUFFIX
