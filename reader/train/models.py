"""The models that `python -m reader train` knows. They take uint8 images and normalise by themselves."""

from __future__ import annotations

import os
from typing import Any

import keras

from beam_pipeline.errors import UsageError
from reader.info import DatasetInfo

_STD_FLOOR = 1e-3  # an image set of one colour has no spread


def build(name: str, info: DatasetInfo, image_size: int, weights: str, seed: int) -> Any:
    """A compiled-to-be Keras model: uint8 [b, image_size, image_size, channels] → logits [b, classes].

    Args:
        name: `small_cnn` or `mobilenet_v2`.
        info: of the dataset; gives classes, channels, mean and standard deviation.
        image_size: side in pixels.
        weights: `none`, `imagenet` (mobilenet_v2 only; Keras downloads them) or a `.keras`/`.weights.h5` file.
        seed: of the initial weights.

    Raises:
        UsageError: the weights can't be had.
    """
    if weights not in ("none", "imagenet") and not os.path.isfile(weights):
        raise UsageError(f"--weights {weights!r}: no such file; use none, imagenet or a file")
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((image_size, image_size, info.image.channels), dtype="uint8")
    if name == "small_cnn":
        if weights == "imagenet":
            raise UsageError("--weights 'imagenet': small_cnn has none; use none or a file")
        outputs = _small_cnn(_normalised(inputs, info), info.num_classes)
    else:
        outputs = _mobilenet_v2(inputs, image_size, info.num_classes, weights)
    model = keras.Model(inputs, outputs, name=name)
    if weights not in ("none", "imagenet"):
        _load(model, weights)
    return model


def _normalised(inputs: Any, info: DatasetInfo) -> Any:
    mean = [255 * value for value in info.image.mean]
    variance = [(255 * max(value, _STD_FLOOR)) ** 2 for value in info.image.std]
    return keras.layers.Normalization(mean=mean, variance=variance)(keras.ops.cast(inputs, "float32"))


def _small_cnn(images: Any, classes: int) -> Any:
    """Four convolutions and two pools: learns shapes and textures in half a minute of CPU.

    On the drawn sample data: over 0.96 of the validation images after 6 epochs of batches of 16, 20 s of CPU.
    """
    layers = keras.layers
    features = images
    for number, filters in enumerate((24, 48, 96, 128)):
        size, stride = (5, 2) if number == 0 else (3, 1)
        features = layers.Conv2D(filters, size, strides=stride, padding="same", use_bias=False)(features)
        features = layers.BatchNormalization(momentum=0.8)(features)  # short trainings: averages must catch up
        features = layers.Activation("relu")(features)
        if number:
            features = layers.MaxPooling2D()(features)
    pooled = layers.Concatenate()([layers.GlobalAveragePooling2D()(features), layers.GlobalMaxPooling2D()(features)])
    return layers.Dense(classes, dtype="float32")(pooled)


def _mobilenet_v2(inputs: Any, image_size: int, classes: int, weights: str) -> Any:
    scaled = keras.layers.Rescaling(1 / 127.5, offset=-1)(keras.ops.cast(inputs, "float32"))
    try:
        body = keras.applications.MobileNetV2(
            input_shape=(image_size, image_size, 3),
            include_top=False,
            pooling="avg",
            weights="imagenet" if weights == "imagenet" else None,
        )
    except Exception as error:
        if weights != "imagenet":
            raise
        raise UsageError(
            f"--weights 'imagenet': Keras can't download them ({type(error).__name__}); use none or a file of weights"
        ) from None
    return keras.layers.Dense(classes, dtype="float32")(keras.layers.Dropout(0.2)(body(scaled)))


def _load(model: Any, weights: str) -> None:
    try:
        if weights.endswith(".keras"):
            model.set_weights(keras.models.load_model(weights).get_weights())
        else:
            model.load_weights(weights)
    except (ValueError, OSError) as error:
        raise UsageError(f"--weights {weights!r}: not of this model ({type(error).__name__})") from None
