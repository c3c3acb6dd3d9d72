"""Checkpoints: all of a training's state in one .npz file, which is there or isn't; the last two are kept.

Keras' own formats lose state (random seeds, optimizers), so these are the arrays of all variables, in their order.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import keras
import numpy as np
from msgspec import Struct, convert

from beam_pipeline.errors import ImageShardsError
from reader.position import Position
from reader.training.compile import LOSS
from reader.training.options import Recipe
from reader.training.out_folder import Line, OutFolder

_FOLDER = "checkpoints"
_FILE = re.compile(r"step-\d{9}\.npz")
_KEPT = 2
_NUMBER = re.compile(r"_\d+")  # Keras numbers layers through the process


@dataclass
class Progress:
    """How far a training is.

    Attributes:
        position: `reader.Position` of the next record, as JSON.
        phase: number of its phase.
        lines: of metrics.jsonl.
        step: updates made, in all phases.
        logs: metrics of an epoch that is trained, but not validated; else None.
    """

    position: str
    phase: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    logs: dict[str, float] | None = None


def save(out: OutFolder, progress: Progress, model: Any, metrics: Sequence[Any]) -> None:
    """Write a checkpoint, then delete those before the last two."""
    state, sums = _state(model), _sums(metrics)
    paths = [[one.path, list(one.shape)] for one in state]
    document = json.dumps({"progress": asdict(progress), "variables": paths, "sums": len(sums)})
    arrays = {f"{number:05}": _numpy(one) for number, one in enumerate([*state, *sums])}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, document=np.frombuffer(document.encode(), np.uint8), **arrays)
    out.write(f"{_FOLDER}/step-{progress.step:09}.npz", file.getvalue())
    for name in _names(out)[:-_KEPT]:
        out.delete(name)


class _Document(Struct):
    """What is in a checkpoint: path and shape of each variable, then how many sums of metrics."""

    progress: Progress
    variables: list[tuple[str, tuple[int, ...]]]
    sums: int


class Checkpoint:
    """A checkpoint that was read: all of it is in memory.

    Raises:
        ValueError, KeyError, TypeError, …: no training of the recipe wrote it.
    """

    def __init__(self, name: str, data: bytes, recipe: Recipe) -> None:
        self.name = name
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            document = convert(json.loads(bytes(file["document"])), _Document)
            self.progress, self._variables = document.progress, document.variables
            count = len(self._variables) + document.sums
            self._arrays = [file[f"{number:05}"] for number in range(count)]
        at, lines = self.progress, convert(self.progress.lines, list[Line])
        Position.from_json(at.position)
        shapes = [shape for _, shape in self._variables]
        is_there = 0 <= at.phase < len(recipe.phases) and 0 <= at.step - len(lines) * recipe.steps <= recipe.steps
        has_logs = at.logs is None or at.logs.keys() >= {LOSS, "accuracy"}
        if not (is_there and has_logs and shapes == [array.shape for array in self._arrays[: len(shapes)]]):
            raise ValueError
        self.has_nan = any(np.isnan(array).any() for array in self._arrays)

    def restore(self, model: Any) -> None:
        """Assign all variables of a compiled model.

        Raises:
            ImageShardsError: they are of another one.
        """
        state = _state(model)
        is_same = [_NUMBER.sub("", one.path) for one in state] == [_NUMBER.sub("", path) for path, _ in self._variables]
        self._assign(state, self._arrays[: len(self._variables)], is_same)

    def restore_sums(self, metrics: Sequence[Any]) -> None:
        """Assign what the metrics have added up in this epoch. Raises ImageShardsError as `restore`."""
        self._assign(_sums(metrics), self._arrays[len(self._variables) :])

    def _assign(self, variables: Sequence[Any], arrays: Sequence[Any], is_same: bool = True) -> None:
        if not is_same or [tuple(one.shape) for one in variables] != [array.shape for array in arrays]:
            raise ImageShardsError(f"{self.name} is of another model or another Keras; choose another --out")
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array)


def latest(out: OutFolder, recipe: Recipe, warn: Callable[[str], None]) -> Checkpoint | None:
    """The valid checkpoint with the most steps; `warn` is given a line about each later one that is corrupt.

    Raises:
        ImageShardsError: there are checkpoints, but all are corrupt.
    """
    reason = ""
    for name in reversed(_names(out)):
        if reason:
            warn(f"{reason}: continuing from the one before")
        try:
            found = Checkpoint(name, out.read(name) or b"", recipe)
        except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error):
            reason = f"{out.as_given}/{name} is corrupt"
            continue
        if not found.has_nan:
            return found
        reason = f"{out.as_given}/{name} holds NaN"  # the loss would stay NaN, however often it continues
    if reason:
        fix = "delete them to start again, or choose another --out"
        raise ImageShardsError(f"{reason}: no checkpoint in {out.as_given}/{_FOLDER} can be read: {fix}")
    return None


def _names(out: OutFolder) -> list[str]:
    return [f"{_FOLDER}/{name}" for name in out.names(_FOLDER) if _FILE.fullmatch(name)]


def _state(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def _sums(metrics: Sequence[Any]) -> list[Any]:
    return [variable for metric in metrics for variable in metric.variables]


def _numpy(variable: Any) -> np.ndarray[Any, Any]:
    """A variable's value; bfloat16, which NumPy's files can't hold, as float32."""
    array: np.ndarray[Any, Any] = keras.ops.convert_to_numpy(variable)
    return array.astype(np.float32) if array.dtype.kind == "V" else array
