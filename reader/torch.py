"""PyTorch without TensorFlow: batches as tensors, for a loop, a `DataLoader` with or without workers, and ranks.

    batches = imageshards.train_batches(info, "train", global_batch_size=64, host="auto")
    loader = DataLoader(imageshards.as_torch(batches), batch_size=None)
    for epoch in range(10):
        for images, labels in loader:
            ...

The engine decodes in threads, so workers are only for transforms in Python that hold the interpreter. They take turns:
the batches are the same with any number of them.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from beam_pipeline.errors import UsageError
from beam_pipeline.text import one_line
from reader.augment import Augment, RandomResizedCrop, flip, flip_crop
from reader.batches import (
    Batches,
    Cache,
    EvalBatches,
    ImageSize,
    Info,
    OnError,
    RecordRows,
    TrainBatches,
    eval_batches,
    train_batches,
)
from reader.features import Feature
from reader.pixels import call_user
from reader.position import Position, integer, process_of_several
from reader.select import Classes, Where
from reader.stream import MAX_ITERATION, BatchIterator, Element, State

_LOG = logging.getLogger("reader")

Transform = Callable[..., Any]

_MAX_WORKERS = 1024
_STATE_BYTES = 16 << 10
# Numbers in shared memory: states that were loaded, the iteration that is next, workers that read.
_LOADED, _NEXT, _WORKERS = range(3)


class TorchBatches(IterableDataset[Any]):  # type: ignore[misc]  # mypy does not follow torch
    """What `as_torch` returns: `len()` is the batches of a full iteration.

    Give it to a `DataLoader` with `batch_size=None`, or iterate over it. Which iteration is next lives in shared memory
    and advances when the last batch was made, in workers when all have made theirs.

    Attributes:
        batches: that it reads.
    """

    def __init__(self, batches: Batches, threads: int | None = None) -> None:
        if not isinstance(batches, Batches):
            raise UsageError(
                f"imageshards.as_torch({type(batches).__name__}): give what train_batches or eval_batches returned"
            )
        self.batches, self._threads = batches, threads
        if isinstance(batches, TrainBatches):  # iterations are counted from the beginning of the run
            begin = batches.start
            self.batches = batches.at(begin)
            self.batches.restore(State(begin, *divmod(begin.batches_read, batches.steps)))
        self._shared = torch.tensor([0, self.batches.next_up()[0], 0]).share_memory_()
        # For each worker: the loader that it is one of, and the iteration that it reads next.
        self._of_workers = torch.zeros((_MAX_WORKERS, 2), dtype=torch.int64).share_memory_()
        self._saved = torch.zeros(_STATE_BYTES, dtype=torch.uint8).share_memory_()
        self._loaded = 0
        self._begin_reading()

    def _begin_reading(self) -> None:
        self._where: tuple[int, int, int] | None = None  # of the last iteration in this process: see `Batches.state`
        self._first_epoch: int | None = None  # what `set_epoch` is counted from

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> BatchIterator:
        worker = get_worker_info()
        if worker is None:
            self._shared[_WORKERS] = 0
            return _TorchIterator(self, self._threads)
        self._shared[_WORKERS] = worker.num_workers
        # The seed that a loader draws tells its workers from those of a loader that was left early.
        return _TorchIterator(self, self._threads or 1, (worker.id, worker.num_workers), worker.seed - worker.id)

    @property
    def skipped(self) -> int:
        """How many corrupt records `on_error="skip"` has left out so far in this process."""
        return self.batches.skipped

    @property
    def iteration(self) -> int:
        """Number of the iteration that is next, or of the one that is being read."""
        if self._loaded < int(self._shared[_LOADED]):  # by the process that this one is a worker of, or by a worker
            self._loaded = int(self._shared[_LOADED])
            self.batches.restore(State.parse(bytes(self._saved.numpy()).rstrip(b"\0")))
            self._begin_reading()
        return int(self._shared[_NEXT])

    def set_epoch(self, epoch: int) -> None:
        """Read this iteration next, from its beginning; nothing changes if it is next or was resumed within.

        Nobody needs to call it: iterations follow one another. A loop that counts from 0 after a resume goes on
        counting from there.

        Raises:
            UsageError: the iteration was read already.
        """
        epoch, now = integer("epoch", epoch, 0, MAX_ITERATION), self.iteration
        if self._first_epoch is None:
            resumed = self.batches.start.step > 0 and epoch < now
            self._first_epoch = now - epoch if resumed else 0
            if resumed:
                _LOG.warning("set_epoch(%d): resumed in iteration %d, so epochs are counted from there", epoch, now)
        if epoch + self._first_epoch < now:
            raise UsageError(
                f"set_epoch({epoch}): iteration {now} is next; to read an earlier one again, give "
                "imageshards.as_torch(batches.at(position))"
            )
        if epoch + self._first_epoch > now:
            self._shared[_NEXT], self._where = epoch + self._first_epoch, None

    def state_dict(self, step: Any = None) -> dict[str, Any]:
        """Where this stream stands, as JSON can hold it: position, iteration and step of the iteration.

        Args:
            step: the global step, counted from the beginning of the run through every resume; None for the batches
                that were handed out, which are known without workers only. (torchdata's `StatefulDataLoader` asks its
                workers; their states are for the same ranks and batch size.)

        Raises:
            UsageError: `step` is before these batches begin, or there are workers and it isn't given.
        """
        iteration = self.iteration
        if step is not None:
            return self.batches.state_at(step).to_dict()
        if int(self._shared[_WORKERS]) and get_worker_info() is None:
            raise UsageError(
                "a DataLoader's workers read ahead of the trainer: give state_dict(step) the global step, or use "
                "torchdata's StatefulDataLoader"
            )
        if self._where is None:
            self.batches.begin(iteration)
            return self.batches.state(*self.batches.next_up()).to_dict()
        return self.batches.state(*self._where).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration is the rest of the one that the state was saved in, also on other ranks or batch sizes.

        Raises:
            UsageError, ValueError: it is another dataset's, or no state.
        """
        parsed, worker = State.parse(state), get_worker_info()
        before, now = parsed.position, self.batches.start
        if worker is not None and (before.global_batch_size, before.hosts) != (now.global_batch_size, now.hosts):
            raise UsageError(  # each worker knows its own batches only
                "what a StatefulDataLoader's workers saved is for the same ranks and batch size: for other ones save "
                "dataset.state_dict(step)"
            )
        self.batches.restore(parsed)
        self._begin_reading()
        self._shared[_NEXT] = parsed.iteration
        if worker is None:
            self._shared[_WORKERS] = 0
            self._loaded = int(self._shared[_LOADED])
        self._loaded += 1  # in every worker: each has a state of its own, and the last one's is no news to the others
        if worker is not None and worker.id < worker.num_workers - 1:  # that has handed out the fewest batches
            return
        text = np.frombuffer(parsed.to_json().ljust(_STATE_BYTES, b"\0"), np.uint8)
        self._saved.copy_(torch.from_numpy(text.copy()))
        self._shared[_LOADED] = self._loaded  # last, so that nobody reads half of it

    def tensors(self, batch: Element) -> Element | None:
        """A NumPy batch → tensors over the same memory; None if no row of it is left."""
        inputs, *arrays = batch
        columns = dict(inputs) if self.batches.features else {"image": inputs}
        columns["image"] = _images(columns["image"])
        for name, feature in self.batches.features.items():
            columns[name] = _column(columns[name], feature)
        return columns if self.batches.features else columns["image"], *map(torch.from_numpy, arrays)


class _TorchIterator(BatchIterator):
    """An iteration in one process, which is told to the others.

    Args:
        dataset: that is read.
        threads, turn: as of `BatchIterator`.
        loader: of which this process is a worker; 0 without workers.
    """

    def __init__(
        self, dataset: TorchBatches, threads: int | None, turn: tuple[int, int] = (0, 1), loader: int = 0
    ) -> None:
        super().__init__(dataset.batches, functools.partial(map, dataset.tensors), turn=turn, threads=threads)
        self._dataset, self._loader = dataset, loader
        dataset.batches.begin(dataset.iteration)
        self._tell()

    def __next__(self) -> Element:
        try:
            while (element := super().__next__()) is None:
                pass
            return element
        finally:
            self._dataset._where = self.where()

    def _restore(self, saved: bytes | str | Mapping[str, Any]) -> None:
        super()._restore(saved)
        iteration, step = self._batches.next_up()
        self._dataset._shared[_NEXT] = iteration
        if not self._batches.sizes(step, self._turn):  # told at once: torchdata doesn't read an iteration that ended
            self._start()
        self._dataset._where = self.where()

    def _end(self) -> None:
        super()._end()
        self._tell()

    def _tell(self) -> None:
        """Which iteration this process reads next: it is the dataset's once all workers of a loader have come there."""
        shared, (worker, workers) = self._dataset._shared, self._turn
        of_workers = self._dataset._of_workers[:workers]
        of_workers[worker] = torch.tensor([self._loader, self._batches.next_up()[0]])
        is_late = self._dataset._loaded < int(shared[_LOADED])  # a state was loaded since
        if not is_late and bool((of_workers[:, 0] == self._loader).all()):
            shared[_NEXT] = max(shared[_NEXT], of_workers[:, 1].min())


def as_torch(batches: Batches) -> TorchBatches:
    """Batches as PyTorch tensors: a dataset for a `DataLoader` with `batch_size=None`, or for a plain loop.

    The batches are those of every other framework, with any number of workers. An iteration is `len(batches)` batches,
    and the next one goes on by itself; after a resume the first one is the rest of the one that was stopped.

    Args:
        batches: what `train_batches` or `eval_batches` returned; with several ranks give them `host="auto"`.

    Returns:
        Elements uint8 [b, channels, height, width] (in memory channels last, the faster layout of convolutions) and
        int64 [b] labels (or float32 [b, classes]), and float32 [b] weights in evaluation. With `features`, the first is
        a dict of `image` and the features: tensors [b] or [b, n]; a list of bytes; a list of tensors (or of lists of
        bytes) for lists of any length.
    """
    return TorchBatches(batches)


class ShardDataset(TorchBatches):
    """`as_torch` for slow transforms and for evaluation without padding; ranks and batch size as PyTorch counts them.

    Args:
        info, split, image_size, resize_mode, augment, features, classes, where, balance, epoch_records, seed,
            window_runs, position, on_error, cache: as for `train_batches`. The cache "memory" is kept in each worker,
            and only if workers persist.
        batch_size: records of a step on one rank.
        transform: after resizing and augmenting, `f(image)` of a PIL image, such as torchvision's, or `f(image, seed)`
            with the record's seed. Returns a PIL image, or anything that `default_collate` takes.
        shuffle: False for evaluation: every record once, in file order, in batches of nearly equal size and as many on
            each rank (unless there are fewer records than ranks). Corrupt records that are skipped have no row.
        rank, world_size: None for what `host="auto"` finds.
        threads: that decode, in each worker; None for one a core without workers and one each with.

    Yields:
        Images, or the collated results of `transform`, and labels, as `as_torch`.

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
        features: Sequence[str] | None = None,
        classes: Classes = None,
        where: Where = None,
        balance: Any = None,
        epoch_records: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        position: Position | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        window_runs: int | None = None,
        threads: int | None = None,
        on_error: OnError = "raise",
        cache: Cache = None,
    ) -> None:
        given, found = locals(), process_of_several()
        world_size = integer("world_size", found[1] if world_size is None else world_size, 1)
        rank = integer("rank", found[0] if rank is None else rank, 0, world_size - 1)
        if isinstance(transform, RandomResizedCrop) or transform in (flip, flip_crop):
            augment, transform = transform, None  # ours work on arrays
        names = ("image_size", "resize_mode", "features", "classes", "where", "on_error", "cache")
        options: dict[str, Any] = {name: given[name] for name in names}
        options |= {"global_batch_size": integer("batch_size", batch_size, 1) * world_size, "host": (rank, world_size)}
        batches: Batches
        if shuffle:
            order: dict[str, Any] = {"seed": seed, "position": position, "window_runs": window_runs}
            order |= {"balance": balance, "epoch_records": epoch_records}
            batches = train_batches(info, split, augment=augment, **order, **options)
        else:
            batches = eval_batches(info, split, **options).without_padding()
        if transform is not None:
            if not callable(transform):
                raise UsageError(
                    f"transform must be a function f(image) or f(image, seed) of a PIL image, got {transform!r}"
                )
            batches = batches.with_rows(functools.partial(_TransformRows, transform))
        super().__init__(batches, None if threads is None else integer("threads", threads, 1))

    def tensors(self, batch: Element) -> Element | None:
        valid = _valid_rows(batch) if isinstance(self.batches, EvalBatches) else batch
        return None if valid is None else super().tensors(valid)


def loader(info: Info, split: str, *, batch_size: int, num_workers: int = 0, **options: Any) -> DataLoader[Any]:
    """A `DataLoader` over a `ShardDataset`.

    Args:
        info, split, batch_size: as `ShardDataset`.
        num_workers: processes; the engine needs none, since it decodes in threads.
        options: further arguments of `ShardDataset` and of `DataLoader`.

    Raises: as `ShardDataset`.
    """
    names = inspect.signature(ShardDataset).parameters
    of_dataset = {name: options.pop(name) for name in [*options] if name in names}
    dataset = ShardDataset(info, split, batch_size=batch_size, **of_dataset)
    return DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)


class _TransformRows(RecordRows):
    """Rows that are what a user's transform returns."""

    def __init__(self, transform: Transform, rows: RecordRows) -> None:
        vars(self).update(vars(rows))
        self._fill, self._pixels = rows.decode, rows.shape
        self._transform, self._takes_seed = transform, _takes_seed(transform)
        self.shape, self.decode = None, self._transformed

    def _transformed(self, encoded: Any, row: Any, seed: int) -> Any:
        pixels = np.empty(self._pixels or (), np.uint8)
        self._fill(encoded, pixels, seed)
        image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
        result = call_user(self._transform, *((image, seed) if self._takes_seed else (image,)))
        return np.asarray(result) if isinstance(result, Image.Image) else result


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


def _column(values: np.ndarray[Any, Any], feature: Feature) -> Any:
    """The values of one feature in a batch: a tensor if there is one that holds them, else a list."""
    if feature.dtype == "bytes":
        return list(values)
    if feature.shape is None:
        return [torch.from_numpy(value) for value in values]
    return torch.from_numpy(values)


def _valid_rows(batch: Element) -> Element | None:
    """A batch (inputs, labels, weights) without weights and without rows of weight 0; None if no row is left."""
    inputs, labels, weights = batch
    rows = np.flatnonzero(weights)
    if len(rows) == len(weights):
        return inputs, labels

    def valid(column: Any) -> Any:
        return [column[row] for row in rows] if isinstance(column, list) else column[rows]

    inputs = {name: valid(column) for name, column in inputs.items()} if isinstance(inputs, dict) else valid(inputs)
    return (inputs, labels[rows]) if len(rows) else None
