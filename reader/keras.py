"""Keras' `fit` on any backend: `Stream` hands it the batches, `Resume` continues a training that was stopped.

    resume = reader.keras.Resume("runs/1", batches)
    model.fit(resume.data, epochs=10, initial_epoch=resume.initial_epoch, shuffle=False, callbacks=[resume])
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError, UsageError
from reader.batches import Batches, TrainBatches
from reader.position import Position, integer
from reader.stream import Element

_LOG = logging.getLogger("reader")
_PEEKS = 3  # batches that Keras looks at before it trains: two for TensorFlow's signature, two ahead on accelerators
_FILE = re.compile(r"step-\d{9}\.npz")
_NUMBER = re.compile(r"_\d+")  # Keras numbers layers through the process
Found = TypeVar("Found")


class Stream(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches for Keras' `fit` (with `shuffle=False`), `validation_data`, `evaluate` and `predict`.

    An epoch is one iteration of the batches, `len()` is its number of batches. The next one continues behind it. An
    epoch that didn't end, because of an error or `stop_training`, begins again: no record is lost. Give no
    `steps_per_epoch`.

    Args:
        batches: what `train_batches` or `eval_batches` returned; elements are theirs.

    Raises:
        UsageError: while it is read: Keras asks for the batches in another order, or `batches` were restored to a
            state within an iteration, which has fewer batches.
    """

    def __init__(self, batches: Batches) -> None:
        super().__init__()
        self._has_begun = False
        self._lock = threading.Lock()  # TensorFlow reads ahead in a thread
        self.move(batches)

    def move(self, batches: Batches) -> None:
        """Begin the next epoch where these batches stand."""
        with self._lock:
            self._batches = batches
            self._iteration: int | None = None  # that Keras is in, or has left early
            self._rewind()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def workers(self) -> int:
        """None. Keras asks for it when a `fit`, `evaluate` or `predict` begins."""
        self._has_begun = False
        return 0

    def on_epoch_end(self) -> None:
        """Go on to the next epoch, if this one ended: `fit` and `evaluate` also call it once before their first."""
        with self._lock:
            if not self._has_begun:  # Keras has looked at a few batches, or all that there are
                self._has_begun, self._asked = True, 0
            elif self._iteration is not None and self._asked == len(self):
                self._batches.end(self._iteration)
                self._iteration = None
                self._rewind()

    def __getitem__(self, index: int) -> Element:
        with self._lock:
            if index not in (0, self._asked) or index >= len(self):
                raise UsageError(f"batch {index} is asked for where {self._asked} follows: give fit(…, shuffle=False)")
            if index >= len(self._first):  # Keras hasn't looked at it before
                if not index:
                    self._begin()
                try:
                    batch = next(self._elements)
                except BaseException:  # nothing follows it, but Keras may begin again
                    self._rewind()
                    raise
                self._first = [*self._first, batch] if index < _PEEKS else []
            else:
                batch = self._first[index]
            self._asked = index + 1
            return batch

    def _begin(self) -> None:
        iteration, step = self._batches.next_up()
        if step:
            raise UsageError(f"the batches stand at step {step} of an iteration: give Stream(batches.at(position))")
        self._iteration = iteration if self._iteration is None else self._iteration
        self._elements = self._batches.read(self._iteration, 0)

    def _rewind(self) -> None:
        self._elements: Iterator[Element] = iter(())
        self._first: list[Element] = []  # batches, while Keras may ask for them again
        self._asked = 0


class Resume(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves a training every so many steps and when it ends; made again, it continues from the last save.

        resume = reader.keras.Resume("runs/1", batches)
        model.fit(resume.data, epochs=10, initial_epoch=resume.initial_epoch, shuffle=False, callbacks=[resume])

    However often it was killed, the training sees the batches that it would have seen, and ends after 10 ·
    `len(batches)` steps with the weights that it would have had: to the bit, where a step is deterministic. A finished
    training gets its weights back, and `fit` does nothing. The last two saves are kept, each one file, which is there
    or isn't: all variables of the model, random seeds included, and of `model.optimizer`, and the position.

    An epoch of `fit` is `len(batches)` steps from where the training was continued, so after a stop within an epoch the
    epochs end elsewhere, and the last one is shorter. What acts at the end of epochs acts there, and forgets what it
    knew: EarlyStopping, ReduceLROnPlateau, LearningRateScheduler, ModelCheckpoint(save_freq="epoch"), validation and
    History. The optimizer's `keras.optimizers.schedules` count steps, and continue. `use_ema` replaces the weights when
    `fit` ends, after they are saved.

    With another batch size or other hosts, the position continues as `batches.at` says: the records of an epoch that
    are unread come first. Trained epochs are then records read // batch size // `len(batches)`, rounded down, and the
    rest up to 10 is trained in steps of the new size.

    Args:
        folder: of this training, or its URL; all hosts must see it. Host 0 writes.
        batches: what `train_batches` returned, with the same arguments as before but for batch size and host.
        every_steps: steps from one save to the next; checked after each execution (`steps_per_execution`), whose steps
            must divide `len(batches)`.

    Attributes:
        data: a `Stream` for `fit`.
        step: steps trained since the beginning of the training, through every resume.

    Raises:
        UsageError: the folder holds a training on another dataset or with another seed; in `fit`: of another model, or
            `fit` isn't given `data` or `initial_epoch`.
        ImageShardsError: all saves are corrupt. If only the last is, a warning is logged and the one before is taken.
    """

    def __init__(self, folder: str | os.PathLike[str], batches: TrainBatches, every_steps: int = 1000) -> None:
        super().__init__()
        self._given, self._url = os.fspath(folder), storage.normalize(os.fspath(folder))
        if why := storage.why_unusable(self._url):
            raise UsageError(f"{self._given}: {why}")
        self._store, self._every = storage.open_storage(self._url), integer("every_steps", every_steps, 1)
        if not isinstance(batches, TrainBatches) or batches.steps != len(batches):
            raise UsageError("Resume needs train_batches(…), without an InputContext")
        found, position = self._find(), batches.start
        self._before, self._packed = found or ("", None)  # the save before, and what is yet to be restored of it
        if self._packed is not None:
            position = Position.from_json(self._packed.document["position"])
        try:
            self._batches = batches.at(position)
            if position.seed != batches.start.seed:
                raise UsageError(f"it has seed {position.seed}, here it is {batches.start.seed}")
        except ValueError as error:
            raise UsageError(f"{self._given} holds another training: {error}; choose another folder") from None
        self.step = self._saved_step = position.step
        self.data = Stream(self._batches)
        self._is_fitting, self._random = False, list[Any]()

    @property
    def initial_epoch(self) -> int:
        """Epochs trained so far, for `fit`."""
        return self._trained() // len(self._batches)

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore: now the model is built, or can be."""
        model, steps, params = self.model, len(self._batches), self.params or {}
        if self._is_fitting:
            raise UsageError("the last fit was interrupted: make a new Resume, which continues from its last save")
        if params.get("steps") != steps:
            raise UsageError(f"an epoch has {params.get('steps')} batches, not {steps}: give fit resume.data")
        if steps % model.steps_per_execution:
            raise UsageError(
                f"steps_per_execution={model.steps_per_execution} doesn't divide the {steps} batches of an epoch: "
                "training couldn't stop at its end; choose one that does"
            )
        if self._packed is not None:
            if not model.built:  # TensorFlow's are built by their first step
                model(self.data[0][0])
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            if not self._packed.restore(model):
                raise UsageError(f"{self._given} holds a training of another model; choose another folder")
            self._random, self._packed = self._packed.more, None
        self.data.move(self._batches.at(self._position()))
        self._last = self.step + params["epochs"] * steps - self._trained()
        self._is_fitting = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count from here."""
        if self.step >= self._last:
            raise UsageError(f"trained for {self.initial_epoch} epochs: give fit initial_epoch=resume.initial_epoch")
        self._first = self.step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """On PyTorch, go on with the random numbers behind those of the batch before."""
        if self._random:
            _set_random(self._random)
            self._random = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if it is time; stop where the last epoch would have ended."""
        before, self.step = self.step, self._first + batch + 1
        if batch + 1 == len(self._batches):  # between epochs torch's DataLoader draws numbers
            self._random = _random()
        if self.step >= self._last:
            self.model.stop_training = True
        if self.step >= self._last or self.step // self._every > before // self._every:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        """Save what another callback ended."""
        self._is_fitting = False
        if self.step > self._saved_step:
            self._save()

    def _position(self) -> Position:
        return self._batches.position_at(self.step)

    def _trained(self) -> int:
        """Batches of this size that the records read so far fill."""
        position = self._position()
        return position.records_read // position.global_batch_size

    def _names(self) -> list[str]:
        return [name for name in self._store.names(self._url) if _FILE.fullmatch(name)]

    def _find(self) -> tuple[str, Packed] | None:
        def load(name: str) -> tuple[str, Packed]:
            packed = Packed(self._store.read(storage.join(self._url, name)))
            Position.from_json(packed.document["position"])
            return name, packed

        found = newest(names := self._names(), load, lambda name: _LOG.warning(
            "%s/%s is corrupt: continuing from the save before", self._given, name
        ))
        if names and found is None:
            raise ImageShardsError(f"no save in {self._given} can be read: delete them to start again")
        return found

    def _save(self) -> None:
        self._saved_step = self.step
        if self._batches.host:
            return
        name = f"step-{self.step:09}.npz"
        # On JAX, `self.model` brings the variables up to date.
        data = pack(self.model, {"position": self._position().to_json()}, _random())
        self._store.write(storage.join(self._url, name), data)
        for other in {*self._names()} - {name, self._before}:
            self._store.delete(storage.join(self._url, other))
        self._before = name


def pack(model: Any, document: Mapping[str, Any], more: Sequence[Any] = ()) -> bytes:
    """All of a training's state as one .npz file: a document (JSON), and the arrays of all variables, in their order.

    Keras' own formats lose state: random seeds, optimizers.

    Args:
        model: compiled and built.
        document: whatever belongs to it.
        more: further variables or arrays.
    """
    state = _state(model)
    paths = [[one.path, list(one.shape)] for one in state]
    text = json.dumps({**document, "variables": paths, "sums": len(more)})
    arrays = {f"{number:05}": _numpy(one) for number, one in enumerate([*state, *more])}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, document=np.frombuffer(text.encode(), np.uint8), **arrays)
    return file.getvalue()


class Packed:
    """What `pack` made, in memory: its `document` and `more`. Raises one of `CORRUPT` if it is something else."""

    def __init__(self, data: bytes) -> None:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            self.document: dict[str, Any] = json.loads(bytes(file["document"]))
            self._variables: list[list[Any]] = self.document["variables"]
            count = len(self._variables)
            arrays = [file[f"{number:05}"] for number in range(count + self.document["sums"])]
            self._arrays, self.more = arrays[:count], arrays[count:]

    def restore(self, model: Any) -> bool:
        """Assign all variables of a model that is compiled and built; False, and nothing done, if it is another one."""
        state = _state(model)
        here = [[_NUMBER.sub("", one.path), list(one.shape)] for one in state]
        if here != [[_NUMBER.sub("", path), shape] for path, shape in self._variables]:
            return False
        for variable, array in zip(state, self._arrays, strict=True):
            variable.assign(array)
        return True


CORRUPT = (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error)


def newest(names: Sequence[str], load: Callable[[str], Found], warn: Callable[[str], None]) -> Found | None:
    """What `load` makes of the last valid file of `names`; None if there is none. `warn` is told each corrupt one."""
    for name in reversed(names):
        try:
            return load(name)
        except CORRUPT:
            warn(name)
    return None


def _state(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def _numpy(variable: Any) -> np.ndarray[Any, Any]:
    """A variable's value; bfloat16, which NumPy's files can't hold, as float32."""
    array: np.ndarray[Any, Any] = keras.ops.convert_to_numpy(variable)
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def _random() -> list[Any]:
    """State of torch's own generators, from which Keras' Dropout draws if it has no `seed`; [] on other backends."""
    if keras.backend.backend() != "torch":
        return []
    import torch

    return [state.numpy() for state in (torch.get_rng_state(), *torch.cuda.get_rng_state_all())]


def _set_random(states: Sequence[Any]) -> None:
    import torch

    cpu, *gpus = map(torch.from_numpy, states)
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state_all(gpus[: torch.cuda.device_count()])
