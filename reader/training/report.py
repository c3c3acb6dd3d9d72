"""What a run prints: a summary, progress, an epoch's line, what it waited for, and run.json."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from beam_pipeline import __version__, storage
from beam_pipeline.machine import cpu_count
from beam_pipeline.text import plural, print_line
from reader.info import DatasetInfo
from reader.training.devices import Devices
from reader.training.models import DECAY
from reader.training.options import Recipe

# Of some steps, compiling not counted: seconds, those waiting for batches, CPU seconds here, images of all processes.
Clocks = npt.NDArray[np.float64]
_NO_WAIT, _BUSY = 0.1, 0.5  # below the first share waiting is ignored; above the second the cores count as busy
_OVERFITTED = 0.95  # training accuracy
_SMALLER = 1.5  # a stored side this many times the trained one is worth storing again


def summary_lines(info: DatasetInfo, recipe: Recipe, devices: Devices) -> Iterator[str]:
    """What is trained on what, and for how long."""
    data = recipe.data
    validation = f"{plural(data.validation_images, 'validation image')} ({data.evaluation})"
    shares = f"{plural(data.images, 'training image')}, {validation if data.evaluation else 'no validation'}"
    yield f"{info.name} {info.version}: {shares}, {plural(len(recipe.classes), 'class')}"
    if data.is_held_out:
        yield f"no validation split: {data.evaluation} is held out of training (--eval_split none trains on it)"
    yield f"{recipe.model} at {recipe.image_size} px on {devices.description}"
    for phase in recipe.phases:
        updates, warmup_steps = recipe.steps * phase.epochs, recipe.schedule(phase)[0]
        decay = f", weight decay {DECAY:g}" * (recipe.options.optimizer == "adamw")
        rate = f"{recipe.options.optimizer}{decay}, learning rate {phase.learning_rate:.2g}"
        rate += f" after {plural(warmup_steps, 'update')} of warm-up" if warmup_steps else ""
        batches = f"{plural(recipe.steps, 'step')} of {recipe.batch_size} images"
        name = phase.name.replace("_", "-")
        yield f"{name}: {plural(phase.epochs, 'epoch')} of {batches}, {plural(updates, 'update')}; {rate}"


def warn(line: str) -> None:
    """Print a warning."""
    print_line(f"warning: {line}", sys.stderr)


def run_document(info: DatasetInfo, recipe: Recipe, devices: Devices, command: str) -> dict[str, Any]:
    """run.json of an unfinished run."""
    versions = {"imageshards": __version__, "keras": keras.__version__, "python": platform.python_version()}
    versions[keras.backend.backend()] = sys.modules[keras.backend.backend()].__version__
    return {
        "finished": False,
        "best_epoch": 0,
        "verdict": "",
        "command": command,
        # Prediction converts new photos as the dataset was written, without opening it.
        "dataset": {
            "url": info.url,
            "name": info.name,
            "version": info.version,
            "is_index": info.is_index,  # of third-party files, whose images were never converted
            **{key: info.manifest[key] for key in ("configuration", "image", "codec")},
        },
        "configuration": recipe.configuration(info),
        "devices": devices.description,
        "dtype_policy": keras.config.dtype_policy().name,
        "versions": versions,
    }


def speed(clocks: Clocks) -> dict[str, float]:
    """Of some steps, as metrics.jsonl and run.json hold it; {} if none was timed."""
    seconds, waited_s, _, images = clocks.tolist()
    if not seconds:
        return {}
    return {"images_per_s": round(images / seconds, 1), "wait_share": round(min(1.0, waited_s / seconds), 4)}


def mean_speed(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The mean of the epochs, for run.json: a resumed run was in several processes."""
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


def verdict(clocks: Clocks, info: DatasetInfo, recipe: Recipe) -> str:
    """What limits a run, and the change that would help most."""
    seconds, _, cpu_s, images = clocks.tolist()
    if recipe.steps == 1 or images <= recipe.batch_size:  # of which the first batch of an epoch is waited for
        return "too few steps were timed to say what limits it: lower --batch_size or raise --epochs"
    share = speed(clocks)["wait_share"]
    waited = f"waited {share:.0%} of the time for input"
    if share < _NO_WAIT:
        return f"{waited}: the device is the limit"
    busy = cpu_s / (seconds * cpu_count())
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


def no_better(counts: Any, recipe: Recipe, trained: float) -> str:
    """A warning if counts [class, predicted class] are, within two standard errors, those of one answer; else "".

    With a training accuracy `trained` near 1 the model has overfitted, and more epochs don't help.
    """
    images, of_class = float(counts.sum()), counts.sum(1)
    accuracy, largest = counts.trace() / images, of_class.max() / images
    answer = f"always answering {recipe.classes[of_class.argmax()]!r} ({largest:.3f})"
    fix = "try --model MobileNetV2 --weights imagenet" if recipe.options.weights == "none" else "raise --epochs"
    if trained >= _OVERFITTED:
        fix = f"it overfits, the training accuracy is {trained:.3f}; add images, or {fix.replace('raise', 'lower')}"
    line = f"validation accuracy {accuracy:.3f} is, within chance, no better than {answer}: {fix}"
    return line if accuracy < min(1, largest + 2 * (largest * (1 - largest) / images) ** 0.5) else ""
