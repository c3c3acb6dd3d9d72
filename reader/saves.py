"""The saves of `imageshards.keras.Resume` and `imageshards train`: a folder that keeps the last two.

A save is one .npz file. Keras' own formats lose state (random seeds, optimizers), so it holds the arrays of all
variables, in their order.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import keras
import numpy as np
from msgspec import Meta, Struct, convert

from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.storage.causes import as_storage_error

_FILE = re.compile(r"step-\d{9}\.npz")
# What reading a file raises that `pack_state` didn't make.
_CORRUPT = (ValueError, KeyError, TypeError, OSError, EOFError, RecursionError, zipfile.BadZipFile, zlib.error)

_NUMBER = re.compile(r"_\d+")  # Keras numbers layers through the process

Progress = TypeVar("Progress")


class Saves:
    """The saves in a folder, which is no one else's.

    Args:
        folder: or its URL.
        warn: is given a line about each save that can't be used.
        is_written: by this process; else `write` does nothing.
    """

    def __init__(self, folder: str, warn: Callable[[str], None], is_written: bool = True) -> None:
        self._given, self._url = folder, storage.normalize(folder)
        self._store, self._warn, self._is_written = storage.open_storage(self._url), warn, is_written
        self._valid: list[str] = []  # names of those up to the last one that is
        if is_written:
            self._store.delete_temporaries(self._url)  # of a process that was killed

    def newest(self, parse: Callable[[Mapping[str, Any]], Progress]) -> tuple[PackedState, Progress] | None:
        """The last save that is valid and holds no NaN, and what `parse` makes of its document; None without any.

        Raises:
            ImageShardsError: there are saves, but none can be used.
        """
        reason = ""
        names = self._names()
        while names:
            name = names[-1]
            if reason:
                self._warn(f"{reason}: continuing from the one before")
            reason = f"{self._given}/{name} is corrupt"
            with suppress(*_CORRUPT):
                packed = PackedState(self._store.read(storage.join(self._url, name)))
                progress = parse(packed.document)
                if not packed.has_nan:
                    self._valid = names
                    return packed, progress
                reason = f"{self._given}/{name} holds NaN"  # the loss would stay NaN, however often it continues
            names.pop()
        if reason:
            fix = "delete them to start again, or choose another folder"
            raise ImageShardsError(f"{reason}: no save in {self._given} can be read: {fix}")
        return None

    def write(self, step: int, data: bytes) -> None:
        """Write what `pack_state` returned, in one step; then delete all but this one and the valid one before."""
        if not self._is_written:
            return
        name = f"step-{step:09}.npz"
        self._store.write(storage.join(self._url, name), data)
        self._valid = [*[other for other in self._valid if other != name][-1:], name]
        for other in {*self._names()} - {*self._valid}:
            self._store.delete(storage.join(self._url, other))

    def _names(self) -> list[str]:
        return [name for name in self._store.names(self._url) if _FILE.fullmatch(name)]


def pack_state(model: Any, document: Mapping[str, Any], more: Sequence[Any] = ()) -> bytes:
    """The state of a model and its optimizer.

    Args:
        model: compiled and built.
        document: what is stored with its variables, as JSON.
        more: further variables or arrays.
    """
    variables = _variables(model)
    shapes = [[one.path, list(one.shape)] for one in variables]
    text = json.dumps({**document, "variables": shapes, "more": len(more)})
    arrays = {f"{number:05}": array for number, array in enumerate(values_of([*variables, *more]))}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, document=np.frombuffer(text.encode(), np.uint8), **arrays)
    return file.getvalue()


class _Contents(Struct):
    """Path and shape of each variable, and how many further arrays follow theirs."""

    variables: list[tuple[str, tuple[int, ...]]]
    more: Annotated[int, Meta(ge=0)]


class PackedState:
    """What `pack_state` returned, in memory: `document`, and the arrays `more`. Raises one of `_CORRUPT`."""

    def __init__(self, data: bytes) -> None:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            self.document: dict[str, Any] = json.loads(bytes(file["document"]))
            contents = convert(self.document, _Contents)
            count = len(contents.variables)
            arrays = [file[f"{number:05}"] for number in range(count + contents.more)]
        self._of, self._arrays, self.more = _names_of(contents.variables), arrays[:count], arrays[count:]
        if [array.shape for array in self._arrays] != [shape for _, shape in contents.variables]:
            raise ValueError("an array has another shape")
        self.has_nan = any(np.isnan(array).any() for array in arrays)

    def restore(self, model: Any) -> bool:
        """Assign all variables of a compiled, built model; False, and nothing is assigned, if they are of another."""
        variables = _variables(model)
        if _names_of([(one.path, tuple(one.shape)) for one in variables]) != self._of:
            return False
        for variable, array in zip(variables, self._arrays, strict=True):
            variable.assign(array)
        return True


def _variables(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def _names_of(variables: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    """Without numbers, and without the scope, which depends on where Keras built them."""
    return [(_NUMBER.sub("", path.rpartition("/")[2]), shape) for path, shape in variables]


def values_of(variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Variables, or arrays, as NumPy arrays; those of bfloat16, which NumPy's files can't hold, as float32."""
    arrays = map(keras.ops.convert_to_numpy, variables)
    return [array.astype(np.float32) if array.dtype.kind == "V" else array for array in arrays]


def torch_random() -> list[Any]:
    """The state of PyTorch's generators, from which Keras' Dropout without `seed` draws there; [] on other backends."""
    if keras.backend.backend() != "torch":
        return []
    import torch

    return [state.numpy() for state in (torch.get_rng_state(), *torch.cuda.get_rng_state_all())]


def set_torch_random(states: Sequence[Any]) -> None:
    """Restore it."""
    import torch

    cpu, *gpus = map(torch.from_numpy, states)
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state_all(gpus[: torch.cuda.device_count()])


def lock_folder(url: str) -> int:
    """Make a local folder and lock it until the descriptor is closed; BlockingIOError if another process holds it."""
    try:
        os.makedirs(url, exist_ok=True)
        descriptor = os.open(url, os.O_RDONLY)
    except OSError as error:
        raise as_storage_error(url, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without locks
        pass
    return descriptor
