"""Checkpoints: all of a run's state in one file (`reader.model_state`); the last two are kept, and the best weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec import convert

from beam_pipeline.errors import ImageShardsError
from reader.model_state import CORRUPT, PackedState, pack_state
from reader.position import Position
from reader.training.compile import LOSS
from reader.training.options import Recipe
from reader.training.out_folder import LAST_MODEL_FILE, Line, OutFolder

_FOLDER = "checkpoints"
_FILE, _BEST_FILE = re.compile(r"step-\d{9}\.npz"), re.compile(r"best-\d{9}\.npz")
_KEPT = 2


@dataclass
class Progress:
    """How far a run is.

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


def save(out: OutFolder, progress: Progress, recipe: Recipe, model: Any, more: Sequence[Any]) -> None:
    """Write a checkpoint, then delete those before the last two, and what neither of these calls the best.

    Args:
        more: variables to keep besides those of the model and its optimizer: the average, sums of metrics.
    """
    data = pack_state(model, {"progress": asdict(progress)}, more)
    out.write(f"{_FOLDER}/step-{progress.step:09}.npz", data)
    names, phase = _names(out), recipe.phases[-1]
    for name in names[:-_KEPT]:
        out.delete(name)
    # The line of a checkpoint's own step is in it or not: it may have been written before its epoch was validated.
    known = [step + more for step in map(_step_of, names[-_KEPT:]) for more in (-1, 0)]
    best = [recipe.best([line for line in progress.lines if line["step"] <= step], phase) for step in known]
    needed = {_best_name(line["step"]) for line in best if line}
    for name in set(_names(out, _BEST_FILE)) - needed:
        out.delete(name)


def save_best(out: OutFolder, step: int, model: Any) -> None:
    """Write the weights of an epoch that is the best so far, by the step that it ended with."""
    out.write(_best_name(step), pack_state(model, {}, with_optimizer=False))


def restore_best(out: OutFolder, step: int, model: Any) -> None:
    """Assign the weights of the best epoch to a model. Raises ImageShardsError if they can't be read."""
    name, is_restored = _best_name(step), False
    with suppress(*CORRUPT):
        is_restored = PackedState(out.read(name) or b"").restore(model, with_optimizer=False)
    if not is_restored:
        raise ImageShardsError(
            f"{out.as_given}/{name}, the weights of the best epoch, is missing or corrupt: delete "
            f"{out.as_given}/{_FOLDER} to train again, or use {out.as_given}/{LAST_MODEL_FILE}"
        )


class Checkpoint:
    """A checkpoint that was read: all of it is in memory.

    Raises:
        ValueError, KeyError, TypeError, …: no run of the recipe wrote it.
    """

    def __init__(self, name: str, data: bytes, recipe: Recipe) -> None:
        self._name, self._state = name, PackedState(data)
        self._sums: Sequence[Any] = ()
        self.has_nan = self._state.has_nan
        self.progress = at = convert(self._state.document["progress"], Progress)
        lines = convert(at.lines, list[Line])
        Position.from_json(at.position)
        is_there = 0 <= at.phase < len(recipe.phases) and 0 <= at.step - len(lines) * recipe.steps <= recipe.steps
        if not (is_there and (at.logs is None or at.logs.keys() >= {LOSS, "accuracy"})):
            raise ValueError

    def restore(self, model: Any, average: Sequence[Any]) -> None:
        """Assign all variables of a compiled model, and those of the average, of which there may be none.

        Raises:
            ImageShardsError: they are of another one.
        """
        self._check(self._state.restore(model))
        self._assign(average, self._state.more[: len(average)])
        self._sums = self._state.more[len(average) :]

    def restore_sums(self, sums: Sequence[Any]) -> None:
        """Assign what the metrics have added up in this epoch. Raises ImageShardsError as `restore`."""
        self._assign(sums, self._sums)

    def _assign(self, variables: Sequence[Any], arrays: Sequence[Any]) -> None:
        self._check([tuple(one.shape) for one in variables] == [array.shape for array in arrays])
        for variable, array in zip(variables, arrays, strict=True):
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


def _names(out: OutFolder, pattern: re.Pattern[str] = _FILE) -> list[str]:
    return [f"{_FOLDER}/{name}" for name in out.names(_FOLDER) if pattern.fullmatch(name)]


def _step_of(name: str) -> int:
    return int(name[-len("000000000.npz") : -len(".npz")])


def _best_name(step: int) -> str:
    return f"{_FOLDER}/best-{step:09}.npz"
