"""`records`: a split as a sequence, to look at single records or to read them in an order of your own.

    records = imageshards.records("gs://bucket/datasets/flowers", "train")
    records[17]["image"], records["rose/1.jpg"]["label"], records[100:110], len(records)

A record is found by arithmetic and read by one request: the run index and its shard's record table say where it is.
"""

from __future__ import annotations

import operator
import os
import reprlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.schema.table import name_hash, order_key
from beam_pipeline.storage import open_storage
from reader.batches import ImageSize, Info, RecordRows
from reader.decode import ImageDecoder, decode_pixels, stored_shape
from reader.features import features_of, pick_features
from reader.info import DatasetInfo, as_info
from reader.machine import cpu_count
from reader.runs import InvalidRecordError, Run

Record = dict[str, Any]
T = TypeVar("T")

_KEPT_BYTES = 64 << 20  # of record tables: 4 a record, and 16 more in shards where a file name was looked up
_REMOTE_READS = 32  # at once; local files are read by a thread a core, which decodes as well
_RANGE_BYTES = 1 << 20  # of a request for several records


def records(
    info: Info,
    split: str,
    *,
    decode: bool = True,
    image_size: ImageSize = None,
    resize_mode: str = "crop",
    features: Sequence[str] | None = None,
) -> Records:
    """The records of a split by number or file name: `records[17]`, `records["cat/1.jpg"]`, slices, lists of these.

    Each is a dict: `image`, `class`, `label` (the class name), `filename`, `size`, and a manifest's columns. Numbers
    are in file order, as `eval_batches` reads. For training `train_batches` is faster: see docs/reader.md.

    Args:
        info: what `load_info` returned, or the URL.
        split: TFDS split string, such as `train[:10%]`.
        decode: False for images as they are stored: the bytes of a JPEG or PNG file.
        image_size: side or (height, width) in pixels; None for the size at which each image is stored.
        resize_mode: `crop`, `stretch` or `pad`, as in `train_batches`.
        features: names of those to read besides image, class and label; None for all.

    Raises:
        UsageError: no such split, feature or size.
        ImageShardsError: the version has no record tables, or is compressed.
    """
    return Records({**locals(), "info": as_info(info)})


class _Span(NamedTuple):
    """Where a record is: its number among those asked for, its shard, its number there, its framed bytes."""

    at: int
    path: str
    row: int
    start: int
    stop: int


class Records:
    """What `records` returns. For any number of threads; pickles.

    It is a map-style `Dataset` for PyTorch's `DataLoader`, and a `RandomAccessDataSource` for Grain.

    Args:
        arguments: of `records`.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments, self._split = arguments, arguments["split"]
        self._info: DatasetInfo = arguments["info"]
        self._table = self._info.run_table(self._split)
        self._columns = _Columns(self._info)
        self._store = open_storage(self._table.files[0])
        names = arguments["features"]
        if names is None:  # `class` says what the one-hot vector says
            known = schema.CLASS_KEY, schema.LABEL_KEY, schema.ONE_HOT_KEY
            names = [name for name in features_of(self._info) if name not in known]
        self._features = pick_features(self._info, names)
        size = self._info.image.max_size if arguments["image_size"] is None else arguments["image_size"]
        decoder = ImageDecoder(self._info.image, size, arguments["resize_mode"])
        self._rows = RecordRows(self._info, decoder, self._features)

    def __len__(self) -> int:
        return int(self._table.total)

    def __repr__(self) -> str:
        info = self._info
        return f"Records({info.name} {info.version} {self._split}: {len(self):,} records; {info.num_classes} classes)"

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
            return self._read(range(len(self))[key])
        if isinstance(key, list | tuple | range) or getattr(key, "ndim", None):  # an array or a tensor of numbers
            return self.__getitems__(key)
        return self._read([self._number(key)])[0]

    def __getitems__(self, keys: Sequence[int | str]) -> list[Record]:
        """The records of a list, several read at once: what PyTorch's `DataLoader` calls for a batch."""
        return self._read([self._number(key) for key in keys])

    def _number(self, key: int | str) -> int:
        """The number that a key means."""
        if isinstance(key, str):
            if (found := self._find(key)) is None:
                raise KeyError(f"{self._split} has no record of {key!r}{self._hint(key)}")
            return found
        try:
            number = operator.index(key)
        except TypeError:
            raise UsageError(f"{reprlib.repr(key)} names no record: give a number, a file name or a list") from None
        if not -len(self) <= number < len(self):
            raise IndexError(f"there is no record {number}: {self._split} has {len(self)}, numbered from 0")
        return number % len(self)

    def _find(self, filename: str) -> int | None:
        """Number of the record of a file; None if there is none."""
        splits = dict.fromkeys(part.split for part in self._info.ranges(self._split))
        rows = (self._columns.find(split, filename) for split in splits)
        numbers = (self._table.number_of(*row) for row in rows if row is not None)
        return next((number for number in numbers if number is not None), None)

    def _hint(self, filename: str) -> str:
        """Where a name is that isn't here, if that is found at little cost."""
        if split := next((split for split in self._info.splits if self._columns.find(split, filename)), ""):
            return f": it is in {split}"
        folders = filename.split("/")
        inner = ("/".join(folders[number:]) for number in range(1, len(folders)))
        nearest = next((name for name in inner if self._find(name) is not None), "")
        return f": did you mean {nearest!r}?" if nearest else ""

    def _read(self, numbers: Sequence[int], decode: bool | None = None) -> list[Record]:
        """Some records, in the order of their numbers."""
        decode, table = self._arguments["decode"] if decode is None else decode, self._table
        runs, indices = table.runs_of(np.array(numbers, np.int64))
        paths = [table.files[file] for file in np.unique(table.file[runs]).tolist()]
        new = [path for path in paths if not self._columns.has(path, "bytes")]
        self._in_parallel(lambda path: self._columns.get(path, "bytes"), new)
        spans = [self._span(*which) for which in zip(range(len(numbers)), runs.tolist(), indices.tolist(), strict=True)]
        found: list[Any] = [None] * len(numbers)

        def read(part: list[_Span]) -> None:
            path, start = part[0].path, part[0].start
            try:
                data = memoryview(self._store.read_range(path, start, part[-1].stop))
            except FileNotFoundError:
                data = None
            for at, _, row, begin, end in part:
                frame = None if data is None else data[begin - start : end - start]
                found[at] = self._record(Run(frame, [0, end - begin], path, row, begin, is_framed=False), decode)

        self._in_parallel(read, _joined(spans))
        return found

    def _span(self, at: int, run: int, index: int) -> _Span:
        """Where a record is, by its run."""
        table = self._table
        path, first = table.files[int(table.file[run])], int(table.file_record[run])
        lengths = self._columns.get(path, "bytes")[first : first + int(table.records[run])]
        if int(lengths.sum()) != table.bytes[run]:
            raise ImageShardsError(f"{path}: its record table isn't of these records; run the job with --repair")
        start = int(table.offset[run]) + int(lengths[:index].sum())
        return _Span(at, path, first + index, start, start + int(lengths[index]))

    def _record(self, run: Run, decode: bool) -> Record:
        """The one record of a run."""
        record = run.record(0)
        try:
            encoded, label, values = self._rows.parse(record)
            image = self._pixels(encoded) if decode else bytes(encoded)
        except InvalidRecordError as error:
            raise run.located(0, error) from None
        found = {"image": image, "class": label, "label": self._info.classes[label]}
        found |= zip(self._features, values, strict=True)
        if isinstance(name := found.get(schema.FILENAME_KEY), bytes):
            found[schema.FILENAME_KEY] = os.fsdecode(name)
        return found

    def _pixels(self, encoded: memoryview) -> npt.NDArray[np.uint8]:
        if self._arguments["image_size"] is None:
            stored_shape(encoded, self._info.image.channels)  # refuses a header that would take all memory
            return decode_pixels(encoded, self._info.image.channels)
        row = np.empty(self._rows.shape or (), np.uint8)
        self._rows.decode(encoded, row, 0)
        return row

    def _in_parallel(self, function: Callable[[T], object], items: Sequence[T]) -> None:
        """Call it for each item; the threads are of this call only, since a fork would have none."""
        threads = min(len(items), _REMOTE_READS if self._store.is_remote else cpu_count())
        shares = [items[number::threads] for number in range(threads)]  # a task for each would cost 40 µs
        with ThreadPoolExecutor(max(threads, 1), "reader-records") as pool:
            list((pool.map if threads > 1 else map)(lambda share: [function(item) for item in share], shares))


def _joined(spans: list[_Span]) -> list[list[_Span]]:
    """Records that follow each other in a shard, which one request reads, in file order."""
    parts: list[list[_Span]] = []
    for span in sorted(spans, key=lambda span: span[1:]):
        last = parts[-1] if parts else [span._replace(path="")]
        is_next = span.path == last[-1].path and span.start <= last[-1].stop  # or the same once more
        if is_next and span.stop - last[0].start <= _RANGE_BYTES:
            last.append(span)
        else:
            parts.append([span])
    return parts


class _Columns:
    """Columns of record tables by shard, those used last within `_KEPT_BYTES`; thread-safe."""

    def __init__(self, info: DatasetInfo) -> None:
        self._info, self._lock, self._bytes = info, threading.Lock(), 0
        self._shards = {info.path(shard.file): shard for split in info.splits.values() for shard in split.shards}
        self._kept: OrderedDict[tuple[str, str], npt.NDArray[Any]] = OrderedDict()

    def has(self, path: str, column: str) -> bool:
        """Whether it is in memory."""
        return (path, column) in self._kept

    def get(self, path: str, column: str) -> npt.NDArray[Any]:
        """A value for each record of a shard."""
        with self._lock:
            if self.has(path, column):
                self._kept.move_to_end((path, column))
                return self._kept[path, column]
        values: npt.NDArray[Any] = self._info.load_table(self._shards[path])[column].copy()
        with self._lock:  # not while it is loaded: others go on
            self._bytes += 0 if self.has(path, column) else values.nbytes
            self._kept[path, column] = values
            while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return values

    def find(self, split: str, filename: str) -> tuple[str, int] | None:
        """The shard of a split that has the record of a file, and the record's number there; None if none has it."""
        info, plan = self._info, self._info.manifest["plan"].get("splits", {}).get(split)
        if plan is None:
            raise UsageError(f"{info.url} isn't in the order of its file names: give record numbers, not {filename!r}")
        key = order_key(filename, info.manifest["configuration"]["seed"])
        path = info.path(info.splits[split].shards[bisect_right(plan["cuts"], key, key=int)].file)
        keys, wanted = self.get(path, "order_key"), np.uint64(key)
        first, last = int(np.searchsorted(keys, wanted)), int(np.searchsorted(keys, wanted, "right"))
        found = np.flatnonzero(self.get(path, "name")[first:last] == name_hash(filename))
        return (path, first + int(found[0])) if len(found) else None
