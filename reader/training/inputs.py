"""What a run reads, as Keras takes it on either backend, and how long training waited for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from beam_pipeline.errors import errors_as_tokens
from reader.augment import BY_NAME
from reader.batches import eval_batches, train_batches
from reader.info import DatasetInfo
from reader.keras import loop_of
from reader.position import AnyPosition
from reader.stream import Element, EvalBatches
from reader.training.devices import Devices
from reader.training.options import Recipe

_BEGINNING_S = 0.1  # that the first batch of an epoch may take; threads begin, and a first window is read


class Inputs:
    """What a recipe trains and validates on.

    Attributes:
        evals: what is validated on, each record once; None if nothing is.
        waited_s: seconds that training has waited for batches so far.
    """

    def __init__(self, info: DatasetInfo, recipe: Recipe, devices: Devices) -> None:
        same: dict[str, Any] = {"global_batch_size": recipe.batch_size, "image_size": recipe.image_size}
        same |= {"cache": recipe.options.cache, "host": (devices.process, devices.processes)}
        self._train = train_batches(
            info,
            recipe.data.train,
            seed=recipe.options.seed,
            augment=BY_NAME.get(recipe.options.augment),
            where=recipe.data.selected,
            balance="classes" if recipe.options.balance == "classes" else None,
            **same,
        )
        self.evals: EvalBatches | None = None
        if recipe.data.evaluation is not None:
            self.evals = eval_batches(info, recipe.data.evaluation, where=recipe.data.validated, **same)
        self.waited_s = 0.0

    @property
    def begin(self) -> AnyPosition:
        """Where a new run begins."""
        return self._train.start

    def training(self, position: AnyPosition) -> Any:
        """What is left of the position's epoch, for `fit`."""
        return loop_of(self._train.at(position), self._timed)

    def validation(self) -> Any:
        """For `evaluate`; None if nothing is validated on."""
        return None if self.evals is None else loop_of(self.evals, _with_error_tokens)

    def _timed(self, batches: Iterator[Element]) -> Iterator[Element]:
        start, free = time.perf_counter(), _BEGINNING_S
        for batch in _with_error_tokens(batches):
            self.waited_s += max(0.0, time.perf_counter() - start - free)
            yield batch
            start, free = time.perf_counter(), 0.0


def _with_error_tokens(batches: Iterator[Element]) -> Iterator[Element]:
    with errors_as_tokens():  # TensorFlow passes on an error's text only
        yield from batches
