"""Checks the input before a job starts; reads the labels file."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from itertools import chain, islice

from beam_pipeline import storage
from beam_pipeline.archives.tree import SUFFIX, tree
from beam_pipeline.config import Config, wrong
from beam_pipeline.errors import UsageError
from beam_pipeline.inputs.folders import (
    HIDDEN_FOLDERS,
    OUTSIDE_CLASSES,
    ClassFolder,
    ListingSummary,
    as_split_folders,
    class_folders,
    folder_names,
    list_images,
    split_word,
    why_skipped,
)
from beam_pipeline.inputs.manifest_rows import row_refs
from beam_pipeline.inputs.references import check_forms, class_name
from beam_pipeline.text import first_few, plural

_MAX_FILES_READ = 1000  # of a listing, for an input without class folders
# Archives without random access to their files.
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".7z", ".rar")
# What the level of the classes is judged by: so many class folders, and a page of files in each.
_FOLDERS_SEEN, _FILES_SEEN, _MAX_LEVELS = 16, 1000, 8
_MAX_STRAYS = 10  # images next to sub-folders that hold the others; a folder with that many is a class


def check_input(config: Config) -> None:
    """Check that there are class folders with images in them, or rows.

    Raises:
        UsageError: nothing is there, no class folder, a class that isn't in the labels file, classes on another level.
    """
    if config.layout == "manifest":
        if next(row_refs(config), None) is None:
            raise UsageError(f"--manifest {config.manifest!r}: it has a header but no row; add a row for each image")
        return
    summary = ListingSummary()
    if config.input.lower().endswith(_COMPRESSED) and os.path.isfile(config.input):
        raise wrong("--input", config.input, _how_to_unpack(config.input))
    if storage.is_local(config.input) and not os.path.isdir(config.input) and not tree(config).is_folder(config.input):
        what = "a file, not a folder" if os.path.exists(config.input) else "no such folder"
        raise wrong("--input", config.input, what)
    try:
        folders = class_folders(config, summary)
    except FileNotFoundError:
        raise wrong("--input", config.input, "no such bucket") from None
    if not folders:
        is_archive = config.input.lower().endswith(_COMPRESSED) and not storage.is_local(config.input)
        why = _how_to_unpack(config.input) if is_archive else _why_no_classes(config, summary)
        raise wrong("--input", config.input, why)
    labels = sorted({folder.label for folder in folders})
    if config.labels is not None and (unknown := set(labels) - set(config.labels)):
        lacks = first_few([repr(label) for label in sorted(unknown)])
        what = f"it lacks {lacks}; add a line for each class or move its folder away"
        raise wrong("--labels_file", config.labels_file, what)
    has_image = not config.folders_are_classes and _check_level(config, folders)
    if not has_image and not any(True for folder in folders for _ in list_images(config, folder, summary)):
        what = (
            f"no image in {plural(len(folders), 'class folder')} ("
            f"{plural(summary.suffixes.total(), 'file')} without an image suffix, {summary.hidden} hidden); "
            f"images end in {', '.join(sorted(config.extensions))}, or give --extensions any"
        )
        if packed := _packed(config, summary):
            what = packed.replace("instead", "in its folders instead")
        raise wrong("--input", config.input, what)


def _check_level(config: Config, folders: list[ClassFolder]) -> bool:
    """Check that class folders aren't splits, nor above the classes, by the sub-folders that hold their images.

    At most some 50 requests; 2 for most inputs, whose images lie directly in their class folders. Returns whether an
    image was seen there.
    """
    names, prefixes = [folder.unpacked[:-1] for folder in folders], [one.prefix for one in folders[:_FOLDERS_SEEN]]
    words = {split_word(name) for name in names[:_FOLDERS_SEEN]}
    of_splits, if_classes = config.layout == "split_class_folders", "if they are classes give --folders_are_classes"
    as_splits = f"give --layout split_class_folders{as_split_folders(names[:_FOLDERS_SEEN])}; {if_classes}"
    if len(names) == len(prefixes) and len(words) > 1 and "train" in words and None not in words and not of_splits:
        raise wrong("--input", config.input, f"its folders are splits, not classes: {', '.join(names)}; {as_splits}")
    up = f"move them up to DIR/{'SPLIT/' * of_splits}CLASS, or list the images in a --layout manifest"
    flat = 0
    for level in range(_MAX_LEVELS):
        nested: dict[str, set[str]] = {}
        for prefix in prefixes:
            inside = _sub_folders(config, prefix)
            nested |= {prefix: inside} if inside else {}
            flat += inside is None
            if flat > 1:  # one may be a test set without classes
                return True
        counts = Counter(chain.from_iterable(nested.values()))
        common = sorted(name for name in counts if counts[name] == len(nested))
        hold = f"the sub-folders {first_few([*map(repr, common or sorted(counts))])}"
        folder, below = next(iter(nested.items()), ("", set()))
        is_one = len({folder.label for folder in folders}) == 1 or (len(nested) == 1 and len(names) == len(prefixes))
        if nested and not level and (is_one if not flat else len(names) == 2 and len(below) > 1):
            fix = up if of_splits else f"give --input {storage.join(config.input, folder[:-1])!r}"
            folder = SUFFIX.sub("", folder[:-1])
            what = f"all images of {'' if flat else 'its only '}class {folder!r} are in {hold}"
            fix = f"if these are the classes {fix}"
            raise wrong("--input", config.input, f"{what}: {fix}; if {folder!r} is one give --folders_are_classes")
        prefixes = [f"{prefix}{name}/" for prefix, inside in nested.items() for name in sorted(inside)]
        if len(prefixes) > len(nested):  # else each has one: what is in that?
            fewest = min(map(len, nested.values()))
            # All of one folder's, or two and half of them: a single shared name such as 2020 says little.
            if len(nested) == 1 or len(common) < min(fewest, max(2, -(-fewest // 2))):
                break
            what = f"{f'all {len(names)}' if len(nested) == len(names) else len(nested)} class folders hold {hold}"
            ask = f"the classes? {up}; {if_classes}" if of_splits or level else f"splits? {as_splits}"
            raise wrong("--input", config.input, f"{what}: are {'these' if of_splits or level else 'they'} {ask}")
    return flat > 0


def _sub_folders(config: Config, prefix: str) -> set[str] | None:
    """The sub-folders that hold the images of a folder; None if they lie in it, but for fewer strays than sub-folders.

    A page of files shows that of most folders; only if it doesn't, the folder's own names are listed.
    """
    url = storage.join(config.input, prefix[:-1])
    images, are_all = _first_images(config, url)
    names, direct = {path.partition("/")[0] for path in images if "/" in path}, sum("/" not in path for path in images)
    if not are_all and direct < _MAX_STRAYS:
        inside = ListingSummary()
        names, direct = set(folder_names(config, prefix, inside)), inside.counts[OUTSIDE_CLASSES]
        if len(names) <= _FOLDERS_SEEN:
            names = {name for name in names if _first_images(config, storage.join(url, name))[0]}
    return None if direct and direct >= min(_MAX_STRAYS, len(names)) else names


def _first_images(config: Config, url: str) -> tuple[list[str], bool]:
    """The images among a page of the files below a folder, and whether these are all."""
    files = [file.path for file in islice(tree(config).files(url), _FILES_SEEN)]
    return [path for path in files if why_skipped(path, config.extensions) is None], len(files) < _FILES_SEEN


def _packed(config: Config, summary: ListingSummary) -> str:
    """That there are archives where there should be images, and what is unpacked; "" if none is."""
    endings = {ending[ending.rindex(".") :] for ending in _COMPRESSED} | {".tar", ".zip"}
    suffix, count = max(((ending, summary.suffixes[ending]) for ending in sorted(endings)), key=lambda item: item[1])
    unpack = 'unzip "$f" -d' if suffix == ".zip" else 'tar -xf "$f" -C'
    if tree(config).is_folder(config.input):
        what = f"{plural(count, f'{suffix} file')} instead of images, which can't be read inside an archive"
        return f"{what}: unpack it and give the folder, with these files as they are" if count else ""
    each = f'for f in *{suffix}; do mkdir "${{f%%.*}}" && {unpack} "${{f%%.*}}"; done'
    return f"{plural(count, f'{suffix} file')} instead of images; unpack each: {each}" if count else ""


def _how_to_unpack(url: str) -> str:
    is_here = storage.is_local(url)
    file = shlex.quote(url) if is_here else "FILE"
    commands = {".7z": f"7z x {file} -oDIR", ".rar": f"unrar x {file} DIR/"}
    command = commands.get(os.path.splitext(url)[1].lower(), f"tar -xf {file} -C DIR")
    copied = "" if is_here else "copy it to this machine, "
    return f"an archive that can't be read in place; {copied}unpack it and give the folder: {command}"


def _why_no_classes(config: Config, summary: ListingSummary) -> str:
    """The expected layout, what is there instead, and the likely reason."""
    of_splits = config.layout == "split_class_folders"
    wanted = "DIR/SPLIT/CLASS/image.jpg" if of_splits else "DIR/CLASS/image.jpg"
    if packed := _packed(config, summary):
        return packed
    files = [file.path for file in islice(tree(config).files(config.input), _MAX_FILES_READ)]
    direct = sum("/" not in path and why_skipped(path, config.extensions) is None for path in files)
    parent, _, name = config.input.rpartition("/")
    if direct and parent and not parent.endswith("/") and not of_splits:
        many = plural(direct, "image") + " or more" * (len(files) == _MAX_FILES_READ)
        fix = f"give --input {parent!r}, else sort them into {wanted}, or list them in a --layout manifest"
        return f"{many} directly in it; if {name!r} is a class, {fix}"
    if hidden := summary.counts[HIDDEN_FOLDERS]:
        return f"looked for {wanted}, found only {plural(hidden, 'hidden folder')}"
    if files and of_splits:
        return f"looked for {wanted}, found no class folders; for DIR/CLASS/image.jpg give --layout class_folders"
    if not files:
        return f"looked for {wanted}, found nothing"
    others = [plural(count, f"{suffix} file") for suffix, count in summary.suffixes.most_common(1)]
    return f"looked for {wanted}, found {' and '.join([*others, 'no class folders'])}"


def read_labels(url: str, deadline_s: float) -> tuple[str, ...]:
    """The lines of a labels file, in order; empty ones may follow the last.

    Raises:
        UsageError: not there, empty, an empty line before a class (ids would move), or a class twice.
    """
    try:
        text = storage.open_storage(url, deadline_s).read(url).decode("utf-8-sig")
    except (FileNotFoundError, UnicodeDecodeError) as error:
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "no such file"
        raise wrong("--labels_file", url, f"{why}; give a UTF-8 text file, one class per line") from None
    lines = text.splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    labels = tuple(class_name(line, "--labels_file: class") for line in lines)
    if not labels:
        raise wrong("--labels_file", url, "it is empty; write each class once, one per line")
    label, times = Counter(labels).most_common(1)[0]
    if times > 1:
        raise wrong("--labels_file", url, f"class {label!r} is repeated; write each class once, one per line")
    check_forms(labels)
    return labels
