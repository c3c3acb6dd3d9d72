"""Compiles a model for a phase: loss, metrics that don't count padding, optimizer and learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from reader.training.devices import Devices
from reader.training.models import Model
from reader.training.options import Phase, Recipe

LOSS = "mean_loss"  # the metric that is reported as `loss`: Keras' own counts the padding of the last batch
DECAY = 0.01  # of adamw, decoupled


def compile_for(model: Model, phase: Phase, recipe: Recipe, devices: Devices) -> list[Any]:
    """Freeze what the phase doesn't train, and build a new optimizer for the rest; returns the metrics."""
    model.freeze(phase.name)
    model.synchronize(devices.strategy is not None)
    full, loss, optimizer = model.full, _loss(len(recipe.classes)), _optimizer(phase, recipe)
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    metrics = [keras.metrics.MeanMetricWrapper(loss, name=LOSS), accuracy]
    jit = False if devices.kind == "tpu" and devices.strategy is not None else "auto"
    full.compile(optimizer=optimizer, loss=loss, weighted_metrics=metrics, jit_compile=jit)
    with devices.scope():
        if recipe.options.optimizer == "adamw":  # decays kernels: scales and biases are vectors
            optimizer.exclude_from_weight_decay([one for one in full.trainable_variables if len(one.shape) < 2])
        full.optimizer.build(full.trainable_variables)
    return metrics


def _optimizer(phase: Phase, recipe: Recipe) -> Any:
    peak, (warmup_steps, decay_steps) = phase.learning_rate, recipe.schedule(phase)
    warm_up = {"warmup_target": peak, "warmup_steps": warmup_steps} if warmup_steps else {}
    rate = keras.optimizers.schedules.CosineDecay(0.0 if warm_up else peak, decay_steps, **warm_up)
    if recipe.options.optimizer == "sgd":
        return keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)
    if recipe.options.optimizer == "adamw":
        return keras.optimizers.AdamW(rate, weight_decay=DECAY)
    return keras.optimizers.Adam(rate)


def _loss(classes: int) -> Callable[[Any, Any], Any]:
    """Cross-entropy of class ids [b] and logits [b, classes], for each record: [b]."""

    def cross_entropy(labels: Any, logits: Any) -> Any:
        labels = ops.cast(ops.reshape(labels, (-1,)), "int32")
        return keras.losses.categorical_crossentropy(ops.one_hot(labels, classes), logits, from_logits=True)

    return cross_entropy
