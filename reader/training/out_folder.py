"""`--out`: a folder, or URL, whose files are written in one step each; whether, and from where, a run resumes in it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NotRequired, TypedDict

from msgspec import Struct, convert

from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError, UsageError
from reader.position import AnyPosition, Position
from reader.saves import PackedState, Saves, lock_folder, pack_state, values_of
from reader.training.models import LOSS
from reader.training.options import Recipe
from reader.training.report import warn

RUN_FILE, METRICS_FILE, LABELS_FILE = "run.json", "metrics.jsonl", "classes.txt"
MODEL_FILE, LAST_MODEL_FILE = "model.keras", "last.keras"
CURVES_FILE = "curves.png"
_CHECKPOINTS = "checkpoints"


class Line(TypedDict):
    """An epoch in metrics.jsonl: some values are known with validation only, or if a step of it was timed."""

    epoch: int
    phase: str
    step: int
    loss: float
    accuracy: float
    val_loss: NotRequired[float]
    val_accuracy: NotRequired[float]
    images_per_s: NotRequired[float]
    wait_share: NotRequired[float]


class _Run(Struct):
    """What is read of run.json; the last two are of a finished run."""

    configuration: dict[str, Any]
    finished: bool
    devices: str
    best_epoch: int
    verdict: str


def usable(given: str) -> str:
    """`--out` as a URL. Raises UsageError if it can't be one of a folder."""
    url = storage.normalize(given)
    why = storage.why_unusable(url) if given else "it is empty"
    if why := why or ("it is a file; choose a folder" if os.path.isfile(url) else ""):
        raise UsageError(f"--out {given!r}: {why}")
    return url


class OutFolder:
    """The folder of one run; all names are relative to it.

    Args:
        url: folder or URL.
        is_written: by this process; else `write` does nothing.

    Raises:
        UsageError: it can't be one, or another process trains there, which is known of local folders only.
    """

    def __init__(self, url: str, is_written: bool = True) -> None:
        self.as_given, self.url = url, usable(url)
        self._store, self.is_written = storage.open_storage(self.url), is_written
        self._lock, self._is_new = -1, not os.path.isdir(self.url)
        if storage.is_local(self.url) and is_written:
            try:
                self._lock = lock_folder(self.url)
            except BlockingIOError:
                raise UsageError(f"--out {url!r}: another process is training there; choose another") from None

    def close(self) -> None:
        """Let others train here; a new local folder that nothing was written to is deleted."""
        if self._lock >= 0:
            if self._is_new:
                with suppress(OSError):
                    os.rmdir(self.url)
            os.close(self._lock)
            self._lock = -1

    def read(self, name: str) -> bytes | None:
        """A file, or None."""
        with suppress(FileNotFoundError):
            return self._store.read(storage.join(self.url, name))
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write, or replace, a file."""
        if self.is_written:
            self._store.write(storage.join(self.url, name), data)

    # --- what a run knows of itself

    def run(self) -> dict[str, Any] | None:
        """run.json, or None if no run has begun here.

        Raises:
            UsageError: the folder holds something else.
        """
        data = self.read(RUN_FILE)
        if data is None:
            if others := [name for name in self._store.names(self.url) if not name.startswith(".")]:
                raise UsageError(f"--out {self.as_given!r}: it holds {others[0]}, not a run; choose a new folder")
            return None
        try:
            run = json.loads(data)
            convert(run, _Run)
        except (ValueError, RecursionError):
            raise self._not_ours(RUN_FILE) from None
        self._store.delete_temporaries(self.url)  # of a process that was killed
        return dict(run)

    def write_run(self, document: dict[str, Any]) -> None:
        """Replace run.json."""
        self.write(RUN_FILE, (json.dumps(document, indent=1) + "\n").encode())

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl. Raises UsageError as `run`."""
        try:
            lines = [json.loads(line) for line in (self.read(METRICS_FILE) or b"").splitlines()]
            convert(lines, list[Line])
        except (ValueError, RecursionError):
            raise self._not_ours(METRICS_FILE) from None
        return lines

    def _not_ours(self, name: str) -> UsageError:
        return UsageError(f"--out {self.as_given!r}: its {name} was not written by train; choose a new folder")

    def write_metrics(self, lines: list[dict[str, Any]]) -> None:
        """Replace metrics.jsonl."""
        self.write(METRICS_FILE, "".join(f"{json.dumps(line)}\n" for line in lines).encode())


def open_out(
    given: str | None, name: str, configuration: dict[str, Any], is_written: bool = True
) -> tuple[OutFolder, dict[str, Any] | None]:
    """The folder to train into, without `given` `runs/NAME`; and the run.json of a run that resumes, or has finished.

    Raises:
        UsageError: it holds something else, or a run of another configuration.
    """
    out = OutFolder(os.path.join("runs", name) if given is None else given, is_written)
    try:
        run = out.run()
        if run is not None and run["configuration"] != configuration:
            raise UsageError(f"--out {out.as_given!r}: {_difference(run, configuration)}; choose another --out")
        return out, run
    except BaseException:
        out.close()
        raise


def _difference(run: dict[str, Any], now: dict[str, Any]) -> str:
    then = run["configuration"]
    names = [name for name in now if then.get(name) != now[name]]
    if "dataset" in names:
        return f"it was trained on another dataset, {run['dataset']['url']}"  # or on another version
    name = names[0] if names else next(iter(then.keys() - now.keys()))
    return f"it was trained with --{name} {then.get(name)}, now it is {now.get(name)}"


# --- checkpoints: progress, variables, sums of metrics and best weights, in `reader.saves`


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

    Attributes:
        at: how far the run is; who trains keeps it up to date.
        best: the weights of the best epoch so far, in the order of the model's variables.
        is_new: whether nothing was saved.

    Raises:
        ImageShardsError: there are checkpoints, but none can be used.
    """

    def __init__(self, out: OutFolder, recipe: Recipe, begin: AnyPosition) -> None:
        self._recipe, self._given = recipe, storage.join(out.as_given, _CHECKPOINTS)
        self._saves = Saves(self._given, warn, out.is_written)
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
