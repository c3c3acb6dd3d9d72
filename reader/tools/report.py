"""`report`: what is in a dataset and what of it needs a look first, as one HTML page with lists to leave that out.

All of it is computed from what is published: manifest, record tables, and one pass over the shards.
"""

from __future__ import annotations

import heapq
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from beam_pipeline import schema, storage
from beam_pipeline.errors import UsageError
from beam_pipeline.schema.exclude import ListedImage
from beam_pipeline.schema.manifest import builtins_of
from beam_pipeline.text import first_few, name_line, plural
from reader.info import DatasetInfo, load_info, version_before
from reader.runs import Integers
from reader.tables import Array, Columns, read_columns
from reader.tools.diff import Difference, diff
from reader.tools.duplicates import GroupedImage, find_groups
from reader.tools.out_file import published_file
from reader.tools.pictures import FENCES, Pictures, statistics
from reader.tools.read import read_paths, with_records
from reader.tools.rejects import rejects

_GROUPS = 500  # of copies that are kept for the page, the largest
_FEW = 10  # a class is small if it has less than this part of the median class
_LONG = 2  # an aspect ratio is extreme if it is this many times the median, among the most extreme 1 %
_EXTREME = 0.99
_COLUMNS = ("class", "bytes", "source_height", "source_width", "source_format", "passthrough")
# Kind → title, and what the groups are.
_COPIES = {
    "leaks": (
        "Leaks between splits",
        "The same picture, or one that looks like it, is in several splits, so the evaluation is better than "
        "the model. The list keeps the one that isn't in train; a group with several labels is in the list of these.",
    ),
    "labels": (
        "Contradicting labels",
        "Pictures that look the same have several labels. Which is right only you can say: in the list, set "
        "keep of a line to true, and --exclude leaves out the others of its group.",
    ),
    "copies": (
        "Copies within a split",
        "A picture comes several times in one split. The list keeps one of each group.",
    ),
}
# What `pictures.statistics` finds suspicious → title, meaning of its number.
_SUSPICIOUS = {
    "dark": ("Dark pictures", "Mean of the grey picture, 0 to 255"),
    "bright": ("Bright pictures", "Mean of the grey picture, 0 to 255"),
    "flat": ("Pictures with little contrast", "Standard deviation of the grey picture"),
    "blurred": ("Blurred pictures", "Variance of the Laplacian by that of the grey picture"),
    "one_colour": ("Pictures of nearly one colour", "Largest share of one colour"),
}


class Shown(NamedTuple):
    """A picture to show.

    Attributes:
        row: its record's number among those of all splits.
        name: of its file; `train[17:18]` for record 17 of third-party files.
        note: what else is to be told of it.
    """

    row: int
    name: str
    note: str = ""


class Group(NamedTuple):
    """Pictures of a finding that belong together, or a line of text.

    Attributes:
        title: the line; "" above a single picture.
        pictures: none below a line of text.
        size: how many of what the finding counts.
    """

    title: str
    pictures: Sequence[Shown] = ()
    size: int = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of what needs a look.

    Attributes:
        kind: in a word: `leaks`, `labels`, `copies`, `classes`, `dark`, …
        title: the same for people.
        count: how many there are.
        unit: of what: `group`, `picture`, `class`, `image`.
        about: what they are, with the threshold if there is one.
        groups: of some, the worst first.
        lines: for `imageshards write --exclude`, the worst first; of groups of copies some.
        listed: how many lines a complete list has.
        complete: the command that writes it.
    """

    kind: str
    title: str
    count: int
    unit: str
    about: str
    groups: Sequence[Group]
    lines: Sequence[ListedImage] = ()
    listed: int = 0
    complete: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What `report` returns.

    Attributes:
        dataset: its URL.
        out: where the page is.
        findings: in the order of the page; all that was looked for.
        empty_classes: those without a record.
        moved_classes: name → (class id in the version before, class id now) of those that differ.
        pictures: the numbers of every record.
    """

    dataset: str
    out: str
    findings: Sequence[Finding]
    empty_classes: Sequence[str]
    moved_classes: Mapping[str, tuple[int, int]]
    pictures: Pictures

    @property
    def faults(self) -> list[str]:
        """What should stop a long training, a line each: leaks, contradicting labels, empty classes, moved ids."""
        counts = {finding.kind: finding.count for finding in self.findings}
        moved = [f"{name} {before} → {now}" for name, (before, now) in self.moved_classes.items()]
        lines = [f"{plural(counts['leaks'], 'group')} of copies in several splits"] * bool(counts["leaks"])
        lines += [f"{plural(counts['labels'], 'group')} of copies with several labels"] * bool(counts["labels"])
        if empty := self.empty_classes:
            lines.append(f"{plural(len(empty), 'class')} without a record: {first_few(empty)}")
        if moved:
            lines.append(f"{plural(len(moved), 'class id')} moved since the version before: {first_few(moved)}")
        return lines

    def __repr__(self) -> str:
        lines = [f"  {one.title.lower()}: {plural(one.count, one.unit)}" for one in self.findings if one.count]
        lines = lines or ["  nothing was found that needs a look"]
        return "\n".join(map(name_line, [f"report on {self.dataset}", *lines, f"page: {self.out}"]))

    def as_json(self) -> dict[str, Any]:
        """The findings with their lists, and a row per record."""
        findings = {
            one.kind: {name: getattr(one, name) for name in ("count", "unit", "about", "listed")}
            | {"list": list(map(builtins_of, one.lines))}
            for one in self.findings
        }
        document: dict[str, Any] = {"dataset": self.dataset, "out": self.out, "faults": self.faults}
        classes = {"empty_classes": list(self.empty_classes), "moved_classes": dict(self.moved_classes)}
        return document | classes | {"findings": findings, "pictures": list(self.pictures.rows())}


def report(dataset: DatasetInfo | str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Report:
    """Write a page on what is in a dataset: one HTML file of up to 4 MB that asks no network for anything.

    Args:
        dataset: what `load_info` returned, or the URL.
        out: file or URL to write; None for report.html in the dataset's folder, where it changes no hash.

    Raises:
        UsageError: `out` can't be written, or Jinja2 isn't installed.
        ImageShardsError: the dataset is compressed, a record is corrupt, or a file isn't what was published.
    """
    from reader.tools.page import render  # Jinja2

    info = load_info(dataset)
    place = storage.normalize(os.fspath(info.path(schema.REPORT_FILE) if out is None else out))
    with published_file(place) as file:
        found, difference = Rows(info), _difference(info)
        rejected, pictures = list(_rejected(found)), statistics(info)
        findings = [*_copies(found, pictures), *_classes(found), *_suspicious(found, pictures)]
        findings += [*_shapes(found), *rejected]
        empty = [info.classes[number] for number in np.flatnonzero(found.counts.sum(0) == 0)]
        changes = difference.classes.items() if difference else ()
        moved = {name: (before, now) for name, (before, now) in changes if before is not None and now is not None}
        made = Report(info.url, place, findings, empty, moved, pictures)
        file.write(render(made, found, difference))
    return made


class Rows:
    """What the record tables say of all records of a dataset.

    Args:
        info: the dataset.

    Attributes:
        url: the dataset's, quoted for a shell.
        splits: names of those that have records, in the order of the rows.
        split: all of these as a split string.
        columns: name → array [records]; an index of third-party files has `class` and `bytes` only.
        counts: int64 [splits, classes], records of each; of empty splits, too.
    """

    def __init__(self, info: DatasetInfo) -> None:
        self.info, self.url = info, shlex.quote(info.url)
        self.splits = with_records(info)
        self.split = "+".join(self.splits)
        self.counts = np.array([split.class_counts for split in info.splits.values()], np.int64)
        there = {*Columns(info, next(shard for name in self.splits for shard in info.splits[name].shards))}
        names = [name for name in _COLUMNS if name in there]
        tables = list(read_columns(info, self.split, names))
        self.columns = {name: np.concatenate([table[name] for table in tables]) for name in names}

    def finding(self, kind: str, title: str, about: str, rows: Integers, notes: Sequence[str]) -> Finding:
        """A finding of single pictures, the worst first; each note is of a row."""
        paths = [path.decode("utf-8", "surrogateescape") for path in read_paths(self.info, self.splits, rows)]
        lines = list(map(ListedImage, paths, notes))
        groups = [Group("", [Shown(*one)]) for one in zip(rows.tolist(), paths, notes, strict=True)]
        return Finding(kind, title, len(lines), "picture", about, groups, lines, len(lines), self.everything)

    @property
    def everything(self) -> str:
        """The command that prints the report with all of its lists."""
        return f"imageshards report {self.url} --json"


def _difference(info: DatasetInfo) -> Difference | None:
    """What differs from the version before; None if there is none."""
    try:
        return None if info.is_index else diff(version_before(info), info)
    except UsageError:
        return None


# --- what needs a look


def _copies(found: Rows, pictures: Pictures) -> Iterator[Finding]:
    """Groups of pictures that look the same: across splits, across labels, and the rest."""
    kept: dict[str, list[tuple[int, str, Sequence[GroupedImage], Sequence[ListedImage]]]]
    kept = {kind: [] for kind in _COPIES}
    counts, listed = dict.fromkeys(kept, 0), dict.fromkeys(kept, 0)

    def take(images: Sequence[GroupedImage], lines: Sequence[ListedImage]) -> None:
        is_leak = len({one.split for one in images}) > 1
        is_conflict = len({one.label for one in images}) > 1
        for kind in ["labels"] * is_conflict + ["leaks"] * is_leak or ["copies"]:
            counts[kind] += 1
            listed[kind] += len(lines) if kind == "labels" or not is_conflict else 0
            heapq.heappush(kept[kind], (len(lines), lines[0].group, images, lines))
            if len(kept[kind]) > _GROUPS:
                heapq.heappop(kept[kind])

    find_groups(found.info, take, pictures)
    complete = f"imageshards duplicates {found.url} --near --out FILE"
    for (kind, largest), (title, about) in zip(kept.items(), _COPIES.values(), strict=True):
        largest.sort(key=lambda group: (-group[0], group[1]))
        groups = [_group(images) for _, _, images, _ in largest]
        decided = [lines for *_, lines in largest if kind == "labels" or lines[0].keep is not None]
        every = [line for lines in decided for line in lines]
        yield Finding(kind, title, counts[kind], "group", about, groups, every, listed[kind], complete)


def _group(images: Sequence[GroupedImage]) -> Group:
    splits, labels = sorted({one.split for one in images}), sorted({one.label for one in images})
    shown = [Shown(one.row, one.name, f"{one.split} · {one.label}") for one in images]
    return Group(f"{plural(len(images), 'image')}: {first_few(splits, 5)} · {first_few(labels, 5)}", shown)


def _classes(found: Rows) -> Iterator[Finding]:
    """Classes that are empty, missing in a split, or small."""
    info, counts = found.info, found.counts
    totals = counts.sum(0)
    median = float(np.median(totals))
    bad = np.flatnonzero((counts == 0).any(0) | (totals * _FEW < median))
    groups = []
    for number in bad[np.argsort(totals[bad], kind="stable")].tolist():
        of_splits = zip(info.splits, counts[:, number].tolist(), strict=True)
        groups.append(Group(f"{info.classes[number]} · " + ", ".join(f"{name} {count:,}" for name, count in of_splits)))
    about = f"No record in a split, or less than 1/{_FEW} of the median class, which has {median:,.0f}."
    yield Finding("classes", "Small and missing classes", len(groups), "class", about, groups)


def _suspicious(found: Rows, pictures: Pictures) -> Iterator[Finding]:
    """What the statistics of the pictures say."""
    for reason, suspects in pictures.suspicious().items():
        title, meaning = _SUSPICIOUS[reason]
        side = "below" if FENCES[reason].is_low else "above"
        about = f"{meaning}: {side} {suspects.threshold:.3g}, which follows from the quartiles of this dataset."
        notes = [f"{reason.replace('_', ' ')}: {value:.3g}" for value in suspects.values.tolist()]
        yield found.finding(reason, title, about, suspects.rows, notes)


def _shapes(found: Rows) -> Iterator[Finding]:
    """Extreme aspect ratios, and originals that were enlarged."""
    if "source_height" not in found.columns:
        return
    height, width = (found.columns[name].astype(np.float64) for name in ("source_height", "source_width"))

    def finding(kind: str, title: str, about: str, values: Array, threshold: float) -> Finding:
        rows = np.flatnonzero(values >= threshold)
        rows = rows[np.argsort(-values[rows], kind="stable")]
        notes = [f"{width[row]:.0f} × {height[row]:.0f}" for row in rows.tolist()]
        return found.finding(kind, title, about, rows, notes)

    ratio = np.maximum(height / width, width / height)
    threshold = max(float(np.quantile(ratio, _EXTREME)), _LONG * float(np.median(ratio)))
    about = f"The longer side of the original is at least {threshold:.2g} times the shorter one."
    yield finding("aspect", "Extreme aspect ratios", about, ratio, threshold)
    image = found.info.image
    if image.min_size is None or image.min_size != image.max_size:
        return  # every image has its own size
    factor = np.maximum(image.min_size[0] / height, image.min_size[1] / width)
    enlarged = plural(int((factor > 1).sum()), "original")
    about = f"{enlarged} of fewer pixels than is stored were enlarged; these at least {_LONG} times."
    yield finding("enlarged", "Tiny originals", about, factor, _LONG)


def _rejected(found: Rows) -> Iterator[Finding]:
    """Images that got no record."""
    info, lines, reasons = found.info, list[ListedImage](), rejects(found.info)
    groups = [
        Group(f"{one.what} · {one.count:,} · {first_few(one.paths)}".strip(" ·"), (), one.count) for one in reasons
    ]
    if schema.REJECTS_FILE in info.manifest["files"]:
        text = info.storage.read(info.path(schema.REJECTS_FILE)).splitlines()
        lines = [ListedImage(one["path"], one["reason"]) for one in map(json.loads, text)]
    about = "Images that got no record. Listed, they are no longer read and counted by the next version."
    count = sum(one.count for one in reasons)
    yield Finding("rejects", "Rejected images", count, "image", about, groups, lines, len(lines), found.everything)
