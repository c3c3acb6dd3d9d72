"""What to train on what, and how: the options of `imageshards train`, and what follows from the dataset."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from beam_pipeline.errors import UsageError
from beam_pipeline.text import first_few, meant, plural
from reader.info import DatasetInfo
from reader.select import Classes, Selection, parse_classes, select
from reader.splits import overlap
from reader.tables import read_columns

SMALL_CNN = "small_cnn"
_SMALL_SIDE = 96  # of small_cnn by default: on the sample data it learns in half the epochs that 224 pixels take
_SMALL_BATCH, _LARGE_BATCH = 8, 64
_MIN_STEPS, _MIN_UPDATES, _MIN_EPOCHS = 25, 150, 6  # steps are of an epoch
_FINE_TUNING_RATE = 0.01  # of the head's
_WARM_UP = 0.05  # of a phase's updates

NO_VALIDATION = "none"
EVAL_SPLITS = "validation", "val"
_HELD_OUT = "90%"  # and the rest

# What `--augment` of `train` and `show` takes, besides none: the keys of `reader.augment.BY_NAME`, without Pillow.
AUGMENTS = ("flip", "flip_crop", "random_resized_crop")

# Options that don't affect the result: they may change when a run resumes.
_MAY_CHANGE = {"out", "device", "distributed", "cache", "checkpoint_steps"}


def _option(default: Any, metavar: str, text: str, read: Callable[[Any], Any] = os.fspath) -> Any:
    """A field that is a flag of the command: its metavar and help, and what checks its value, which may be text."""
    return field(default=default, metadata={"metavar": metavar, "help": text, "read": read})


def _choice(default: str, choices: str, text: str) -> Any:
    """A field that takes one of the words `a|b|c`."""

    def read(value: object) -> object:
        if value not in choices.split("|"):
            raise ValueError(f"choose one of {choices.replace('|', ', ')}")
        return value

    return _option(default, choices, f"{text} (default: %(default)s).", read)


def _number(default: float | None, text: str, minimum: float = -math.inf, kind: type[int] | type[float] = int) -> Any:
    """A field that takes an integer from a minimum on, or a finite number above it."""
    what = "an integer" if kind is int else f"a number above {minimum}"
    what += f" from {minimum}" if kind is int and minimum > -math.inf else ""

    def read(value: object) -> float:
        with suppress(ValueError):
            number = kind(str(value))
            if number >= minimum if kind is int else minimum < number < math.inf:
                return number
        raise ValueError(f"give {what}")

    return _option(default, "N" if kind is int else "R", text, read)


@dataclass(frozen=True)
class TrainOptions:
    """What to train and how: the flags of `imageshards train`, whose help describes them.

    Those that are None follow from the dataset.

    Raises:
        UsageError: a value can't be used; the text of one can, as on the command line.
    """

    out: str | None = _option(None, "OUT", "Folder or URL for all that comes out (default: runs/NAME).")
    model: str = _option(
        SMALL_CNN,
        "MODEL",
        f"One of {SMALL_CNN}, any model of keras.applications, such as MobileNetV2, or package.module:function "
        "(default: %(default)s).",
    )
    weights: str = _option(
        "none",
        "WEIGHTS",
        "One of none, imagenet, or a file (.keras, or .h5 of weights). With weights, --epochs train a new head on a "
        "frozen model, then half as many all of it but BatchNormalization (default: %(default)s).",
    )
    epochs: int | None = _number(None, "Epochs (default: 6, more for 150 updates).", 1)
    batch_size: int | None = _number(None, "Images in a step, over all devices (default: 8 to 64).", 1)
    image_size: int | None = _number(
        None, "Side in pixels of what the model sees (default: as stored; at most 96 for small_cnn).", 16
    )
    optimizer: str = _choice("adam", "adam|adamw|sgd", "Optimizer; sgd has Nesterov momentum of 0.9")
    learning_rate: float | None = _number(
        None,
        "Peak learning rate (default: of adam and adamw 0.001 at a batch of 64, of small_cnn 0.003, growing with the "
        "square root of the batch, arxiv.org/abs/2205.10287; of sgd 0.1 at 256, growing with the batch, "
        "arxiv.org/abs/1706.02677).",
        0,
        float,
    )
    classes: Mapping[str, str] | None = _option(
        None,
        "NAMES",
        "Train on these classes only, such as cat,dog; with new names, which may merge some: tabby=cat,tiger=cat.",
        parse_classes,
    )
    balance: str = _choice("none", "none|classes", "With classes, equally many images of every class in each epoch")
    augment: str = _choice("flip_crop", "|".join(("none", *AUGMENTS)), "Augmentation of the training images")
    mixed_precision: str = _choice(
        "auto",
        "auto|none|bfloat16|float16",
        "With auto, bfloat16 on TPUs and new GPUs, float16 on older GPUs, none on CPUs",
    )
    seed: int = _number(0, "Seed of the order, the augmentation and the initial weights (default: %(default)s).")
    train_split: str = _option("train", "SPLIT", "Split to train on, such as train[:80%%] (default: %(default)s).")
    eval_split: str | None = _option(
        None,
        "SPLIT",
        "Split to validate on, or none (default: validation, or val; without either a tenth of train is held out, of "
        "third-party files nothing).",
    )
    early_stopping: int | None = _number(None, "Stop after N epochs without a lower validation loss.", 1)
    cache: str | None = _option(None, "DIR", "Keep what was read from remote storage in this folder; or memory.")
    device: str = _choice("auto", "auto|tpu|gpu|cpu", "What to train on")
    distributed: bool = _option(False, "", "This process is one of several (JAX only).", bool)
    checkpoint_steps: int = _number(1000, "Steps from one checkpoint to the next (default: %(default)s).", 1)

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if value is not None or option.default is not None:
                try:
                    object.__setattr__(self, option.name, option.metadata["read"](value))
                except (TypeError, ValueError) as error:
                    raise UsageError(f"--{option.name} {str(value)!r}: {error}") from None


class TrainingData(NamedTuple):
    """What is trained on, and validated on.

    Attributes:
        train, evaluation: split strings; `evaluation` is None without validation.
        is_held_out: whether nobody named `evaluation`, which is a part of the split that is trained on.
        selected, validated: which of their records; None for all.
        classes: names of those that are trained.
        images, validation_images: how many there are.
    """

    train: str
    evaluation: str | None
    is_held_out: bool
    selected: Selection | None
    validated: Selection | None
    classes: tuple[str, ...]
    images: int
    validation_images: int


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
        model: as Keras writes its name.
        batch_size, image_size, steps: as in the options; steps of an epoch.
        phases: one, or with weights two.
        data: what is trained and validated on.
    """

    options: TrainOptions
    model: str
    batch_size: int
    image_size: int
    steps: int
    phases: tuple[Phase, ...]
    data: TrainingData

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that are trained."""
        return self.data.classes

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
        return given | {
            "dataset": info.manifest["self_sha256"],
            "model": self.model,
            "epochs": self.phases[0].epochs,
            "batch_size": self.batch_size,
            "image_size": self.image_size,
            "learning_rate": self.phases[0].learning_rate,
            "train_split": self.data.train,
            "eval_split": self.data.evaluation or NO_VALIDATION,
        }

    def best(self, lines: Sequence[Mapping[str, Any]], phase: Phase) -> Mapping[str, Any] | None:
        """The line of metrics.jsonl of a phase's best epoch: the first of equals; without validation the last one."""
        lines = [line for line in lines if line["phase"] == phase.name]
        if not lines or "val_loss" not in lines[0]:
            return lines[-1] if lines else None
        return min(lines, key=lambda line: math.inf if math.isnan(line["val_loss"]) else line["val_loss"])


def application_name(given: str) -> str:
    """A model's name as Keras writes it: `MobileNetV2` for `mobilenet_v2`.

    Raises:
        UsageError: there is none; names the nearest.
    """
    if ":" in given or given == SMALL_CNN:
        return given
    import keras

    names = [SMALL_CNN, *(name for name, one in vars(keras.applications).items() if callable(one))]
    plain: dict[str, str] = {_plain(name): name for name in names}
    if (found := plain.get(_plain(given))) is not None:
        return found
    hint = meant(_plain(given), plain, f"choose one of {', '.join(names)}", lambda name: plain[name])
    raise UsageError(f"--model {given!r}: {hint}")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def check_backend(backend: str) -> None:
    """Raises UsageError if Keras can't train on a backend here."""
    if backend not in ("tensorflow", "jax"):
        raise UsageError(f"KERAS_BACKEND={backend}: train runs on tensorflow or jax; others: see docs/howto/keras.md")


def make_recipe(info: DatasetInfo, options: TrainOptions, devices: int = 1) -> Recipe:
    """Fill in what the options leave to the dataset.

    Args:
        info: the dataset.
        options: as given.
        devices: how many share a batch evenly.

    Raises:
        UsageError: an option can't be used with this dataset, or these devices.
    """
    model = application_name(options.model)
    chosen = choose_data(info, options.train_split, options.eval_split, options.classes)
    mixed = not info.is_index or chosen.train in info.splits  # a part of our splits has all classes
    counts = class_counts(info, chosen, at_most=mixed)
    trained = [name for name, count in zip(chosen.classes, counts, strict=True) if count]
    if len(trained) < 2:
        fix = "name two with --classes" if options.classes else "is --input of imageshards write one level too high?"
        raise UsageError(f"{info.url}: {chosen.train} has one class, {first_few(trained)}; training needs two: {fix}")
    if options.early_stopping and chosen.evaluation is None:
        raise UsageError("--early_stopping needs validation: give --eval_split")
    records = chosen.images
    fits = 1 << max(0, (records // _MIN_STEPS).bit_length() - 1)  # the largest power of two
    batch = options.batch_size or -(-min(max(fits, _SMALL_BATCH), _LARGE_BATCH) // devices) * devices
    if batch % devices:
        fits = -(-batch // devices) * devices
        raise UsageError(f"--batch_size {batch}: {devices} devices share it; the next that fits is {fits}")
    steps = max(1, records // batch)
    epochs = options.epochs or max(_MIN_EPOCHS, math.ceil(_MIN_UPDATES / steps))
    # Malladi et al. 2022, https://arxiv.org/abs/2205.10287; of SGD Goyal et al. 2017, https://arxiv.org/abs/1706.02677
    peak = (3e-3 if model == SMALL_CNN else 1e-3) * math.sqrt(batch / 64)
    rate = options.learning_rate or (0.1 * batch / 256 if options.optimizer == "sgd" else peak)
    has_weights = options.weights != "none" and model != SMALL_CNN and ":" not in model
    phases = [Phase("head" if has_weights else "training", epochs, rate)]
    if has_weights:
        phases.append(Phase("fine_tuning", (epochs + 1) // 2, rate * _FINE_TUNING_RATE))
    side = options.image_size or _side(info, model)
    return Recipe(options, model, batch, side, steps, tuple(phases), chosen)


def _side(info: DatasetInfo, model: str) -> int:
    """The side of the stored images, of which small_cnn sees at most 96 pixels."""
    smallest, largest = info.image.min_size, info.image.max_size
    if model == SMALL_CNN and smallest is not None and min(smallest) >= _SMALL_SIDE:
        return _SMALL_SIDE
    if smallest is not None and smallest == largest and smallest[0] == smallest[1]:
        return smallest[0]
    sizes = [f"{size[0]}x{size[1]}" if size else "unknown" for size in (smallest, largest)]
    stored = f"{sizes[0]}, which is not square" if smallest == largest else f"of mixed sizes, {sizes[0]} to {sizes[1]}"
    raise UsageError(f"--image_size is missing: the stored images are {stored}; give a side in pixels")


# --- which records


def choose_data(info: DatasetInfo, train: str, evaluation: str | None, classes: Classes) -> TrainingData:
    """Fill in what `--train_split`, `--eval_split` and `--classes` leave to the dataset.

    Without a split `validation` or `val`, and unless `evaluation` names one or is `none`, a tenth of `train` is held
    out if that is the name of a split of shuffled shards. `test` is never chosen.

    Raises:
        UsageError: there is no such split or class.
    """
    if train == "train" and "train" not in info.splits:
        raise UsageError(f"{info.url} has no split 'train': it has {first_few(list(info.splits))}; give --train_split")
    for flag, split in (("train_split", train), ("eval_split", evaluation)):
        if split is not None and (flag, split) != ("eval_split", NO_VALIDATION):
            try:
                info.records(split)
            except UsageError as error:
                raise UsageError(f"--{flag} {split!r}: {error}") from None
    chosen = evaluation or next((name for name in EVAL_SPLITS if name in info.splits), None)
    is_held_out = chosen is None and train in info.splits and not info.is_index
    if is_held_out := is_held_out and round(0.9 * info.records(train)) < info.records(train):
        train, chosen = f"{train}[:{_HELD_OUT}]", f"{train}[{_HELD_OUT}:]"
    chosen = None if chosen == NO_VALIDATION else chosen
    selected, validated = select(info, train, classes), None if chosen is None else select(info, chosen, classes)
    images, validation_images = (
        part.size if part else info.records(split) if split else 0
        for part, split in ((selected, train), (validated, chosen))
    )
    names = selected.classes if selected else info.classes
    return TrainingData(train, chosen, is_held_out, selected, validated, names, images, validation_images)


def class_counts(info: DatasetInfo, data: TrainingData, at_most: bool = False) -> list[int]:
    """How many images of each class are trained on: of a part of a split, by the record tables; or `at_most`."""
    new = np.array(range(info.num_classes) if data.selected is None else data.selected.labels)
    known, count = new >= 0, len(data.classes)
    old = np.sum([info.splits[part.split].class_counts for part in info.ranges(data.train)], axis=0)
    counts = np.bincount(new[known], old[known], count).astype(np.int64)
    if at_most or counts.sum() == data.images:
        return list(map(int, counts))
    counts, begin = np.zeros(count, np.int64), 0
    mask = np.ones(info.records(data.train), np.bool_) if data.selected is None else data.selected.mask()
    for columns in read_columns(info, data.train, ["class"]):
        labels = new[columns["class"]][mask[begin : begin + columns.records]]
        counts, begin = counts + np.bincount(labels, minlength=count), begin + columns.records
    return list(map(int, counts))


def warnings(info: DatasetInfo, recipe: Recipe) -> Iterator[str]:
    """What will probably make the result disappoint, or say less than it seems to."""
    data, records, updates = recipe.data, recipe.data.images, recipe.steps * recipe.epochs
    if recipe.batch_size > records:
        has = f"{data.train} has {plural(records, 'image')}, so images repeat within a batch"
        yield f"--batch_size {recipe.batch_size}: {has}: give at most {records}"
    elif updates < _MIN_UPDATES:
        yield f"only {plural(updates, 'update')}: raise --epochs or lower --batch_size"
    if data.is_held_out and info.manifest["configuration"].get("split_by"):
        fix = "write the dataset with --splits, or give --eval_split none"
        yield f"{data.evaluation} is held out at random, so a group of --split_by may be in both parts: {fix}"
    if data.evaluation is None:
        fix, part = "--eval_split names what to validate on", f"{data.train}[{{}}]"
        if info.is_index and data.train in info.splits:
            held = f"--train_split {part.format(':90%')} --eval_split {part.format('90%:')}"
            fix = f"if the files are shuffled, {held} holds out a tenth"
        yield f"no validation, so model.keras is the last epoch's: {fix}"
    elif not data.is_held_out and overlap(info.ranges(data.train), info.ranges(data.evaluation)):
        yield f"--eval_split {data.evaluation}: the accuracy on images that were trained on says little of others"
