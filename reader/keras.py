"""Keras' `fit`, `evaluate` and `predict` on any backend; `Resume` continues a training that was stopped.

model.fit(**imageshards.keras.fit_arguments(train, evals), epochs=3)

resume = imageshards.keras.Resume("runs/1", train)
resume.fit(model, evals, epochs=10)  # the same again, after a kill
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import keras

from beam_pipeline import storage
from beam_pipeline.errors import UsageError
from reader.hosts import integer
from reader.saves import Saves, lock_folder, pack_state, set_torch_random, torch_random
from reader.stream import Batches, Element, EvalBatches, State, TrainBatches

if _ON_JAX := keras.backend.backend() == "jax":
    from reader.jax import check_values, take_part
if _ON_TENSORFLOW := keras.backend.backend() == "tensorflow":
    from reader.tensorflow import as_tf, dataset_of

__all__ = ["Resume", "evaluate_arguments", "fit_arguments"]

_LOG = logging.getLogger("reader")
_LOOK = 2  # batches that Keras may take before it trains: one to build the model, and one ahead on accelerators
_PASSED_ON = ("class_weight", "validation_freq")  # to Keras' `fit`
_hold = cache(lock_folder)  # until this process ends: in it one Resume may follow another

Adapt = Callable[[Iterator[Element]], Iterator[Element]]


class _Indexed(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches by index, in order. Index 0 begins the loop again: before a `fit` Keras may look at the first batches.

    With `moves`, which is for training, each epoch that has ended moves it and the batches to the next loop. A look may
    be as long as a short epoch, so the indices of those go on through the `fit`.
    """

    def __init__(self, batches: Batches, adapt: Adapt = iter, moves: bool = False) -> None:
        super().__init__()
        self._batches, self._adapt, self._moves, self._begin = batches, adapt, moves, batches.next_loop
        self._steps = len(batches.sizes(self._begin.step))
        self._is_short = moves and self._steps <= _LOOK
        self._next, self._ended, self._loop, self._read = 0, 0, self._begin, self._begin

    @property
    def num_batches(self) -> int | None:
        return None if self._is_short else self._steps

    def __getitem__(self, index: int) -> Element:
        if index == 0:
            self._next, self._ended, self._loop = 0, 0, self._begin
        if index != self._next:
            raise UsageError(f"Keras asked for batch {index}, expected {self._next}: give fit(…, shuffle=False)")
        if index % self._steps == 0:
            self._read = self._batches.loop_after(self._read) if index else self._begin
            self._elements = self._adapt(self._batches.read(self._read))
        self._next, batch = index + 1, next(self._elements)
        if self._next % self._steps == 0:
            self._elements = iter(())  # ends its threads
        if _ON_JAX:
            check_values(batch)
        return batch

    def on_epoch_end(self) -> None:
        if not self._moves or self._next < self._steps * (self._ended + 1):
            return
        if self._batches.next_loop == self._loop:
            self._batches.end(self._batches.next_loop)
        self._loop = self._batches.loop_after(self._loop)
        if self._is_short:
            self._ended += 1
        else:
            self._begin, self._next = self._loop, 0


def fit_arguments(train: TrainBatches, evals: EvalBatches | None = None) -> dict[str, Any]:
    """Arguments of Keras' `fit`: `model.fit(**fit_arguments(train, evals), epochs=3)`.

    An epoch is an iteration of `train`, each validation one of `evals`. Call it for each `fit`: another one continues
    after the last epoch that ended. What `fit` is given besides is up to you, `class_weight` too.

    Args:
        train: what `train_batches` returned.
        evals: what `eval_batches` returned; None without validation.

    Raises:
        UsageError: `train` begins inside an iteration; or another host's rows are this process's, see `as_jax`.
    """
    validation = None if evals is None else evaluate_arguments(evals)["x"]
    more = {"validation_data": validation, "shuffle": False}  # `train` is shuffled
    if _ON_TENSORFLOW:
        return {"x": as_tf(train), **more}
    _check(train, TrainBatches, "train_batches")
    train.check_full()
    return {"x": _Indexed(train, moves=True), "steps_per_epoch": len(train) if len(train) <= _LOOK else None, **more}


def evaluate_arguments(evals: EvalBatches) -> dict[str, Any]:
    """Arguments of Keras' `evaluate` and `predict`: `model.evaluate(**evaluate_arguments(evals))`.

    Args:
        evals: what `eval_batches` returned: every record once, and padding of weight 0, which `predict` returns, too.

    Raises:
        UsageError: another host's rows are this process's, see `as_jax`.
    """
    if _ON_TENSORFLOW:
        return {"x": as_tf(evals)}
    _check(evals, EvalBatches, "eval_batches")
    return {"x": _Indexed(evals)}


def loop_of(batches: Batches, adapt: Adapt = iter) -> Any:
    """The batches' next loop, for one `fit` or `evaluate`, however often Keras begins to read it.

    Args:
        batches: they don't move.
        adapt: an iterator of batches → an iterator of the same batches.
    """
    if not _ON_TENSORFLOW:
        return _Indexed(batches, adapt)
    begin = batches.next_loop
    return dataset_of(batches, lambda light: adapt(light.read(begin)), len(batches.sizes(begin.step)))


def _check(batches: Batches, kind: type[Batches], name: str) -> None:
    if not isinstance(batches, kind):
        raise UsageError(f"Keras takes what imageshards.{name} returned here, got {type(batches).__name__}")
    _take_part(batches)


def _take_part(batches: Batches) -> None:
    """As `jax.take_part`, of what `keras.distribution` makes of a batch."""
    if _ON_JAX and (distribution := keras.distribution.distribution()) is not None:
        take_part(batches, distribution.get_data_layout((batches.batch_size,)).backend_layout)


class Resume(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves a training every so many steps and at its end; constructed again, it continues from the last save.

        resume = imageshards.keras.Resume("runs/1", train)
        resume.fit(model, evals, epochs=10)

    However often it is stopped, the run sees the same batches and ends with the same weights, to the bit if its steps
    are deterministic; epochs and validations stay where they were. If it has ended, also by EarlyStopping, the model
    gets its weights, nothing is trained, and a line says so. A save is one file, written in one step, with all
    variables of model and optimizer, random seeds of layers included, and the position; the last two are kept. While
    the loss is NaN nothing is saved.

    After a stop within an epoch its loss and metrics are those of the steps that were left. What callbacks count
    (EarlyStopping, ReduceLROnPlateau) begins at the resume; a line says so. The learning rate itself is saved.

    With another batch size or number of hosts the rest of the epoch comes first.

    Args:
        folder: of this run only, or its URL. All hosts read it, host 0 alone writes.
        batches: what `train_batches` returned, with the arguments of the beginning but for batch size and host.
        every_steps: steps between saves. Keras calls back after `steps_per_execution` steps.

    Attributes:
        step: steps trained since the beginning, through every resume.
        epoch: epochs that have ended.

    Raises:
        UsageError: the folder's run has another dataset, split, seed or (in `fit`) model.
        ImageShardsError: no save is valid. If only the last is corrupt or holds NaN, that is logged.
    """

    def __init__(self, folder: str | os.PathLike[str], batches: TrainBatches, every_steps: int = 1000) -> None:
        super().__init__()
        self._given, url = os.fspath(folder), storage.normalize(os.fspath(folder))
        if why := storage.why_unusable(url):
            raise UsageError(f"{self._given}: {why}")
        if not isinstance(batches, TrainBatches) or len(batches) != batches.steps:
            raise UsageError(
                "Resume takes what train_batches returned, without an InputContext: not the tf.data.Dataset of "
                "train_dataset"
            )
        self._every, is_written = integer("every_steps", every_steps, 1), not batches.host
        if is_written and storage.is_local(url):
            try:
                _hold(url)
            except BlockingIOError:
                raise UsageError(f"{self._given}: another process trains there; end it, or choose another") from None
        self._saves = Saves(self._given, _LOG.warning, is_written)
        self._packed = self._saves.newest(_progress)
        self._batches, self.epoch = batches.at(batches.start, rest=False), 0
        state, self._is_stopped = batches.next_loop, False  # by EarlyStopping
        if self._packed is not None:
            state, self.epoch, self._is_stopped = self._packed[1]
        try:
            self._batches.restore(state)
        except ValueError as error:
            raise UsageError(f"{self._given} holds another run: {error}; choose another folder") from None
        self.step = self._saved_step = state.position.step
        self._random, self._is_training = list[Any](), False

    def fit(
        self,
        model: Any,
        evals: EvalBatches | None = None,
        *,
        epochs: int,
        callbacks: Iterable[keras.callbacks.Callback] = (),
        verbose: int | str = "auto",
        **more: Any,
    ) -> keras.callbacks.History:
        """Train until so many epochs have ended, counted from the beginning; returns Keras' History of this `fit`.

        Args:
            model: compiled. Only the first `fit` of a run uses the weights that it has.
            evals: what `eval_batches` returned, for a validation after each epoch.
            epochs: in all.
            callbacks: as of Keras' `fit`.
            verbose: as of Keras' `fit`.
            more: `class_weight` and `validation_freq` of Keras' `fit`.
        """
        if unknown := sorted(more.keys() - {*_PASSED_ON}):
            raise UsageError(f"resume.fit takes no {unknown[0]}, only {', '.join(_PASSED_ON)} of Keras' fit")
        if self._is_training:
            raise UsageError("the last fit was interrupted: make a new Resume, which continues from the last save")
        if getattr(model.optimizer, "use_ema", False):
            raise UsageError("use_ema would replace the weights at the end of each epoch: leave it out")
        _take_part(self._batches)
        validation = None if evals is None else evaluate_arguments(evals)["x"]
        history, given, epochs = keras.callbacks.History(), list(callbacks), integer("epochs", epochs, 1)
        self._restore(model, given)
        self.set_model(model)
        if self._is_stopped or self.epoch >= epochs:
            by = "by EarlyStopping" if self._is_stopped else "as asked"
            fix = "choose another folder" if self._is_stopped else "raise epochs"
            said = "%s is finished after epoch %d, %s: nothing is trained; %s to train on"
            _LOG.warning(said, self._given, self.epoch, by, fix)
        watched = _Epochs(self, [history, *given], epochs, verbose)
        model.stop_training, self._is_training = self._is_stopped, True
        watched.train(validation_data=validation, **more)
        if self._is_stopped and history.epoch:
            self._save(self._batches.next_loop, {"loss": history.history["loss"][-1]})  # of restored weights, too
        self._is_training = False
        return history

    def _restore(self, model: Any, callbacks: list[Any]) -> None:
        steps = len(self._batches)
        if steps % model.steps_per_execution:
            raise UsageError(f"steps_per_execution={model.steps_per_execution} must divide len(batches), {steps}")
        if self._packed is None:
            return
        with model.distribute_strategy.scope() if _ON_TENSORFLOW else nullcontext():
            if not model.built:
                inputs, *_ = next(self._batches.read(self._batches.next_loop))
                model(inputs)
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            packed, self._packed = self._packed[0], None
            if not packed.restore(model):
                raise UsageError(f"{self._given} holds a run of another model; choose another folder")
        self._random = packed.more
        if callbacks:
            names = ", ".join(type(one).__name__ for one in callbacks)
            _LOG.warning("continuing after step %d: what callbacks count (%s) begins here", self.step, names)

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse another trainer's loop."""
        raise UsageError("model.fit(callbacks=[resume]) doesn't resume: call resume.fit(model, …)")

    def _is_due(self) -> bool:
        return self.step // self._every > self._saved_step // self._every

    def _save(self, state: State, logs: Any) -> None:
        self._saved_step = self.step
        if math.isnan(float((logs or {}).get("loss", 0))):  # it would stay NaN, and the saves before would go
            _LOG.warning("the loss is NaN after step %d: not saved", self.step)
            return
        # Where JAX trains, `self.model` brings its variables up to date.
        progress = {"state": state.to_dict(), "epoch": self.epoch, "is_stopped": self._is_stopped}
        self._saves.write(self.step, pack_state(self.model, progress, torch_random()))


class _Epochs(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of a `Resume.fit`, which see one training: Keras calls these in a `fit` for each epoch."""

    def __init__(self, resume: Resume, callbacks: list[Any], epochs: int, verbose: int | str) -> None:
        more = {"verbose": verbose, "epochs": epochs, "steps": len(resume._batches)}
        super().__init__(callbacks, add_progbar=verbose != 0, model=resume.model, **more)
        self._resume, self._epochs = resume, epochs

    def train(self, **more: Any) -> None:
        """Train until all epochs have ended; `more` is of Keras' `fit`."""
        resume = self._resume
        super().on_train_begin()
        while resume.epoch < self._epochs and not self.model.stop_training:  # the rest of an epoch can be a `fit`, too
            more |= {"initial_epoch": resume.epoch, "epochs": resume.epoch + 1, "verbose": 0}
            self.model.fit(loop_of(resume._batches), callbacks=self, shuffle=False, **more)
        super().on_train_end()

    def on_train_begin(self, logs: Any = None) -> None:
        pass  # of an epoch

    def on_train_end(self, logs: Any = None) -> None:
        pass

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._begin, self._done = self._resume._batches.next_loop, 0
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._resume._random:  # PyTorch's DataLoader, which Keras makes for each epoch, has drawn one
            set_torch_random(self._resume._random)
            self._resume._random = []
        super().on_train_batch_begin(self._begin.step + batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        resume, self._done = self._resume, batch + 1
        resume.step = self._begin.position.step + self._done
        super().on_train_batch_end(self._begin.step + batch, logs)
        if resume._is_due() and self._begin.step + self._done < len(resume._batches):  # else after the validation
            resume._save(resume._batches.state(self._begin, self._done), logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        resume, batches = self._resume, self._resume._batches
        if has_ended := self._begin.step + self._done == len(batches):
            state = batches.loop_after(self._begin)
        else:
            state = batches.state(self._begin, self._done)  # a callback has stopped it
        batches.restore(state)
        resume.epoch += has_ended
        super().on_epoch_end(epoch, logs)
        resume._random = torch_random()
        resume._is_stopped = any(
            isinstance(one, keras.callbacks.EarlyStopping) and one.stopped_epoch > 0 for one in self.callbacks
        )
        is_last = resume.epoch >= self._epochs or self.model.stop_training
        if (resume._is_due() or is_last) and not resume._is_stopped:
            resume._save(state, logs)


def _progress(document: Mapping[str, Any]) -> tuple[State, int, bool]:
    """(where the next step begins, epochs that have ended, whether EarlyStopping has ended the run), of a save."""
    return State.parse(document["state"]), integer("epoch", document["epoch"], 0), document["is_stopped"] is True
