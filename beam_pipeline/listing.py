"""From a folder or URL to image references, in pages: class folders first, then the images of each.

What is no image by its name is skipped and counted by kind; no name is changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from beam_pipeline import storage
from beam_pipeline.errors import UsageError
from beam_pipeline.images.files import EXTENSIONS
from beam_pipeline.manifest_rows import Row, RowReader
from beam_pipeline.options import Config
from beam_pipeline.schema import NAME_PATTERN
from beam_pipeline.sharding import ImageRef, Splits, order_key
from beam_pipeline.storage import ListedFile

HIDDEN = "hidden"
OTHER_SUFFIX = "other-suffix"
Count = Callable[[str], None]


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


def class_folders(config: Config) -> list[ClassFolder]:
    """The class folders of an input, by delimiter listings.

    Raises:
        FileNotFoundError: there is no such bucket.
        UsageError: a folder's name can't be a split or a class.
    """
    assert config.input is not None
    store = storage.open_storage(config.input, config.io_deadline)
    if config.layout == "class_folders":
        return [ClassFolder(f"{name}/", _label(name), None) for name in _visible(store.folders(config.input))]
    folders = []
    for split in _visible(store.folders(config.input)):
        if not NAME_PATTERN.fullmatch(split):
            raise UsageError(f"--input: folder {split!r} can't be a split: rename it to a-z, 0-9 and _, a letter first")
        for name in _visible(store.folders(storage.join(config.input, split))):
            folders.append(ClassFolder(f"{split}/{name}/", _label(name), split))
    return folders


def _visible(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith(".")]


def _label(name: str) -> str:
    """A folder's name as a class name.

    Raises:
        UsageError: readers of the dataset would change it.
    """
    if not name.strip() or name != name.strip() or len(name.splitlines()) != 1:
        raise UsageError(
            f"class folder {name!r}: rename it, white space around a class name and line breaks are lost by TFDS"
        )
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
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


def list_images(config: Config, folder: ClassFolder, count: Count) -> Iterator[ImageRef]:
    """The images below one class folder, nested folders included, streamed.

    Args:
        config: input, seed and splits.
        folder: one of `class_folders`.
        count: called with `HIDDEN` or `OTHER_SUFFIX` for each file that is skipped.
    """
    assert config.input is not None
    maker, suffixes = RefMaker(config), config.suffixes
    store = storage.open_storage(config.input, config.io_deadline)
    for file in store.files(storage.join(config.input, folder.prefix.rstrip("/"))):
        skipped = why_skipped(file.path, suffixes)
        if skipped:
            count(skipped)
        else:
            yield maker.make(folder.prefix + file.path, file.bytes, file.etag, folder.label, folder.split)


def all_images(config: Config) -> Iterator[ImageRef]:
    """Every image of the input in this process, streamed, folders one after the other."""
    if config.layout == "manifest":
        yield from _all_rows(config)
        return
    for folder in class_folders(config):
        yield from list_images(config, folder, lambda kind: None)


def row_reader(config: Config) -> RowReader:
    """The reader of `--manifest`."""
    return RowReader(config.manifest or "", config.header, config.io_deadline)


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


def check_input(config: Config) -> None:
    """Look at the input before a job is submitted.

    Raises:
        UsageError: nothing there, no class folders, a class that isn't in the labels file, no image; says what was
            found.
    """
    if config.layout == "manifest":
        _check_manifest(config)
        return
    assert config.input is not None
    if storage.is_local(config.input) and not os.path.isdir(config.input):
        raise UsageError(
            f"--input {config.input!r}: {'a file, not a folder' if os.path.exists(config.input) else 'no such folder'}"
        )
    try:
        folders = class_folders(config)
        store = storage.open_storage(config.input, config.io_deadline)
        if not folders:
            raise _no_classes(config, store)
        _check_labels(config, folders)
        found: Counter[str] = Counter()
        if not any(_has_image(config, folder, found) for folder in folders):
            skipped = f"{found[OTHER_SUFFIX]} files without an image suffix, {found[HIDDEN]} hidden"
            raise UsageError(
                f"--input {config.input!r}: {len(folders)} class folders but no image ({skipped}); "
                f"images end in {', '.join(sorted(config.suffixes))}"
            )
    except FileNotFoundError:
        raise UsageError(f"--input {config.input!r}: no such bucket") from None


def _check_manifest(config: Config) -> None:
    if "split" in config.header and config.splits is not None:
        raise UsageError(f"--splits {config.splits!r}: leave it out, the manifest has a column 'split'")
    reader = row_reader(config)
    if not any(True for start, end in reader.ranges() for _ in reader.rows(start, end)):
        raise UsageError(f"--manifest {config.manifest!r}: it has a header but no row; add a row for each image")


def _has_image(config: Config, folder: ClassFolder, found: Counter[str]) -> bool:
    images = list_images(config, folder, lambda kind: found.update((kind,)))
    return next(images, None) is not None


def _no_classes(config: Config, store: storage.Storage) -> UsageError:
    assert config.input is not None
    files = 0
    for files, _ in enumerate(store.files(config.input), 1):
        if files == 1000:
            break
    wanted = "DIR/CLASS/image.jpg" if config.layout == "class_folders" else "DIR/SPLIT/CLASS/image.jpg"
    found = f"{files}{'+' if files == 1000 else ''} files in no such folders" if files else "nothing in it"
    return UsageError(f"--input {config.input!r}: no class folders, {found}; --layout {config.layout} wants {wanted}")


def _check_labels(config: Config, folders: list[ClassFolder]) -> None:
    if config.labels is None:
        return
    unknown = sorted({folder.label for folder in folders} - set(config.labels))
    if unknown:
        raise UsageError(
            f"--labels_file {config.labels_file!r}: class folder {unknown[0]!r} is not in it"
            f"{f', nor {len(unknown) - 1} more' if unknown[1:] else ''}; add a line for each or move the folder away"
        )


def read_labels(url: str, deadline_s: float) -> tuple[str, ...]:
    """The lines of a labels file, in order.

    Raises:
        UsageError: not there, empty, or a class twice.
    """
    try:
        text = storage.open_storage(url, deadline_s).read(url).decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--labels_file {url!r}: {type(error).__name__}; give a UTF-8 text file, one class a line"
        ) from None
    labels = tuple(_label(line) for line in text.splitlines() if line.strip())
    repeated = [label for label, times in Counter(labels).items() if times > 1]
    if repeated or not labels:
        what = f"class {repeated[0]!r} stands in it twice" if repeated else "it is empty"
        raise UsageError(f"--labels_file {url!r}: {what}; write each class once, one a line")
    return labels
