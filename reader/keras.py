"""Keras' `fit` on any backend: `Stream` hands it the batches, `Resume` continues a run that was stopped.

resume = imageshards.keras.Resume("runs/1", batches)
model.fit(resume.data, epochs=10, initial_epoch=resume.initial_epoch, shuffle=False, callbacks=[resume])
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import keras

from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError, UsageError
from reader.hosts import integer
from reader.machine import lock_folder
from reader.model_state import CORRUPT, PackedState, pack_state, set_torch_random, torch_random
from reader.position import Position
from reader.stream import Batches, Element, State, TrainBatches

if _ON_JAX := keras.backend.backend() == "jax":
    from reader.jax import check_values, take_part

__all__ = ["Resume", "Stream"]

_LOG = logging.getLogger("reader")
_PEEKS = 3  # batches that Keras looks at before it trains: two for TensorFlow's signature, two ahead on accelerators
_FILE = re.compile(r"step-\d{9}\.npz")
_hold = cache(lock_folder)  # until this process ends: in it one Resume may follow another


class Stream(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches for Keras' `fit` (with `shuffle=False`), `validation_data`, `evaluate` and `predict`.

    An epoch is an iteration of the batches. An epoch that doesn't end (an error, `stop_training`) begins again in the
    next `fit`, so no record is lost; as does one that was only predicted on. Leave out `steps_per_epoch`.

    Args:
        batches: what `train_batches` or `eval_batches` returned: elements are theirs.

    Raises:
        UsageError: while it is read: Keras asks for batches in another order; `batches` begin inside an iteration, see
            `as_tf`; or JAX can't take them, see `as_jax`.
    """

    def __init__(self, batches: Batches) -> None:
        super().__init__()
        self._lock = threading.Lock()  # TensorFlow reads ahead in a thread
        self._elements: Iterator[Element] = iter(())
        self._first: list[Element] = []  # batches, while Keras may ask for them again
        self._asked = 0  # for so many in this epoch
        self.move(batches)

    def move(self, batches: Batches) -> None:
        """Begin the next epoch at the batches' current position."""
        with self._lock:
            self._batches = batches
            self._begin: State | None = None  # of the iteration that Keras is in, or didn't end
            self._has_begun = True
            self._rewind()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def workers(self) -> int:
        """None. Keras asks when a `fit`, `evaluate` or `predict` begins."""
        self._has_begun = False
        return 0

    def on_epoch_end(self) -> None:
        """Go on to the next epoch if all batches of this one were asked for; Keras no longer prefetches here."""
        with self._lock:
            if not self._has_begun:  # Keras says so before the first epoch, too, and may have looked at its batches
                self._has_begun, self._asked = True, 0
            elif self._begin is not None and self._asked == len(self):
                self._batches.end(self._begin)
                self._begin = None
                self._rewind()

    def __getitem__(self, index: int) -> Element:
        with self._lock:
            if index not in (0, self._asked) or index >= len(self):
                raise UsageError(f"Keras asked for batch {index}, expected {self._asked}: give fit(…, shuffle=False)")
            if index < len(self._first):
                batch = self._first[index]
            else:
                batch = self._read(index)
                self._first = [*self._first, batch] if index < _PEEKS else []
            self._asked = index + 1
            return batch

    def _read(self, index: int) -> Element:
        if not index:
            _take_part(self._batches)
            self._batches.check_full()
            self._begin = self._begin or self._batches.next_loop
            self._elements = self._batches.read(self._begin)
        try:
            batch = next(self._elements)
            if _ON_JAX:
                check_values(batch)
        except BaseException:  # nothing follows it, but Keras may begin again
            self._rewind()
            raise
        if index + 1 == len(self):
            self._elements = iter(())  # ends its threads
        return batch

    def _rewind(self) -> None:
        self._elements, self._first, self._asked = iter(()), [], 0


class Resume(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves a run every so many steps and at its end; constructed again, it resumes from the last save.

        resume = imageshards.keras.Resume("runs/1", batches)
        epochs = {"epochs": resume.epochs(10), "initial_epoch": resume.initial_epoch}
        model.fit(resume.data, **epochs, shuffle=False, callbacks=[resume])

    However often it is stopped, the run sees the same batches and ends at the same step, 10 · `len(batches)`, with
    the same weights, to the bit if its steps are deterministic. If it has ended, the model gets its weights and `fit`
    does nothing. A save is one file, written in one step, with all variables of model and optimizer, random
    seeds of layers included, and the position; the last two are kept. While the loss is NaN nothing is saved.

    After a stop within an epoch, `fit` counts its epochs of `len(batches)` steps from there, and the last is shorter.
    So these act at other steps, and none remembers what it saw: validation, History, EarlyStopping, ReduceLROnPlateau,
    LearningRateScheduler, ModelCheckpoint(save_freq="epoch"). Learning rates of `keras.optimizers.schedules` go by
    steps, and continue. `use_ema` replaces the weights after `fit`'s last save.

    With another batch size or number of hosts, the records that are unread of the epoch come first. Epochs trained are
    then records read // global batch size // `len(batches)`, and training ends after 10 epochs of that count.

    Args:
        folder: of this run only, or its URL. All hosts read it, host 0 alone writes.
        batches: what `train_batches` returned, with the arguments of the beginning but for batch size and host.
        every_steps: steps between saves. Keras calls back after `steps_per_execution` steps, which must divide
            `len(batches)`.

    Attributes:
        data: a `Stream`, for `fit`.
        step: steps trained since the beginning, through every resume.

    Raises:
        UsageError: the folder's run has another dataset, split, seed or (in `fit`) model, or `fit` isn't called as
            above; after a `fit` that was interrupted, make a new `Resume`.
        ImageShardsError: no save is valid. If only the last is corrupt or holds NaN, that is logged.
    """

    def __init__(self, folder: str | os.PathLike[str], batches: TrainBatches, every_steps: int = 1000) -> None:
        super().__init__()
        self._given, self._url = os.fspath(folder), storage.normalize(os.fspath(folder))
        if why := storage.why_unusable(self._url):
            raise UsageError(f"{self._given}: {why}")
        if not isinstance(batches, TrainBatches) or len(batches) != batches.steps:
            raise UsageError(
                "Resume takes what train_batches returned, without an InputContext: not the tf.data.Dataset of "
                "train_dataset; give resume.data to fit"
            )
        self._store, self._every = storage.open_storage(self._url), integer("every_steps", every_steps, 1)
        self._writes = not batches.host
        if self._writes and storage.is_local(self._url):
            try:
                _hold(self._url)
            except BlockingIOError:
                raise UsageError(f"{self._given}: another process trains there; end it, or choose another") from None
        if self._writes:
            self._store.delete_temporaries(self._url)  # of a process that was killed
        # The name of the last save, and what is yet to be restored of it.
        self._before, self._packed = self._newest()
        position = batches.start if self._packed is None else Position.from_json(self._packed.document["position"])
        try:
            self._batches = batches.at(position, rest=False)
        except ValueError as error:
            raise UsageError(f"{self._given} holds another run: {error}; choose another folder") from None
        self.step = self._saved_step = position.step
        self.data = Stream(self._batches)
        self._is_fitting, self._random = False, list[Any]()

    @property
    def initial_epoch(self) -> int:
        """Epochs trained so far, for `fit`."""
        return self._trained // len(self._batches)

    def epochs(self, count: int) -> int:
        """The `epochs` of a `fit` that ends after so many in all: no fewer than are trained."""
        return max(integer("count", count, 1), self.initial_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore: here the model is built, or can be."""
        model, steps, params = self.model, len(self._batches), self.params or {}
        if self._is_fitting:
            raise UsageError("the last fit was interrupted: make a new Resume, which continues from the last save")
        if params.get("steps") != steps:
            raise UsageError(f"fit runs {params.get('steps')} steps per epoch, expected {steps}: pass x=resume.data")
        if steps % model.steps_per_execution:
            raise UsageError(
                f"steps_per_execution={model.steps_per_execution}, but len(batches) is {steps}: it must be divided, so "
                "that training can stop at the end of an epoch"
            )
        if self._packed is not None:
            if not model.built:  # with TensorFlow, Keras builds it in the first step
                model(self.data[0][0])
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            if not self._packed.restore(model):
                raise UsageError(f"{self._given} holds a run of another model; choose another folder")
            self._random, self._packed = self._packed.more, None
        _take_part(self._batches)
        self.data.move(self._batches.at(self._position, rest=False))
        self._last = self.step - self._trained + params["epochs"] * steps
        self._is_fitting = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count from here."""
        if self.step >= self._last:
            raise UsageError(f"{self.initial_epoch} epochs are trained: give fit initial_epoch=resume.initial_epoch")
        self._first = self.step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Draw the random numbers that follow those of the step before."""
        if self._random:
            set_torch_random(self._random)
            self._random = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if it is time; stop where the last epoch would have ended."""
        before, self.step = self.step, self._first + batch + 1
        is_last = self.step >= self._last
        if is_last or batch + 1 == len(self._batches):
            self._random = torch_random()  # PyTorch's DataLoader draws one when the next epoch begins
        if is_last:
            self.model.stop_training = True
        if is_last or self.step // self._every > before // self._every:
            self._save(logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Save if another callback has ended it."""
        self._is_fitting = False
        if self.step > self._saved_step:
            self._save(logs)

    @property
    def _position(self) -> Position:
        return self._batches.position_at(self.step)

    @property
    def _trained(self) -> int:
        """Batches of this size that the records read so far fill."""
        return self._position.batches_read

    def _names(self) -> list[str]:
        return [name for name in self._store.names(self._url) if _FILE.fullmatch(name)]

    def _newest(self) -> tuple[str, PackedState | None]:
        """(name, save), the last that is valid."""
        names = self._names()
        for name in reversed(names):
            try:
                packed = PackedState(self._store.read(storage.join(self._url, name)))
                Position.from_json(packed.document["position"])
                if not packed.has_nan:  # or the loss would stay NaN
                    return name, packed
            except CORRUPT:
                pass
            _LOG.warning("%s/%s is corrupt or holds NaN: continuing from the save before", self._given, name)
        if names:
            raise ImageShardsError(f"no save in {self._given} can be read: delete them to start again")
        return "", None

    def _save(self, logs: Any) -> None:
        self._saved_step = self.step
        if math.isnan(float((logs or {}).get("loss", 0))):  # it would stay NaN, and the saves before would go
            _LOG.warning("the loss is NaN after step %d: not saved", self.step)
            return
        if not self._writes:
            return
        name = f"step-{self.step:09}.npz"
        # Where JAX trains, `self.model` brings its variables up to date.
        data = pack_state(self.model, {"position": self._position.to_json()}, torch_random())
        self._store.write(storage.join(self._url, name), data)
        for other in {*self._names()} - {name, self._before}:
            self._store.delete(storage.join(self._url, other))
        self._before = name


def _take_part(batches: Batches) -> None:
    """As `jax.take_part`, of what `keras.distribution` makes of a batch."""
    if _ON_JAX and (distribution := keras.distribution.distribution()) is not None:
        take_part(batches, distribution.get_data_layout((batches.batch_size,)).backend_layout)
