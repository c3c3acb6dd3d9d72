"""What batches are made of: parts of datasets, how their records are parsed and decoded, and where they are."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from beam_pipeline.errors import ImageShardsError, UsageError
from reader import order
from reader.balance import Balance, Weights
from reader.cache import Cache, open_cache
from reader.engine import Batch
from reader.example import ImageFinder
from reader.features import Feature, note_boxes, pick_features, read_features, stacked
from reader.feeds import Source
from reader.info import DatasetInfo
from reader.pixels import ImageDecoder
from reader.position import AnyPosition, MixPosition, Position
from reader.runs import InvalidRecordError, Parsed, RunReader, SelectedTable
from reader.select import Selection
from reader.skips import Skips

_LOG = logging.getLogger("reader")

NOT_PADDED = " without padding"  # in the source of an evaluation's position: other steps


class Part(NamedTuple):
    """Records of one dataset that batches are made of.

    Attributes:
        info, split: the dataset and its split string.
        selection: those that are read; None for all.
        balance: how often; None for once an epoch.
    """

    info: DatasetInfo
    split: str
    selection: Selection | None = None
    balance: Weights | None = None

    def __str__(self) -> str:
        return f"{self.info.name} {self.info.version} {self.split}"

    @property
    def source(self) -> str:
        """Names the records, their order and their runs, as a position does."""
        selected = "" if self.selection is None else f" selection {self.selection.digest}"
        balanced = "" if self.balance is None else f" balance {self.balance.digest}"
        return self.info.source(self.split) + selected + balanced

    @property
    def records(self) -> int:
        """Records in an epoch."""
        if self.balance is not None:
            return self.balance.records
        return self.info.records(self.split) if self.selection is None else self.selection.size

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.info.classes if self.selection is None else self.selection.classes


class RecordRows:
    """How a record of a dataset is parsed and decoded (see `runs.Rows`).

    Args:
        info: the dataset.
        decode: (encoded image, row, seed) → None, fills the row: an `ImageDecoder`.
        features: those that are read in addition to image and class.
        labels: class id in the records → that of the batch, -1 for a class that isn't selected; None if they are equal.
    """

    def __init__(
        self,
        info: DatasetInfo,
        decode: ImageDecoder,
        features: Mapping[str, Feature],
        labels: Sequence[int] | None = None,
    ) -> None:
        self._find = ImageFinder(info.image_key, info.class_key)
        self._labels = range(info.num_classes) if labels is None else labels
        self._features = features
        self.decode: Callable[[Any, Any, int], Any] = decode
        self.shape: tuple[int, int, int] | None = decode.shape

    def parse(self, record: bytes) -> Parsed:
        """(encoded image, class id, features) of a record. Raises InvalidRecordError."""
        try:
            encoded, label = self._find(record)
            values = read_features(record, self._features) if self._features else ()
        except ValueError as error:
            raise InvalidRecordError(f"it isn't an Example with the dataset's features ({error})") from None
        if not 0 <= label < len(self._labels):
            raise InvalidRecordError(f"class {label}: there are {len(self._labels)}")
        if self._labels[label] < 0:
            raise InvalidRecordError(f"class {label} isn't selected, the record table has another one")
        return encoded, self._labels[label], values


class Content:
    """What batches are made of: parts whose classes are joined by name, and whose images and features are of one type.

    Args:
        parts: what is read.
        arguments: of the builder.

    Attributes:
        classes, features, shape, one_hot_classes: as of `Batches`.
        rows: how records of each part are parsed and decoded.
        skips: counts the records of each part that are skipped; None to raise.

    Raises:
        UsageError: the parts' images or features differ, or an argument is invalid.
    """

    def __init__(self, parts: Sequence[Part], arguments: Mapping[str, Any]) -> None:
        labels, on_error = arguments["labels"], arguments["on_error"]
        if labels not in ("int", "one_hot"):
            raise UsageError(f"labels must be int or one_hot, got {labels!r}")
        if on_error not in ("raise", "skip"):
            raise UsageError(f"on_error must be raise or skip, got {on_error!r}")
        self._parts, self._arguments = parts, arguments
        self.features = pick_features(parts[0].info, arguments["features"] or ())
        for part in parts[1:]:
            for name, feature in pick_features(part.info, list(self.features)).items():
                if feature != (first := self.features[name]):
                    raise UsageError(f"features: {name!r} is {first} in {parts[0]}, but {feature} in {part}")
        self.classes = parts[0].classes
        if any(part.classes != self.classes for part in parts):
            self.classes = tuple(sorted({name for part in parts for name in part.classes}))
        self.one_hot_classes = len(self.classes) if labels == "one_hot" else None
        self.rows = [self._rows_of(part) for part in parts]
        shapes: list[Any] = [*dict.fromkeys(rows.shape for rows in self.rows)]
        if len(shapes) > 1:
            found = " and ".join("x".join(map(str, shape)) for shape in shapes)
            alike = len({channels for *_, channels in shapes}) == 1
            fix = "give image_size=" if alike else "write them with the same --channels"
            raise UsageError(f"the sources have images of {found} (height, width, channels): {fix}")
        self.shape: tuple[int, int, int] = shapes[0]
        sizes = {size for part in parts for size in (part.info.image.min_size, part.info.image.max_size)}
        self._moves_pixels = sizes != {self.shape[:2]} or arguments.get("augment") is not None
        self.skips = [Skips() if on_error == "skip" else None for _ in parts]

    def _rows_of(self, part: Part) -> RecordRows:
        info, arguments = part.info, self._arguments
        decode = ImageDecoder(
            info.image,
            arguments["image_size"],
            arguments["resize_mode"],
            arguments.get("augment"),
            is_foreign=info.is_index,
        )
        labels: Sequence[int] | None = None if part.selection is None else part.selection.labels
        if part.classes != self.classes:
            ids = {name: number for number, name in enumerate(self.classes)}
            of_part = [ids[name] for name in part.classes]
            labels = [-1 if label < 0 else of_part[label] for label in labels or range(info.num_classes)]
        return RecordRows(info, decode, self.features, labels)

    def open(self) -> list[Source]:
        """The records of each part. Raises UsageError, ImageShardsError as `open_source`."""
        both = zip(self._parts, self.skips, strict=True)
        return [open_source(part, skips, self._arguments["cache"]) for part, skips in both]

    def arrays(self, batch: Batch) -> tuple[Any, npt.NDArray[Any]]:
        """Images (a dict of them and the features, if any are wanted) and labels."""
        labels: npt.NDArray[Any] = batch.labels
        if self.one_hot_classes is not None:
            labels = np.zeros((len(batch.labels), self.one_hot_classes), np.float32)
            labels[np.arange(len(batch.labels)), batch.labels] = 1
        if not self.features:
            return batch.images, labels
        columns = zip(*batch.features, strict=True)
        values = {
            name: stacked(column, feature)
            for (name, feature), column in zip(self.features.items(), columns, strict=True)
        }
        if self._moves_pixels:
            note_boxes(self.features, values)
        return {"image": batch.images, **values}, labels


def open_source(part: Part, skips: Skips | None, cache: Cache) -> Source:
    """Find the records of a part and check that their files are there, with the sizes of the manifest.

    Raises:
        UsageError: no such split, or no such cache; or a class with a weight has no record.
        ImageShardsError: a shard is missing or has another size, unless records are skipped; or it is
            compressed.
    """
    info, split, selection, weights = part
    table = info.run_table(split) if selection is None else selection.table(info, split, weights is not None)
    wrong = info.wrong_sizes(split)
    if wrong and skips is None:
        more = f" (and {len(wrong) - 1} more shards)" if len(wrong) > 1 else ""
        raise ImageShardsError(f"{wrong[0]}{more}: run the job again with --repair, or read with on_error='skip'")
    for line in wrong:
        _LOG.warning("%s: the records that it lacks are skipped", line)
    reader = RunReader(table, open_cache(info, table, cache))
    if weights is not None and isinstance(table, SelectedTable):
        balance = Balance(weights, table, part.classes)
        return Source(reader, skips, lambda seed: partial(balance.draws, seed))
    once = order.each_once(table.first, table.mean_run)
    return Source(reader, skips, lambda seed: once)


def check_same(ours: AnyPosition, given: Any) -> None:
    """Raise UsageError unless a position is one of the records that batches with another position read."""
    if not isinstance(given, AnyPosition):
        raise UsageError(
            "position must be an imageshards.Position, such as batches.position_at(trained_steps), or "
            f"Position.from_json of saved text, got {reprlib.repr(given)}"
        )
    if type(given) is not type(ours):
        kinds = {Position: "a dataset", MixPosition: "a mix"}
        raise UsageError(f"the position is that of {kinds[type(given)]}, these batches are {kinds[type(ours)]}")
    for name, meaning in (("source", _differing(ours, given)), ("records", "number of records")):
        here, there = getattr(ours, name), getattr(given, name)
        if here != there:
            raise UsageError(f"the position was made with another {meaning}: {there!r}, here it is {here!r}")


def _differing(ours: AnyPosition, given: AnyPosition) -> str:
    """What two positions' sources differ in, in words."""
    if isinstance(ours, MixPosition) and isinstance(given, MixPosition):
        (names, other_names) = ([one.source for one in position.sources] for position in (ours, given))
        return "weights" if names == other_names else "sources"
    (split, *_), (other_split, *_) = (position.source.split(" balance ") for position in (ours, given))
    if split == other_split:
        return "balance"
    if split.removesuffix(NOT_PADDED) == other_split.removesuffix(NOT_PADDED):
        return "pad"
    is_dataset = split.partition(" ")[0] != other_split.partition(" ")[0]
    return "dataset or split" if is_dataset else "selection (classes, where)"
