"""Pipelines as TensorFlow's tutorials write them, and a tuned one of single files: for `experiment.py` and `doors.py`.

https://keras.io/examples/keras_recipes/tfrecord, https://www.tensorflow.org/guide/data_performance
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import doors
import numpy as np
from stored import SHUFFLED

from beam_pipeline import schema, storage
from beam_pipeline.machine import cpu_count
from reader.info import ImageInfo
from reader.pixels import ImageDecoder
from reader.preprocess import image_files

Tensor = Any  # TensorFlow ships no types

AT_ONCE = 32  # files in flight
SHUFFLED_IMAGES = 1024  # of a cache, whose order is fixed otherwise; 150 MB at 224×224
_GZIP = 31  # zlib's window bits, with GZIP's header


def list_files(folder: str) -> list[str]:
    """The image files of class folders."""
    return [storage.join(folder, path) for path in image_files(folder)]


def shards(
    shards: Sequence[Path], batch: int, *, is_gzip: bool = False, interleaved: int = 4, prefetch: bool = True
) -> Any:
    """Shards in batches of uint8, read through our storage layer, a shard a request, as TensorFlow reads gs://.

    Args:
        shards: files, of images of 224 pixels.
        batch: images in a batch.
        is_gzip: whether the shards are compressed.
        interleaved: how many shards are read at a time; 1 reads one after the other.
        prefetch: whether finished batches are kept ready.
    """
    import tensorflow as tf

    read_file = storage.open_storage(str(shards[0])).read

    def read(name: bytes) -> Any:
        data = read_file(os.fsdecode(name))
        return np.array(list(schema.unframe(zlib.decompress(data, _GZIP) if is_gzip else data)), object)

    def records(name: Tensor) -> Any:
        found = tf.ensure_shape(tf.numpy_function(read, [name], tf.string), [None])
        return tf.data.Dataset.from_tensor_slices(found)

    autotune = tf.data.AUTOTUNE
    names = tf.data.Dataset.from_tensor_slices(list(map(str, shards))).shuffle(len(shards), seed=0)
    if interleaved > 1:
        found = names.interleave(records, cycle_length=interleaved, num_parallel_calls=autotune)
    else:
        found = names.flat_map(records)
    batches = found.shuffle(SHUFFLED, seed=0).map(doors.example, autotune).batch(batch)
    if prefetch:
        return batches.prefetch(autotune)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # tf.data would add one itself
    return batches.with_options(options)


def files(names: Sequence[str], batch: int, decode: ImageDecoder) -> Any:
    """Images of single files through our storage layer, in a map that tf.data runs in parallel as it thinks best."""
    import tensorflow as tf

    read = storage.open_storage(names[0]).read

    def load(name: bytes) -> Any:
        row = np.empty(decode.shape, np.uint8)
        decode(read(os.fsdecode(name)), row, 0)
        return row

    paths = tf.data.Dataset.from_tensor_slices(list(map(os.fsencode, names)))
    images = paths.map(lambda name: (tf.numpy_function(load, [name], tf.uint8),), tf.data.AUTOTUNE)
    return images.batch(batch).prefetch(tf.data.AUTOTUNE)


def decoder(size: int) -> ImageDecoder:
    """Of images of any size and format."""
    return ImageDecoder(ImageInfo("jpeg", 3, None, None, (), ()), size)


def files_at_once(folder: str, batch: int, size: int, cache: str | None = None) -> Any:
    """Image files of class folders in batches of (uint8, int64): 32 are in flight, and every core decodes.

    Each iteration has another order.

    Args:
        folder: of class folders.
        batch: images in a batch.
        size: side in pixels.
        cache: None; "" keeps the decoded images in memory, a file's name on the disk, once all were read.
    """
    import tensorflow as tf

    files, read, decode = list_files(folder), storage.open_storage(folder).read, decoder(size)
    names = [Path(file).parent.name for file in files]
    labels = np.unique(names, return_inverse=True)[1].astype(np.int64)
    fetching, decoding = ThreadPoolExecutor(AT_ONCE), ThreadPoolExecutor(cpu_count())

    def load(paths: Any) -> Any:
        images = np.empty((len(paths), *decode.shape), np.uint8)
        # The files arrive in order, and each is decoded while later ones are fetched.
        list(decoding.map(decode, fetching.map(read, map(os.fsdecode, paths)), images, itertools.repeat(0)))
        return images

    def with_images(paths: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return tf.ensure_shape(tf.numpy_function(load, [paths], tf.uint8), [None, *decode.shape]), labels

    batches = tf.data.Dataset.from_tensor_slices((list(map(os.fsencode, files)), labels))
    batches = batches.shuffle(len(files), seed=0).batch(batch).map(with_images, num_parallel_calls=2)
    if cache is not None:
        batches = batches.unbatch().cache(cache).shuffle(min(len(files), SHUFFLED_IMAGES), seed=0).batch(batch)
    return batches.prefetch(2)
