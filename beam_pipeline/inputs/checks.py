"""Checks the input before there is a job; reads the labels file."""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice

from beam_pipeline import storage
from beam_pipeline.config import Config, splits_text, wrong
from beam_pipeline.errors import UsageError, plural
from beam_pipeline.inputs.folders import (
    HIDDEN_FOLDERS,
    ClassFolder,
    ListingSummary,
    class_folders,
    class_name,
    list_images,
    why_skipped,
)
from beam_pipeline.inputs.manifest_rows import row_refs

_LOOKED_AT = 1000  # files at most, of an input without class folders
_SPLIT_NAMES = frozenset({"train", "val", "valid", "validation", "dev", "test"})


def check_input(config: Config) -> None:
    """Look for class folders with images in them, or rows.

    Raises:
        UsageError: nothing there, no class folders, a class that isn't in the labels file, no image; says what was
            found.
    """
    if config.layout == "manifest":
        _check_manifest(config)
        return
    if storage.is_local(config.input) and not os.path.isdir(config.input):
        raise UsageError(
            f"--input {config.input!r}: {'a file, not a folder' if os.path.exists(config.input) else 'no such folder'}"
        )
    try:
        summary = ListingSummary()
        folders = class_folders(config, summary)
        if not folders:
            raise _no_classes(config, summary.counts[HIDDEN_FOLDERS])
        _check_not_splits(config, {folder.label for folder in folders})
        _check_labels(config, folders)
        if not any(True for folder in folders for _ in list_images(config, folder, summary)):
            raise UsageError(
                f"--input {config.input!r}: no image in {plural(len(folders), 'class folder')} ("
                f"{plural(summary.suffixes.total(), 'file')} without an image suffix, {summary.hidden} hidden); "
                f"images end in {', '.join(sorted(config.extensions))}"
            )
    except FileNotFoundError:
        raise UsageError(f"--input {config.input!r}: no such bucket") from None


def _check_manifest(config: Config) -> None:
    if "split" in config.header and config.splits is not None:
        raise wrong("--splits", splits_text(config.splits), "leave it out, the manifest has a column 'split'")
    if next(row_refs(config), None) is None:
        raise UsageError(f"--manifest {config.manifest!r}: it has a header but no row; add a row for each image")


def _no_classes(config: Config, hidden: int) -> UsageError:
    """What is there in place of class folders, and the likely reason."""
    of_splits = config.layout == "split_class_folders"
    wanted = "DIR/SPLIT/CLASS/image.jpg" if of_splits else "DIR/CLASS/image.jpg"
    store = storage.open_storage(config.input, config.io_deadline)
    files = [file.path for file in islice(store.files(config.input), _LOOKED_AT)]
    direct = sum("/" not in path and why_skipped(path, config.extensions) is None for path in files)
    parent, _, name = config.input.rpartition("/")
    if direct and parent and not parent.endswith("/") and not of_splits:
        many = plural(direct, "image") + " or more" * (len(files) == _LOOKED_AT)
        what = f"{many} directly in it; if {name!r} is a class, give --input {parent!r}, else sort them into {wanted}"
    elif files and of_splits:
        what = f"no class folders in folders of splits ({wanted}); for DIR/CLASS/image.jpg give --layout class_folders"
    else:
        found = f"{plural(direct, 'image')} directly" if direct else "no image" if files else "nothing"
        found = plural(hidden, "hidden folder") if hidden else found
        what = f"no class folders, {found} in it; --layout {config.layout} wants {wanted}"
    return UsageError(f"--input {config.input!r}: {what}")


def _check_not_splits(config: Config, labels: set[str]) -> None:
    if config.layout == "class_folders" and "train" in labels and len(labels) > 1 and labels <= _SPLIT_NAMES:
        raise UsageError(
            f"--input {config.input!r}: its folders are splits, not classes: {', '.join(sorted(labels))}; "
            "give --layout split_class_folders"
        )


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
    except (FileNotFoundError, UnicodeDecodeError) as error:
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "no such file"
        raise UsageError(f"--labels_file {url!r}: {why}; give a UTF-8 text file, one class a line") from None
    labels = tuple(class_name(line) for line in text.splitlines() if line.strip())
    repeated = [label for label, times in Counter(labels).items() if times > 1]
    if repeated or not labels:
        what = f"class {repeated[0]!r} stands in it twice" if repeated else "it is empty"
        raise UsageError(f"--labels_file {url!r}: {what}; write each class once, one a line")
    return labels
