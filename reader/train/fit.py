"""Trains an image classifier on a dataset: on a TPU if there is one, else on all GPUs, else on the CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from beam_pipeline.errors import ImageShardsError, UsageError, from_worker, one_line
from reader import augment
from reader.dataset import eval_dataset, train_dataset
from reader.info import DatasetInfo
from reader.train.models import build

METRICS_FILE = "metrics.jsonl"
MODEL_FILE = "model.keras"


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


def train(info: DatasetInfo, options: TrainOptions) -> str:
    """Fit a model; returns a line that says how good it is and where it lies.

    Raises:
        UsageError: a flag can't be used with this dataset or these devices.
    """
    _check(options)
    strategy, devices = pick_strategy()
    replicas = strategy.num_replicas_in_sync
    if options.batch_size % replicas:
        raise UsageError(
            f"--batch_size {options.batch_size}: {replicas} replicas share it; use a multiple of {replicas}"
        )
    size = options.image_size or _stored_side(info)
    steps = info.steps_per_epoch("train", options.batch_size)
    print(f"training {options.model} on {devices}: {steps} steps an epoch of {options.batch_size} images", flush=True)
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
            weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
            jit_compile=False if isinstance(strategy, tf.distribute.TPUStrategy) else "auto",
        )
    os.makedirs(options.out, exist_ok=True)
    metrics_file = os.path.join(options.out, METRICS_FILE)
    with open(metrics_file, "w", encoding="utf-8") as file, _our_errors():
        history = model.fit(
            data,
            epochs=options.epochs,
            validation_data=validation,
            shuffle=False,  # the dataset does
            verbose=0,
            callbacks=[_epoch_lines(file)],
        ).history
    model_file = os.path.join(options.out, MODEL_FILE)
    model.save(model_file)
    name = "val_accuracy" if validation is not None else "accuracy"
    return f"{'validation' if validation is not None else 'training'} accuracy {history[name][-1]:.3f}: {model_file}"


def _check(options: TrainOptions) -> None:
    for name, least in (("epochs", 1), ("batch_size", 1), ("image_size", 16)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UsageError(f"--{name} {value}: give {least} or more")


def _stored_side(info: DatasetInfo) -> int:
    size = info.image.min_size
    if size is None or size != info.image.max_size or size[0] != size[1]:
        raise UsageError(
            f"--image_size is missing: stored images are {size} to {info.image.max_size}; give a side in pixels"
        )
    return size[0]


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


def _epoch_lines(file: Any) -> Any:
    """A callback that writes and prints the metrics of each epoch."""

    def write(epoch: int, logs: dict[str, float]) -> None:
        values = {name: round(float(value), 6) for name, value in logs.items()}
        file.write(json.dumps({"epoch": epoch + 1, **values}) + "\n")
        file.flush()
        print(f"epoch {epoch + 1}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()), flush=True)

    return keras.callbacks.LambdaCallback(on_epoch_end=write)
