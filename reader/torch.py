"""PyTorch without TensorFlow: the batches of `train_batches` as tensors, for ranks and `DataLoader` workers.

    loader = reader.torch.loader(info, "train", batch_size=64, image_size=224, augment=reader.augment.flip_crop)
    for epoch in range(10):
        loader.dataset.set_epoch(epoch)
        for images, labels in loader:
            ...

The engine decodes in threads, so workers are only for transforms in Python that hold the interpreter. Each (rank,
worker) reads as a host of its own: in an epoch each record comes at most once, and all ranks make equally many steps.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from beam_pipeline import schema
from beam_pipeline.errors import UsageError, one_line
from reader import order
from reader.augment import Augment, RandomResizedCrop, flip, flip_crop
from reader.batches import Cache, ImageSize, Info, RecordRows, open_source
from reader.buffers import BufferPool
from reader.decode import ImageDecoder, call_user
from reader.engine import Batch, Engine, Rest, Source
from reader.epoch_parts import EpochParts, Part, parts_from_lists
from reader.features import Feature, pick_features, stacked
from reader.info import DatasetInfo, as_info
from reader.limits import cpu_count
from reader.position import WINDOW_RUNS, whole

Transform = Callable[..., Any]


class _Resumed(NamedTuple):
    """What a state says of the epoch that it was taken in; ignored in another one."""

    epoch: int
    parts: tuple[Part, ...]  # of it, in earlier runs
    at: tuple[int, int] | None  # a worker's number and the batches that it made; None if the state is of a rank


class ShardDataset(IterableDataset[Any]):  # type: ignore[misc]  # mypy does not follow torch
    """The batches of one split, one epoch in each iteration; give it to a `DataLoader` with `batch_size=None`.

    Args:
        info, split, image_size, resize_mode, augment, features, seed, window_runs: as for `train_batches`.
        batch_size: the most records of a step on one rank. The batches of an epoch are nearly equal and may be
            smaller (45 records make 23 and 22 of at most 32), since no record is dropped and all ranks make equally
            many steps. Only with batches of one record, or fewer records than ranks × workers, some ranks make one
            step less: give `drop_last=True` if that would leave the others waiting, as under
            `DistributedDataParallel`.
        transform: after resizing and augmenting, `f(image)` of a PIL image, such as torchvision's, or `f(image, seed)`
            with the record's seed. Returns a PIL image, or anything that `default_collate` takes.
        shuffle: False for file order: evaluation.
        drop_last: batches of exactly `batch_size`; the up to (batch_size + 1) × ranks × workers records left over,
            other ones each epoch, are left out.
        rank, world_size: None for those of `torch.distributed` if it is initialized, else 0 of 1.
        threads: that decode, in each worker; None for one a core without workers and one each with.
        on_error: `raise`, or `skip` corrupt records: another record takes the row of each, or none with
            `shuffle=False`, where a batch of nothing else is left out. `reader.skipped` counts those of this process.
        cache: as for `train_batches`; "memory" is kept in each worker, and only if workers persist.

    Yields:
        uint8 [b, channels, height, width] (in memory channels last, the faster layout of convolutions) or the collated
        results of `transform`, and int64 [b] labels. With `features`, the first is a dict of `image` and the features:
        tensors [b] or [b, n]; a list of bytes; a list of tensors (or of lists of bytes) for lists of any length.

    Raises:
        UsageError: no such split or feature, or an argument's value is invalid.
    """

    def __init__(
        self,
        info: Info,
        split: str,
        *,
        batch_size: int,
        image_size: ImageSize = None,
        resize_mode: str = "crop",
        augment: Augment | None = None,
        transform: Transform | None = None,
        features: Sequence[str] = (),
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        window_runs: int = WINDOW_RUNS,
        threads: int | None = None,
        on_error: str = "raise",
        cache: Cache = None,
    ) -> None:
        info = as_info(info)
        batch_size = _at_least(1, "batch_size", batch_size)
        self._rank, self._world_size = _rank(rank, world_size)
        self._info, self._split = info, split
        self._features = pick_features(info, features)
        self._rows = _rows(info, image_size, resize_mode, augment, transform, self._features)
        self._shuffle, self._drop_last, self._batch_size = shuffle, drop_last, batch_size
        self._threads = None if threads is None else _at_least(1, "threads", threads)
        self._on_error, self._cache = on_error, cache
        self._beginning = info.position(split, global_batch_size=1, hosts=1, seed=seed, window_runs=window_runs)
        # In shared memory: also workers that persist see a new epoch.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._opened: tuple[int, Source, BufferPool] | None = None  # and the process that opened it
        self._open()  # what is missing is said here, not by a worker
        self._resumed: _Resumed | None = None
        self._steps = 0  # handed out in this iteration
        self._worker, self._batches = 0, 0  # whose turn an iteration here reads, and how many batches that has made
        #: Workers of the `DataLoader`, which `len()` must know.
        self.num_workers = 0

    def __len__(self) -> int:
        return self.steps_per_epoch(self.num_workers)

    @property
    def skipped(self) -> int:
        """How many corrupt records `on_error="skip"` has left out so far in this process."""
        skips = None if self._opened is None else self._opened[1].skips
        return 0 if skips is None else skips.count

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration reads: another order and other seeds. Call it before each, on every rank."""
        epoch = _at_least(0, "epoch", epoch)
        if epoch != int(self._epoch[0]):
            self._epoch[0] = epoch
            self._resumed, self._steps = None, 0

    def steps_per_epoch(self, num_workers: int = 0) -> int:
        """Batches of this rank in an epoch that is read from its beginning by a `DataLoader` with so many workers."""
        return EpochParts(self._beginning.records, self._shuffle, (self._part(max(1, num_workers)),)).steps(self._rank)

    def state_dict(self, steps: Any = None, num_workers: int = 0) -> dict[str, Any]:
        """The progress of training in this epoch, as JSON can hold it; the same for all ranks.

        Args:
            steps: batches that this rank has trained since the iteration began; None for those handed out, which are
                known without workers only (and in a worker, where torchdata's `StatefulDataLoader` asks).
            num_workers: of the `DataLoader`.
        """
        worker = get_worker_info()
        workers = whole("num_workers", num_workers) if worker is None else worker.num_workers
        parts = self._epoch_parts(max(1, workers)).parts
        trained = self._steps if steps is None else _at_least(0, "steps", steps)
        if worker is None:
            parts = (*parts[:-1], replace(parts[-1], steps=parts[-1].steps + trained))
        return {
            "source": self._beginning.source,
            "seed": self._beginning.seed,
            "epoch": int(self._epoch[0]),
            "parts": [list(astuple(part)) for part in parts],
            "worker": None if worker is None else [self._worker, self._batches],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration continues where the state was taken, also with other ranks, workers or batch sizes.

        Load it before a `DataLoader` starts its workers: those that persist don't see it.

        Raises:
            UsageError: it is another dataset's or seed's, or no state.
        """
        try:
            epoch, parts, worker = _at_least(0, "epoch", state["epoch"]), state["parts"], state["worker"]
            at = None if worker is None else (int(worker[0]), int(worker[1]))
            resumed = _Resumed(epoch, parts_from_lists(parts, self._beginning.records), at)
            if at is not None and not (0 <= at[0] < resumed.parts[-1].workers and at[1] >= 0):
                raise ValueError
            ours = {name: (state[name], getattr(self._beginning, name)) for name in ("source", "seed")}
        except (KeyError, IndexError, TypeError, ValueError):
            raise UsageError(f"not a state of a ShardDataset: {str(state)[:80]}") from None
        for name, (saved, here) in ours.items():
            if saved != here:
                raise UsageError(f"the state was made with another {name}: {saved!r}, here it is {here!r}")
        self._resumed, self._steps = resumed, 0
        self._epoch[0] = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        parts = self._epoch_parts(workers)
        last = parts.parts[-1]
        turn = (number + last.steps) % workers  # whose turn the next step is
        at = None if self._resumed is None else self._resumed.at
        self._worker, self._batches = at or (turn, last.batches(turn))
        self._steps = 0
        consumer = self._rank * workers + self._worker
        sizes = parts.sizes(consumer)
        if not sizes and len(parts.parts) == 1:
            raise UsageError(
                f"batch_size={self._batch_size} with drop_last: {self._beginning.records} records for {last.consumers} "
                "readers (ranks x workers) fill no batch; give a smaller batch_size, or drop_last=False"
            )
        threads = self._threads or (cpu_count() if worker is None else 1)
        left = [size for size in sizes[self._batches :] if size]
        with self._engine(parts, consumer, sum(sizes[: self._batches]), left, threads) as engine:
            for _ in left:
                batch = engine.take()
                self._batches += 1
                self._steps += 1
                if batch.weights.any():  # else all its records are corrupt, and skipped
                    yield self._tensors(batch)

    def _epoch_parts(self, workers: int) -> EpochParts:
        """The parts of this epoch up to one that `workers` workers a rank read on."""
        if self._resumed is not None and self._resumed.epoch != int(self._epoch[0]):
            self._resumed = None  # `set_epoch` was called in the process that this one is a worker of
        now = self._part(workers)
        parts = (now,) if self._resumed is None else self._resumed.parts
        return EpochParts(self._beginning.records, self._shuffle, parts).then(now)

    def _part(self, workers: int) -> Part:
        return Part(self._world_size, workers, self._batch_size, self._drop_last)

    def _engine(self, parts: EpochParts, consumer: int, read: int, sizes: list[int], threads: int) -> Engine:
        """What reads a consumer's batches from its record `read` on."""
        source, pool = self._open()
        first, consumers = source.reader.table.first, parts.parts[-1].consumers
        if self._shuffle:
            *before, last = parts.phases(self._beginning.window_runs)
            mine = replace(last, by_host=tuple(read if i == consumer else last.by_host[i] for i in range(consumers)))
            position = replace(self._beginning, epoch=int(self._epoch[0]), phases=(*before, mine))
            windows = order.train_windows(first, position, consumer)
        else:
            start, stop = order.eval_share(self._beginning.records, consumers, consumer)
            windows = order.eval_windows(first, min(start + read, stop), stop)
        more: dict[str, Any] = {"seed": self._beginning.seed, "for_training": self._shuffle}
        return Engine(source, self._rows, Rest(windows, None), sizes, threads=threads, pool=pool, **more)

    def _open(self) -> tuple[Source, BufferPool]:
        """The source of this process, which keeps its cache from epoch to epoch."""
        if self._opened is None or self._opened[0] != os.getpid():
            source = open_source(self._info, self._split, self._on_error, self._cache)
            self._opened = os.getpid(), source, BufferPool()
        return self._opened[1:]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _tensors(self, batch: Batch) -> _TorchBatch:
        rows = np.flatnonzero(batch.weights).tolist()
        all_count = len(rows) == len(batch.labels)
        images = _images(batch.images if all_count else [batch.images[row] for row in rows])
        labels = torch.from_numpy(batch.labels if all_count else batch.labels[rows])
        if not self._features:
            return _TorchBatch(images, labels)
        columns = zip(*(batch.features[row] for row in rows), strict=True)
        values = {
            name: _column(column, feature)
            for (name, feature), column in zip(self._features.items(), columns, strict=True)
        }
        return _TorchBatch({"image": images, **values}, labels)


class _TorchBatch(NamedTuple("_TorchBatch", [("inputs", Any), ("labels", Any)])):
    """What an iteration yields."""

    __slots__ = ()

    def __new__(cls, inputs: Any, labels: Any) -> _TorchBatch:
        if getattr(labels, "ndim", 1) != 1:  # a `DataLoader` has collated several batches into one
            raise UsageError(
                "a ShardDataset yields batches: give its DataLoader batch_size=None, or use reader.torch.loader"
            )
        return super().__new__(cls, inputs, labels)


def loader(info: Info, split: str, *, batch_size: int, num_workers: int = 0, **more: Any) -> Any:
    """A `DataLoader` over a `ShardDataset`, whose `len()` is the batches of an epoch.

    Args:
        info, split, batch_size: as `ShardDataset`.
        num_workers: processes; the engine needs none, since it decodes in threads.
        more: what `ShardDataset` takes; and of `DataLoader`, `pin_memory`, `persistent_workers`, `prefetch_factor`,
            `multiprocessing_context`.

    Raises: as `ShardDataset`.
    """
    names = ("pin_memory", "persistent_workers", "prefetch_factor", "multiprocessing_context")
    options = {name: more.pop(name) for name in names if name in more}
    dataset = ShardDataset(info, split, batch_size=batch_size, **more)
    dataset.num_workers = num_workers
    return DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)


class _TransformRows(RecordRows):
    """Rows that are what a user's transform returns."""

    def __init__(self, transform: Transform, info: DatasetInfo, decode: ImageDecoder, features: Any) -> None:
        super().__init__(info, decode, features)
        self._fill, self._transform, self._takes_seed = decode, transform, _takes_seed(transform)
        self.shape, self.decode = None, self._transformed

    def _transformed(self, encoded: Any, row: Any, seed: int) -> Any:
        pixels = np.empty(self._fill.shape, np.uint8)
        self._fill(encoded, pixels, seed)
        image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
        result = call_user(self._transform, *((image, seed) if self._takes_seed else (image,)))
        return np.asarray(result) if isinstance(result, Image.Image) else result


def _rows(
    info: DatasetInfo,
    image_size: ImageSize,
    resize_mode: str,
    augment: Augment | None,
    transform: Transform | None,
    features: Mapping[str, Feature],
) -> RecordRows:
    if isinstance(transform, RandomResizedCrop) or transform in (flip, flip_crop):
        augment, transform = transform, None  # ours work on arrays
    decode = ImageDecoder(info.image, image_size, resize_mode, augment, schema.FOREIGN_KEY in info.manifest)
    if transform is None:
        return RecordRows(info, decode, features)
    if not callable(transform):
        raise UsageError(f"transform={transform!r}: a function f(image) or f(image, seed) of a PIL image")
    return _TransformRows(transform, info, decode, features)


def _takes_seed(transform: Transform) -> bool:
    """Whether a transform has a second argument of its own: torchvision's are called with the image alone."""
    try:
        parameters = inspect.signature(transform).parameters.values()
    except ValueError:  # a builtin without a signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in positional and parameter.default is parameter.empty for parameter in parameters) > 1


def _images(images: Any) -> Any:
    if isinstance(images, list) and not isinstance(images[0], np.ndarray):
        try:
            return default_collate(images)
        except (TypeError, RuntimeError) as error:
            raise UsageError(f"what transform returned makes no batch: {one_line(error)[:200]}") from None
    if isinstance(images, list):
        shapes = {image.shape for image in images}
        if len(shapes) > 1:
            raise UsageError(f"transform returned images of mixed shapes ({min(shapes)} to {max(shapes)}): no batch")
        images = np.stack(images)
    return torch.from_numpy(images[..., None] if images.ndim == 3 else images).permute(0, 3, 1, 2)


def _column(values: Sequence[Any], feature: Feature) -> Any:
    """The values of one feature in a batch: a tensor if there is one that holds them, else a list."""
    if feature.dtype == "bytes":
        return list(values)
    if feature.shape is None:
        return [torch.from_numpy(value) for value in values]
    return torch.from_numpy(stacked(values, feature))


def _at_least(least: int, name: str, value: Any) -> int:
    number = whole(name, value)
    if number < least:
        raise UsageError(f"{name}={number}: at least {least}")
    return number


def _rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size), those of torch.distributed unless given."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = rank if rank is not None else torch.distributed.get_rank() if is_distributed else 0
    world_size = world_size if world_size is not None else torch.distributed.get_world_size() if is_distributed else 1
    rank, world_size = whole("rank", rank), whole("world_size", world_size)
    if not 0 <= rank < world_size:
        raise UsageError(f"rank={rank}, world_size={world_size}: 0 <= rank < world_size")
    return rank, world_size
