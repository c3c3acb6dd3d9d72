"""Keras' `fit` with `reader.keras.Resume`: the backend is that of KERAS_BACKEND, so it runs in processes of its own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from typing import Any

import keras
import numpy as np
from keras import ops

import reader
from tests.soak.trainers import Job, Rows

EPOCHS, EVERY_STEPS, MAX_STEPS, MAX_RECORDS = 3, 5, 500, 64


class _Recorder(keras.layers.Layer):  # type: ignore[misc]
    """Writes the records of each training step into a weight, so that what made the weights is one of them."""

    def __init__(self, segment: int, batch: int) -> None:
        super().__init__()
        self._segment, self._batch = segment, batch
        kind: Any = {"dtype": "int32", "initializer": "zeros", "trainable": False}
        self.at = self.add_weight(shape=(), name="at", **kind)
        self.log = self.add_weight(shape=(MAX_STEPS, 2 + MAX_RECORDS), name="log", **kind)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        outputs, numbers = inputs
        if training:
            head = ops.convert_to_tensor([self._segment, self._batch], "int32")
            tail = ops.zeros((MAX_RECORDS - self._batch,), "int32")
            numbers = ops.cast(ops.reshape(numbers, (self._batch,)), "int32")
            row = ops.concatenate([head, numbers, tail])
            here = ops.expand_dims(ops.equal(ops.arange(MAX_STEPS), self.at.value), 1)
            self.log.assign(ops.where(here, row, self.log.value))
            self.at.assign(self.at + 1)
        return outputs

    def rows(self) -> Rows:
        log = ops.convert_to_numpy(self.log)[: int(ops.convert_to_numpy(self.at))].tolist()
        return [[segment, *numbers[:batch]] for segment, batch, *numbers in log]


class _Killed(Exception):
    pass


class _Kill(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends `fit` after so many steps, as a kill does: by one, or by an error that nobody expects."""

    def __init__(self, steps: int | None, is_killed: bool) -> None:
        super().__init__()
        self._left, self._is_killed = steps, is_killed

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left = None if self._left is None else self._left - 1
        if self._left == 0:
            if self._is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise _Killed


class KerasFit:
    """The recipe of the docs. The state is in the job's folder; what `save` returns is a hash of the last weights."""

    def __init__(self, job: Job, rows: Rows, state: Any) -> None:
        self._job = job
        self._model, self._recorder = _compiled(job)
        self.rows = rows

    def read(self, steps: int | None) -> None:
        if steps == 0:
            return
        resume = reader.keras.Resume(self._job.folder, self._job.batches(), every_steps=EVERY_STEPS)
        with contextlib.suppress(_Killed):
            resume.fit(self._model, epochs=EPOCHS, callbacks=[_Kill(steps, self._job.is_killed)], verbose=0)
        self.rows = self._recorder.rows()

    def save(self) -> Any:
        if self._job.steps is not None:
            return None
        uninterrupted, _ = _compiled(self._job)
        uninterrupted.fit(**reader.keras.fit_arguments(self._job.batches()), epochs=EPOCHS, verbose=0)
        return [_weights(self._model), _weights(uninterrupted)]


def _compiled(job: Job) -> tuple[Any, _Recorder]:
    """A small model whose optimizer has a state; equal each time."""
    image = keras.Input((16, 24, 3), name="image")
    number = keras.Input((), dtype="int32", name="number")
    pixels = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(image))
    logits = keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(1))(pixels)
    recorder = _Recorder(job.segment, job.batch)
    model = keras.Model({"image": image, "number": number}, recorder([logits, number]))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, recorder


def _weights(model: Any) -> str:
    """A hash of every bit that training changes; but for the numbers of the segments."""
    variables = [*model.trainable_variables, *model.optimizer.variables]
    return hashlib.sha256(b"".join(np.asarray(ops.convert_to_numpy(one)).tobytes() for one in variables)).hexdigest()
