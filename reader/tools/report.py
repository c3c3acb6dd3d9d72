"""`report`: what is in a dataset and what of it needs a look first, as one HTML page with lists to leave that out.

All of it is computed from what is published: manifest, record tables, and one pass over the shards.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from beam_pipeline import schema, storage
from beam_pipeline.errors import UsageError
from beam_pipeline.schema.exclude import ListedImage
from beam_pipeline.schema.job import Run, as_run
from beam_pipeline.schema.manifest import FOREIGN_KEY, builtins_of
from beam_pipeline.schema.table import COLUMNS, name_hash
from beam_pipeline.text import first_few, name_line, plural
from reader.info import DatasetInfo, load_info, version_before
from reader.runs import Integers
from reader.tables import Array, Columns, read_columns
from reader.tools.diff import Difference, diff
from reader.tools.duplicates import find_groups, read_paths
from reader.tools.out_file import published_file
from reader.tools.pictures import FENCES, Pictures, statistics
from reader.tools.rejects import RejectGroup, rejects

_GROUPS = 500  # of copies that are kept for the page, the largest
_FEW = 10  # a class is small if it has less than this part of the median class
_LONG = 2  # an aspect ratio is extreme if it is this many times the median, among the most extreme 1 %
_EXTREME = 0.99
_COLUMNS = ("class", "bytes", "source_height", "source_width", "source_format", "passthrough", "name")
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


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of what needs a look.

    Attributes:
        kind: in a word: `leaks`, `labels`, `copies`, `classes`, `dark`, …
        title: the same for people.
        count: how many there are.
        unit: of what: `group`, `picture`, `class`, `image`.
        about: what they are, with the threshold if there is one.
        groups: (title, pictures) of some, the worst first.
        lines: for `imageshards write --exclude`, the worst first; of groups of copies some.
        listed: how many lines a complete list has.
        complete: the command that writes it, if these aren't all.
    """

    kind: str
    title: str
    count: int
    unit: str
    about: str
    groups: Sequence[tuple[str, Sequence[Shown]]] = ()
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
        if self.empty_classes:
            lines.append(
                f"{plural(len(self.empty_classes), 'class')} without a record: {first_few(self.empty_classes)}"
            )
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
            one.kind: {
                "count": one.count,
                "unit": one.unit,
                "about": one.about,
                "list": list(map(builtins_of, one.lines)),
                "listed": one.listed,
            }
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
        groups, pictures = rejects(info), statistics(info)
        findings = [
            *_copies(found, pictures),
            *_classes(info),
            *_suspicious(found, pictures),
            *_shapes(found),
            *_rejected(info, groups),
        ]
        counts = class_counts(info)
        empty = [name for number, name in enumerate(info.classes) if not counts[:, number].any()]
        changes = difference.classes.items() if difference else ()
        moved = {name: (before, now) for name, (before, now) in changes if before is not None and now is not None}
        made = Report(info.url, place, findings, empty, moved, pictures)
        file.write(render(made, found, difference, run_of(info)))
    return made


class Rows:
    """What the record tables say of all records of a dataset.

    Args:
        info: the dataset.

    Attributes:
        splits: names of those that have records, in the order of the rows.
        ends: int64 [splits], rows up to the end of each.
        columns: name → array [records]; an index of third-party files has `class` and `bytes` only.
    """

    def __init__(self, info: DatasetInfo) -> None:
        self.info = info
        self.is_foreign = FOREIGN_KEY in info.manifest
        self.splits = [name for name, split in info.splits.items() if split.records]
        self.ends = np.cumsum([info.splits[name].records for name in self.splits])
        there = {*Columns(info, next(shard for name in self.splits for shard in info.splits[name].shards))}
        names = [name for name in _COLUMNS if name in there]
        self.columns = {name: np.empty(self.ends[-1], COLUMNS[name]) for name in names}
        start = 0
        for table in read_columns(info, self.split, names):
            for name, column in self.columns.items():
                column[start : start + table.records] = table[name]
            start += table.records
        self._by_name = np.argsort(self.columns["name"]) if "name" in names else np.empty(0, np.int64)

    @property
    def split(self) -> str:
        """All splits as a split string."""
        return "+".join(self.splits)

    def find(self, path: str) -> int:
        """The row of a path, as lists have it."""
        if self.is_foreign:
            split, number = re.fullmatch(r"(\w+)\[(\d+):\d+\]", path).groups()  # type: ignore[union-attr]
            return int(self.row(split, int(number)))
        names = self.columns["name"]
        return int(self._by_name[np.searchsorted(names, np.uint64(name_hash(path)), sorter=self._by_name)])

    def row(self, split: str, record: int | Integers) -> Any:
        """The row of a record of a split."""
        at = self.splits.index(split)
        return record + (self.ends[at - 1] if at else 0)

    def split_of(self, row: int) -> str:
        """The split that a row is in."""
        return self.splits[int(np.searchsorted(self.ends, row, "right"))]

    def label_of(self, row: int) -> str:
        """The class that a row is of."""
        return self.info.classes[int(self.columns["class"][row])]

    def listed(self, rows: Integers, reason: Callable[[int], str]) -> list[ListedImage]:
        """Lines for some rows, in their order; `reason` is given the index of each."""
        ascending, at = np.unique(rows, return_inverse=True)
        names = read_paths(self.info, self.splits, ascending)
        paths = (names[number].decode("utf-8", "surrogateescape") for number in at.tolist())
        return [ListedImage(path, reason(number)) for number, path in enumerate(paths)]

    def finding(self, kind: str, title: str, about: str, rows: Integers, note: Callable[[int], str]) -> Finding:
        """A finding of single pictures, the worst first."""
        lines = self.listed(rows, note)
        shown = [Shown(row, line.path, line.reason) for row, line in zip(rows.tolist(), lines, strict=True)]
        return Finding(kind, title, len(lines), "picture", about, [("", shown)], lines, len(lines))


def run_of(info: DatasetInfo) -> Run:
    """How the job went that wrote the dataset; all defaults if that isn't known."""
    try:
        return as_run(json.loads(info.storage.read(info.path(schema.RUN_FILE))))
    except (FileNotFoundError, ValueError):
        return Run()


def _difference(info: DatasetInfo) -> Difference | None:
    """What differs from the version before; None if there is none."""
    try:
        return None if FOREIGN_KEY in info.manifest else diff(version_before(info), info)
    except UsageError:
        return None


def class_counts(info: DatasetInfo) -> Array:
    """int64 [splits, classes]: records of each split that has some."""
    return np.array([split.class_counts for split in info.splits.values() if split.records], np.int64)


# --- what needs a look


def _copies(found: Rows, pictures: Pictures) -> Iterator[Finding]:
    """Groups of pictures that look the same: across splits, across labels, and the rest."""
    kept: dict[str, list[tuple[int, str, list[ListedImage]]]] = {"leaks": [], "labels": [], "copies": []}
    counts, listed = dict.fromkeys(kept, 0), dict.fromkeys(kept, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "near.jsonl")
        find_groups(found.info, path, pictures)
        for key, group in groupby(_lines(path), lambda line: line.group):
            lines = list(group)
            rows = [found.find(line.path) for line in lines]
            is_leak = len({*map(found.split_of, rows)}) > 1
            is_conflict = len({*found.columns["class"][rows].tolist()}) > 1
            for kind in ["labels"] * is_conflict + ["leaks"] * is_leak or ["copies"]:
                counts[kind] += 1
                listed[kind] += len(lines) if kind == "labels" or not is_conflict else 0
                heapq.heappush(kept[kind], (len(lines), key, lines))
                if len(kept[kind]) > _GROUPS:
                    heapq.heappop(kept[kind])
    about = {
        "leaks": "The same picture, or one that looks like it, is in several splits, so the evaluation is better than "
        "the model. The list keeps the one that isn't in train; a group with several labels is in the list of these.",
        "labels": "Pictures that look the same have several labels. Which is right only you can say: in the list, set "
        "keep of a line to true, and --exclude leaves out the others of its group.",
        "copies": "A picture comes several times in one split. The list keeps one of each group.",
    }
    titles = {"leaks": "Leaks between splits", "labels": "Contradicting labels", "copies": "Copies within a split"}
    for kind, groups in kept.items():
        largest = [lines for *_, lines in sorted(groups, key=lambda group: (-group[0], group[1]))]
        shown = [(_across(found, lines), [_shown(found, line) for line in lines]) for lines in largest]
        is_decided = (kind == "labels" or lines[0].keep is not None for lines in largest)
        every = [line for lines in compress(largest, is_decided) for line in lines]
        complete = f"imageshards duplicates {found.info.url} --near --out FILE"
        yield Finding(kind, titles[kind], counts[kind], "group", about[kind], shown, every, listed[kind], complete)


def _lines(path: Path) -> Iterator[ListedImage]:
    with path.open("rb") as file:
        yield from (msgspec.convert(json.loads(line), ListedImage) for line in file)


def _shown(found: Rows, line: ListedImage) -> Shown:
    row = found.find(line.path)
    return Shown(row, line.path, f"{found.split_of(row)} · {found.label_of(row)}")


def _across(found: Rows, lines: Sequence[ListedImage]) -> str:
    rows = [found.find(line.path) for line in lines]
    parts = [sorted({*map(of, rows)}) for of in (found.split_of, found.label_of)]
    across = " · ".join(first_few(part, 5) for part in parts)
    return f"{plural(len(lines), 'image')}: {across}"


def _classes(info: DatasetInfo) -> Iterator[Finding]:
    """Classes that are empty, missing in a split, or small."""
    counts, splits = class_counts(info), [name for name, split in info.splits.items() if split.records]
    totals = counts.sum(0)
    median = float(np.median(totals))
    bad = np.flatnonzero((counts == 0).any(0) | (totals * _FEW < median))
    titles = []
    for number in bad[np.argsort(totals[bad], kind="stable")].tolist():
        missing = [name for name, count in zip(splits, counts[:, number].tolist(), strict=True) if not count]
        text = f"none in {', '.join(missing)}" if totals[number] and missing else ""
        titles.append(
            (" · ".join(filter(None, (info.classes[number], plural(int(totals[number]), "image"), text))), ())
        )
    about = f"No record in a split, or less than 1/{_FEW} of the median class, which has {median:,.0f}."
    yield Finding("classes", "Small and missing classes", len(titles), "class", about, titles)


def _suspicious(found: Rows, pictures: Pictures) -> Iterator[Finding]:
    """What the statistics of the pictures say."""
    for reason, suspects in pictures.suspicious().items():
        title, meaning = _SUSPICIOUS[reason]
        side = "below" if FENCES[reason].is_low else "above"
        about = f"{meaning}: {side} {suspects.threshold:.3g}, which follows from the quartiles of this dataset."
        notes = [f"{reason.replace('_', ' ')}: {value:.3g}" for value in suspects.values.tolist()]
        yield found.finding(reason, title, about, suspects.rows, notes.__getitem__)


def _shapes(found: Rows) -> Iterator[Finding]:
    """Extreme aspect ratios, and originals that were enlarged."""
    if "source_height" not in found.columns:
        return
    height, width = (found.columns[name].astype(np.float64) for name in ("source_height", "source_width"))
    ratio = np.maximum(height / width, width / height)
    threshold = max(float(np.quantile(ratio, _EXTREME)), _LONG * float(np.median(ratio)))
    rows = np.flatnonzero(ratio >= threshold)
    rows = rows[np.argsort(-ratio[rows], kind="stable")]
    about = f"The longer side of the original is at least {threshold:.2g} times the shorter one."
    note = [f"{width[row]:.0f} × {height[row]:.0f}" for row in rows.tolist()]
    yield found.finding("aspect", "Extreme aspect ratios", about, rows, note.__getitem__)
    image = found.info.image
    if image.min_size is None or image.min_size != image.max_size:
        return  # every image has its own size
    factor = np.maximum(image.min_size[0] / height, image.min_size[1] / width)
    rows = np.flatnonzero(factor >= _LONG)
    rows = rows[np.argsort(-factor[rows], kind="stable")]
    enlarged = plural(int((factor > 1).sum()), "original")
    about = f"{enlarged} of fewer pixels than is stored were enlarged; these at least {_LONG} times."
    note = [f"{width[row]:.0f} × {height[row]:.0f}" for row in rows.tolist()]
    yield found.finding("enlarged", "Tiny originals", about, rows, note.__getitem__)


def _rejected(info: DatasetInfo, groups: Sequence[RejectGroup]) -> Iterator[Finding]:
    """Images that got no record."""
    titles = [(f"{group.what} · {group.count:,} · {first_few(group.paths)}".strip(" ·"), ()) for group in groups]
    lines: list[ListedImage] = []
    if schema.REJECTS_FILE in info.manifest["files"]:
        text = info.storage.read(info.path(schema.REJECTS_FILE)).splitlines()
        lines = [ListedImage(one["path"], one["reason"]) for one in map(json.loads, text)]
    about = "Images that got no record. Listed, they are no longer read and counted by the next version."
    count = sum(group.count for group in groups)
    yield Finding("rejects", "Rejected images", count, "image", about, titles, lines, len(lines))
