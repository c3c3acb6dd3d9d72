"""The models: each takes uint8 images, scales them as its weights expect, and returns float32 logits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.text import one_line
from reader.info import DatasetInfo
from reader.training.options import SMALL_CNN, Recipe

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

    def freeze(self, phase: str) -> None:
        """Let only those variables be trained that the phase is for."""
        if phase != "training":
            self.base.trainable = phase == "fine_tuning"
            for layer in self._normalizations():
                layer.trainable = False

    def synchronize(self, on: bool) -> None:
        """Let BatchNormalization see the batch of all replicas of a strategy, or not: it learns as on one device."""
        for layer in self._normalizations():
            layer.synchronized = on

    def _normalizations(self) -> list[Any]:
        import keras

        return [layer for layer in _layers(self.full) if isinstance(layer, keras.layers.BatchNormalization)]


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
    import keras

    keras.utils.set_random_seed(recipe.options.seed % (1 << 32))
    shape = (recipe.image_size, recipe.image_size, info.image.channels)
    inputs = keras.Input(shape, dtype="uint8")
    images = keras.ops.cast(inputs, "float32")
    if recipe.model == SMALL_CNN:
        logits, base = _small_cnn(_normalised(images, info), len(recipe.classes)), None
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


def _normalised(images: Any, info: DatasetInfo) -> Any:
    import keras

    mean = [255 * value for value in info.image.mean]
    variance = [(255 * max(value, _STD_FLOOR)) ** 2 for value in info.image.std]
    return keras.layers.Normalization(mean=mean, variance=variance)(images)


def _small_cnn(images: Any, classes: int) -> Any:
    """Four convolutions and three pools: learns shapes and textures in half a minute of CPU."""
    from keras import layers

    features = images
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
    import keras

    name, weights = recipe.model, recipe.options.weights
    if images.shape[-1] == 1:
        images = keras.layers.Concatenate(dtype="float32")([images] * 3)  # the models are for colours
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
    features = keras.layers.Dropout(_DROPOUT)(features)
    return keras.layers.Dense(classes, dtype="float32")(features), base


def _users_model(written: str, images: Any, classes: int) -> Any:
    """`package.module:function`, called as function((height, width, channels), classes), returns a Keras model."""
    import keras

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
    return keras.layers.Activation("linear", dtype="float32")(logits)


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
    import keras

    if not os.path.isfile(weights):
        raise UsageError(f"--weights {weights!r}: no such file; use none, imagenet or a file of this machine")
    with catch_warnings():
        simplefilter("error", UserWarning)  # Keras only warns of layers that the file lacks
        try:
            if weights.endswith(".keras"):
                return _set_weights(model, keras.saving.load_model(weights, compile=False))
            with suppress(ValueError, AttributeError, UserWarning):
                return model.base.load_weights(weights)
            model.full.load_weights(weights)
        except (ValueError, OSError, TypeError, KeyError, UserWarning) as error:
            raise UsageError(f"--weights {weights!r}: not of this model: {one_line(error)[:300]}") from None


def _set_weights(model: Model, loaded: Any) -> Any:
    """The weights of a loaded model; of other classes, those of its base."""
    if _shapes(loaded) == _shapes(model.full):
        return model.full.set_weights(loaded.get_weights())
    for layer in loaded.layers:
        if model.base and _shapes(layer) == _shapes(model.base):
            return model.base.set_weights(layer.get_weights())
    raise ValueError("its layers have other shapes")


def _shapes(layer: Any) -> list[tuple[int, ...]]:
    return [tuple(variable.shape) for variable in layer.weights]
