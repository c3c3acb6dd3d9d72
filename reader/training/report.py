"""What a run prints: a summary, progress, an epoch's line, what it waited for, and run.json."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import keras

from beam_pipeline import __version__, storage
from beam_pipeline.errors import plural, say
from reader.info import DatasetInfo
from reader.machine import cpu_count
from reader.training.devices import Devices
from reader.training.options import Recipe

_REDRAW_S = 0.5
_NO_WAIT, _BUSY = 0.1, 0.5  # below the first share waiting is ignored; above the second the cores count as busy
_SMALLER = 1.5  # a stored side this many times the trained one is worth storing again


def summary_lines(info: DatasetInfo, recipe: Recipe, devices: Devices) -> Iterator[str]:
    """What is trained on what, and for how long."""
    split = recipe.eval_split
    validated = recipe.validation.size if recipe.validation else info.records(split) if split else 0
    validation = f", {plural(validated, 'validation image')} ({split})" if split else ""
    classes = plural(len(recipe.classes), "class")
    yield f"{info.name} {info.version}: {plural(recipe.images, 'training image')}{validation}, {classes}"
    yield f"{recipe.model} at {recipe.image_size} px on {devices.description}"
    for phase in recipe.phases:
        updates, warmup_steps = recipe.steps * phase.epochs, recipe.schedule(phase)[0]
        rate = f"learning rate {phase.learning_rate:.2g}"
        rate += f" after {plural(warmup_steps, 'update')} of warm-up" if warmup_steps else ""
        batches = f"{plural(recipe.steps, 'step')} of {recipe.batch_size} images"
        name = phase.name.replace("_", "-")
        yield f"{name}: {plural(phase.epochs, 'epoch')} of {batches}, {plural(updates, 'update')}; {rate}"


def warn(line: str) -> None:
    """Print a warning."""
    say(f"warning: {line}", sys.stderr)


def run_document(info: DatasetInfo, recipe: Recipe, devices: Devices, command: str) -> dict[str, Any]:
    """run.json of an unfinished run."""
    versions = {"imageshards": __version__, "keras": keras.__version__, "python": platform.python_version()}
    versions[keras.backend.backend()] = sys.modules[keras.backend.backend()].__version__
    return {
        "finished": False,
        "command": command,
        "dataset": {"url": info.url, "name": info.name, "version": info.version},
        "configuration": recipe.configuration(info),
        "devices": devices.description,
        "dtype_policy": keras.config.dtype_policy().name,
        "versions": versions,
    }


class Speed(NamedTuple):
    """Of some steps, compiling not counted.

    Attributes:
        seconds: that they took.
        waited_s: of these, waiting for batches.
        cpu_s: CPU time of this process.
        images: of all processes.
    """

    seconds: float = 0.0
    waited_s: float = 0.0
    cpu_s: float = 0.0
    images: int = 0

    def since(self, start: Speed) -> Speed:
        """The difference of two readings."""
        return Speed._make(here - there for here, there in zip(self, start, strict=True))

    def plus(self, other: Speed) -> Speed:
        """Both together."""
        return Speed._make(one + another for one, another in zip(self, other, strict=True))

    @property
    def wait_share(self) -> float:
        """Share of the time that was waited."""
        return min(1.0, self.waited_s / self.seconds) if self.seconds else 0.0

    def document(self) -> dict[str, float]:
        """As metrics.jsonl and run.json hold it."""
        rate = self.images / self.seconds if self.seconds else 0.0
        return {"images_per_s": round(rate, 1), "wait_share": round(self.wait_share, 4)}


def mean_speed(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The mean of the epochs, for run.json: a continued training has run in several processes."""
    timed = [line for line in lines if "images_per_s" in line]
    return {name: round(fmean(line[name] for line in timed), 4) for name in ("images_per_s", "wait_share") if timed}


def epoch_line(line: dict[str, Any], epochs: int) -> str:
    """A line of metrics.jsonl in words."""
    names = ("loss", "accuracy", "val_loss", "val_accuracy")
    metrics = ", ".join(f"{name} {line[name]:.4f}" for name in names if name in line)
    text = f"epoch {line['epoch']}/{epochs}: {metrics}"
    if "images_per_s" not in line:  # no step of it was made here
        return text
    return f"{text}; {line['images_per_s']:,.0f} images/s, waited {line['wait_share']:.0%} of the time for input"


def verdict(speed: Speed, info: DatasetInfo, recipe: Recipe) -> str:
    """What limits the training, and the change that would help most."""
    if not speed.seconds:
        return "no step was timed"
    waited = f"waited {speed.wait_share:.0%} of the time for input"
    if speed.wait_share < _NO_WAIT:
        return f"{waited}: the device is the limit"
    busy = speed.cpu_s / (speed.seconds * cpu_count())
    if busy < _BUSY:
        where = "the disk" if storage.is_local(info.url) else "storage"
        fix = "; --cache would help most" if recipe.options.cache is None else " until all is in the cache"
        return f"{waited}, the cores were {1 - busy:.0%} idle: {where} is the limit{fix}"
    stored = min(info.image.min_size or (0,))
    if stored >= _SMALLER * recipe.image_size:
        return (
            f"{waited}: decoding is the limit; a dataset written with --image_size {recipe.image_size} instead of "
            f"{stored} would help most"
        )
    return f"{waited}: decoding is the limit; more CPU cores would help most (there are {cpu_count()})"


class ProgressLine:
    """The line within an epoch, on a terminal."""

    def __init__(self, epoch: int, recipe: Recipe) -> None:
        self._head = f"epoch {epoch + 1}/{recipe.epochs}"
        self._recipe, self._drawn, self._is_shown = recipe, time.monotonic(), sys.stderr.isatty()
        self._began: tuple[float, int] | None = None

    def step(self, done: int, loss: float | None) -> None:
        """Draw it again, if it is time.

        Args:
            done: steps of this epoch.
            loss: so far, if it is known.
        """
        now, steps = time.monotonic(), self._recipe.steps
        if self._began is None and loss is not None:
            self._began = now, done
        if not self._is_shown or now - self._drawn < _REDRAW_S or self._began is None or done <= self._began[1]:
            return
        self._drawn = now
        rate = (done - self._began[1]) / (now - self._began[0])
        left = (steps - done) / rate
        text = (
            f"{self._head}: {done:,}/{steps:,} steps, loss {loss:.4f}, {rate * self._recipe.batch_size:,.0f} images/s"
        )
        print(f"\r\x1b[K{text}, {left:,.0f} s left", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear it."""
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
