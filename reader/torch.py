"""`as_torch`: batches as PyTorch tensors, for a loop or a `DataLoader`, without TensorFlow.

batches = imageshards.train_batches(info, "train", global_batch_size=64, host="auto")
loader = DataLoader(imageshards.as_torch(batches), batch_size=None)
for epoch in range(10):
    for images, labels in loader:
        ...
"""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from beam_pipeline.errors import UsageError
from beam_pipeline.text import one_line
from reader.augment import RandomResizedCrop, flip, flip_crop
from reader.features import Feature
from reader.pixels import call_user
from reader.rows import RecordRows
from reader.stream import Batches, BatchIterator, Element, EvalBatches, State

Transform = Callable[..., Any]


class TorchBatches(IterableDataset[Any]):  # type: ignore[misc]  # mypy does not follow torch
    """What `as_torch` returns: `len()` is the batches of a full iteration.

    Attributes:
        batches: that it reads.
    """

    def __init__(self, batches: Batches, transform: Transform | None = None) -> None:
        Batches.check_given(batches, "as_torch")
        if transform is not None:
            if not callable(transform):
                raise UsageError(
                    f"transform must be a function f(image) or f(image, seed) of a PIL image, got {transform!r}"
                )
            if transform in (flip, flip_crop) or isinstance(transform, RandomResizedCrop):
                name = getattr(transform, "__name__", "random_resized_crop(…)")
                raise UsageError(f"augment.{name} works on arrays: give it to train_batches, augment=augment.{name}")
            batches = batches.with_rows(functools.partial(_TransformRows, transform))
        self.batches = batches
        self._is_worker = False  # of a DataLoader
        # In shared memory, since nothing else tells this process: the loops of workers don't move its batches.
        self._is_read_by_workers = torch.zeros(1, dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Element]:
        worker, begin = get_worker_info(), self.batches.next_loop
        is_any_loop = isinstance(self.batches, EvalBatches) and not begin.step  # that an evaluation makes
        if not (self._is_worker or is_any_loop) and (worker is None or worker.id == 0):
            self._check_unread("give the DataLoader persistent_workers=True: new workers would read this loop again")
        if worker is None:
            return BatchIterator(self.batches, self._adapt)
        if worker.id == 0:
            self._is_read_by_workers[0] = True
        self._is_worker = True
        self.batches.end(begin)  # at once: workers that read ahead unequally far begin the next loop together
        return self._adapt(self.batches.read(begin, (worker.id, worker.num_workers), threads=1))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._is_read_by_workers.share_memory_()  # a copy isn't

    def state_dict(self, step: Any = None) -> dict[str, Any]:
        """The state after a step, as JSON can hold it.

        Args:
            step: in training the global step, counted from the beginning of the run through every resume; in evaluation
                the steps that are read of it. An integer of any kind.

        Raises:
            UsageError: `step` isn't given, or is before these batches begin.
        """
        if step is None:
            raise UsageError(
                "give state_dict(step) the step that is trained, since loaders read ahead of it; torchdata's "
                "StatefulDataLoader doesn't: use torch.utils.data.DataLoader"
            )
        return self.batches.state_at(step).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next loop is the rest of the interrupted one, with any workers; in training also with other ranks.

        Raises:
            UsageError, ValueError: it is another dataset's, or no state; or a DataLoader's workers have begun to read.
        """
        self._check_unread("load the state into a new imageshards.as_torch(batches)")
        self.batches.restore(State.parse(state))

    def _check_unread(self, fix: str) -> None:
        if self._is_read_by_workers[0]:
            raise UsageError(f"a DataLoader's workers have read this dataset, and only they know how far: {fix}")

    def _adapt(self, batches: Iterator[Element]) -> Iterator[Element]:
        return map(self._tensors, batches)

    def _tensors(self, batch: Element) -> Element:
        """A NumPy batch → tensors over the same memory."""
        inputs, *arrays = batch
        columns = dict(inputs) if self.batches.features else {"image": inputs}
        columns["image"] = _images(columns["image"])
        for name, feature in self.batches.features.items():
            columns[name] = _column(columns[name], feature)
        kind = EvalBatch if isinstance(self.batches, EvalBatches) else TrainBatch
        made: Element = kind(columns if self.batches.features else columns["image"], *map(torch.from_numpy, arrays))
        return made


def _named_tuple(name: str, *fields: str) -> Any:
    """A type of batches that refuses what `default_collate` would make of several.

    It is passed through `default_convert`, `pin_memory`, Lightning and accelerate as a named tuple is, that is, by
    `type(batch)(*parts)`; accelerate knows one by its bases, so this can't be a class that inherits from one.
    """
    made = cast(Any, namedtuple(name, fields))
    new = made.__new__

    def checked(cls: Any, inputs: Any, labels: Any, *weights: Any) -> Any:
        if isinstance(labels, torch.Tensor) and labels.ndim > (1 if labels.dtype == torch.int64 else 2):
            raise UsageError("the DataLoader makes batches of batches: give it batch_size=None")
        return new(cls, inputs, labels, *weights)

    made.__new__ = checked
    return made


TrainBatch = _named_tuple("TrainBatch", "inputs", "labels")
EvalBatch = _named_tuple("EvalBatch", "inputs", "labels", "weights")


def as_torch(batches: Batches, transform: Transform | None = None) -> TorchBatches:
    """Batches as PyTorch tensors: a dataset for a `DataLoader` with `batch_size=None`, or for a plain loop.

    The batches are those of every other framework. They are decoded in threads: workers are for transforms in Python
    that hold the interpreter. Worker k of n makes every n-th batch, so any number of them yields the same batches. They
    need `persistent_workers=True` for more than one loop, and each loop, also after one that was left early, is the
    next iteration.

    Args:
        batches: what `train_batches` or `eval_batches` returned; with several ranks give them `host="auto"`.
        transform: after resizing and augmenting, `f(image)` of a PIL image, such as torchvision's, or `f(image, seed)`
            with the record's seed. Returns a PIL image, or anything that `default_collate` takes.

    Returns:
        Elements uint8 [b, channels, height, width] (in memory channels last, the faster layout of convolutions), or the
        collated results of `transform`; int64 [b] labels (or float32 [b, classes]), and float32 [b] weights in
        evaluation. With `features`, the first is a dict of `image` and the features: tensors [b] or [b, n]; a list of
        bytes; a list of tensors (or of lists of bytes) for lists of any length.

    Raises:
        UsageError: the batches aren't some, or `transform` isn't callable. While iterating: `transform` failed, the
            loader has a batch size of its own, or its workers don't persist.
    """
    return TorchBatches(batches, transform)


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
        raise UsageError(f"can't collate what transform returned: {one_line(error)[:200]}") from None
    return torch.from_numpy(images[..., None] if images.ndim == 3 else images).permute(0, 3, 1, 2)


def _column(values: np.ndarray[Any, Any], feature: Feature) -> Any:
    """The values of one feature in a batch: a tensor if there is one that holds them, else a list."""
    if feature.dtype == "bytes":
        return list(values)
    if feature.shape is None:
        return [torch.from_numpy(value) for value in values]
    return torch.from_numpy(values)
