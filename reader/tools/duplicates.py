"""`duplicates`: which images of a dataset have the same bytes, by the MD5s of the record tables, or look the same.

Of the records only those are read whose paths are named; with `near`, all of them once.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from beam_pipeline.schema import canonical_json
from beam_pipeline.schema.exclude import ListedImage
from beam_pipeline.schema.manifest import builtins_of
from beam_pipeline.schema.table import Table
from beam_pipeline.text import first_few, name_line, plural
from reader.info import DatasetInfo, load_info
from reader.runs import Integers
from reader.tables import Array, read_columns
from reader.tools.near import near_groups
from reader.tools.out_file import published_file
from reader.tools.pictures import Pictures, statistics
from reader.tools.read import read_images, read_paths, read_tables, with_records

_SHOWN_GROUPS, _SHOWN_PATHS = 20, 5
_HALVES = struct.Struct(">QQ")  # of an MD5
# Of groups of records: a number of 128 bits for each, as two; where its records begin among the grouped ones, then
# where the last one's end; of these their numbers among the records of all splits, and their class ids; and how many
# pairs got a second look.
Grouped = tuple[npt.NDArray[np.uint64], Integers, Integers, Array, int]


@dataclass(frozen=True, slots=True)
class DuplicateGroup:
    """Images with the same bytes, or that look the same.

    Attributes:
        group: the MD5 of these bytes, in hexadecimal; of images that look the same the first one's perceptual hash and
            record number.
        images: how many, at least 2.
        splits, labels: that they are in.
        paths: of the first five in the order of the records; `train[17:18]` for record 17 of third-party files.
    """

    group: str
    images: int
    splits: list[str]
    labels: list[str]
    paths: list[str]

    def __str__(self) -> str:
        more = f" and {self.images - len(self.paths):,} more" if self.images > len(self.paths) else ""
        across = [f"labels {first_few(self.labels)}"] * (len(self.labels) > 1)
        across += [f"splits {', '.join(self.splits)}"] * (len(self.splits) > 1)
        return f"{', '.join(self.paths)}{more}{' across ' * bool(across)}{' and '.join(across)}"


@dataclass(frozen=True, slots=True)
class Duplicates:
    """What `duplicates` returns; true if there are any.

    Attributes:
        dataset: its URL.
        compared: the `source` files' bytes, those of the `stored` images of an index of third-party files, or how
            `pictures` look.
        records: how many images were compared.
        groups, images: of images that are the same.
        across_labels, across_splits: groups with several labels (contradictions), with several splits (leaks).
        first: up to 20 groups across labels, up to 20 others across splits, and up to 20 of the rest: of the same bytes
            by their MD5s, of the same look in the order of the records.
        candidates: pairs with near hashes, whose pictures were compared; 0 if bytes were.
    """

    dataset: str
    compared: str
    records: int
    groups: int
    images: int
    across_labels: int
    across_splits: int
    first: list[DuplicateGroup]
    candidates: int = 0

    def __bool__(self) -> bool:
        return self.groups > 0

    def __repr__(self) -> str:
        looked = f" ({plural(self.candidates, 'pair')} compared by their pictures)" * (self.compared == "pictures")
        records = plural(self.records, "image")
        have, that = {
            "source": ("have the same bytes", "with the same bytes"),
            "stored": ("have the same stored bytes", "with the same stored bytes"),
        }.get(self.compared, ("look the same", "of images that look the same"))
        if not self:
            return f"no two of {records} {have}{looked}"
        lines = [
            f"{plural(self.groups, 'group')} {that}, {self.images:,} of {records}: {self.across_labels:,} across "
            f"labels (contradictions), {self.across_splits:,} across splits (leaks){looked}",
            *(f"  {group}" for group in self.first),
        ]
        if more := self.groups - len(self.first):
            lines.append(f"and {plural(more, 'more group')}")
        return "\n".join(map(name_line, lines))


def duplicates(
    dataset: DatasetInfo | str | os.PathLike[str], out: str | os.PathLike[str] | None = None, near: bool = False
) -> Duplicates:
    """Find the images of a dataset whose source files have the same bytes; of an index, whose stored images have.

    Takes about 40 bytes of memory per record; with `out`, 130 per image of a group if that is more.

    Args:
        dataset: what `load_info` returned, or the URL.
        out: file or URL for a list of all groups that `imageshards write --exclude` reads: JSON Lines of `ListedImage`.
            One image of a group is kept, the first path that isn't in split train, else the first; of a group with
            several labels nothing is decided.
        near: find the images that look the same instead, whatever their size, quality, brightness or side; those
            with the same bytes do. Reads and decodes every record once; all pairs are compared.

    Raises:
        UsageError: `out` can't be written.
        ImageShardsError: the dataset has no record tables, or a file isn't what was published.
    """
    info = load_info(dataset)
    with nullcontext() if out is None else published_file(os.fspath(out)) as file:

        def write(_: Sequence[GroupedImage], lines: Sequence[ListedImage]) -> None:
            assert file is not None
            file.writelines(canonical_json(builtins_of(line)) for line in lines)

        return find_groups(info, write if file else None, statistics(info) if near else None)


def find_groups(
    info: DatasetInfo,
    take: Callable[[Sequence[GroupedImage], Sequence[ListedImage]], None] | None = None,
    found: Pictures | None = None,
) -> Duplicates:
    """What `duplicates` returns; of images that look the same if their statistics are given.

    Args:
        take: is given each group, by path, and its lines of a list.
    """
    splits = with_records(info)
    grouped = _equal_bytes(info, splits) if found is None else _same_look(info, splits, found)
    keys, first, row, label, candidates = grouped
    ends = np.cumsum([info.splits[name].records for name in splits])
    split = np.searchsorted(ends, row, "right").astype(np.uint16)
    across_labels, across_splits = _have_several(label, first), _have_several(split, first)
    kind = np.where(across_labels, 0, np.where(across_splits, 1, 2))
    shown = np.concatenate([np.flatnonzero(kind == one)[:_SHOWN_GROUPS] for one in range(3)]).tolist()
    some = (row[first[number] : first[number + 1]][:_SHOWN_PATHS] for number in shown)
    named = np.sort(row if take else np.concatenate([row[:0], *some]))
    paths = read_paths(info, splits, named)

    def images(begin: int, end: int) -> list[GroupedImage]:
        numbers = row[begin:end]
        names = (paths[place] for place in np.searchsorted(named, numbers).tolist())
        in_splits = (splits[one] for one in split[begin:end].tolist())
        labels = (info.classes[one] for one in label[begin:end].tolist())
        return list(map(GroupedImage, names, in_splits, labels, numbers.tolist()))

    def described(number: int) -> DuplicateGroup:
        begin, end = first[number : number + 2].tolist()
        in_splits = [splits[one] for one in np.unique(split[begin:end]).tolist()]
        labels = [info.classes[one] for one in np.unique(label[begin:end]).tolist()]
        names = [image.name for image in images(begin, min(end, begin + _SHOWN_PATHS))]
        return DuplicateGroup(keys[number].tobytes().hex(), end - begin, in_splits, labels, names)

    if take:
        for key, begin, end in zip(keys, first[:-1], first[1:], strict=True):
            of_group = sorted(images(begin, end))
            take(of_group, list(_lines(key.tobytes().hex(), of_group, found is not None)))
    return Duplicates(
        dataset=info.url,
        compared="pictures" if found is not None else "stored" if info.is_index else "source",
        records=int(ends[-1]),
        groups=len(keys),
        images=len(row),
        across_labels=int(across_labels.sum()),
        across_splits=int(across_splits.sum()),
        first=list(map(described, shown)),
        candidates=candidates,
    )


class GroupedImage(NamedTuple):
    """An image of a group; `row` is its record's number among those of all splits."""

    path: bytes
    split: str
    label: str
    row: int

    @property
    def name(self) -> str:
        return self.path.decode("utf-8", "surrogateescape")


def _lines(group: str, images: Sequence[GroupedImage], is_near: bool) -> Iterator[ListedImage]:
    """The lines of a group, whose images are in order of their paths."""
    kept = next((image for image in images if image.split != "train"), images[0])
    contrary = next((image for image in images if image.label != kept.label), None)
    second = contrary or images[images[0] is kept]
    for image in images:
        other = second if image is kept or (contrary and image.label == kept.label) else kept
        reason = f"{'looks like' if is_near else 'same bytes as'} {other.name}"
        if other.label != image.label:
            reason += f", whose label is {other.label}"
        elif other.split != image.split:
            reason += f" of split {other.split}"
        yield ListedImage(image.name, reason, group, None if contrary else image is kept)


# --- groups


def _have_several(values: npt.NDArray[np.integer], first: Integers) -> npt.NDArray[np.bool_]:
    """bool [groups]: whether the values of a group differ."""
    differ: npt.NDArray[np.bool_] = np.maximum.reduceat(values, first[:-1]) != np.minimum.reduceat(values, first[:-1])
    return differ


def _equal_bytes(info: DatasetInfo, splits: Sequence[str]) -> Grouped:
    """Records with the same MD5, in order of these."""
    high, low, label = _load(info, splits)
    row, first = equal_rows(high, low)
    heads = row[first[:-1]]
    return np.stack([high[heads], low[heads]], 1).astype(">u8"), first, row, label[row], 0


def _same_look(info: DatasetInfo, splits: Sequence[str], found: Pictures) -> Grouped:
    """Records that look the same; a group's number is the first one's hash and record number."""
    row, first, candidates = near_groups(info, found)
    label = np.concatenate([part["class"] for part in read_columns(info, "+".join(splits), ["class"])])
    heads = row[first[:-1]]
    return np.stack([found.hash[heads], heads.astype(np.uint64)], 1).astype(">u8"), first, row, label[row], candidates


def equal_rows(high: Array, low: Array) -> tuple[Integers, Integers]:
    """The rows whose two numbers other rows have, too: group after group, ascending; and where each group begins."""
    order = np.argsort(high)
    ordered = high[order]
    is_same = np.zeros(len(order) + 1, np.bool_)  # as the row before
    is_same[1:-1] = ordered[1:] == ordered[:-1]
    row = order[is_same[:-1] | is_same[1:]]
    del order, ordered, is_same
    row = row[np.lexsort((row, low[row], high[row]))]
    is_first = np.ones(len(row) + 1, np.bool_)
    is_first[1:-1] = (high[row[1:]] != high[row[:-1]]) | (low[row[1:]] != low[row[:-1]])
    sizes = np.diff(np.flatnonzero(is_first))
    row, sizes = row[np.repeat(sizes > 1, sizes)], sizes[sizes > 1]  # of others only the first number is equal
    return row, np.concatenate(([0], np.cumsum(sizes)))


def _load(info: DatasetInfo, splits: Sequence[str]) -> tuple[Array, Array, Array]:
    """Of all records the MD5's first and last 8 bytes as numbers, and the class id."""
    records = sum(info.splits[name].records for name in splits)
    (high, low), label = np.empty((2, records), np.uint64), np.empty(records, np.uint32)

    def take(_: str, rows: slice, table: Table) -> None:
        label[rows] = table["class"]
        if not info.is_index:
            high[rows], low[rows] = np.ascontiguousarray(table["source_md5"]).view(">u8").T

    read_tables(info, take)
    if info.is_index:

        def digest(number: int, encoded: memoryview) -> None:
            high[number], low[number] = _HALVES.unpack(hashlib.md5(encoded, usedforsecurity=False).digest())

        deque(read_images(info, info.run_table("+".join(splits)), digest), 0)
    return high, low, label
