"""Augmentation: on the host while images are decoded (here), or on the accelerator in the model (`on_device`).

    train = reader.train_dataset(info, "train", global_batch_size=256, augment=reader.augment.flip_crop)
    crop = reader.augment.random_resized_crop(then=reader.augment.flip)
    train = reader.train_dataset(info, "train", global_batch_size=256, image_size=224, augment=crop)

An augment is `f(images, seeds)`, stateless, after decode and resize: `images` is uint8 [b, height, width, c]; `seeds`
is int32 [b, 2], one seed a record, which follows from (seed, epoch, record number): the same record is augmented in the
same way on any thread, batch size or host, and after any resume. Write others with `uniform`, or with TensorFlow's
`stateless_*` functions and one row of `seeds` an image. `PerImage` makes one of a function of a single image.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from reader.augment.crops import RandomResizedCrop, random_resized_crop
from reader.augment.per_image import PerImage, flip, flip_crop, uniform

if TYPE_CHECKING:
    from reader.augment import on_device

__all__ = ["PerImage", "RandomResizedCrop", "flip", "flip_crop", "on_device", "random_resized_crop", "uniform"]


def __getattr__(name: str) -> Any:
    """`on_device` needs Keras, which takes a second to import (PEP 562)."""
    if name == "on_device":
        return importlib.import_module("reader.augment.on_device")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
