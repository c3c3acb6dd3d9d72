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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from beam_pipeline.errors import UsageError, one_line
from beam_pipeline.schema.manifest import FOREIGN_KEY
from reader import order
from reader.augment import Augment, RandomResizedCrop, flip, flip_crop
from reader.batches import Cache, ImageSize, Info, RecordRows, open_source
from reader.buffers import BufferPool
from reader.decode import ImageDecoder, call_user
from reader.engine import Batch, Cursor, Engine
from reader.features import Feature, pick_features, stacked
from reader.info import DatasetInfo, as_info
from reader.limits import cpu_count
from reader.position import WINDOW_RUNS, Phase, integer, share_before

Transform = Callable[..., Any]


class Part(Phase, kw_only=True, frozen=True):
    """A phase of one epoch whose hosts are workers: number rank × workers + worker. They read batch by batch.

    Batches are equally many for all hosts, and steps for all ranks, unless there are fewer records than batches.

    Attributes:
        unread: records of the epoch that were unread when the part began.
        workers: of each rank.
        batch_size: the most records of a batch.
        drop_last: only full batches.
        steps: batches that each rank trained; its workers take turns, from worker 0 on.
    """

    unread: int
    workers: int
    batch_size: int
    drop_last: bool
    steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("workers", self.workers, 1)
        integer("batch_size", self.batch_size, 1)
        integer("steps", self.steps, 0, self.unread + 2 * self.workers)  # a worker's own state rounds up

    def sizes(self, host: int) -> list[int]:
        """Records in each batch of a host; the last may be 0: no batch."""
        if self.drop_last:
            return [self.batch_size] * (self.unread // self.hosts // self.batch_size)
        records = share_before(self.unread, self.hosts, host + 1) - share_before(self.unread, self.hosts, host)
        count = -(-self.unread // self.hosts // self.batch_size)
        # Larger ones first: what has no record comes last, so that the first n sizes are those of n batches.
        return [records // count + (number < records % count) for number in range(count)]

    def batches_by(self, host: int) -> int:
        """How many of the trained batches of a rank one of its hosts made."""
        return self.steps // self.workers + (host % self.workers < self.steps % self.workers)

    def read_by(self, host: int) -> int:
        return sum(self.sizes(host)[: self.batches_by(host)])

    @property
    def read(self) -> int:
        return sum(map(self.read_by, range(self.hosts)))


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
        self._batch_size = integer("batch_size", batch_size, 1)
        self._rank, self._world_size = _rank(rank, world_size)
        self._features = pick_features(info, features)
        self._rows = _rows(info, image_size, resize_mode, augment, transform, self._features)
        self._shuffle, self._drop_last = shuffle, drop_last
        self._threads = None if threads is None else integer("threads", threads, 1)
        self._beginning = info.position(split, global_batch_size=1, hosts=1, seed=seed, window_runs=window_runs)
        self._source, self._pool = open_source(info, split, on_error, cache), BufferPool()
        # In shared memory: also workers that persist see a new epoch.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._resumed: tuple[int, tuple[Part, ...]] = (0, ())  # an epoch, and what was trained of it in earlier runs
        self._steps = 0  # handed out in this iteration
        #: Workers of the `DataLoader`, which `len()` must know.
        self.num_workers = 0

    def __len__(self) -> int:
        return self.steps_per_epoch(self.num_workers)

    @property
    def skipped(self) -> int:
        """How many corrupt records `on_error="skip"` has left out so far in this process."""
        return 0 if self._source.skips is None else self._source.skips.count

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration reads: another order and other seeds. Call it before each, on every rank."""
        epoch = integer("epoch", epoch, 0)
        if epoch != int(self._epoch[0]):
            self._epoch[0] = epoch
            self._resumed, self._steps = (epoch, ()), 0

    def steps_per_epoch(self, num_workers: int = 0) -> int:
        """Batches of this rank in an epoch that is read from its beginning by a `DataLoader` with so many workers."""
        part = self._new_part(max(1, num_workers))
        hosts = range(self._rank * part.workers, (self._rank + 1) * part.workers)
        return sum(size > 0 for host in hosts for size in part.sizes(host))

    def state_dict(self, steps: Any = None, num_workers: int = 0) -> dict[str, Any]:
        """The progress of training in this epoch, as JSON can hold it; the same for all ranks.

        Args:
            steps: batches that this rank has trained since the iteration began; None for those handed out, which are
                known without workers only (and in a worker, where torchdata's `StatefulDataLoader` asks).
            num_workers: of the `DataLoader`.
        """
        worker = get_worker_info()
        workers = max(1, integer("num_workers", num_workers)) if worker is None else worker.num_workers
        # A worker's state is for that worker: as if the others had made as many batches.
        made = self._steps * (1 if worker is None else workers)
        trained = made if steps is None else integer("steps", steps, 0)
        *parts, last = self._parts(workers)
        return {
            "source": self._beginning.source,
            "seed": self._beginning.seed,
            "epoch": int(self._epoch[0]),
            "parts": [
                [part.hosts // part.workers, part.workers, part.batch_size, part.drop_last, part.steps]
                for part in (*parts, replace(last, steps=last.steps + trained))
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration continues where the state was taken, also with other ranks, workers or batch sizes.

        Load it before a `DataLoader` starts its workers: those that persist don't see it.

        Raises:
            UsageError: it is another dataset's or seed's, or no state.
        """
        try:
            epoch, parts = integer("epoch", state["epoch"], 0), self._saved_parts(state)
            ours = {name: (state[name], getattr(self._beginning, name)) for name in ("source", "seed")}
        except (KeyError, IndexError, TypeError, ValueError):
            raise UsageError(f"not a state of a ShardDataset: {str(state)[:80]}") from None
        for name, (saved, here) in ours.items():
            if saved != here:
                raise UsageError(f"the state was made with another {name}: {saved!r}, here it is {here!r}")
        self._resumed, self._steps = (epoch, parts), 0
        self._epoch[0] = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        self._steps = 0
        parts = self._parts(workers)
        last = parts[-1]
        host = self._rank * workers + (number + last.steps) % workers  # whose turn the next step is
        sizes = last.sizes(host)
        if not sizes and len(parts) == 1:
            raise UsageError(
                f"batch_size={self._batch_size} with drop_last: {self._beginning.records} records for {last.hosts} "
                "readers (ranks x workers) fill no batch; give a smaller batch_size, or drop_last=False"
            )
        left = [size for size in sizes[last.batches_by(host) :] if size]
        threads = self._threads or (cpu_count() if worker is None else 1)
        remaining = Cursor(self._windows(parts, host), None)
        more: dict[str, Any] = {"seed": self._beginning.seed, "for_training": self._shuffle}
        with Engine(self._source, self._rows, remaining, left, threads=threads, pool=self._pool, **more) as engine:
            for _ in left:
                batch = engine.next_batch()
                self._steps += 1
                if batch.weights.any():  # else all its records are corrupt, and skipped
                    yield self._tensors(batch)
            self._source.report()

    def _part(self, unread: int, ranks: int, workers: int, batch_size: int, drop_last: int, steps: int = 0) -> Part:
        more: dict[str, Any] = {"unread": unread, "batch_size": batch_size, "drop_last": bool(drop_last)}
        return Part(ranks * workers, self._beginning.window_runs, workers=workers, steps=steps, **more)

    def _new_part(self, workers: int) -> Part:
        """An epoch that is read from its beginning with so many workers on each rank."""
        return self._part(self._beginning.records, self._world_size, workers, self._batch_size, self._drop_last)

    def _parts(self, workers: int) -> tuple[Part, ...]:
        """The parts of this epoch, the last one for so many workers on each rank."""
        (epoch, before), now = self._resumed, self._new_part(workers)
        if not before or epoch != int(self._epoch[0]):  # set by the process that this one is a worker of
            return (now,)
        last = before[-1]
        if replace(now, unread=last.unread, steps=last.steps) == last:
            return before
        if not self._shuffle:
            raise UsageError("with shuffle=False a state is for the same ranks, workers and batch_size only")
        return (*before, replace(now, unread=last.unread - last.read))

    def _saved_parts(self, state: Mapping[str, Any]) -> tuple[Part, ...]:
        """What was trained of an epoch by a state. Raises TypeError, ValueError, … if no training can have made it."""
        parts: list[Part] = []
        for values in state["parts"]:
            unread = self._beginning.records - sum(part.read for part in parts)
            parts.append(self._part(unread, *map(int, values)))
        last = parts[-1]
        if state.get("worker") is not None:  # a worker's of release 1: whose turn it had, and the batches it made
            turn, made = map(int, state["worker"])
            first = last.steps % last.workers
            made -= integer("worker", turn, 0, last.workers - 1) < first
            parts[-1] = replace(last, steps=made * last.workers + first)
        return tuple(part for part in parts if part.steps)

    def _windows(self, parts: tuple[Part, ...], host: int) -> Iterator[order.Window]:
        """What a host of the last part reads, from its first record that wasn't trained on."""
        first, last = self._source.reader.table.first, parts[-1]
        if self._shuffle:
            return order.train_windows(first, replace(self._beginning, epoch=int(self._epoch[0]), phases=parts), host)
        start, stop = order.eval_share(self._beginning.records, last.hosts, host)
        return order.eval_windows(first, start + last.read_by(host), stop)

    def _tensors(self, batch: Batch) -> _TorchBatch:
        images, labels, features = batch.images, batch.labels, batch.features
        if not batch.weights.all():  # in evaluation, corrupt records
            rows = np.flatnonzero(batch.weights)
            images = images[rows] if isinstance(images, np.ndarray) else [images[row] for row in rows]
            labels, features = labels[rows], [features[row] for row in rows]
        inputs = _images(images)
        if self._features:
            columns = zip(self._features.items(), zip(*features, strict=True), strict=True)
            inputs = {"image": inputs, **{name: _column(column, feature) for (name, feature), column in columns}}
        return _TorchBatch(inputs, torch.from_numpy(labels))


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
    decode = ImageDecoder(info.image, image_size, resize_mode, augment, FOREIGN_KEY in info.manifest)
    if transform is None:
        return RecordRows(info, decode, features)
    if not callable(transform):
        raise UsageError(f"transform must be a function f(image) or f(image, seed) of a PIL image, got {transform!r}")
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
    """Images [b, height, width(, channels)], or what a transform returned for each, as a tensor of a batch."""
    try:
        if isinstance(images, list):
            if not isinstance(images[0], np.ndarray):
                return default_collate(images)
            images = np.stack(images)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"what transform returned makes no batch: {one_line(error)[:200]}") from None
    return torch.from_numpy(images[..., None] if images.ndim == 3 else images).permute(0, 3, 1, 2)


def _column(values: Sequence[Any], feature: Feature) -> Any:
    """The values of one feature in a batch: a tensor if there is one that holds them, else a list."""
    if feature.dtype == "bytes":
        return list(values)
    if feature.shape is None:
        return [torch.from_numpy(value) for value in values]
    return torch.from_numpy(stacked(values, feature))


def _rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size), those of torch.distributed unless given."""
    found = (0, 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        found = torch.distributed.get_rank(), torch.distributed.get_world_size()
    world_size = integer("world_size", found[1] if world_size is None else world_size, 1)
    return integer("rank", found[0] if rank is None else rank, 0, world_size - 1), world_size
