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
_TOP = 5
TOP_ACCURACY = f"top_{_TOP}_accuracy"  # with more classes than that


def compile_for(model: Model, phase: Phase, recipe: Recipe, devices: Devices) -> list[Any]:
    """Freeze what the phase doesn't train, and build a new optimizer for the rest; returns the metrics."""
    model.freeze(phase.name)
    model.synchronize(devices.strategy is not None)
    full, metrics, optimizer = model.full, _metrics(recipe), _optimizer(phase, recipe)
    jit = False if devices.kind == "tpu" and devices.strategy is not None else "auto"
    full.compile(optimizer=optimizer, loss=_loss(recipe), weighted_metrics=metrics, jit_compile=jit)
    with devices.scope():
        if recipe.weight_decay:  # of kernels: scales and biases are vectors
            optimizer.exclude_from_weight_decay([one for one in full.trainable_variables if len(one.shape) < 2])
        full.optimizer.build(full.trainable_variables)
    return metrics


def _metrics(recipe: Recipe) -> list[Any]:
    metrics = [
        keras.metrics.MeanMetricWrapper(_loss(recipe), name=LOSS),
        keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
    ]
    if len(recipe.classes) > _TOP:
        metrics.append(keras.metrics.SparseTopKCategoricalAccuracy(_TOP, name=TOP_ACCURACY))
    return metrics


def _optimizer(phase: Phase, recipe: Recipe) -> Any:
    peak, more = phase.learning_rate, {"weight_decay": recipe.weight_decay or None}
    warmup_steps, decay_steps = recipe.schedule(phase)
    warm_up = {"warmup_target": peak, "warmup_steps": warmup_steps} if warmup_steps else {}
    rate = keras.optimizers.schedules.CosineDecay(0.0 if warm_up else peak, decay_steps, **warm_up)
    if recipe.options.optimizer == "sgd":
        return keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, **more)
    return (keras.optimizers.AdamW if recipe.options.optimizer == "adamw" else keras.optimizers.Adam)(rate, **more)


def _loss(recipe: Recipe) -> Callable[[Any, Any], Any]:
    """Cross-entropy of class ids [b] and logits [b, classes], for each record: [b]."""
    classes = len(recipe.classes)

    def cross_entropy(labels: Any, logits: Any) -> Any:
        labels = ops.cast(ops.reshape(labels, (-1,)), "int32")
        return keras.losses.categorical_crossentropy(ops.one_hot(labels, classes), logits, from_logits=True)

    return cross_entropy
