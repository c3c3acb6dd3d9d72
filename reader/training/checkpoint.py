"""Checkpoints: all of a training's state in one file (`reader.model_state`), which is there or isn't; two are kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec import convert

from beam_pipeline.errors import ImageShardsError
from reader.model_state import CORRUPT, PackedState, pack_state
from reader.position import Position
from reader.training.compile import LOSS
from reader.training.options import Recipe
from reader.training.out_folder import Line, OutFolder

_FOLDER = "checkpoints"
_FILE = re.compile(r"step-\d{9}\.npz")
_KEPT = 2


@dataclass
class Progress:
    """How far a training is.

    Attributes:
        position: `imageshards.Position` of the next record, as JSON.
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
    data = pack_state(model, {"progress": asdict(progress)}, _sums(metrics))
    out.write(f"{_FOLDER}/step-{progress.step:09}.npz", data)
    for name in _names(out)[:-_KEPT]:
        out.delete(name)


class Checkpoint:
    """A checkpoint that was read: all of it is in memory.

    Raises:
        ValueError, KeyError, TypeError, …: no training of the recipe wrote it.
    """

    def __init__(self, name: str, data: bytes, recipe: Recipe) -> None:
        self._name, self._state = name, PackedState(data)
        self.has_nan = self._state.has_nan
        self.progress = at = convert(self._state.document["progress"], Progress)
        lines = convert(at.lines, list[Line])
        Position.from_json(at.position)
        is_there = 0 <= at.phase < len(recipe.phases) and 0 <= at.step - len(lines) * recipe.steps <= recipe.steps
        if not (is_there and (at.logs is None or at.logs.keys() >= {LOSS, "accuracy"})):
            raise ValueError

    def restore(self, model: Any) -> None:
        """Assign all variables of a compiled model.

        Raises:
            ImageShardsError: they are of another one.
        """
        self._check(self._state.restore(model))

    def restore_sums(self, metrics: Sequence[Any]) -> None:
        """Assign what the metrics have added up in this epoch. Raises ImageShardsError as `restore`."""
        sums, arrays = _sums(metrics), self._state.more
        self._check([tuple(one.shape) for one in sums] == [array.shape for array in arrays])
        for variable, array in zip(sums, arrays, strict=True):
            variable.assign(array)

    def _check(self, is_same: bool) -> None:
        if not is_same:
            raise ImageShardsError(f"{self._name} is of another model or another Keras; choose another --out")


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
        except CORRUPT:
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


def _sums(metrics: Sequence[Any]) -> list[Any]:
    return [variable for metric in metrics for variable in metric.variables]
