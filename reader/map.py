"""`records`: a split as a map-style dataset, to look at single records or to read them in an order of your own.

    records = imageshards.records("gs://bucket/datasets/flowers", "train")
    records[17]["image"], records["rose/1.jpg"]["label"], records[100:110], len(records)

A record is found by arithmetic and read by one request: the run index and its shard's record table say where it is.
"""

from __future__ import annotations

import functools
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from beam_pipeline import schema
from beam_pipeline.errors import UsageError
from beam_pipeline.machine import cpu_count
from beam_pipeline.schema.table import name_hash, order_key
from beam_pipeline.text import plural
from reader.batches import Dataset, ImageSize, names_arguments
from reader.features import features_of, note_boxes, pick_features
from reader.info import DatasetInfo, load_info
from reader.pixels import ImageDecoder, decode_pixels, stored_shape
from reader.rows import RecordRows
from reader.runs import Integers, InvalidRecordError, Run, RunReader
from reader.select import Classes, Selection, Where, select
from reader.tables import Array, column_of, locate, locate_one

Record = dict[str, Any]
_OWN_KEYS = "image", "class", "label"  # in every record, whatever a feature of that name holds

# Kept of record tables, half of it for numbers (4 bytes per record) and half for file names (8).
_KEPT_BYTES = 64 << 20
_REMOTE_READS = 32  # at once; local files are read by a thread a core, which decodes as well


@names_arguments
def records(
    dataset: Dataset,
    split: str,
    *,
    decode: bool = True,
    image_size: ImageSize = None,
    resize_mode: str = "crop",
    features: Sequence[str] | None = None,
    classes: Classes = None,
    where: Where = None,
) -> Records:
    """The records of a split by number or file name: `records[17]`, `records["cat/1.jpg"]`, slices, lists of these.

    Each is a dict: `image`, `class`, `label` (the class name), `filename`, `size`, and a manifest's columns. Numbers
    are in file order, as `eval_batches` reads. For training `train_batches` is faster: see docs/howto/records.md.

    Args:
        dataset: what `load_info` returned, or the URL.
        split: TFDS split string, such as `train[:10%]`.
        decode: False for images as they are stored: the bytes of a JPEG or PNG file.
        image_size: side or (height, width) in pixels; None for the size at which each image is stored.
        resize_mode: `crop`, `stretch` or `pad`, as in `train_batches`.
        features: names of those to read besides image, class and label; None for all.
        classes, where: only these records, as in `train_batches`.

    Raises:
        UsageError: no such split, feature, class or size, or nothing is selected.
        ImageShardsError: the version is compressed.
    """
    dataset = load_info(dataset)
    where = select(dataset, split, classes, where)
    return Records(locals())


class Records:
    """What `records` returns. For any number of threads; pickles.

    It is a map-style `Dataset` for PyTorch's `DataLoader`, and a `RandomAccessDataSource` for Grain.

    Args:
        arguments: of `records`, with a `Selection` for `where`.

    Attributes:
        classes: names of the classes; `class` is an index into it.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        info: DatasetInfo = arguments["dataset"]
        split: str = arguments["split"]
        size, names = arguments["image_size"], arguments["features"]
        selection: Selection | None = arguments["where"]
        self._info, self._split = info, split
        self._table = info.run_table(split)
        self._lengths, self._names = self._kept("bytes", 4), self._kept("name", 8)
        self._lengths(self._table.files[0])  # a compressed version says so now
        self._chosen = None if selection is None else selection.numbers()  # of the records of the split
        self.classes: tuple[str, ...] = info.classes if selection is None else selection.classes
        if names is None:  # `class` says what the one-hot vector says
            names = [name for name in features_of(info) if name != schema.ONE_HOT_KEY]
        picked = pick_features(info, names)
        self._features = {name: picked[name] for name in picked if name not in _OWN_KEYS}
        self._arguments = {**arguments, "features": list(self._features)}
        decoder = ImageDecoder(info.image, 1 if size is None else size, arguments["resize_mode"])
        is_stored = info.image.min_size == info.image.max_size == decoder.shape[:2]
        self._moves_pixels = size is not None and not is_stored
        self._rows = RecordRows(info, decoder, self._features, None if selection is None else selection.labels)

    def __len__(self) -> int:
        return self._table.total if self._chosen is None else len(self._chosen)

    def __repr__(self) -> str:
        name, classes = f"{self._info.name} {self._info.version} {self._split}", plural(len(self.classes), "class")
        return f"Records({name}: {plural(len(self), 'record')} of {classes})"

    def _repr_html_(self) -> str:
        from reader.tools.show import html  # which draws

        return html(repr(self), lambda: self._read(range(min(len(self), 8)), decode=True))

    def __reduce__(self) -> Any:  # another process opens the dataset itself
        return Records, (self._arguments,)

    def __iter__(self) -> Iterator[Record]:
        for first in range(0, len(self), schema.RUN_RECORDS):
            yield from self[first : first + schema.RUN_RECORDS]

    def __contains__(self, filename: object) -> bool:
        return isinstance(filename, str) and self._find(filename) is not None

    def __getitem__(self, key: Any) -> Any:
        """A record by its number or file name; a list of records by a slice, or by a list of numbers and names.

        Raises:
            IndexError, KeyError: there is no such record.
            CorruptRecordError: a record is corrupt; names file, record and byte offset.
        """
        if isinstance(key, slice):
            return self._read(range(len(self))[key], self._arguments["decode"])
        if isinstance(key, list | tuple | range) or getattr(key, "ndim", None):  # an array or a tensor of numbers
            return self.__getitems__(key)
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[int | str]) -> list[Record]:
        """The records of a list, several read at once: what PyTorch's `DataLoader` calls for a batch."""
        return self._read([self._number(key) for key in keys], self._arguments["decode"])

    def _number(self, key: int | str) -> int:
        """The number that a key means."""
        if isinstance(key, str):
            if (found := self._find(key)) is None:
                raise KeyError(f"{self._split} has no record of {key!r}{self._hint(key)}")
            return found
        number = operator.index(key)
        if not -len(self) <= number < len(self):
            raise IndexError(f"there is no record {number}: {self._split} has {len(self)}, numbered from 0")
        return number % len(self)

    def _find(self, filename: str) -> int | None:
        """Number of the record of a file; None if there is none."""
        rows = (self._row(part.split, filename) for part in self._info.ranges(self._split))
        numbers = (self._table.number_of(*row) for row in rows if row is not None)
        number = next((number for number in numbers if number is not None), None)
        if number is None or self._chosen is None:
            return number
        at = int(np.searchsorted(self._chosen, number))
        return at if at < len(self) and self._chosen[at] == number else None

    def _row(self, split: str, filename: str) -> tuple[str, int] | None:
        """The shard of a split that has the record of a file, and the record's number there."""
        info, plan = self._info, self._info.manifest["plan"].get("splits", {}).get(split)
        if plan is None:
            raise UsageError(f"{info.url} isn't in the order of its file names: give record numbers, not {filename!r}")
        key = order_key(filename, info.manifest["configuration"]["seed"])
        path: str = info.path(info.splits[split].shards[bisect_right(plan["cuts"], key, key=int)].file)
        found = np.flatnonzero(self._names(path) == name_hash(filename))
        return (path, int(found[0])) if len(found) else None

    def _hint(self, filename: str) -> str:
        """Where a name is that isn't here, if that is found at little cost."""
        if split := next((split for split in self._info.splits if self._row(split, filename)), ""):
            return f": it is in {split}" + ", but not selected" * (split == self._split)
        folders = filename.split("/")
        inner = ("/".join(folders[number:]) for number in range(1, len(folders)))
        nearest = next((name for name in inner if self._find(name) is not None), "")
        return f": did you mean {nearest!r}?" if nearest else ""

    def _read(self, numbers: Sequence[int], decode: bool) -> list[Record]:
        """Some records, in the order of their numbers."""
        chosen = np.array(numbers, np.int64)
        chosen = chosen if self._chosen is None else self._chosen[chosen]
        if len(chosen) > 1:
            found = self._read_some(chosen, decode)
        else:
            pieces = [locate_one(self._table, number, self._lengths) for number in chosen.tolist()]
            found = [self._record(RunReader(self._table).read(piece), 0, decode) for piece in pieces]
        if decode and self._moves_pixels:
            note_boxes(self._features, {name: [record[name] for record in found] for name in self._features})
        return found

    def _read_some(self, chosen: Integers, decode: bool) -> list[Record]:
        """Records by their numbers in the split string, several read at once."""
        wanted = np.unique(chosen)
        reader = RunReader(locate(self._info, self._table, wanted, self._lengths))
        pieces, of, index = reader.pieces_of(np.searchsorted(wanted, chosen))
        by_piece = np.argsort(of, kind="stable")
        groups = np.split(by_piece, np.flatnonzero(np.diff(of[by_piece])) + 1)
        found: list[Any] = [None] * len(chosen)

        def read(number: int) -> None:
            run = reader.read(pieces[number])
            for at in groups[number].tolist():
                found[at] = self._record(run, int(index[at]), decode)

        threads = min(len(pieces), _REMOTE_READS if reader.is_remote else cpu_count())
        shares = [range(number, len(pieces), threads) for number in range(threads)]  # a task for each would cost 40 µs
        if threads == 1:
            list(map(read, shares[0]))
        else:
            with ThreadPoolExecutor(threads, "reader-records") as pool:  # of this call only: a fork would have none
                list(pool.map(lambda share: list(map(read, share)), shares))
        return found

    def _record(self, run: Run, index: int, decode: bool) -> Record:
        """A record of a run."""
        record, channels = run.record(index), self._info.image.channels
        try:
            encoded, label, values = self._rows.parse(record)
            if not decode:
                image: Any = bytes(encoded)
            elif self._arguments["image_size"] is None:
                stored_shape(encoded, channels)  # refuses a header that would take all memory
                image = decode_pixels(encoded, channels)
            else:
                image = np.empty(self._rows.shape or (), np.uint8)
                self._rows.decode(encoded, image, 0)
        except InvalidRecordError as error:
            raise run.located(index, error) from None
        found: Record = dict(zip(_OWN_KEYS, (image, label, self.classes[label]), strict=True))
        found |= zip(self._features, values, strict=True)
        if isinstance(name := found.get(schema.FILENAME_KEY), bytes):
            found[schema.FILENAME_KEY] = name.decode("utf-8", "surrogateescape")
        return found

    def _kept(self, column: str, record_bytes: int) -> Callable[[str], Array]:
        """A function from a shard to a column of its table, which keeps those of the shards used last."""
        shard = max(one.records for split in self._info.splits.values() for one in split.shards)
        return functools.lru_cache(max(_KEPT_BYTES // 2 // (record_bytes * shard), 1))(column_of(self._info, column))
