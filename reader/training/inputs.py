"""The reader's batches for Keras on either backend, and how long training waited for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from beam_pipeline.errors import errors_as_tokens
from reader.augment import BY_NAME
from reader.batches import eval_batches, train_batches
from reader.info import DatasetInfo
from reader.position import Position
from reader.training.devices import Devices
from reader.training.options import Recipe

_BEGINNING_S = 0.1  # that the first batch of an epoch may take; threads begin, and a first window is read


class Inputs:
    """What a recipe trains and validates on.

    Attributes:
        waited_s: seconds that training has waited for batches so far.
    """

    def __init__(self, info: DatasetInfo, recipe: Recipe, devices: Devices) -> None:
        self._info, self._recipe = info, recipe
        size: dict[str, Any] = {"global_batch_size": recipe.batch_size, "image_size": recipe.image_size}
        self._train = train_batches(
            info,
            recipe.data.train,
            seed=recipe.options.seed,
            augment=BY_NAME.get(recipe.options.augment),
            cache=recipe.options.cache,
            host=devices.host,
            where=recipe.data.selected,
            balance="classes" if recipe.options.balance == "classes" else None,
            **size,
        )
        self._validation = None
        if recipe.data.evaluation is not None:
            self._validation = eval_batches(
                info,
                recipe.data.evaluation,
                cache=recipe.options.cache,
                host=devices.host,
                where=recipe.data.validated,
                **size,
            )
        self.waited_s = 0.0

    @property
    def begin(self) -> Position:
        """Where a new run begins."""
        return self._train.start

    def training(self, position: Position, steps: int) -> Any:
        """The batches of the steps that are left of the position's epoch, for `fit`."""

        def batches() -> Iterator[Any]:
            """Begins at the position whenever it is called: Keras takes a batch to look at, and begins again."""
            start, free = time.perf_counter(), _BEGINNING_S
            for batch in self._train.at(position):
                self.waited_s += max(0.0, time.perf_counter() - start - free)
                yield batch
                start, free = time.perf_counter(), 0.0

        return self._for_keras(batches, steps)

    def validation(self) -> Any:
        """The records of the eval split, each once, for `evaluate`; None if there is none."""
        if self._validation is None:
            return None
        return self._for_keras(self._validation.__iter__, len(self._validation), with_weights=True)

    def _for_keras(self, begin: Callable[[], Iterator[Any]], length: int, with_weights: bool = False) -> Any:
        if keras.backend.backend() != "tensorflow":
            return _Epoch(begin, length)
        import tensorflow as tf

        from reader.tensorflow import generated

        rows, side = self._recipe.batch_size, self._recipe.image_size
        images = tf.TensorSpec((rows, side, side, self._info.image.channels), tf.uint8)
        weights = (tf.TensorSpec((rows,), tf.float32),) if with_weights else ()
        signature = (images, tf.TensorSpec((rows,), tf.int64), *weights)

        def told() -> Iterator[Any]:
            with errors_as_tokens():  # TensorFlow passes on their text only
                yield from begin()

        return generated(told, signature, length)


class _Epoch(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches that Keras begins again in each epoch, and for each validation."""

    def __init__(self, begin: Callable[[], Iterator[Any]], length: int) -> None:
        super().__init__()
        self._begin, self._length = begin, length
        self._iteration = begin()

    def __len__(self) -> int:
        return self._length

    def on_epoch_begin(self) -> None:
        self._iteration = self._begin()

    def __getitem__(self, step: int) -> Any:
        return next(self._iteration)
