"""From a folder or URL to image references: class folders first, then the images of each; skipped files are counted."""

from __future__ import annotations

import dataclasses
import heapq
import os
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from beam_pipeline import storage
from beam_pipeline.archives.tree import LINK_ETAG, SUFFIX
from beam_pipeline.archives.tree import tree as archives_tree
from beam_pipeline.config import ANY, Config, wrong
from beam_pipeline.errors import UsageError
from beam_pipeline.images.formats import EXTENSIONS
from beam_pipeline.inputs import exclude
from beam_pipeline.inputs.manifest_rows import rows_with_sizes
from beam_pipeline.inputs.references import (
    MAX_SAMPLE,
    ImageRef,
    check_forms,
    class_hashes,
    class_name,
    labels_spelling,
    limits,
    ref_maker,
    reference_fields,
    split_stratified,
)
from beam_pipeline.schema import NAME_PATTERN
from beam_pipeline.schema.job import Excluded, ReferenceSum, Skipped

# Kinds of skipped files, as `Skipped` names them.
HIDDEN, HIDDEN_IMAGES, HIDDEN_FOLDERS, LINKS = "hidden", "hidden_images", "hidden_folders", "links"
OUTSIDE_CLASSES, OTHER_SUFFIX = "outside_classes", "suffixes"
_MAX_SUFFIXES = 20  # counted one by one: each file may have a different one
# Folders that systems keep for themselves, in lower case: Synology, QNAP, NetApp, Windows, macOS, fsck, Python.
_SYSTEM = frozenset((
    "@eadir", "@tmp", "@recycle", "@recently-snapshot", "@__thumb", "#recycle", "#snapshot", "~snapshot", "found.000",
    "lost+found", "$recycle.bin", "system volume information", "__macosx", "__pycache__",
))  # fmt: skip
# A folder's complete name; `imageshards index` looks for such a word within the name of a file, too.
_SPLIT_FOLDER = re.compile(
    r"(?:.*[\W_])?(?:(train)(?:ing)?|(test)(?:ing)?|val|valid|validation|eval|evaluation|dev|holdout)"
    r"(?:[\W_]?(?:set|data|images?|split))?[\W_]*(?:v?\d+)?\W*",  # also train2017, train_256, train (1)
    re.IGNORECASE,
)


@dataclasses.dataclass
class ListingSummary:
    """Images and skipped files of a listing, or of a part of one.

    Attributes:
        class_counts: images by class; 0 for a class folder without any.
        smallest: the references with the smallest order keys, sorted: the sample.
        counts: skipped files by kind, except those in `suffixes`.
        suffixes: files that were skipped for their suffix, by suffix.
        references: count and order-free sum of all images, etags included, as run.json keeps it.
        source_bytes: of all images.
        excluded, on_list: images that `--exclude` leaves out; order keys of those that its list names.
        classes: class names, sorted or in the labels file's order; of a complete listing only.
        exclusion: what run.json says of the list; of a complete listing only.
    """

    class_counts: Counter[str] = dataclasses.field(default_factory=Counter)
    smallest: list[ImageRef] = dataclasses.field(default_factory=list)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    suffixes: Counter[str] = dataclasses.field(default_factory=Counter)
    references: ReferenceSum = dataclasses.field(default_factory=ReferenceSum)
    source_bytes: int = 0
    excluded: int = 0
    on_list: array[int] = dataclasses.field(default_factory=lambda: array("Q"))
    classes: tuple[str, ...] = ()
    exclusion: Excluded | UnsetType = UNSET

    @property
    def images(self) -> int:
        """How many images are listed."""
        return self.references.count

    @property
    def hidden(self) -> int:
        """How many files and class folders are hidden: by their name, or that of a folder above."""
        return self.counts.total() - self.counts[OUTSIDE_CLASSES] - self.counts[LINKS]

    @property
    def skipped(self) -> Skipped:
        """The skipped files by kind."""
        kinds = (HIDDEN, HIDDEN_IMAGES, HIDDEN_FOLDERS, LINKS, OUTSIDE_CLASSES)
        return Skipped(**{kind: self.counts[kind] for kind in kinds}, suffixes=dict(self.suffixes))

    def add(self, refs: list[ImageRef]) -> None:
        """Count listed images."""
        self.class_counts.update(ref.label for ref in refs)
        self.smallest = smallest(chain(self.smallest, refs))
        for ref in refs:
            self.references.add(reference_fields(ref))
            self.source_bytes += ref.source_bytes

    def skip(self, kind: str, path: str) -> None:
        """Count a skipped file; `kind` is what `why_skipped` says."""
        if kind == OTHER_SUFFIX:
            self._count_suffix(os.path.splitext(path)[1] or "none", 1)
        else:
            self.counts[kind] += 1

    def _count_suffix(self, suffix: str, files: int) -> None:
        has_room = suffix in self.suffixes or len(self.suffixes) < _MAX_SUFFIXES
        self.suffixes[suffix if has_room else "others"] += files

    def merge(self, part: ListingSummary) -> None:
        """Add the summary of another part of the listing."""
        self.class_counts.update(part.class_counts)
        if part.smallest:
            self.smallest = smallest(chain(self.smallest, part.smallest))
        self.counts.update(part.counts)
        self.references.merge(part.references)
        self.source_bytes += part.source_bytes
        self.excluded += part.excluded
        self.on_list.extend(part.on_list)
        for suffix, files in part.suffixes.items():
            self._count_suffix(suffix, files)


def smallest(refs: Iterable[ImageRef]) -> list[ImageRef]:
    """The references with the smallest order keys, sorted: the largest sample that a job takes."""
    return heapq.nsmallest(MAX_SAMPLE, refs, key=lambda ref: (ref.order_key, ref.path))


class ClassFolder(NamedTuple):
    """One folder, or archive, whose images share a class.

    Attributes:
        prefix: its path relative to the input, with a slash at the end.
        label: class name.
        split: its split, or None if a hash decides.
        unpacked: its path when every archive is unpacked into a folder of its name.
    """

    prefix: str
    label: str
    split: str | None
    unpacked: str


def class_folders(config: Config, summary: ListingSummary) -> list[ClassFolder]:
    """The class folders of an input, by delimiter listings; files outside them are counted in `summary`.

    Raises:
        FileNotFoundError: there is no such bucket.
        UsageError: a folder's name can't be a split or a class, or two names are one.
    """
    spelled, tops = labels_spelling(config), _class_level(config, "", summary)
    if config.layout == "class_folders":
        folders = [ClassFolder(f"{file}/", class_name(name), None, f"{name}/") for name, file in tops.items()]
    else:
        folders = [
            ClassFolder(f"{tops[top]}/{file}/", class_name(name), split, f"{top}/{name}/")
            for top, split in _splits_of(config, list(tops)).items()
            for name, file in _class_level(config, f"{tops[top]}/", summary).items()
        ]
    check_forms(folder.label for folder in folders)
    return [folder._replace(label=spelled(folder.label)) for folder in folders]


def _class_level(config: Config, prefix: str, summary: ListingSummary) -> dict[str, str]:
    """Name → the folder of that name, or the archive that is unpacked into it; sorted.

    Raises:
        UsageError: archives next to folders, probably what was unpacked from them: every image would be there twice.
            One of several archives is none; if there are only files, that shows when they are listed.
    """
    archives: list[str] = []
    names = folder_names(config, prefix, summary, archives)
    url, tree = _url_of(config, prefix), archives_tree(config)
    others = [name for name in archives if not tree.is_archive(url, name)] if names or tree.is_folder(url) else []
    archives = [name for name in archives if name not in others]
    if others and archives and not names:
        what = f"{prefix + others[0]!r} is no archive, as {archives[0]!r} is"
        raise wrong("--input", config.input, f"{what}: copy it again, or leave it out")
    for name in others:
        summary.skip(why_skipped(name, config.extensions) or OUTSIDE_CLASSES, name)
    if names and archives:
        what = f"archive {prefix + archives[0]!r} is next to folder {prefix + names[0]!r}"
        fix = "move away the archives, or the folders that were unpacked from them"
        raise wrong("--input", config.input, f"{what}: {fix}")
    level = {name: name for name in names} | {SUFFIX.sub("", name): name for name in archives}
    if len(level) < len(names) + len(archives):
        one, other = next(pair for pair in pairwise(archives) if len({SUFFIX.sub("", name) for name in pair}) == 1)
        raise wrong("--input", config.input, f"archives {one!r} and {other!r} are one class: keep one")
    return level


def _splits_of(config: Config, names: list[str]) -> dict[str, str]:
    """Folder → split."""
    given = config.split_folders or {name: name for name in names}
    for name in sorted(given.keys() ^ set(names)):
        what = f"has no split: add {name}=SPLIT, or move it away" if name in names else "isn't there: leave it out"
        raise UsageError(f"--split_folders: folder {name!r} {what}")
    if wrong_names := [name for name, split in given.items() if not NAME_PATTERN.fullmatch(split)]:
        raise UsageError(f"--input: folder {wrong_names[0]!r} can't be a split: give{as_split_folders(names)}")
    return given


def as_split_folders(names: list[str]) -> str:
    """The flag that maps folders to what they probably are; "" if their names are splits."""
    if "train" in names and all(map(NAME_PATTERN.fullmatch, names)):
        return ""
    return " --split_folders " + ",".join(f"{name}={split_word(name) or 'SPLIT'}" for name in names)


def split_word(name: str) -> str | None:
    """The split that a folder's name says."""
    match = _SPLIT_FOLDER.fullmatch(name)
    return match and (match[1] or match[2] or "validation").lower()


def folder_names(config: Config, prefix: str, summary: ListingSummary, archives: list[str] | None = None) -> list[str]:
    """Names of the visible folders directly inside one of the input, sorted; archives go to `archives`, if given."""
    folders = []
    for name in archives_tree(config).names(_url_of(config, prefix)):
        if archives is not None and not _is_hidden(name) and SUFFIX.search(name):
            archives.append(name)
        elif not name.endswith("/"):
            summary.skip(why_skipped(name, config.extensions) or OUTSIDE_CLASSES, name)
        elif _is_hidden(name):
            summary.skip(HIDDEN_FOLDERS, name)
        else:
            folders.append(name[:-1])
    return sorted(folders)


def _url_of(config: Config, prefix: str) -> str:
    return storage.join(config.input, prefix[:-1]) if prefix else config.input


def list_images(config: Config, folder: ClassFolder, summary: ListingSummary) -> Iterator[ImageRef]:
    """The images below one class folder, at any depth, streamed; other files are counted in `summary`."""
    make, suffixes = ref_maker(config), config.extensions
    tree = archives_tree(config)
    # With every name, a broken link becomes a reject when it is read, instead of vanishing silently.
    for file in tree.files(storage.join(config.input, folder.prefix.rstrip("/")), every_name=True):
        if why := why_skipped(file.path, suffixes) or (LINKS if file.etag == LINK_ETAG else None):
            summary.skip(why, file.path)
        else:
            path = folder.unpacked + file.path
            yield make(path, file.bytes, file.etag, folder.label, folder.split, part=file.part)


def all_images(config: Config) -> Iterator[ImageRef]:
    """Every image of the input, listed in this process and streamed; with `--stratify` listed twice."""
    if not config.stratify:
        return _listed_images(config)
    of_class = {label: limits(hashes, config) for label, hashes in class_hashes(_listed_images(config), config).items()}
    return split_stratified(_listed_images(config), of_class, config)


def _listed_images(config: Config) -> Iterator[ImageRef]:
    left_out = ListingSummary()
    if config.layout == "manifest":
        refs = rows_with_sizes(config)
    else:
        folders = class_folders(config, left_out)
        refs = chain.from_iterable(list_images(config, folder, left_out) for folder in folders)
    return exclude.kept(config, refs, left_out)


def _is_hidden(path: str) -> bool:
    """Whether a file or `folder/`, or a folder above it, begins with a dot, or is in a folder of a system."""
    return path.startswith(".") or "/." in path or not _SYSTEM.isdisjoint(path.lower().split("/")[:-1])


def why_skipped(path: str, suffixes: Collection[str] = EXTENSIONS) -> str | None:
    """The kind of a file that isn't taken for an image, by its name; None if it is. Suffixes: lower case, no dots."""
    stem, dot, suffix = path.rpartition("/")[2].rpartition(".")
    takes_any = ANY in suffixes
    is_image = dot and stem and suffix.strip().lower() in (EXTENSIONS if takes_any else suffixes)
    if _is_hidden(path):
        return HIDDEN_IMAGES if is_image else HIDDEN
    return None if is_image or takes_any else OTHER_SUFFIX
