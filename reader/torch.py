"""PyTorch without TensorFlow: a dataset that reads, shuffles and decodes as `train_dataset` does.

    dataset = reader.torch.ShardDataset(info, "train", batch_size=64, image_size=224, transform=reader.pillow.flip_crop)
    for epoch in range(10):
        dataset.set_epoch(epoch)
        for images, labels in torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=4):
            ...

Records are dealt to (rank, worker) by the same arithmetic as to hosts: in an epoch each record comes once over all
ranks and workers, and all ranks make equally many steps. Nothing is opened before the iteration begins, so it survives
fork and spawn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from beam_pipeline.errors import UsageError
from reader.epoch_parts import EpochParts, Part, parts_from_lists, parts_to_lists
from reader.features import Feature, pick_features
from reader.info import DatasetInfo, check_info
from reader.limits import cpu_count
from reader.packages import explained
from reader.pillow import RandomResizedCrop
from reader.pillow_batches import BatchDecoder, Sample, Transform
from reader.position import WINDOW_RUNS, whole
from reader.skips import Skips
from reader.stream import EvalStream, RecordStream, Source, open_source

try:
    import torch
    from torch.utils.data import IterableDataset, default_collate, get_worker_info
except ModuleNotFoundError as error:
    raise explained(error) from None

Batch = tuple[Any, Any]


class _Resumed(NamedTuple):
    """What a state says of the epoch that it was taken in; worth nothing for another one.

    Attributes:
        epoch: which one.
        parts: of it, in earlier runs.
        at: a worker's own place: its number, and batches that it made; None where the state is of a whole rank.
    """

    epoch: int
    parts: tuple[Part, ...]
    at: tuple[int, int] | None


class ShardDataset(IterableDataset[Batch]):  # type: ignore[misc]  # mypy does not follow torch
    """The batches of one split, one epoch in each iteration.

    Give it to a `DataLoader` with `batch_size=None`: it makes whole batches itself. Without workers it decodes in
    threads, which is as fast and starts at once; workers are for transforms in Python that hold the interpreter.

    Args:
        info: from `load_info`.
        split: TFDS split string, such as `train[:10%]`.
        batch_size: the most records of a step on one rank. The batches of an epoch are nearly equal and may be
            smaller (45 records make 23 and 22 of at most 32), since no record is dropped and all ranks make equally
            many steps. Only with batches of one record, or fewer records than ranks × workers, some ranks make one
            step less: give `drop_last=True` where that would leave the others waiting, as under
            `DistributedDataParallel`.
        image_size: side or (height, width) in pixels; None for the stored size.
        resize_mode: `crop`, `stretch` or `pad`.
        transform: `f(image, seed)` after resizing: a PIL image and a 64-bit integer that follows from (seed, epoch,
            record), so that a record is changed in the same way on any rank or worker. Returns a PIL image, or
            anything that `default_collate` takes. `reader.pillow` has `flip`, `flip_crop` and, in place of resizing,
            `random_resized_crop(…)`.
        features: names of further features that are wanted, as for `train_dataset`.
        shuffle: False for file order: evaluation.
        seed: of order and transforms.
        drop_last: batches of exactly `batch_size`; the up to (batch_size + 1) × ranks × workers records left over,
            other ones each epoch, are left out.
        rank, world_size: None for those of `torch.distributed` if it is initialized, else 0 of 1.
        window_runs: runs of 64 records that are shuffled together.
        threads: that decode, in each worker; None for one a core without workers and one each with.
        on_error: `raise`, or `skip` damaged records: another record takes the place of each, or none with
            `shuffle=False`, where a batch of nothing else is left out. `reader.skipped` counts those of this process.
        cache: as for `train_dataset`; "memory" is kept in each worker, and only if workers persist.

    Yields:
        uint8 [b, channels, height, width] (in memory channels last, the faster layout of convolutions) or the collated
        results of `transform`, and int64 [b] labels. With `features`, the first is a dict of `image` and the features:
        tensors [b] or [b, n]; a list of bytes where they are bytes; a list of tensors (or of lists of bytes) where
        records have lists of any length.

    Raises:
        UsageError: no such split or feature, or an argument has no such value.
    """

    def __init__(
        self,
        info: DatasetInfo,
        split: str,
        *,
        batch_size: int,
        image_size: int | tuple[int, int] | None = None,
        resize_mode: str = "crop",
        transform: Transform | RandomResizedCrop | None = None,
        features: Sequence[str] = (),
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        window_runs: int = WINDOW_RUNS,
        threads: int | None = None,
        on_error: str = "raise",
        cache: str | None = None,
    ) -> None:
        check_info(info)
        batch_size = whole("batch_size", batch_size)
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size}: at least 1")
        self._rank, self._world_size = _rank(rank, world_size)
        self._info = info
        self._split = split
        self._features = pick_features(info, features)
        self._decoder = BatchDecoder(info, image_size, resize_mode, transform, self._features)
        self._shuffle = shuffle
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._threads = threads
        self._on_error = on_error
        self._cache = cache
        self._beginning = info.position(split, global_batch_size=1, seed=seed, window_runs=window_runs)
        # In shared memory: also workers that persist see a new epoch.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._source: tuple[int, Source] | None = None  # and the process that opened it
        self._resumed: _Resumed | None = None
        self.skips = Skips()
        self._steps = 0  # handed out in this iteration
        self._worker, self._batches = 0, 0  # whose turn an iteration here reads, and how many batches that has made

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration reads: another order and other seeds. Call it before each, on every rank."""
        if epoch != int(self._epoch[0]):
            self._epoch[0] = epoch
            self._resumed, self._steps = None, 0

    def steps_per_epoch(self, num_workers: int = 0) -> int:
        """Batches of this rank in an epoch that is read from its beginning by a `DataLoader` with so many workers."""
        whole = self._part(max(1, num_workers))
        return EpochParts(self._beginning.records, self._shuffle, (whole,)).steps(self._rank)

    def state_dict(self, steps: Any = None, num_workers: int = 0) -> dict[str, Any]:
        """Where training stands in this epoch, as JSON can hold it; the same for all ranks.

        Args:
            steps: batches that this rank has trained since the iteration began; None for those handed out, which are
                known without workers only (and in a worker, where torchdata's `StatefulDataLoader` asks).
            num_workers: of the `DataLoader`.
        """
        worker = get_worker_info()
        workers = whole("num_workers", num_workers) if worker is None else worker.num_workers
        parts = self._epoch_parts(max(1, workers)).parts
        trained = self._steps if steps is None else whole("steps", steps)
        if trained < 0:
            raise UsageError(f"steps={trained}: at least 0")
        if worker is None:
            parts = (*parts[:-1], replace(parts[-1], steps=parts[-1].steps + trained))
        return {
            "source": self._beginning.source,
            "seed": self._beginning.seed,
            "epoch": int(self._epoch[0]),
            "parts": parts_to_lists(parts),
            "worker": None if worker is None else [self._worker, self._batches],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where the state was taken, also with other ranks, workers or batch sizes.

        Load it before a `DataLoader` starts its workers: those that persist don't see it.

        Raises:
            UsageError: it is another dataset's or seed's, or no state.
        """
        for name in ("source", "seed"):
            if state.get(name) != getattr(self._beginning, name):
                raise UsageError(f"the state was made with another {name}: {state.get(name)!r}")
        try:
            at = None if state["worker"] is None else (int(state["worker"][0]), int(state["worker"][1]))
            self._resumed = _Resumed(int(state["epoch"]), parts_from_lists(state["parts"]), at)
            self._epoch[0] = self._resumed.epoch
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"not a state of a ShardDataset: {str(state)[:80]}") from None
        self._steps = 0

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        workers, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        parts = self._epoch_parts(workers)
        last = parts.parts[-1]
        place = (number + last.steps) % workers  # the next step is the turn of this one
        at = None if self._resumed is None else self._resumed.at
        self._worker, self._batches = at or (place, last.batches(place))
        self._steps = 0
        consumer = self._rank * workers + self._worker
        sizes = parts.sizes(consumer)
        if not sizes and len(parts.parts) == 1:
            raise UsageError(
                f"batch_size={self._batch_size} with drop_last: {self._beginning.records} records for {last.consumers} "
                "readers (ranks x workers) fill no batch; give a smaller batch_size, or drop_last=False"
            )
        stream = self._open(parts, consumer, sum(sizes[: self._batches]))
        threads = self._threads or (cpu_count() if worker is None else 1)
        for samples in self._decoder.batches(stream, [size for size in sizes[self._batches :] if size], threads):
            self._batches += 1
            self._steps += 1
            if samples:  # else all its records are damaged, and skipped
                yield _collate(samples, self._features)

    def _epoch_parts(self, workers: int) -> EpochParts:
        """The parts of this epoch up to one that `workers` workers a rank read on."""
        if self._resumed is not None and self._resumed.epoch != int(self._epoch[0]):
            self._resumed = None  # `set_epoch` was called in the process that this one is a worker of
        now = self._part(workers)
        parts = (now,) if self._resumed is None else self._resumed.parts
        return EpochParts(self._beginning.records, self._shuffle, parts).then(now)

    def _part(self, workers: int) -> Part:
        return Part(self._world_size, workers, self._batch_size, self._drop_last)

    def _open(self, parts: EpochParts, consumer: int, read: int) -> RecordStream | EvalStream:
        """The records of a consumer from its record `read` on."""
        source, consumers = self._open_source(), parts.parts[-1].consumers
        if not self._shuffle:
            return EvalStream(source, consumers, consumer, skip=read)
        *before, last = parts.phases(self._beginning.phases[0].window_runs)
        mine = replace(last, by_host=tuple(read if i == consumer else last.by_host[i] for i in range(consumers)))
        position = replace(self._beginning, epoch=int(self._epoch[0]), phases=(*before, mine))
        return RecordStream.train(source, position, consumer)

    def _open_source(self) -> Source:
        """The source of this process, which keeps its cache from epoch to epoch."""
        if self._source is None or self._source[0] != os.getpid():
            source = open_source(self._info, self._split, on_error=self._on_error, cache=self._cache)
            self._source = os.getpid(), source
            self.skips = source.skips or self.skips
        return self._source[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}


def _collate(samples: Sequence[Sample], features: Mapping[str, Feature]) -> Batch:
    images, labels = _images([sample.image for sample in samples]), torch.tensor([sample.label for sample in samples])
    if not features:
        return images, labels
    values = zip(*(sample.features for sample in samples), strict=True)
    columns = {name: _column(list(column), features[name]) for name, column in zip(features, values, strict=True)}
    return {"image": images, **columns}, labels


def _images(images: list[Any]) -> Any:
    if not isinstance(images[0], np.ndarray):
        return default_collate(images)
    shapes = {image.shape for image in images}
    if len(shapes) > 1:
        raise UsageError(f"images of mixed shapes make no batch ({min(shapes)} to {max(shapes)}): give image_size")
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def _column(values: list[Any], feature: Feature) -> Any:
    """The values of one feature in a batch: a tensor where there is one that holds them, else a list."""
    if feature.dtype == "bytes":
        return values
    if feature.shape is None:
        return [torch.from_numpy(value) for value in values]
    return torch.from_numpy(np.stack(values))


def _rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size), those of torch.distributed where they aren't given."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = rank if rank is not None else torch.distributed.get_rank() if is_distributed else 0
    world_size = world_size if world_size is not None else torch.distributed.get_world_size() if is_distributed else 1
    rank, world_size = whole("rank", rank), whole("world_size", world_size)
    if not 0 <= rank < world_size:
        raise UsageError(f"rank={rank}, world_size={world_size}: 0 <= rank < world_size")
    return rank, world_size
