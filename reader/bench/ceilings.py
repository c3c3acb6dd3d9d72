"""Ceilings: the work on each image alone, on bytes in memory, in one batched map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from reader.files import decode_files
from reader.limits import cpu_count
from reader.storage import open_storage

Dataset = Any  # tf.data.Dataset: TensorFlow ships no types
Tensor = Any


def of_images(images: Sequence[bytes], work: Callable[..., Tensor], batch_size: int) -> Callable[[], Dataset]:
    """`work(encoded string [b], seeds int32 [b, 2])` on these images again and again."""

    def make() -> Dataset:
        seeds = np.random.default_rng(0).integers(-(2**31), 2**31, (len(images), 2)).astype(np.int32)
        source = tf.data.Dataset.from_tensor_slices((list(images), seeds)).repeat()
        options = tf.data.Options()
        options.autotune.enabled = False  # as many calls as `train_dataset` makes
        return source.batch(batch_size).map(work, num_parallel_calls=cpu_count()).prefetch(2).with_options(options)

    return make


def of_files(folder: str, size: int, batch_size: int, count: int) -> Callable[[], Dataset]:
    """Decoding and resizing individual files, at most `count` of them."""

    def make() -> Dataset:
        storage = open_storage(folder)
        files = [f"{folder}/{path}" for path, _ in storage.files(folder) if "/" in path][:count]
        images = [storage.read(file) for file in files]
        return of_images(images, lambda encoded, _: decode_files(encoded, (size, size)), batch_size)()

    return make
