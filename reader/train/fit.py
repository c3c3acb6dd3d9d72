"""Trains an image classifier on a dataset: on a TPU if there is one, else on all GPUs, else on the CPU.

Keras divides its own `val_loss` by the size of the batches, padding included. What is printed and written as `loss` and
`val_loss` is the loss as a weighted metric: the mean over the records.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import keras
import tensorflow as tf

from beam_pipeline.errors import ImageShardsError, UsageError, from_worker, one_line
from reader import augment
from reader.info import DatasetInfo
from reader.tf_data import eval_dataset, train_dataset
from reader.train.models import build

METRICS_FILE = "metrics.jsonl"
MODEL_FILE = "model.keras"
_LOSS = "mean_loss"  # the weighted metric that is told as `loss`

Metrics = dict[str, float]


@dataclass(frozen=True)
class TrainOptions:
    """What to train and how.

    Attributes:
        model: `small_cnn` or `mobilenet_v2`.
        epochs: iterations of `train_dataset`.
        out: folder for metrics.jsonl (a line an epoch) and model.keras.
        batch_size: global, over all devices.
        image_size: side in pixels that the model sees; None for the stored size.
        learning_rate: of Adam at its peak; falls to 0 by a cosine.
        seed: of order, augmentation and initial weights.
        weights: `none`, `imagenet` or a file.
    """

    model: str
    epochs: int
    out: str
    batch_size: int = 64
    image_size: int | None = None
    learning_rate: float = 3e-3
    seed: int = 0
    weights: str = "none"


@dataclass(frozen=True)
class Trained:
    """What a training did.

    Attributes:
        model_file: the model as Keras saves it.
        devices: that it ran on, in words.
        steps_per_epoch: batches of an epoch.
        epochs: for each epoch `epoch` (from 1), `loss` and `accuracy`, with a validation split also `val_loss` and
            `val_accuracy`: means over the records.
    """

    model_file: str
    devices: str
    steps_per_epoch: int
    epochs: tuple[Metrics, ...]

    def __str__(self) -> str:
        name, data = ("val_accuracy", "validation") if "val_accuracy" in self.epochs[-1] else ("accuracy", "training")
        return f"{data} accuracy {self.epochs[-1][name]:.3f}: {self.model_file}"


def train(info: DatasetInfo, options: TrainOptions, tell: Callable[[str], None] = lambda line: None) -> Trained:
    """Fit a model and save it.

    Args:
        tell: is given a line at the beginning and after each epoch.

    Raises:
        UsageError: a flag can't be used with this dataset or these devices.
    """
    if os.path.isfile(options.out):
        raise UsageError(f"--out {options.out!r}: it is a file; choose a folder")
    strategy, devices = pick_strategy()
    replicas = strategy.num_replicas_in_sync
    if options.batch_size % replicas:
        raise UsageError(
            f"--batch_size {options.batch_size}: {replicas} replicas share it; use a multiple of {replicas}"
        )
    size = options.image_size or _stored_side(info)
    steps = info.steps_per_epoch("train", options.batch_size)
    tell(
        f"training {options.model} on {devices}: {steps} step{'s' * (steps != 1)} an epoch, "
        f"{options.batch_size} images each"
    )
    common: dict[str, Any] = {"global_batch_size": options.batch_size, "image_size": size}
    data = train_dataset(info, "train", augment=augment.flip_crop, seed=options.seed, **common)
    validation = eval_dataset(info, "validation", **common) if "validation" in info.splits else None
    with strategy.scope():
        model = build(options.model, info, size, options.weights, options.seed)
        model.compile(
            optimizer=keras.optimizers.Adam(
                keras.optimizers.schedules.CosineDecay(options.learning_rate, steps * options.epochs)
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            # weighted_metrics, not metrics: these would count the padding of the last validation batch.
            weighted_metrics=[
                keras.metrics.SparseCategoricalCrossentropy(name=_LOSS, from_logits=True),
                keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            ],
            jit_compile=False if isinstance(strategy, tf.distribute.TPUStrategy) else "auto",
        )
    epochs: list[Metrics] = []
    os.makedirs(options.out, exist_ok=True)
    with open(os.path.join(options.out, METRICS_FILE), "w", encoding="utf-8") as file, _our_errors():
        model.fit(
            data,
            epochs=options.epochs,
            validation_data=validation,
            shuffle=False,  # the dataset does
            verbose=0,
            callbacks=[_noting(epochs, file, tell)],
        )
    model_file = os.path.join(options.out, MODEL_FILE)
    model.save(model_file)
    return Trained(model_file, devices, steps, tuple(epochs))


def _stored_side(info: DatasetInfo) -> int:
    """The side of the stored images. Raises UsageError where they aren't all squares of one size."""
    least, most = info.image.min_size, info.image.max_size
    if least is not None and least == most and least[0] == least[1]:
        return least[0]
    smallest, largest = (f"{size[0]}x{size[1]}" if size else "unknown" for size in (least, most))
    stored = f"{smallest}, which is no square" if least == most else f"of mixed sizes, {smallest} to {largest}"
    raise UsageError(f"--image_size is missing: the stored images are {stored}; give a side in pixels")


def pick_strategy() -> tuple[Any, str]:
    """How to spread over the devices that are there, and their name."""
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect()
        return tf.distribute.TPUStrategy(resolver), "a TPU"
    except (ValueError, tf.errors.NotFoundError):  # no TPU; or a TensorFlow without TPU kernels
        pass
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) > 1:
        return tf.distribute.MirroredStrategy(), f"{len(gpus)} GPUs"
    return tf.distribute.get_strategy(), "a GPU" if gpus else "the CPU"


@contextmanager
def _our_errors() -> Iterator[None]:
    """Turns what TensorFlow makes of an error of the reader (a damaged record) back into it."""
    try:
        yield
    except tf.errors.OpError as error:
        ours = from_worker(error)
        raise ours or ImageShardsError(f"training failed: {one_line(error)[:500]}") from error


def _noting(epochs: list[Metrics], file: IO[str], tell: Callable[[str], None]) -> Any:
    """A callback that appends the metrics of each epoch to `epochs` and the file, and tells them."""

    def note(number: int, logs: Metrics) -> None:
        values = {name: round(float(value), 6) for name, value in logs.items()}
        for prefix in ("", "val_"):
            if prefix + _LOSS in values:
                values[f"{prefix}loss"] = values.pop(prefix + _LOSS)
        epochs.append({"epoch": number + 1, **values})
        file.write(json.dumps(epochs[-1]) + "\n")
        file.flush()
        tell(f"epoch {number + 1}: " + ", ".join(f"{name} {value:.4f}" for name, value in sorted(values.items())))

    return keras.callbacks.LambdaCallback(on_epoch_end=note)
