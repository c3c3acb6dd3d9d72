"""`train_batches` and `eval_batches`: a dataset's batches as NumPy arrays, without a framework.

    batches = reader.train_batches("gs://bucket/datasets/flowers/1.0.0", "train", global_batch_size=1024)
    for images, labels in batches:
        ...

`reader.train_dataset`, `reader.as_jax` and `reader.torch` hand out the same batches.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.schema.manifest import FOREIGN_KEY
from reader import order
from reader.augment import Augment
from reader.buffers import BufferPool
from reader.cache import open_cache
from reader.decode import ImageDecoder
from reader.engine import Batch, Cursor, Engine, Source
from reader.example import ImageFinder
from reader.features import Feature, pick_features, read_features, stacked
from reader.info import DatasetInfo, as_info, warn_if_batch_exceeds
from reader.limits import cpu_count
from reader.position import WINDOW_RUNS, Host, Position, batch_size_of, share_of_host
from reader.records import InvalidRecordError, RunReader
from reader.skips import Skips

_LOG = logging.getLogger("reader")

Info = DatasetInfo | str | os.PathLike[str]
ImageSize = int | tuple[int, int] | None
Labels = Literal["int", "one_hot"]
OnError = Literal["raise", "skip"]
Cache = str | os.PathLike[str] | None


# The batches behind each tf.data.Dataset that is in use, for `skipped`: a dataset has no room for them.
BEHIND: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class RecordRows:
    """How a record of a dataset is parsed and decoded (see `records.Rows`).

    Args:
        info: the dataset.
        decode: (encoded image, row, seed) → None, fills the row: an `ImageDecoder`.
        features: those that are read in addition to image and class.
    """

    def __init__(self, info: DatasetInfo, decode: ImageDecoder, features: Mapping[str, Feature]) -> None:
        self._find = ImageFinder(info.image_key, info.class_key)
        self._classes = info.num_classes
        self._features = features
        self.decode: Callable[[Any, Any, int], Any] = decode
        self.shape: tuple[int, int, int] | None = decode.shape

    def parse(self, record: bytes) -> tuple[Any, int, tuple[Any, ...]]:
        """(encoded image, class id, features) of a record. Raises InvalidRecordError."""
        try:
            encoded, label = self._find(record)
            values = read_features(record, self._features) if self._features else ()
        except ValueError as error:
            raise InvalidRecordError(f"it isn't an Example with the dataset's features ({error})") from None
        if not 0 <= label < self._classes:
            raise InvalidRecordError(f"class {label}: there are {self._classes}")
        return encoded, label, values


class _Batches:
    """What training and evaluation have in common."""

    def __init__(
        self,
        info: DatasetInfo,
        split: str,
        global_batch_size: int,
        host: Host,
        decode: ImageDecoder,
        labels: str,
        features: Sequence[str],
        on_error: str,
        cache: Cache = None,
    ) -> None:
        if labels not in ("int", "one_hot"):
            raise UsageError(f"labels must be int or one_hot, got {labels!r}")
        self._host, self._hosts, self._replicas = share_of_host(host)
        self.batch_size = batch_size_of(global_batch_size, self._hosts, self._replicas)
        self.shape = decode.shape
        self.features = pick_features(info, features)
        self.classes = info.num_classes if labels == "one_hot" else None
        self._source = open_source(info, split, on_error, cache)
        self._table = self._source.reader.table
        self._rows = RecordRows(info, decode, self.features)
        self._pool = BufferPool()
        self._batches = 0

    def __len__(self) -> int:
        """Batches of one iteration."""
        return self._batches

    @property
    def skipped(self) -> int:
        """How many corrupt records `on_error="skip"` has left out so far, each counted once."""
        return self._source.skips.count if self._source.skips is not None else 0

    def _engine(self, remaining: Cursor, seed: int = 0, for_training: bool = True) -> Engine:
        sizes = [self.batch_size] * self._batches
        more: dict[str, Any] = {"threads": cpu_count(), "pool": self._pool, "seed": seed, "for_training": for_training}
        return Engine(self._source, self._rows, remaining, sizes, **more)

    def _inputs(self, batch: Batch) -> tuple[Any, npt.NDArray[Any]]:
        """Images (a dict of them and the features, if any are wanted) and labels."""
        labels: npt.NDArray[Any] = batch.labels
        if self.classes is not None:
            labels = np.zeros((len(batch.labels), self.classes), np.float32)
            labels[np.arange(len(batch.labels)), batch.labels] = 1
        if not self.features:
            return batch.images, labels
        columns = zip(*batch.features, strict=True)
        values = {
            name: stacked(column, feature)
            for (name, feature), column in zip(self.features.items(), columns, strict=True)
        }
        return {"image": batch.images, **values}, labels


class TrainBatches(_Batches):
    """What `train_batches` returns: each iteration continues where the last one ended.

    Attributes:
        position: where the first iteration begins.
        batch_size: records of a batch.
    """

    def __init__(self, info: DatasetInfo, split: str, global_batch_size: int, position: Position, **more: Any) -> None:
        super().__init__(info, split, global_batch_size, **more)
        warn_if_batch_exceeds(info, split, global_batch_size)
        self.position = position
        self._steps = info.steps_per_epoch(split, global_batch_size)
        self._batches = self._steps * self._replicas
        self._ended = 0  # iterations whose last batch was handed out
        self._remaining: tuple[int, Cursor] | None = None  # what an iteration has read for the one with this number

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        begin = self._ended
        with self._engine(self._take_remaining(begin), self.position.seed) as engine:
            for number in range(1, self._batches + 1):
                batch = engine.next_batch()
                if number == self._batches:
                    self._remaining = begin + 1, engine.cursor()
                    self._ended = max(self._ended, begin + 1)
                    self._source.report()
                yield self._inputs(batch)

    def repeat(self) -> Iterator[tuple[Any, Any]]:
        """Iteration after iteration, without end: what Keras' `fit` takes on JAX and PyTorch."""
        while True:
            yield from self

    def at(self, position: Position) -> TrainBatches:
        """The same batches from another position on: files that are open stay open, nothing is checked again."""
        moved = copy.copy(self)
        moved.position, moved._ended, moved._remaining = position, 0, None
        return moved

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_remaining": None}

    def _take_remaining(self, iteration: int) -> Cursor:
        kept, self._remaining = self._remaining, None
        if kept is not None and kept[0] == iteration:
            return kept[1]
        position = self.position.after(iteration * self._steps)
        return Cursor(order.train_windows(self._table.first, position, self._host), None)


class EvalBatches(_Batches):
    """What `eval_batches` returns: each iteration is the same."""

    def __init__(self, info: DatasetInfo, split: str, global_batch_size: int, **more: Any) -> None:
        super().__init__(info, split, global_batch_size, **more)
        self._batches = -(-self._table.total // global_batch_size) * self._replicas

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        start, stop = order.eval_share(self._table.total, self._hosts, self._host)
        padding = self._batches * self.batch_size - (stop - start)
        windows = order.eval_windows(self._table.first, start, stop, padding)
        with self._engine(Cursor(windows, None), for_training=False) as engine:
            for number in range(1, self._batches + 1):
                batch = engine.next_batch()
                if number == self._batches:
                    self._source.report()
                yield (*self._inputs(batch), batch.weights)


def train_batches(
    info: Info,
    split: str,
    *,
    global_batch_size: int,
    image_size: ImageSize = None,
    resize_mode: str = "crop",
    seed: int = 0,
    position: Position | None = None,
    host: Host = None,
    augment: Augment | None = None,
    labels: Labels = "int",
    features: Sequence[str] = (),
    window_runs: int = WINDOW_RUNS,
    cache: Cache = None,
    on_error: OnError = "raise",
) -> TrainBatches:
    """An endless, globally shuffled stream of batches (images, labels), an epoch's worth in each iteration.

    One iteration is `info.steps_per_epoch(split, global_batch_size)` batches; the next one continues where the last one
    that was read to its end stopped, so no record is dropped between epochs. Leaving an iteration early moves nothing.

    Args:
        info: from `load_info`, or the dataset's URL.
        split: TFDS split string, such as `train`, `train[:10%]`, `train+validation`.
        global_batch_size: records that all hosts together read in a step.
        image_size: side or (height, width) in pixels; None for the stored size.
        resize_mode: `crop`, `stretch` or `pad`, if `image_size` isn't the stored size.
        seed: of the order and of augmentation.
        position: where to resume, from the trained steps: `batches.position.after(steps)`. Its own seed and window_runs
            are used; a `seed` other than 0 that differs is an error.
        host: which part of the records is read here: (index, count), or the `tf.distribute.InputContext` that
            `distribute_datasets_from_function` gives, whose replicas then take a batch each; None for all.
        augment: `f(image, seed)`, of `reader.augment` or your own.
        labels: `int` or `one_hot`.
        features: names of further features that are wanted: a manifest's columns, or `filename`, `label`, `size`.
        window_runs: runs of 64 records that are shuffled together; larger values mix better but use more memory.
        cache: None, `memory` or a local folder: keeps undecoded what was read from remote storage (`reader.cache`).
        on_error: `raise`, or `skip` corrupt records: another record of the split takes the row of each; they are
            counted (`batches.skipped`, `reader.skipped(dataset)`) and logged at the end of an iteration.

    Returns:
        Batches of uint8 [b, height, width, channels] and int64 [b] (or float32 [b, classes]), b = global_batch_size /
        hosts. With `features`, the first is a dict of `image` and the features: [b] each, [b, n] if all records have n
        values; arrays of objects [b] for bytes and for lists of any length.

    Raises:
        ValueError: the batch can't be divided by the hosts or replicas; another dataset's position.
        UsageError: no such split, mixed stored sizes without `image_size`, or an argument's value is invalid.
        ImageShardsError: a shard is missing or has another size than the manifest says.
        CorruptRecordError: while iterating, after all batches before it: names file, record and byte offset.
    """
    info = as_info(info)
    _, hosts, _ = share_of_host(host)
    if position is None:
        position = info.position(
            split, global_batch_size=global_batch_size, hosts=hosts, seed=seed, window_runs=window_runs
        )
    else:
        position = _resumed(info, split, position, global_batch_size, hosts, seed, window_runs)
    decode = _decoder(info, image_size, resize_mode, augment)
    return TrainBatches(
        info,
        split,
        global_batch_size,
        position,
        host=host,
        decode=decode,
        labels=labels,
        features=features,
        on_error=on_error,
        cache=cache,
    )


def eval_batches(
    info: Info,
    split: str,
    *,
    global_batch_size: int,
    image_size: ImageSize = None,
    resize_mode: str = "crop",
    host: Host = None,
    labels: Labels = "int",
    features: Sequence[str] = (),
    on_error: OnError = "raise",
) -> EvalBatches:
    """Every record exactly once, in file order, as batches (images, labels, weights).

    All batches are full and every host has as many; padding has weight 0, as has the row of a skipped record. Give
    metrics to Keras as `weighted_metrics=[…]`: plain `metrics` count the padding.

    Args: as `train_batches`.

    Returns:
        Images and labels as of `train_batches`, and float32 [b] weights; ceil(records / global_batch_size) batches (for
        each replica of an InputContext).

    Raises: as `train_batches`.
    """
    info = as_info(info)
    decode = _decoder(info, image_size, resize_mode, None)
    more: dict[str, Any] = {
        "host": host,
        "decode": decode,
        "labels": labels,
        "features": features,
        "on_error": on_error,
    }
    return EvalBatches(info, split, global_batch_size, **more)


class _NumpyBatches:
    """A `tf.data.Dataset` as NumPy batches."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return int(self._dataset.cardinality())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset.as_numpy_iterator())


def as_numpy(dataset: Any) -> Any:
    """The batches of a `tf.data.Dataset` as NumPy arrays, read-only, without a copy; other batches as they are.

    For datasets of `train_dataset`, `train_batches` is the shorter way.
    """
    return _NumpyBatches(dataset) if hasattr(dataset, "as_numpy_iterator") else dataset


def skipped(dataset: Any) -> int:
    """How many corrupt records `on_error="skip"` has left out of a dataset so far, each counted once.

    Args:
        dataset: of `train_dataset` or `eval_dataset` (not what `map` and the like made of it), `train_batches`,
            `eval_batches`, or a `reader.torch.ShardDataset`.

    Raises:
        UsageError: it is something else.
    """
    try:
        batches = BEHIND.get(dataset, dataset)
    except TypeError:  # not hashable
        batches = dataset
    count = getattr(batches, "skipped", None)
    if not isinstance(count, int):
        raise UsageError(
            f"reader.skipped({type(dataset).__name__}): give what train_dataset, train_batches or the like returned"
        )
    return count


def open_source(info: DatasetInfo, split: str, on_error: str = "raise", cache: Cache = None) -> Source:
    """Find the records of a split string and check that their files are there, with the sizes of the manifest.

    Raises:
        UsageError: no such split, or an argument's value is invalid.
        ImageShardsError: a shard is missing or has another size, unless records are skipped; or it is
            compressed.
    """
    if on_error not in ("raise", "skip"):
        raise UsageError(f"on_error must be raise or skip, got {on_error!r}")
    table = info.run_table(split)
    wrong = info.wrong_sizes(split)
    if wrong and on_error == "raise":
        more = f" (and {len(wrong) - 1} more shards)" if len(wrong) > 1 else ""
        raise ImageShardsError(f"{wrong[0]}{more}: run the job again with --repair, or read with on_error='skip'")
    for line in wrong:
        _LOG.warning("%s: the records that it lacks are skipped", line)
    return Source(RunReader(table, open_cache(info, table, cache)), Skips() if on_error == "skip" else None)


def _decoder(info: DatasetInfo, image_size: ImageSize, resize_mode: str, augment: Augment | None) -> ImageDecoder:
    return ImageDecoder(info.image, image_size, resize_mode, augment, is_foreign=FOREIGN_KEY in info.manifest)


def _resumed(
    info: DatasetInfo, split: str, position: Position, global_batch_size: int, hosts: int, seed: int, window_runs: int
) -> Position:
    """`position`, read on by these hosts and batches."""
    if not isinstance(position, Position):
        raise UsageError(
            f"position must be a reader.Position, such as batches.position.after(trained_steps), got {position!r}"
        )
    here = info.position(split, global_batch_size=global_batch_size, hosts=hosts)
    for name, meaning in (("source", "dataset or split"), ("records", "number of records")):
        ours, given = getattr(here, name), getattr(position, name)
        if ours != given:
            raise ValueError(f"the position was made with another {meaning}: {given!r}, here it is {ours!r}")
    if seed not in (0, position.seed):
        raise ValueError(f"the position was made with another seed: {position.seed}, here it is {seed}")
    runs = None if window_runs == WINDOW_RUNS else window_runs
    return position.on(global_batch_size=global_batch_size, hosts=hosts, window_runs=runs)
