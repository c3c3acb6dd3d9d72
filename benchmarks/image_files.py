"""`image_files_dataset`: individual image files in class folders, as trainers read them without shards.

A tuned baseline: files are listed once and their names fully shuffled, 32 are in flight, and the reader's own decoder
runs on every core.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError, UsageError
from reader.cache import cache_name
from reader.info import ImageInfo
from reader.machine import cpu_count
from reader.pixels import ImageDecoder, Pixels, UndecodableImageError, checked_size
from reader.tools.bench import list_files

_FILES_AT_ONCE, _BATCHES_AT_ONCE = 32, 2  # a batch is fetched while the last images of another are decoded
_SHUFFLED_IMAGES = 1024  # of a cache, whose order is fixed otherwise; 150 MB at 224×224


def image_files_dataset(
    root: str | os.PathLike[str],
    *,
    batch_size: int = 64,
    image_size: int | tuple[int, int] = 224,
    cache: str | os.PathLike[str] | None = None,
) -> tf.data.Dataset:
    """Image files of class folders as a `tf.data.Dataset` of (uint8 [b, height, width, 3], int64 [b]).

    Every file once per iteration, each time in another order; the last batch may be smaller. The label is the index of
    the top-level folder in the sorted `dataset.class_names`, which Keras' own dataset has as well.

    Args:
        root: local folder or URL whose sub-folders are classes.
        batch_size: images in a batch.
        image_size: side or (height, width) in pixels; the middle of larger images is scaled.
        cache: None; "memory" for the decoded images (150 kB each at 224×224: 1 million are 150 GB); or a folder for the
            same on disk. Written while they are first read to the end.

    Raises:
        UsageError: no folder, no image in class folders, or an argument's value is invalid. A file that doesn't decode
            ends the iteration, with an error that names it.
    """
    size, cache = checked_size(image_size), None if cache is None else cache_name(cache)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size must be an integer from 1, got {batch_size!r}")
    folder = storage.normalize(os.fspath(root))
    files = list_files(folder)
    names = [file.removeprefix(f"{folder}/").split("/")[0] for file in files]
    classes = sorted({*names})
    ids = {name: number for number, name in enumerate(classes)}
    labels = np.array([ids[name] for name in names], np.int64)
    paths = list(map(os.fsencode, files))
    dataset = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(files), seed=0).batch(batch_size)
    load = _Loader(folder, size)

    def with_images(paths: Any, labels: Any) -> tuple[Any, Any]:
        return tf.ensure_shape(tf.numpy_function(load, [paths], tf.uint8), [None, *size, 3]), labels

    dataset = dataset.map(with_images, num_parallel_calls=_BATCHES_AT_ONCE, deterministic=True)
    if cache is not None:
        if cache != "memory":
            os.makedirs(cache, exist_ok=True)
        name = f"images-{hashlib.sha256(repr((folder, size, files)).encode()).hexdigest()[:16]}"
        dataset = dataset.unbatch().cache("" if cache == "memory" else storage.join(cache, name))
        dataset = dataset.shuffle(min(len(files), _SHUFFLED_IMAGES), seed=0).batch(batch_size)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(-(-len(files) // batch_size))).prefetch(2)
    dataset.class_names = classes
    return dataset


class _Loader:
    """A function from paths string [b] to images uint8 [b, height, width, 3]; for several threads."""

    def __init__(self, folder: str, size: tuple[int, int]) -> None:
        self._read = storage.open_storage(folder).read
        self._decoder = ImageDecoder(ImageInfo("jpeg", 3, None, None, (), ()), size)  # of any size, PNG too
        self._fetching = ThreadPoolExecutor(_FILES_AT_ONCE, "reader-fetch")
        self._decoding = ThreadPoolExecutor(cpu_count(), "reader-decode")

    def __call__(self, paths: Any) -> Pixels:
        names = [os.fsdecode(path) for path in paths]
        images = np.empty((len(names), *self._decoder.shape), np.uint8)
        # The files arrive in order, and each is decoded while later ones are fetched.
        list(self._decoding.map(self._decode, names, self._fetching.map(self._read, names), images))
        return images

    def _decode(self, path: str, encoded: bytes, row: Pixels) -> None:
        try:
            self._decoder(encoded, row, 0)
        except UndecodableImageError as error:
            raise ImageShardsError(f"{path}: {error}") from None
