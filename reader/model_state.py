"""The state of a Keras training as one .npz file, for `imageshards.keras.Resume` and `imageshards train`.

Keras' own formats lose state (random seeds, optimizers), so these are the arrays of all variables, in their order.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import keras
import numpy as np
from msgspec import Meta, Struct, convert

# What `PackedState` raises of bytes that `pack_state` didn't return.
CORRUPT = (ValueError, KeyError, TypeError, OSError, EOFError, RecursionError, zipfile.BadZipFile, zlib.error)

_NUMBER = re.compile(r"_\d+")  # Keras numbers layers through the process


def pack_state(model: Any, document: Mapping[str, Any], more: Sequence[Any] = (), with_optimizer: bool = True) -> bytes:
    """The state of a model and its optimizer.

    Args:
        model: compiled and built.
        document: what is stored beside its variables, as JSON.
        more: further variables or arrays.
        with_optimizer: else the model alone, which needn't be compiled.
    """
    variables = _variables(model, with_optimizer)
    shapes = [[one.path, list(one.shape)] for one in variables]
    text = json.dumps({**document, "variables": shapes, "sums": len(more)})
    arrays = {f"{number:05}": _array(one) for number, one in enumerate([*variables, *more])}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, document=np.frombuffer(text.encode(), np.uint8), **arrays)
    return file.getvalue()


class _Contents(Struct):
    """Path and shape of each variable, and how many further arrays follow theirs."""

    variables: list[tuple[str, tuple[int, ...]]]
    sums: Annotated[int, Meta(ge=0)]


class PackedState:
    """What `pack_state` returned, read into memory: `document`, and the arrays `more`; else raises one of `CORRUPT`."""

    def __init__(self, data: bytes) -> None:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            self.document: dict[str, Any] = json.loads(bytes(file["document"]))
            contents = convert(self.document, _Contents)
            count = len(contents.variables)
            arrays = [file[f"{number:05}"] for number in range(count + contents.sums)]
        self._of, self._arrays, self.more = _names_of(contents.variables), arrays[:count], arrays[count:]
        if [array.shape for array in self._arrays] != [shape for _, shape in contents.variables]:
            raise ValueError("an array has another shape")
        self.has_nan = any(np.isnan(array).any() for array in arrays)

    def restore(self, model: Any, with_optimizer: bool = True) -> bool:
        """Assign all variables of a compiled, built model; False, and nothing is assigned, if they are of another."""
        variables = _variables(model, with_optimizer)
        if _names_of([(one.path, tuple(one.shape)) for one in variables]) != self._of:
            return False
        for variable, array in zip(variables, self._arrays, strict=True):
            variable.assign(array)
        return True


def _variables(model: Any, with_optimizer: bool) -> list[Any]:
    return [*model.variables, *(model.optimizer.variables if with_optimizer else ())]


def _names_of(variables: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    """Without numbers, and without the scope, which depends on where Keras built them."""
    return [(_NUMBER.sub("", path.rpartition("/")[2]), shape) for path, shape in variables]


def _array(variable: Any) -> np.ndarray[Any, Any]:
    """A variable's value; bfloat16, which NumPy's files can't hold, as float32."""
    array: np.ndarray[Any, Any] = keras.ops.convert_to_numpy(variable)
    return array.astype(np.float32) if array.dtype.kind == "V" else array


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
