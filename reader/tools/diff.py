"""`diff`: what differs between two versions, from their record tables; of the records only the names shown are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import UsageError, plural, some
from beam_pipeline.schema.manifest import FOREIGN_KEY
from reader.example import parse_example
from reader.info import DatasetInfo, SplitInfo, as_info
from reader.tools.checks import only_bytes

KINDS = ("added", "gone", "changed", "relabelled", "moved", "other_split")
_NAMES = 20  # shown of each kind
_READS_AT_ONCE = 32
Rows = npt.NDArray[np.void]
# An image of a version, from its shard's record table; `label` numbers the class names of both versions.
_ROW = np.dtype(
    [
        ("key", "<u8"),
        ("name", "<u8"),
        ("md5", "S16"),
        ("label", "<u4"),
        ("split", "u1"),
        ("shard", "<u4"),
        ("offset", "<u8"),
        ("bytes", "<u4"),
    ]
)


@dataclass(frozen=True, slots=True)
class Difference:
    """What `diff` returns; true if the versions differ.

    Attributes:
        a, b: the versions' URLs.
        counts: images by kind: `added`, `gone`; `changed` (other bytes at the same path); `moved` (the same bytes and
            file name in another folder: neither added nor gone); `relabelled` and `other_split`, moved or not.
        names: the first 20 of each kind in the order of the records; (before, now) of those that moved.
        classes: name → (id before, id now), None for none, of the classes whose ids differ.
        configuration: flag → (value before, value now).
        leaked: moved images that were in split train and are in another now, or the other way round.
    """

    a: str
    b: str
    counts: dict[str, int]
    names: dict[str, list[Any]]
    classes: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    configuration: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    leaked: int = 0

    def __bool__(self) -> bool:
        return any(self.counts.values()) or bool(self.classes or self.configuration)

    def __str__(self) -> str:
        if not self:
            return f"{self.a} and {self.b} hold the same images"
        words = {"changed": "with other bytes", "other_split": "in another split"}
        lines = []
        for kind in KINDS:
            if count := self.counts[kind]:
                names = [name if isinstance(name, str) else " → ".join(name) for name in self.names[kind]]
                lines.append(f"{plural(count, 'image')} {words.get(kind, kind)}:")
                lines += [f"  {name}" for name in names]
                lines += [f"  and {count - len(names):,} more"] * (count > len(names))
        if self.leaked:
            lines.append(
                f"warning: {plural(self.leaked, 'moved image')} changed between train and another split, since "
                "its path decides: --split_by name keeps an image in its split"
            )
        if self.classes:
            ids = [f"{name} {_id(before)} → {_id(now)}" for name, (before, now) in self.classes.items()]
            lines.append(f"ids of {plural(len(ids), 'class')} differ: {some(ids, _NAMES)}")
        lines += [f"--{flag} was {before!r}, is {now!r}" for flag, (before, now) in self.configuration.items()]
        return "\n".join(lines)


def _id(number: int | None) -> str:
    return "none" if number is None else str(number)


def diff(a: DatasetInfo | str | os.PathLike[str], b: DatasetInfo | str | os.PathLike[str]) -> Difference:
    """Compare two versions of a dataset.

    Their record tables are read shard by shard, so memory grows with the images that differ, not with all; if the
    versions have other seeds, with all: 57 bytes each.

    Args:
        a, b: the earlier and the later version.

    Raises:
        UsageError: one is an index of third-party files, whose records have no names.
        ImageShardsError: one has no record tables, since it was written before there were any.
    """
    versions = as_info(a), as_info(b)
    for info in versions:
        if FOREIGN_KEY in info.manifest:
            raise UsageError(f"{info.url}: its records were not written by imageshards, so they have no names")
    splits = sorted({*versions[0].splits, *versions[1].splits})
    same = {kind: _Pairs() for kind in ("changed", "relabelled", "other_split")}
    alone: tuple[list[Rows], list[Rows]] = [], []
    for before, now in _chunks(versions, splits):
        _, in_before, in_now = np.intersect1d(before["name"], now["name"], assume_unique=True, return_indices=True)
        alone[0].append(np.delete(before, in_before))
        alone[1].append(np.delete(now, in_now))
        before, now = before[in_before], now[in_now]
        same["changed"].add(before, now, before["md5"] != now["md5"])
        same["relabelled"].add(before, now, before["label"] != now["label"])
        same["other_split"].add(before, now, before["split"] != now["split"])
    names = _Names(versions, splits)
    gone, added = (np.sort(np.concatenate(rows), order=("key", "name")) for rows in alone)
    first, second = _moves(gone, added, names)
    before, now, all_moved = gone[first], added[second], np.ones(len(first), bool)
    same["moved"] = _Pairs()
    same["moved"].add(before, now, all_moved)
    same["relabelled"].add(before, now, before["label"] != now["label"])
    same["other_split"].add(before, now, before["split"] != now["split"])
    is_train = np.array([split == "train" for split in splits])
    gone, added = np.delete(gone, first), np.delete(added, second)
    shown: dict[str, list[Any]] = {kind: names.of_all(1, pairs.now) for kind, pairs in same.items()}
    moved = list(zip(names.of_all(0, same["moved"].before), shown.pop("moved"), strict=True))
    return Difference(
        versions[0].url,
        versions[1].url,
        {kind: pairs.count for kind, pairs in same.items()} | {"gone": len(gone), "added": len(added)},
        shown | {"moved": moved, "gone": names.of_all(0, gone[:_NAMES]), "added": names.of_all(1, added[:_NAMES])},
        _class_ids(*versions),
        _flags(*versions),
        int((is_train[before["split"]] != is_train[now["split"]]).sum()),
    )


class _Pairs:
    """Images that both versions have and that differ: how many, and the first of them, before and now."""

    def __init__(self) -> None:
        self.count = 0
        self.before: list[np.void] = []
        self.now: list[np.void] = []

    def add(self, before: Rows, now: Rows, is_different: npt.NDArray[np.bool_]) -> None:
        """Count those that differ."""
        different = np.flatnonzero(is_different)
        self.count += len(different)
        for index in different[: _NAMES - len(self.now)].tolist():
            self.before.append(before[index])
            self.now.append(now[index])


class _Names:
    """Reads the file names of images."""

    def __init__(self, versions: tuple[DatasetInfo, DatasetInfo], splits: list[str]) -> None:
        self._versions, self._splits = versions, splits

    def of(self, version: int, row: np.void) -> str:
        """The name of an image of the first (0) or the second (1) version, from its record."""
        info = self._versions[version]
        path = info.path(info.splits[self._splits[row["split"]]].shards[row["shard"]].file)
        start = int(row["offset"])
        (record,) = schema.unframe(info.storage.read(path, start, start + int(row["bytes"])))
        return (only_bytes(parse_example(record), schema.FILENAME_KEY) or b"").decode("utf-8", "surrogateescape")

    def of_all(self, version: int, rows: Iterable[np.void]) -> list[str]:
        """The same of several images at a time."""
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            return list(pool.map(partial(self.of, version), rows))


def _moves(gone: Rows, added: Rows, names: _Names) -> tuple[list[int], list[int]]:
    """Indices of the images that are gone at one path and added at another, with the same bytes and file name."""
    again = np.intersect1d(gone["md5"], added["md5"])
    candidates = [np.flatnonzero(np.isin(rows["md5"], again)) for rows in (gone, added)]
    found: dict[tuple[bytes, str], list[int]] = {}
    for index, name in zip(candidates[1].tolist(), names.of_all(1, added[candidates[1]]), strict=True):
        found.setdefault((bytes(added["md5"][index]), name.rpartition("/")[2]), []).append(index)
    first, second = [], []
    for index, name in zip(candidates[0].tolist(), names.of_all(0, gone[candidates[0]]), strict=True):
        if others := found.get((bytes(gone["md5"][index]), name.rpartition("/")[2])):
            first.append(index)
            second.append(others.pop(0))
    return first, second


# --- the record tables of two versions, in step


def _chunks(versions: tuple[DatasetInfo, DatasetInfo], splits: list[str]) -> Iterator[tuple[Rows, Rows]]:
    """The images of both versions, in the order of their keys, cut at the same keys; at once if their seeds differ."""
    labels = {name: number for number, name in enumerate(sorted({*versions[0].classes, *versions[1].classes}))}
    streams = [
        [_Stream(info, split, splits.index(split.name), labels) for split in info.splits.values()] for info in versions
    ]
    together = [stream for side in streams for stream in side]
    has_one_order = len({info.manifest["configuration"]["seed"] for info in versions}) == 1
    while sum(map(_Stream.fill, together)):
        ends = [stream.rows["key"][-1] for stream in together if stream.has_more] if has_one_order else []
        end = min(ends, default=np.uint64((1 << 64) - 1))
        if not has_one_order:
            for stream in together:
                stream.read_all()
        before, now = (np.concatenate([stream.take(end) for stream in side]) for side in streams)
        yield before, now


class _Stream:
    """The images of one split, a shard at a time.

    Attributes:
        rows: those that were read and not taken.
        has_more: whether there are shards to read.
    """

    def __init__(self, info: DatasetInfo, split: SplitInfo, number: int, labels: Mapping[str, int]) -> None:
        self._info, self._split, self._number = info, split, number
        self._labels = np.array([labels[name] for name in info.classes], np.uint32)
        self._shard = 0
        self.rows = np.empty(0, _ROW)

    @property
    def has_more(self) -> bool:
        return self._shard < len(self._split.shards)

    def fill(self) -> int:
        """Read a shard if nothing is left of the last one; returns how many rows there are."""
        while not len(self.rows) and self.has_more:
            self.rows = self._read()
        return len(self.rows)

    def read_all(self) -> None:
        """Read all shards."""
        rows = [self.rows]
        while self.has_more:
            rows.append(self._read())
        self.rows = np.concatenate(rows)

    def take(self, end: np.uint64) -> Rows:
        """The rows up to a key."""
        count = int(np.searchsorted(self.rows["key"], end, "right"))
        taken, self.rows = self.rows[:count], self.rows[count:]
        return taken

    def _read(self) -> Rows:
        table = self._info.load_table(self._split.shards[self._shard])
        rows = np.empty(len(table["bytes"]), _ROW)
        rows["key"], rows["name"], rows["bytes"] = table["order_key"], table["name"], table["bytes"]
        rows["md5"] = np.ascontiguousarray(table["source_md5"]).view("S16").ravel()
        rows["label"], rows["split"] = self._labels[table["class"]], self._number
        rows["shard"], self._shard = self._shard, self._shard + 1
        rows["offset"] = np.cumsum(table["bytes"], dtype=np.uint64) - table["bytes"]
        return rows


# --- the manifests


def _class_ids(a: DatasetInfo, b: DatasetInfo) -> dict[str, tuple[int | None, int | None]]:
    before, now = ({name: number for number, name in enumerate(info.classes)} for info in (a, b))
    return {
        name: (before.get(name), now.get(name))
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    }


def _flags(a: DatasetInfo, b: DatasetInfo) -> dict[str, tuple[Any, Any]]:
    before, now = a.manifest["configuration"], b.manifest["configuration"]
    keys = sorted((before.keys() | now.keys()) - {"labels"})  # class ids say it
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}
