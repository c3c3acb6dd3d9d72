"""What to train and how: the options of `imageshards train`, and the numbers that follow from the dataset."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from beam_pipeline.errors import UsageError, plural, some
from reader.info import DatasetInfo
from reader.select import Selection, parse_classes, select
from reader.training.models import MODULES, SMALL_CNN, application_name

_EVAL_SPLITS = ("validation", "val", "test")
_SMALL_SIDE = 96  # of small_cnn by default: on the sample data it learns in half the epochs that 224 pixels take
_SMALL_BATCH, _LARGE_BATCH, _IMAGES_A_BATCH = 8, 64, 25
_LEAST_UPDATES, _LEAST_EPOCHS = 150, 6
_FINE_TUNING_RATE = 0.01  # of the head's
_WARM_UP = 0.05  # of a phase's updates
# Adam's peak rate for a batch of 64; it grows with the square root of the batch.
_RATES = {SMALL_CNN: 3e-3}
_RATE = 1e-3


# What `--augment` of `train` and `show` takes, besides none: the keys of `reader.augment.BY_NAME`, without Pillow.
AUGMENTS = ("flip", "flip_crop", "random_resized_crop")

# Options that don't affect the result: they may change when a run resumes.
_MAY_CHANGE = {
    "out",
    "device",
    "tpu",
    "distributed",
    "steps_per_execution",
    "cache",
    "checkpoint_minutes",
    "checkpoint_steps",
}


def _number(kind: type[int] | type[float], wanted: str, fits: Callable[[Any], bool]) -> Callable[[object], Any]:
    """Reads a number, which may be text; the error says what to give."""

    def read(value: object) -> Any:
        with suppress(ValueError):
            number = kind(str(value))
            if fits(number):
                return number
        raise ValueError(f"give a {wanted}")

    return read


def _from(least: int) -> Callable[[object], int]:
    return _number(int, f"whole number from {least}", lambda number: number >= least)


_WHOLE = _number(int, "whole number", lambda number: True)
_POSITIVE = _number(float, "number above 0", lambda number: 0 < number < math.inf)
_BELOW_1 = _number(float, "number from 0 to 0.99", lambda number: 0 <= number <= 0.99)


def _option(default: Any, metavar: str, text: str, read: Callable[[Any], Any] = os.fspath) -> Any:
    """A field that is a flag of the command: its metavar and help, and what checks its value."""
    return field(default=default, metadata={"metavar": metavar, "help": text, "read": read})


def _choice(default: str, choices: str, text: str) -> Any:
    """A field that takes one of the words `a|b|c`."""

    def read(value: object) -> object:
        if value not in choices.split("|"):
            raise ValueError(f"choose one of {choices.replace('|', ', ')}")
        return value

    return _option(default, choices, f"{text} (default: %(default)s).", read)


@dataclass(frozen=True)
class TrainOptions:
    """What to train and how: the flags of `imageshards train`, whose help describes them.

    Those that are None follow from the dataset.

    Raises:
        UsageError: a value can't be used; the text of one can, as on the command line.
    """

    out: str | None = _option(None, "OUT", "Folder or URL for all that comes out (default: runs/NAME-N).")
    model: str = _option(
        SMALL_CNN,
        "MODEL",
        f"One of {SMALL_CNN}, {', '.join(MODULES)}; or package.module:function (default: %(default)s).",
    )
    weights: str = _option(
        "none",
        "WEIGHTS",
        "One of none, imagenet, or a file (.keras, or .h5 of weights). With weights, --epochs train a new head on a "
        "frozen model, then --fine_tune_epochs all of it but BatchNormalization (default: %(default)s).",
    )
    epochs: int | None = _option(None, "N", "Epochs (default: 6, more for 150 updates).", _from(1))
    fine_tune_epochs: int | None = _option(
        None, "N", "Epochs of fine-tuning; with --weights (default: half).", _from(0)
    )
    batch_size: int | None = _option(None, "N", "Images in a step, over all devices (default: 8 to 64).", _from(1))
    image_size: int | None = _option(
        None, "N", "Side in pixels of what the model sees (default: as stored; at most 96 for small_cnn).", _from(16)
    )
    learning_rate: float | None = _option(
        None, "R", "Adam's peak learning rate (default: by model and batch).", _POSITIVE
    )
    label_smoothing: float = _option(
        0.0, "R", "Share of each label given to all classes (default: %(default)s).", _BELOW_1
    )
    classes: Mapping[str, str] | None = _option(
        None,
        "NAMES",
        "Train on these classes only, such as cat,dog; with new names, which may merge some: tabby=cat,tiger=cat.",
        parse_classes,
    )
    balance: str = _choice("none", "none|classes", "With classes, as many images of each class in every epoch")
    augment: str = _choice("flip_crop", "|".join(("none", *AUGMENTS)), "Augmentation of the training images")
    class_weights: str = _choice("none", "none|balanced", "With balanced, all classes weigh the same")
    mixed_precision: str = _choice(
        "auto",
        "auto|none|bfloat16|float16",
        "With auto, bfloat16 on TPUs and new GPUs, float16 on older GPUs, none on CPUs",
    )
    seed: int = _option(0, "N", "Of the order, the augmentation and the first weights (default: %(default)s).", _WHOLE)
    eval_split: str | None = _option(None, "SPLIT", "To validate on (default: validation, else val, else test).")
    early_stopping: int | None = _option(
        None, "N", "Stop after N epochs without a lower validation loss; the last weights are kept.", _from(1)
    )
    steps_per_execution: int | None = _option(
        None, "N", "Steps in one call, lowered to a divisor of an epoch's steps (default: 1 on CPUs, else 8).", _from(1)
    )
    cache: str | None = _option(None, "DIR", "Keep what was read from remote storage in this folder; or memory.")
    device: str = _choice("auto", "auto|tpu|gpu|cpu", "What to train on")
    tpu: str | None = _option(None, "NAME", "A Cloud TPU by its name, if it isn't this machine's.")
    distributed: bool = _option(False, "", "This process is one of several (JAX only).", bool)
    checkpoint_minutes: float = _option(
        10.0, "M", "How often a checkpoint is written (default: %(default)s).", _POSITIVE
    )
    checkpoint_steps: int | None = _option(None, "N", "Write one every N steps instead.", _from(1))

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if value is not None or option.default is not None:
                try:
                    object.__setattr__(self, option.name, option.metadata["read"](value))
                except (TypeError, ValueError) as error:
                    raise UsageError(f"--{option.name} {str(value)!r}: {error}") from None


class Phase(NamedTuple):
    """A part of a run with an optimizer of its own.

    Attributes:
        name: `training`, or with weights `head`, then `fine_tuning`.
        epochs: how many.
        learning_rate: peak.
    """

    name: str
    epochs: int
    learning_rate: float


@dataclass(frozen=True)
class Recipe:
    """The options with every number filled in.

    Attributes:
        options: as given.
        classes: names of those that are trained, and how many images of train each has.
        train, validation: which records are read; None for all of the split.
        model: as Keras writes its name.
        batch_size, image_size, steps, eval_split: as in the options; steps of an epoch; None if there is no such split.
        phases: one, or with weights two.
    """

    options: TrainOptions
    model: str
    batch_size: int
    image_size: int
    steps: int
    eval_split: str | None
    phases: tuple[Phase, ...]
    classes: Mapping[str, int]
    train: Selection | None = None
    validation: Selection | None = None

    @property
    def images(self) -> int:
        """Of train."""
        return sum(self.classes.values())

    @property
    def epochs(self) -> int:
        """Of all phases."""
        return sum(phase.epochs for phase in self.phases)

    def schedule(self, phase: Phase) -> tuple[int, int]:
        """(warmup steps, decay steps) of the learning rate."""
        warmup_steps = int(_WARM_UP * self.steps * phase.epochs)
        return warmup_steps, self.steps * phase.epochs - warmup_steps

    def configuration(self, info: DatasetInfo) -> dict[str, Any]:
        """Everything that affects the result, as JSON. A run resumes only if it is unchanged."""
        given = {name: value for name, value in asdict(self.options).items() if name not in _MAY_CHANGE}
        for name in ("classes", "balance"):  # a run that began before there were these options resumes
            if given[name] in (None, "none"):
                del given[name]
        return given | {
            "dataset": info.manifest["self_sha256"],
            "model": self.model,
            "epochs": self.phases[0].epochs,
            "fine_tune_epochs": self.epochs - self.phases[0].epochs,
            "batch_size": self.batch_size,
            "image_size": self.image_size,
            "learning_rate": self.phases[0].learning_rate,
            "eval_split": self.eval_split,
        }


def check_backend(backend: str) -> None:
    """Raises UsageError if Keras can't train on a backend here."""
    if backend not in ("tensorflow", "jax"):
        raise UsageError(f"KERAS_BACKEND={backend}: train runs on tensorflow or jax")


def make_recipe(info: DatasetInfo, options: TrainOptions, devices: int = 1) -> Recipe:
    """Fill in what the options leave to the dataset.

    Args:
        info: the dataset.
        options: as given.
        devices: how many share a batch evenly.

    Raises:
        UsageError: an option can't be used with this dataset, or these devices.
    """
    if "train" not in info.splits:
        raise UsageError(f"{info.url} has no split 'train': it has {some(list(info.splits))}")
    model = application_name(options.model)
    if options.balance == "classes" and options.class_weights == "balanced":
        raise UsageError("--balance classes reads all classes equally often: leave out --class_weights balanced")
    train = select(info, "train", options.classes)
    found = dict.fromkeys(info.classes if train is None else train.classes, 0)
    for number, count in enumerate(info.splits["train"].class_counts):
        if train is None or train.labels[number] >= 0:
            found[info.classes[number] if train is None else train.classes[train.labels[number]]] += count
    records = info.records("train") if train is None else train.size
    batch = options.batch_size or -(-_batch_size(records) // devices) * devices
    if batch % devices:
        fits = -(-batch // devices) * devices
        raise UsageError(f"--batch_size {batch}: {devices} devices share it; the next that fits is {fits}")
    steps = max(1, records // batch)
    epochs = options.epochs or max(_LEAST_EPOCHS, math.ceil(_LEAST_UPDATES / steps))
    rate = options.learning_rate or _RATES.get(model, _RATE) * math.sqrt(batch / _LARGE_BATCH)
    has_weights = options.weights != "none" and model != SMALL_CNN and ":" not in model
    if options.fine_tune_epochs and not has_weights:
        raise UsageError("--fine_tune_epochs goes with --weights of a model of keras.applications; leave it out")
    phases = [Phase("head" if has_weights else "training", epochs, rate)]
    more = (epochs + 1) // 2 if options.fine_tune_epochs is None else options.fine_tune_epochs
    if has_weights and more:
        phases.append(Phase("fine_tuning", more, rate * _FINE_TUNING_RATE))
    side = options.image_size or _side(info, model)
    eval_split = _eval_split(info, options.eval_split)
    validation = None if eval_split is None else select(info, eval_split, options.classes)
    return Recipe(options, model, batch, side, steps, eval_split, tuple(phases), found, train, validation)


def _batch_size(records: int) -> int:
    """The largest power of two that gives 25 steps an epoch, from 8 to 64."""
    fits = 1 << max(0, (records // _IMAGES_A_BATCH).bit_length() - 1)
    return min(max(fits, _SMALL_BATCH), _LARGE_BATCH)


def _side(info: DatasetInfo, model: str) -> int:
    """The side of the stored images, of which small_cnn sees at most 96 pixels."""
    least, most = info.image.min_size, info.image.max_size
    if model == SMALL_CNN and least is not None and min(least) >= _SMALL_SIDE:
        return _SMALL_SIDE
    if least is not None and least == most and least[0] == least[1]:
        return least[0]
    smallest, largest = (f"{size[0]}x{size[1]}" if size else "unknown" for size in (least, most))
    stored = f"{smallest}, which is not square" if least == most else f"of mixed sizes, {smallest} to {largest}"
    raise UsageError(f"--image_size is missing: the stored images are {stored}; give a side in pixels")


def _eval_split(info: DatasetInfo, given: str | None) -> str | None:
    if given is not None:
        info.records(given)  # raises UsageError if there is none
        return given
    return next((name for name in _EVAL_SPLITS if name in info.splits), None)


def warnings(info: DatasetInfo, recipe: Recipe) -> Iterator[str]:
    """What will probably make the result disappoint."""
    records, updates = recipe.images, recipe.steps * recipe.epochs
    if len(recipe.classes) < 2:
        has = "the dataset has" if recipe.train is None else "--classes leaves"
        yield f"{has} one class: every prediction is correct"
    if recipe.batch_size > records:
        yield f"--batch_size {recipe.batch_size}: train has {plural(records, 'image')}, so images repeat within a batch"
    if updates < _LEAST_UPDATES:
        yield f"only {plural(updates, 'update')}: raise --epochs or lower --batch_size"
    if recipe.eval_split is None:
        has = some(list(info.splits))
        yield f"no validation: the dataset has {has}; write it with --splits train=0.9,validation=0.1, or --eval_split"
    elif any(part.strip().partition("[")[0] == "train" for part in recipe.eval_split.split("+")):
        yield f"--eval_split {recipe.eval_split}: the accuracy on images that were trained on says little of others"
