"""From a folder or URL to image references, in pages: class folders first, then the images of each.

What is no image by its name is skipped and counted by kind; no name is changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from beam_pipeline import storage
from beam_pipeline.errors import UsageError
from beam_pipeline.images.files import EXTENSIONS
from beam_pipeline.manifest_rows import Row, RowReader
from beam_pipeline.options import Config
from beam_pipeline.schema import NAME_PATTERN, is_utf8
from beam_pipeline.sharding import ImageRef, Splits, order_key
from beam_pipeline.storage import ListedFile

HIDDEN = "hidden"
OTHER_SUFFIX = "other-suffix"
OUTSIDE_CLASSES = "outside-classes"
Skip = Callable[[str, str], None]  # which of the three, and the path


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
        skip: called for each file beside a class folder or a folder of a split.

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
        elif not name.startswith("."):
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


class Skipped:
    """Files that are no images by their names: how many, by suffix as it is written; and images without a class."""

    _MOST = 20  # suffixes that are told apart: there may be a different one for each file

    def __init__(self) -> None:
        self.hidden = 0
        self.outside_classes = 0
        self._suffixes: Counter[str] = Counter()

    def add(self, why: str, path: str) -> None:
        """Count one file."""
        if why == HIDDEN:
            self.hidden += 1
        elif why == OUTSIDE_CLASSES:
            self.outside_classes += 1
        else:
            self._count(os.path.splitext(path)[1] or "none", 1)

    def merge(self, other: Skipped) -> None:
        """Add what another worker has skipped."""
        self.hidden += other.hidden
        self.outside_classes += other.outside_classes
        for suffix, files in other._suffixes.items():
            self._count(suffix, files)

    def _count(self, suffix: str, files: int) -> None:
        known = suffix in self._suffixes or len(self._suffixes) < self._MOST
        self._suffixes[suffix if known else "others"] += files

    @property
    def other_suffix(self) -> int:
        """How many have another suffix."""
        return self._suffixes.total()

    def document(self) -> dict[str, Any]:
        """As run.json holds it."""
        return {
            "hidden": self.hidden,
            "outside_classes": self.outside_classes,
            "suffixes": dict(self._suffixes),
        }


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


def row_reader(config: Config) -> RowReader:
    """The reader of `--manifest`."""
    return RowReader(config.manifest or "", config.header, config.io_deadline, config.input or "")


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


def row_ref(config: Config, maker: RefMaker, row: Row, found: ListedFile | None = None) -> ImageRef:
    """The reference of one row.

    Args:
        config: of the job.
        maker: makes its keys.
        row: of the manifest.
        found: the image in a listing, where `needs_sizes`; an image that isn't there becomes a reject when it is read.
    """
    url = image_url(config, row.path)
    if row.byte_count is None and storage.is_local(url):
        found = storage.open_storage(url).stat(url)
    size = row.byte_count if row.byte_count is not None else found.bytes if found else 0
    etag = f"md5:{row.md5}" if row.md5 else found.etag if found else ""
    path = url.removeprefix(f"{config.input}/")  # relative also where the row holds the whole URL
    return maker.make(path, size, etag, row.label, row.split, row.features)


def _all_rows(config: Config) -> Iterator[ImageRef]:
    reader, maker = row_reader(config), RefMaker(config)
    known: dict[str, ListedFile] = {}
    prefixes: set[str] = set()
    for start, end in reader.ranges():
        for row in reader.rows(start, end):
            url = image_url(config, row.path)
            if needs_sizes(config) and (prefix := size_prefix(config, url)) not in prefixes:
                prefixes.add(prefix)
                known |= dict(list_sizes(config, prefix))
            yield row_ref(config, maker, row, known.get(url))


def list_sizes(config: Config, prefix: str) -> Iterator[tuple[str, ListedFile]]:
    """(URL, file) of everything below a folder."""
    store = storage.open_storage(prefix, config.io_deadline)
    return ((storage.join(prefix, file.path), file) for file in store.files(prefix))


def why_skipped(path: str, suffixes: Collection[str] = EXTENSIONS) -> str | None:
    """Why a listed file is no image by its name, or None for one that is; suffixes in lower case, without dots."""
    if path.startswith(".") or "/." in path:
        return HIDDEN
    stem, dot, suffix = path.rpartition("/")[2].rpartition(".")
    return None if dot and stem and suffix.strip().lower() in suffixes else OTHER_SUFFIX
