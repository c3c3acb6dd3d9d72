"""Checkpoints of a run: its progress, variables, sums of metrics and best weights, in `reader.saves`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec import convert

from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError
from reader.position import AnyPosition, Position
from reader.saves import PackedState, Saves, pack_state, values_of
from reader.training.compile import LOSS
from reader.training.options import Recipe
from reader.training.out_folder import Line, OutFolder
from reader.training.report import warn

_FOLDER = "checkpoints"


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        position: `imageshards.Position` of the next record, as JSON.
        phase: number of its phase.
        lines: of metrics.jsonl.
        step: updates made, in all phases.
        logs: metrics of an epoch that is trained, but not validated; else None.
        best: how many arrays the weights of the best epoch are; 0 before there is one.
    """

    position: str
    phase: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    logs: dict[str, float] | None = None
    best: int = 0


class Checkpoints:
    """The last two checkpoints of a run, from the newest of which it continues.

    Args:
        out: the folder of the run.
        recipe: of the run.
        begin: where it begins to read.
        is_written: by this process.

    Attributes:
        at: how far the run is; who trains keeps it up to date.
        best: the weights of the best epoch so far, in the order of the model's variables.
        is_new: whether nothing was saved.

    Raises:
        ImageShardsError: there are checkpoints, but none can be used.
    """

    def __init__(self, out: OutFolder, recipe: Recipe, begin: AnyPosition, is_written: bool) -> None:
        self._recipe, self._given = recipe, storage.join(out.as_given, _FOLDER)
        self._saves = Saves(self._given, warn, is_written)
        found = self._saves.newest(self._progress)
        self._packed: PackedState | None = found[0] if found else None
        self.at, self.is_new = found[1] if found else Progress(begin.to_json()), found is None
        self.best: list[Any] = []
        self._sums: list[Any] = []

    def save(self, position: AnyPosition, model: Any, sums: Sequence[Any]) -> None:
        """Write one of a model; `sums` are the variables of its metrics."""
        self.at.position, self.at.best = position.to_json(), len(self.best)
        self._saves.write(self.at.step, pack_state(model, {"progress": asdict(self.at)}, [*self.best, *sums]))

    def keep_best(self, model: Any) -> None:
        """Keep the weights of a model: its epoch is the best one so far."""
        self.best = values_of(model.variables)

    def restore(self, model: Any) -> None:
        """Assign all variables of a compiled model. Raises ImageShardsError if they are of another one."""
        if self._packed is None:
            return
        packed, self._packed = self._packed, None
        self._check(packed.restore(model))
        self.best, self._sums = packed.more[: self.at.best], packed.more[self.at.best :]
        if self.best:
            self._check([array.shape for array in self.best] == [tuple(one.shape) for one in model.variables])

    def restore_sums(self, sums: Sequence[Any]) -> None:
        """Assign what the metrics had added up in the epoch of the checkpoint. Raises ImageShardsError as `restore`."""
        arrays, self._sums = self._sums, []
        if arrays and self.at.step % self._recipe.steps:
            self._check([tuple(one.shape) for one in sums] == [array.shape for array in arrays])
            for variable, array in zip(sums, arrays, strict=True):
                variable.assign(array)

    def _check(self, is_same: bool) -> None:
        if not is_same:
            raise ImageShardsError(f"{self._given} is of another model or another Keras; choose another --out")

    def _progress(self, document: Mapping[str, Any]) -> Progress:
        recipe, at = self._recipe, convert(document["progress"], Progress)
        lines = convert(at.lines, list[Line])
        Position.from_json(at.position)
        is_there = 0 <= at.phase < len(recipe.phases) and 0 <= at.step - len(lines) * recipe.steps <= recipe.steps
        if not (is_there and (at.logs is None or at.logs.keys() >= {LOSS, "accuracy"}) and at.best >= 0):
            raise ValueError
        return at
