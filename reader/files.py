"""`image_files_dataset`: individual image files in class folders, as trainers read them without shards.

The baseline to beat, and no straw man: listing once, 32 files in flight, batched decoding, a full shuffle of the names.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from beam_pipeline.errors import ImageShardsError, UsageError, one_line
from reader.cache import cache_name
from reader.decode import resize
from reader.sizes import checked_size
from reader.storage import Storage, normalize, open_storage

Dataset = Any  # tf.data.Dataset: TensorFlow ships no types
Tensor = Any

_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png")
_FILES_AT_ONCE = 32
# Batches whose files are being fetched: with 32 in flight at 50 ms each, more don't come faster.
_BATCHES_AHEAD = 2
_SHUFFLED_IMAGES = 1024  # of a cache, whose order is fixed otherwise; 150 MB at 224×224


def image_files_dataset(
    root: str | os.PathLike[str],
    *,
    batch_size: int = 64,
    image_size: int | tuple[int, int] = 224,
    cache: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Image files of class folders as a `tf.data.Dataset` of (uint8 [b, height, width, 3], int64 [b]).

    Every file once in an iteration, shuffled anew for each; the last batch may be smaller. The label is the place of
    the first folder's name among all of these, sorted; `dataset.class_names` has them.

    Args:
        root: local folder or URL whose sub-folders are classes.
        batch_size: images in a batch.
        image_size: side or (height, width) in pixels; the middle of larger images is scaled.
        cache: None; "memory" for the decoded images (150 kB each at 224×224: 1 million are 150 GB); or a folder for the
            same on disk. Written while they are first read to the end.

    Raises:
        UsageError: no folder, no image in class folders, or an argument has no such value. A file that doesn't decode
            ends the iteration, with an error that names it.
    """
    root, size = os.fspath(root), checked_size(image_size)
    cache = None if cache is None else cache_name(cache)
    storage, folder = open_storage(root), normalize(root)
    files = [(path, size) for path, size in storage.files(folder) if "/" in path and path.lower().endswith(_SUFFIXES)]
    if not files:
        raise UsageError(f"{root}: no image in class folders there; images end in {', '.join(_SUFFIXES)}")
    classes = sorted({path.split("/")[0] for path, _ in files})
    ids = {name: number for number, name in enumerate(classes)}
    labels = np.array([ids[path.split("/")[0]] for path, _ in files], np.int64)
    paths = np.array([f"{folder}/{path}" for path, _ in files])
    dataset = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(files), seed=0)
    dataset = dataset.batch(batch_size).map(_fetcher(storage), num_parallel_calls=_BATCHES_AHEAD, deterministic=True)
    dataset = dataset.map(_decoder(size), num_parallel_calls=tf.data.AUTOTUNE)
    if cache is not None:
        dataset = dataset.unbatch().cache(_cache_file(cache, folder, files, size))
        dataset = dataset.shuffle(min(len(files), _SHUFFLED_IMAGES), seed=0).batch(batch_size)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(-(-len(files) // batch_size))).prefetch(2)
    dataset.class_names = classes
    return dataset


def _fetcher(storage: Storage) -> Any:
    """A function from paths string [b] and labels to paths, the files' bytes string [b] and labels."""
    executor = ThreadPoolExecutor(_FILES_AT_ONCE, "reader-file")

    def read(paths: Any) -> Any:
        files = list(executor.map(storage.read, [path.decode() for path in paths.numpy()]))
        with tf.device("CPU"):  # by py_function, as in `sources`
            return tf.constant(files, tf.string)

    def fetch(paths: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return paths, tf.ensure_shape(tf.py_function(read, [paths], tf.string), [None]), labels

    return fetch


def _decoder(size: tuple[int, int]) -> Any:
    """A function from paths, files and labels to decoded images and labels."""

    def name_undecodable(paths: Any, encoded: Any) -> Any:
        for path, data in zip(paths, encoded, strict=True):
            try:
                decode_files(tf.constant([data]), size)
            except tf.errors.InvalidArgumentError as error:
                raise ImageShardsError(f"{path.decode()}: the image doesn't decode ({one_line(error)[:200]})") from None
        raise ImageShardsError(f"{paths[0].decode()} or a file beside it: the image doesn't decode")

    def name(paths: Tensor, encoded: Tensor) -> Tensor:
        return tf.ensure_shape(tf.numpy_function(name_undecodable, [paths, encoded], tf.uint8), [None, *size, 3])

    def decode(paths: Tensor, encoded: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # TensorFlow's error names no file. It is found where there is one: 0.8 ms a batch for a dataset that tries.
        tried = tf.data.Dataset.from_tensors(encoded).map(lambda files: decode_files(files, size)).ignore_errors()
        found = tried.concatenate(tf.data.Dataset.from_tensors((paths, encoded)).map(name))
        return found.take(1).get_single_element(), labels

    return decode


def decode_files(encoded: Tensor, size: tuple[int, int]) -> Tensor:
    """string [b] → uint8 [b, height, width, 3]."""

    def decode(one: Tensor) -> Tensor:
        pixels = tf.io.decode_image(one, channels=3, expand_animations=False)
        pixels = tf.ensure_shape(pixels, [None, None, 3])
        is_of_size = tf.reduce_all(tf.shape(pixels)[:2] == size)
        pixels = tf.cond(is_of_size, lambda: pixels, lambda: resize(pixels, *size, "crop"))
        return tf.ensure_shape(pixels, [*size, 3])

    return tf.map_fn(decode, encoded, fn_output_signature=tf.TensorSpec([*size, 3], tf.uint8), parallel_iterations=1)


def _cache_file(cache: str, folder: str, files: list[tuple[str, int]], size: tuple[int, int]) -> str:
    """Where tf.data keeps the decoded images: "" for memory, on disk a name that other files or sizes don't share."""
    if cache == "memory":
        return ""
    digest = hashlib.sha256(repr((folder, size)).encode())
    for name_and_size in files:
        digest.update(repr(name_and_size).encode())
    os.makedirs(cache, exist_ok=True)
    return os.path.join(cache, f"images-{digest.hexdigest()[:16]}")
