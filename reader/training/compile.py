"""Compiles a model for a phase: loss, metrics that don't count padding, optimizer and learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from reader.info import DatasetInfo
from reader.training.devices import Devices
from reader.training.models import Model
from reader.training.options import Phase, Recipe

LOSS = "mean_loss"  # the metric that is reported as `loss`: Keras' own counts the padding of the last batch
_EXECUTION_STEPS = 8  # on accelerators, which are faster than a look from Python at each step


def compile_for(model: Model, phase: Phase, info: DatasetInfo, recipe: Recipe, devices: Devices) -> list[Any]:
    """Freeze what the phase doesn't train, and build a new optimizer for the rest; returns the metrics."""
    model.freeze(phase.name)
    model.synchronize(devices.strategy is not None)
    loss = _loss(info, recipe)
    metrics = [
        keras.metrics.MeanMetricWrapper(loss, name=LOSS),
        keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
    ]
    full = model.full
    full.compile(
        optimizer=keras.optimizers.Adam(_schedule(phase, recipe)),
        loss=loss,
        weighted_metrics=metrics,
        steps_per_execution=steps_per_execution(recipe, devices),
        jit_compile=False if devices.kind == "tpu" and devices.strategy is not None else "auto",
    )
    with devices.scope():
        full.optimizer.build(full.trainable_variables)
    return metrics


def _schedule(phase: Phase, recipe: Recipe) -> Any:
    warmup_steps, decay_steps = recipe.schedule(phase)
    peak = phase.learning_rate
    if not warmup_steps:
        return keras.optimizers.schedules.CosineDecay(peak, decay_steps)
    return keras.optimizers.schedules.CosineDecay(0.0, decay_steps, warmup_target=peak, warmup_steps=warmup_steps)


def _loss(info: DatasetInfo, recipe: Recipe) -> Callable[[Any, Any], Any]:
    """Cross-entropy of class ids [b] and logits [b, classes], for each record: [b]."""
    smoothing, classes = recipe.options.label_smoothing, len(recipe.classes)
    weights = _balanced(recipe) if recipe.options.class_weights == "balanced" else None

    def cross_entropy(labels: Any, logits: Any) -> Any:
        labels = ops.cast(ops.reshape(labels, (-1,)), "int32")
        targets = ops.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes
        loss = keras.losses.categorical_crossentropy(targets, logits, from_logits=True)
        return loss if weights is None else loss * ops.take(ops.convert_to_tensor(weights, "float32"), labels)

    return cross_entropy


def _balanced(recipe: Recipe) -> np.ndarray[Any, Any]:
    """A weight for each class, so that all classes with images weigh the same; 1 on average over the images."""
    counts = np.array(list(recipe.classes.values()), np.float64)
    present = counts > 0
    return np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 0.0).astype(np.float32)


def steps_per_execution(recipe: Recipe, devices: Devices) -> int:
    """As wanted, lowered to a number that divides the steps of an epoch; 1 where Keras can't do more."""
    if devices.strategy is not None and devices.kind != "tpu":
        return 1  # InvalidArgumentError under MirroredStrategy in Keras 3.15
    default = 1 if devices.kind == "cpu" else _EXECUTION_STEPS
    wanted = min(recipe.options.steps_per_execution or default, recipe.steps)
    return next(number for number in range(wanted, 0, -1) if recipe.steps % number == 0)
