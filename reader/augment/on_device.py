"""Augmentation on the accelerator, in the training step: uint8 batches cross to it, a quarter of float32's bytes.

    from reader.augment import on_device

    augment = on_device.Augment(info, rand_augment=(2, 9), mixup=0.2, cutmix=1.0, label_smoothing=0.1, seed=0)
    images, labels = augment.pair(images, labels, step)              # in a step of your own, any Keras backend
    model = on_device.AugmentedModel(inputs, outputs); model.augment = augment            # or in `fit`
    inputs = keras.Input((224, 224, 3), dtype="uint8"); x = on_device.Normalize(info)(inputs)   # also when serving

Everything is stateless: what happens follows from (seed, step, place in the batch), so a resumed job goes on as the
uninterrupted one would. Written in `keras.ops`: the same on TensorFlow, JAX and PyTorch, and compiled with the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import keras
import numpy as np

from beam_pipeline.errors import UsageError
from reader.augment.rand_augment import MOST_MAGNITUDE, rand_augment
from reader.augment.stateless import beta, uniform
from reader.info import DatasetInfo

Tensor = Any  # Keras ships no types

ops = keras.ops


def normalize(images: Tensor, info: DatasetInfo) -> Tensor:
    """uint8 [b, h, w, c] → float32 with mean 0 and standard deviation 1 over the training split's sample.

    Raises:
        UsageError: the dataset's mean and std aren't known.
    """
    if not info.image.mean or not info.image.std:
        raise UsageError(f"{info.url}: mean and std aren't known")
    return _normalize(images, info.image.mean, info.image.std)


@keras.saving.register_keras_serializable("imageshards")
class Normalize(keras.layers.Layer):  # type: ignore[misc]
    """`normalize` as a layer: the first one of a model, saved with it.

    Args:
        info: from `load_info`; or give `mean` and `std`, numbers a channel of pixels scaled to [0, 1].
    """

    def __init__(self, info: DatasetInfo | None = None, *, mean: Any = None, std: Any = None, **layer: Any) -> None:
        super().__init__(**layer)
        known = (mean or (), std or ()) if info is None else (info.image.mean, info.image.std)
        self.mean, self.std = ([float(value) for value in values] for values in known)
        if not self.mean or not self.std:
            raise UsageError("the dataset's mean and std aren't known: give mean and std")

    def call(self, images: Tensor) -> Tensor:
        return _normalize(images, self.mean, self.std)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "mean": self.mean, "std": self.std}


@dataclass(frozen=True)
class Augment:
    """What is done to a training batch on the device.

    Attributes:
        info: of the dataset: its number of classes.
        rand_augment: (operations an image, magnitude 0–10) as RandAugment, or None.
        mixup: alpha of the Beta distribution of shares, 0 for none.
        cutmix: the same for pasted boxes; with both, each image gets one of the two.
        label_smoothing: share of a label that goes to all classes alike.
        seed: of all of it.

    Raises:
        UsageError: an argument is outside its range.
    """

    info: DatasetInfo
    rand_augment: tuple[int, float] | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    label_smoothing: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            if not (_is_number(alpha) and 0 <= alpha < math.inf):
                raise UsageError(f"{name}={alpha!r}: alpha of a Beta distribution, 0 for none")
        if not (_is_number(self.label_smoothing) and 0 <= self.label_smoothing <= 1):
            raise UsageError(f"label_smoothing={self.label_smoothing!r}: a share, 0 to 1")
        if self.rand_augment is not None and not _is_rand_augment(self.rand_augment):
            raise UsageError(
                f"rand_augment={self.rand_augment!r}: (operations an image, magnitude 0 to {MOST_MAGNITUDE}), "
                "such as (2, 9)"
            )

    def images(self, images: Tensor, step: Tensor) -> Tensor:
        """uint8 [b, h, w, c] → uint8, without what needs labels.

        Args:
            step: number of the training step, a Python or tensor integer.
        """
        if self.rand_augment is None:
            return images
        changed = rand_augment(ops.cast(images, "float32"), step, self.seed, *self.rand_augment)
        return ops.cast(ops.round(changed), "uint8")

    def pair(self, images: Tensor, labels: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Images as of `images`, mixed; labels int [b] or float [b, classes] → float32 [b, classes]."""
        images = self.images(images, step)
        labels = self.shares(labels)
        if self.label_smoothing:
            labels = labels * (1 - self.label_smoothing) + self.label_smoothing / labels.shape[-1]
        if not self.mixup and not self.cutmix:
            return images, labels
        shares = self._mixup_shares(images, step) if self.mixup else None
        boxes = self._cutmix_shares(images, step) if self.cutmix else None
        if shares is not None and boxes is not None:
            is_mixup = uniform(self.seed, step, "which", ops.shape(images)[0])[:, None, None, None] < 0.5
            share = ops.where(is_mixup, shares, boxes)
        else:
            share = shares if shares is not None else boxes
        mixed = ops.cast(images, "float32") * share + ops.cast(ops.flip(images, 0), "float32") * (1 - share)
        own = ops.mean(share, axis=(1, 2))  # [b, 1]
        return ops.cast(ops.round(mixed), "uint8"), labels * own + ops.flip(labels, 0) * (1 - own)

    def shares(self, labels: Tensor) -> Tensor:
        """Labels int [b] or float [b, classes] → float32 [b, classes]."""
        if len(labels.shape) == 1:
            labels = ops.one_hot(labels, self.info.num_classes)
        return ops.cast(labels, "float32")

    def _mixup_shares(self, images: Tensor, step: Tensor) -> Tensor:
        """What share of each pixel stays its own: one number an image, [b, h, w, 1]."""
        share = beta(self.mixup, uniform(self.seed, step, "mixup", ops.shape(images)[0]))
        return share[:, None, None, None] * ops.ones((1, *images.shape[1:3], 1))

    def _cutmix_shares(self, images: Tensor, step: Tensor) -> Tensor:
        """1 outside a box, 0 inside, [b, h, w, 1]; a box whose middle lies near the border is cut."""
        height, width = images.shape[1:3]
        count = ops.shape(images)[0]
        side = ops.sqrt(1 - beta(self.cutmix, uniform(self.seed, step, "cutmix", count)))
        inside = ops.ones((1, 1, 1))
        for name, length, shape in (("y", height, (1, -1, 1)), ("x", width, (1, 1, -1))):
            middle = (uniform(self.seed, step, f"cutmix {name}", count) * length)[:, None, None]
            place = ops.reshape(ops.arange(length, dtype="float32") + 0.5, shape)
            inside = inside * ops.cast(ops.abs(place - middle) < (side * length / 2)[:, None, None], "float32")
        return 1 - inside[..., None]


class AugmentedModel(keras.Model):  # type: ignore[misc]
    """A functional model whose training steps augment their batch first: set its `augment` to an `Augment`.

    Compile it with a loss for [b, classes] labels, such as `CategoricalCrossentropy`; int labels become such ones, also
    those of validation data.
    """

    augment: Augment | None = None

    def train_step(self, *arguments: Any) -> Any:
        *state, data = arguments  # Keras on JAX passes the variables
        if self.augment is None:
            return super().train_step(*arguments)
        images, labels, weights = keras.utils.unpack_x_y_sample_weight(data)
        step = state[0][2][0] if state else self.optimizer.iterations
        images, labels = self.augment.pair(images, labels, step)
        return super().train_step(*state, keras.utils.pack_x_y_sample_weight(images, labels, weights))

    # Evaluation, and Keras' building of losses and metrics before the first step, see the dataset's own labels.
    def compute_loss(self, x: Any = None, y: Any = None, *arguments: Any, **options: Any) -> Any:
        return super().compute_loss(x, self._shares(y), *arguments, **options)

    def compute_metrics(self, x: Any, y: Any, *arguments: Any, **options: Any) -> Any:
        return super().compute_metrics(x, self._shares(y), *arguments, **options)

    def _shares(self, labels: Tensor) -> Tensor:
        return labels if self.augment is None or labels is None else self.augment.shares(labels)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real)


def _is_rand_augment(value: Any) -> bool:
    if not isinstance(value, Sequence) or len(value) != 2:
        return False
    operations, magnitude = value
    is_count = isinstance(operations, Integral) and int(operations) >= 0
    return is_count and _is_number(magnitude) and 0 <= magnitude <= MOST_MAGNITUDE


def _normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    return (ops.cast(images, "float32") / 255.0 - np.array(mean, np.float32)) / np.array(std, np.float32)
