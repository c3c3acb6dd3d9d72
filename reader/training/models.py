"""The models: from uint8 images, scaled as their weights expect, to float32 logits; compiled for each phase."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import keras
from keras import layers, ops

from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.text import one_line
from reader.info import DatasetInfo
from reader.training.devices import Devices
from reader.training.options import SMALL_CNN, Phase, Recipe

LOSS = "mean_loss"  # the metric that is reported as `loss`: Keras' own counts the padding of the last batch
DECAY = 0.01  # of adamw, decoupled
_SCALED_BY_WEIGHTS = "EfficientNetB"  # with `imagenet` these have a layer more, which has no variables
_STD_FLOOR = 1e-3  # images of one colour have no spread
_DROPOUT = 0.2  # before the new head


class Model(NamedTuple):
    """A model and the part of it that pre-trained weights are for.

    Attributes:
        full: uint8 [b, side, side, channels] → float32 logits [b, classes].
        base: its layers but the head; None if it isn't one of `keras.applications`.
    """

    full: Any
    base: Any

    def synchronize(self, on: bool) -> None:
        """Let BatchNormalization see the batch of all replicas of a strategy, or not: it learns as on one device."""
        for layer in self.normalizations():
            layer.synchronized = on

    def normalizations(self) -> list[Any]:
        """All layers of BatchNormalization."""
        return [layer for layer in _layers(self.full) if isinstance(layer, layers.BatchNormalization)]


def _layers(layer: Any) -> Iterator[Any]:
    """A layer and all inside it."""
    yield layer
    for inner in getattr(layer, "layers", ()):
        yield from _layers(inner)


def build(info: DatasetInfo, recipe: Recipe) -> Model:
    """The model of a recipe, with its first weights, in the dtype policy that is set.

    Raises:
        UsageError: it can't take such images, or such weights.
        ImageShardsError: the weights can't be downloaded.
    """
    keras.utils.set_random_seed(recipe.options.seed % (1 << 32))
    shape = (recipe.image_size, recipe.image_size, info.image.channels)
    inputs = keras.Input(shape, dtype="uint8")
    images = ops.cast(inputs, "float32")
    if recipe.model == SMALL_CNN:
        logits, base = _small_cnn(images, len(recipe.classes), info), None
    elif ":" in recipe.model:
        logits, base = _users_model(recipe.model, images, len(recipe.classes)), None
    else:
        logits, base = _application(recipe, images, len(recipe.classes))
    full = keras.Model(inputs, logits, name=recipe.model.partition(":")[2] or recipe.model)
    if recipe.options.weights == "imagenet" and base is None:
        raise UsageError(f"--weights imagenet: {recipe.model} has none; use none or a file")
    if recipe.options.weights not in ("none", "imagenet"):
        _load(Model(full, base), recipe.options.weights)
    return Model(full, base)


def _small_cnn(images: Any, classes: int, info: DatasetInfo) -> Any:
    """Four convolutions and three pools: learns shapes and textures in half a minute of CPU."""
    mean = [255 * value for value in info.image.mean]
    variance = [(255 * max(value, _STD_FLOOR)) ** 2 for value in info.image.std]
    features = layers.Normalization(mean=mean, variance=variance)(images)
    for number, filters in enumerate((24, 48, 96, 128)):
        size, stride = (5, 2) if number == 0 else (3, 1)
        features = layers.Conv2D(filters, size, strides=stride, padding="same", use_bias=False)(features)
        features = layers.BatchNormalization(momentum=0.8)(features)  # short runs: averages must catch up
        features = layers.Activation("relu")(features)
        if number:
            features = layers.MaxPooling2D(padding="same")(features)
    pooled = layers.Concatenate()([layers.GlobalAveragePooling2D()(features), layers.GlobalMaxPooling2D()(features)])
    return layers.Dense(classes, dtype="float32")(pooled)


def _application(recipe: Recipe, images: Any, classes: int) -> tuple[Any, Any]:
    """(logits, base): pre-trained layers see images scaled as they were trained, and run in inference mode."""
    name, weights = recipe.model, recipe.options.weights
    if images.shape[-1] == 1:
        images = layers.Concatenate(dtype="float32")([images] * 3)  # the models are for colours
    builder = getattr(keras.applications, name)
    arguments = {"include_top": False, "pooling": "avg", "input_shape": images.shape[1:]}
    try:
        base = builder(weights=None, **arguments)
    except ValueError as error:
        raise UsageError(f"--image_size {recipe.image_size}: {name} can't take it: {one_line(error)}") from None
    if weights == "imagenet":
        try:
            base = builder(weights="imagenet", **arguments)
        except Exception as error:  # what Keras raises if a download fails has no kind of its own
            what, fix = "downloaded", "get them elsewhere and give --weights FILE"
            if isinstance(error, OSError | ValueError):
                what, fix = "read", "if Keras' copy in ~/.keras/models is corrupt, delete it"
            raise ImageShardsError(f"--weights imagenet: can't be {what}: {one_line(error)}; {fix}") from None
    elif name.startswith(_SCALED_BY_WEIGHTS) and weights != "none":
        raise UsageError(
            f"--weights {weights!r}: Keras builds {name} in another way for imagenet than for a file; give imagenet "
            "(on a machine without a network, copy ~/.keras/models)"
        )
    scaled = sys.modules[builder.__module__].preprocess_input(images)
    features = base(scaled, training=False if weights != "none" else None)
    features = layers.Dropout(_DROPOUT)(features)
    return layers.Dense(classes, dtype="float32")(features), base


def _users_model(written: str, images: Any, classes: int) -> Any:
    """`package.module:function`, called as function((height, width, channels), classes), returns a Keras model."""
    function: Callable[..., Any] = getattr(import_user_module(written), written.partition(":")[2])
    try:
        model = function(tuple(images.shape[1:]), classes)
        logits = model(images) if isinstance(model, keras.Layer) else None
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)[:300]}"
        raise UsageError(f"--model {written!r}: for images {tuple(images.shape[1:])} it raised {reason}") from error
    shape = getattr(logits, "shape", None)  # several outputs have none
    if shape is None or tuple(shape) != (None, classes):
        made = type(model).__name__ if shape is None else f"a model of output {tuple(shape)}"
        raise UsageError(
            f"--model {written!r}: it returned {made}; return a Keras model from images of 0 to 255 to logits "
            f"[batch, {classes}]"
        )
    return layers.Activation("linear", dtype="float32")(logits)


def import_user_module(written: str, is_first: bool = True) -> ModuleType:
    """The module of a user's `package.module:function`; the current folder is searched first, or last."""
    module, _, name = written.partition(":")
    if os.getcwd() not in sys.path:  # `python -m` looks there, the command doesn't
        sys.path.insert(0 if is_first else len(sys.path), os.getcwd())
    try:
        getattr(found := import_module(module), name)
        return found
    except Exception as error:  # whatever the module does
        why = f"{type(error).__name__}: {one_line(error)}"
        raise UsageError(f"--model {written!r}: {why}; give package.module:function") from error


def _load(model: Model, weights: str) -> Any:
    """Weights of a file: of all layers (a dataset of as many classes), or of the base alone."""
    if not os.path.isfile(weights):
        raise UsageError(f"--weights {weights!r}: no such file; use none, imagenet or a file of this machine")
    with catch_warnings():
        simplefilter("error", UserWarning)  # Keras only warns of layers that the file lacks
        try:
            if weights.endswith(".keras"):
                loaded = keras.saving.load_model(weights, compile=False)
                of_base = ((model.base, layer) for layer in getattr(loaded, "layers", ()) if model.base)
                for ours, theirs in ((model.full, loaded), *of_base):
                    if _shapes(ours) == _shapes(theirs):
                        return ours.set_weights(theirs.get_weights())
                raise ValueError("its layers have other shapes")
            with suppress(ValueError, AttributeError, UserWarning):
                return model.base.load_weights(weights)
            model.full.load_weights(weights)
        except (ValueError, OSError, TypeError, KeyError, UserWarning) as error:
            raise UsageError(f"--weights {weights!r}: not of this model: {one_line(error)[:300]}") from None


def _shapes(layer: Any) -> list[tuple[int, ...]]:
    return [tuple(variable.shape) for variable in layer.weights]


# --- for a phase


def compile_for(model: Model, phase: Phase, recipe: Recipe, devices: Devices) -> list[Any]:
    """Freeze what the phase doesn't train, and build a new optimizer for the rest; returns the metrics."""
    if phase.name != "training":
        model.base.trainable = phase.name == "fine_tuning"
        for layer in model.normalizations():
            layer.trainable = False
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
