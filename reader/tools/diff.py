"""`diff`: what differs between two versions, from their record tables; of the records only the names shown are read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.recfunctions import repack_fields

from beam_pipeline.errors import CorruptRecordError, ImageShardsError, UsageError
from beam_pipeline.schema.table import Table
from beam_pipeline.text import first_few, name_line, plural
from reader.info import DatasetInfo, load_info, version_before
from reader.tools.read import read_paths, read_tables, with_records

KINDS = ("added", "removed", "changed", "moved", "relabelled", "moved_split")
_NAMES = 20  # shown of each kind
Rows = npt.NDArray[np.void]
# An image of a version, from its shard's record table; `label` numbers the class names of both versions, `number` is
# that of the record among those of all splits.
_ROW = np.dtype([("key", "<u8"), ("name", "<u8"), ("md5", "S16"), ("label", "<u4"), ("split", "u1"), ("number", "<i8")])


@dataclass(frozen=True, slots=True)
class Difference:
    """What `diff` returns; true if the versions differ.

    Attributes:
        a, b: the versions' URLs.
        counts: images by kind: `added`, `removed`; `changed` (other bytes at the same path); `moved` (the same bytes at
            another path: neither added nor removed); `relabelled` and `moved_split`, moved or not.
        names: the first 20 of each kind in the order of the records; (before, now) of those that moved.
        classes: name → (id before, id now), None for none, of the classes whose ids differ.
        configuration: flag → (value before, value now).
        leaked: moved images that were in split train and are in another now, or the other way round.
        leaked_since: why they did.
    """

    a: str
    b: str
    counts: dict[str, int]
    names: dict[str, list[Any]]
    classes: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    configuration: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    leaked: int = 0
    leaked_since: str = ""

    def __bool__(self) -> bool:
        return any(self.counts.values()) or bool(self.classes or self.configuration)

    def __repr__(self) -> str:
        if not self:
            return f"{self.a} and {self.b} hold the same images"
        words = {"changed": "with other bytes", "moved_split": "in another split"}
        lines, moved = [], {now for _, now in self.names["moved"]}  # named once
        for kind in KINDS:
            if count := self.counts[kind]:
                names = [" → ".join(name) if kind == "moved" else name for name in self.names[kind]]
                shown = [name for name in names if name not in moved]
                more = f"  and {count - len(shown):,} more" + " (see those that moved)" * (len(shown) < len(names))
                more = more if shown else "  all of them moved: see there"
                lines.append(f"{plural(count, 'image')} {words.get(kind, kind)}:")
                lines += [*(f"  {name}" for name in shown), *[more] * (count > len(shown))]
        if self.leaked:
            images = plural(self.leaked, "moved image")
            lines.append(f"warning: {images} changed between train and another split, since {self.leaked_since}")
        if self.classes:
            texts = [["none" if number is None else str(number) for number in pair] for pair in self.classes.values()]
            ids = [f"{name} {' → '.join(pair)}" for name, pair in zip(self.classes, texts, strict=True)]
            lines.append(f"ids of {plural(len(ids), 'class')} differ: {first_few(ids, _NAMES)}")
        lines += [f"--{flag} was {before!r}, is {now!r}" for flag, (before, now) in self.configuration.items()]
        return "\n".join(map(name_line, lines))


def diff(
    dataset: DatasetInfo | str | os.PathLike[str], other: DatasetInfo | str | os.PathLike[str] | None = None
) -> Difference:
    """Compare two versions of a dataset, from their record tables.

    Images are matched by path, the others by the MD5 of their source; of several with the same MD5, those that keep
    class and split first. That takes some 200 bytes of memory per image of one version.

    Args:
        dataset: the earlier version; if it is the only one, or the folder of all (for the newest), it is compared with
            the version before it.
        other: the later version.

    Raises:
        UsageError: one is an index of third-party files, whose records have no names; or no version is earlier.
        ImageShardsError: a record whose name is shown is corrupt.
    """
    given = load_info(dataset)
    versions = (version_before(given), given) if other is None else (given, load_info(other))
    for info in versions:
        if info.is_index:
            raise UsageError(f"{info.url}: its records were not written by imageshards, so they have no names")
    splits = sorted({*versions[0].splits, *versions[1].splits})
    labels = {name: number for number, name in enumerate(sorted({*versions[0].classes, *versions[1].classes}))}
    found = {kind: _Found() for kind in KINDS}
    is_train, leaked = np.array([split == "train" for split in splits]), 0
    removed, added = (_read_rows(info, splits, labels) for info in versions)
    for same in (["name"], ["md5", "label", "split"], ["md5", "label"], ["md5"]):
        first, second = _match(removed, added, same)
        for kind, column in {"changed": "md5", "relabelled": "label", "moved_split": "split"}.items():
            is_different = removed[column][first] != added[column][second]
            found[kind].add(removed[first[is_different]], added[second[is_different]])
        if same != ["name"]:
            found["moved"].add(removed[first], added[second])
            leaked += int((is_train[removed["split"][first]] != is_train[added["split"][second]]).sum())
        removed = np.delete(removed, first)
        added = np.delete(added, second)
    found["removed"].add(removed, removed)
    found["added"].add(added, added)
    names = {kind: found[kind].names(0 if kind == "removed" else 1, versions) for kind in KINDS}
    moved = list(zip(found["moved"].names(0, versions), names["moved"], strict=True))
    configuration = _different(*({**info.manifest["configuration"], "labels": None} for info in versions))
    return Difference(
        versions[0].url,
        versions[1].url,
        {kind: found[kind].count for kind in KINDS},
        {**names, "moved": moved},
        _different(*({name: number for number, name in enumerate(info.classes)} for info in versions)),
        configuration,  # without the labels: class ids say it
        leaked,
        _drawn_by(versions[1].manifest["configuration"], configuration) if leaked else "",
    )


def _drawn_by(flags: Mapping[str, Any], different: Mapping[str, Any]) -> str:
    """What puts an image of a version with these flags into another split when it moves."""
    if changed := [f"--{flag}" for flag in ("layout", "splits", "split_by", "stratify") if flag in different]:
        return f"{' and '.join(changed)} changed"
    if not flags["splits"]:
        return "the input says which split it is in"
    if flags.get("stratify"):
        return "--stratify gives each class its exact shares, also of what moves into it: leave it out to keep splits"
    by = flags["split_by"]
    return f"its path decides: {f'--split_by {by} takes another part' if by else '--split_by name keeps its split'}"


def _different(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = sorted(before.keys() | now.keys())
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def _read_rows(info: DatasetInfo, splits: Sequence[str], labels: Mapping[str, int]) -> Rows:
    """All images of a version."""
    labels_by_id = np.array([labels[name] for name in info.classes], np.uint32)

    every = np.empty(sum(split.records for split in info.splits.values()), _ROW)

    def take(split: str, rows: slice, table: Table) -> None:
        some = every[rows]
        some["key"], some["name"] = table["order_key"], table["name"]
        some["md5"] = np.ascontiguousarray(table["source_md5"]).view("S16").ravel()
        some["label"], some["split"] = labels_by_id[table["class"]], splits.index(split)

    read_tables(info, take)
    every["number"] = np.arange(len(every))
    return every


def _match(before: Rows, now: Rows, columns: list[str]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Indices of images that have the same values in some columns; if there are several, in pairs."""
    sides = []
    for rows in (before, now):
        packed = repack_fields(rows[columns])
        values = packed.view(f"S{packed.itemsize}")  # compares as bytes
        order = np.argsort(values, kind="stable")
        sides.append((order, values[order]))
    (first, ours), (second, theirs) = sides
    rank = np.arange(len(ours)) - np.searchsorted(ours, ours)  # among those with the same values
    at = np.searchsorted(theirs, ours) + rank
    is_pair = at < np.searchsorted(theirs, ours, "right")
    return first[is_pair], second[at[is_pair]]


class _Found:
    """Images of a kind: how many, and the first of them in the order of the records, before and now."""

    def __init__(self) -> None:
        self.count = 0
        self._first = [np.empty(0, _ROW)] * 2

    def add(self, before: Rows, now: Rows) -> None:
        self.count += len(now)
        first = np.argsort(now["key"], kind="stable")[:_NAMES]
        sides = [np.concatenate(pair) for pair in zip(self._first, (before[first], now[first]), strict=True)]
        order = np.argsort(sides[1]["key"], kind="stable")[:_NAMES]
        self._first = [rows[order] for rows in sides]

    def names(self, version: int, versions: Sequence[DatasetInfo]) -> list[str]:
        """Their file names in the first (0) or the second (1) version, from its records."""
        info = versions[version]
        try:
            paths = read_paths(info, with_records(info), self._first[version]["number"])
        except CorruptRecordError as error:
            raise ImageShardsError(f"{error}; imageshards verify {info.url} finds every fault") from None
        return [path.decode("utf-8", "surrogateescape") for path in paths]
