"""Keras callback: stop, checkpoint and progress between steps, without blocking the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras

_AHEAD = 2  # steps that are begun before earlier ones have ended: a device then never waits for Python
_PATIENCE_S = 60.0  # after which the next is begun in any case: an error of a step comes with it


class StepWatch(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls `before` in the main thread before each step, when the state of the model may be read.

    Args:
        before: gets the number of steps of this `fit`, or `evaluate`, that are begun, and the last known logs of `fit`.
        at_first: is called after `fit` has reset the metrics, which may be restored then.
    """

    # Keras then gives `on_train_batch_end`, whose logs it has to wait for, to another thread.
    async_safe = True

    def __init__(
        self, before: Callable[[int, dict[str, float] | None], None], at_first: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._before, self._at_first, self._logs = before, at_first, None
        self._free = threading.Semaphore(_AHEAD)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._at_first()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._free.acquire(timeout=_PATIENCE_S)
        self._before(batch, self._logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._logs = logs
        self._free.release()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._before(batch, None)
