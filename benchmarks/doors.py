"""This package's doors, TensorFlow's own ways and the ceilings, as `turns.Reader`s, each for a process of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import turns
from stored import BATCH, SHUFFLED, SIZE, stored

DECODING_S = 270e-6  # a 224-pixel JPEG
_WRAPPED = ExitStack()  # the storage of this process, and of the workers that it forks


def delay(latency_ms: float) -> None:
    """Every request to storage waits from now on."""
    from beam_pipeline import storage
    from reader.tools.requests import SlowStorage

    if latency_ms:
        _WRAPPED.enter_context(storage.wrapped(lambda store: SlowStorage(store, latency_ms / 1000)))


def sizes(batches: Iterable[Any], batch: int = BATCH) -> turns.Reader:
    """A reader of (images, labels); checks that they are what was asked for."""

    def read() -> Iterable[int]:
        for images, labels in batches:
            assert list(images.shape).count(SIZE) == 2 and len(images) == len(labels) <= batch
            yield len(images)

    return read


def _options(is_cropped: bool) -> dict[str, Any]:
    import reader

    return {"image_size": SIZE, "augment": reader.augment.random_resized_crop()} if is_cropped else {}


def numpy(url: str, batch: int = BATCH, is_cropped: bool = False, **options: Any) -> turns.Reader:
    """`train_batches`."""
    import reader

    options |= _options(is_cropped)
    return sizes(reader.train_batches(reader.load_info(url), "train", global_batch_size=batch, **options), batch)


def tensorflow(url: str, is_cropped: bool = False) -> turns.Reader:
    """`train_dataset`."""
    import reader

    info = reader.load_info(url)
    return sizes(reader.train_dataset(info, "train", global_batch_size=BATCH, **_options(is_cropped)))


def torch(url: str, is_cropped: bool = False) -> turns.Reader:
    """A `DataLoader` over `as_torch`."""
    from torch.utils.data import DataLoader

    import reader

    batches = reader.train_batches(reader.load_info(url), "train", global_batch_size=BATCH, **_options(is_cropped))
    return sizes(DataLoader(reader.as_torch(batches), batch_size=None))


def jax(url: str) -> turns.Reader:
    """`as_jax`, on one device of the CPU."""
    import jax

    import reader

    batches = reader.train_batches(reader.load_info(url), "train", global_batch_size=BATCH)
    return sizes(reader.as_jax(batches, jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))))


def ceiling(folder: str, is_autotuned: bool) -> turns.Reader:
    """`tf.io.decode_jpeg` of bytes in memory in a batched map: as many calls as cores, or as tf.data chooses."""
    import tensorflow as tf

    def decode(encoded: Any, labels: Any) -> Any:
        spec = tf.TensorSpec([SIZE, SIZE, 3], tf.uint8)
        return tf.map_fn(_decode_jpeg, encoded, fn_output_signature=spec, parallel_iterations=1), labels

    calls = tf.data.AUTOTUNE if is_autotuned else len(os.sched_getaffinity(0))
    options = tf.data.Options()
    options.autotune.enabled = is_autotuned
    batches = tf.data.Dataset.from_tensor_slices(stored(folder)).batch(BATCH, drop_remainder=True)
    return sizes(batches.map(decode, num_parallel_calls=calls).prefetch(2).with_options(options))


def _decode_jpeg(encoded: Any) -> Any:
    import tensorflow as tf

    # Pillow's pixels, as all doors give them, at the default's cost.
    pixels = tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")
    return tf.ensure_shape(pixels, [SIZE, SIZE, 3])


def bare(folder: str) -> turns.Reader:
    """A thread a core decodes its part of the images in memory by simplejpeg, into rows that are there."""
    images, _ = stored(folder)
    threads = len(os.sched_getaffinity(0))

    def read() -> Iterable[int]:
        parts = [images[number::threads] for number in range(threads)]
        workers = [threading.Thread(target=_decode_all, args=(part,)) for part in parts]
        for worker in workers:
            worker.start()
        for worker, part in zip(workers, parts, strict=True):
            worker.join()
            yield len(part)

    return read


def _decode_all(images: Sequence[bytes]) -> None:
    import simplejpeg

    rows = np.empty((4 * BATCH, SIZE, SIZE, 3), np.uint8)
    for number, image in enumerate(images):
        simplejpeg.decode_jpeg(image, buffer=rows[number % len(rows)])


def example(record: Any) -> Any:
    """Image and class of a serialized Example, as TensorFlow's tutorials parse it."""
    import tensorflow as tf

    keys = {"image": tf.io.FixedLenFeature([], tf.string), "class": tf.io.FixedLenFeature([], tf.int64)}
    parsed = tf.io.parse_single_example(record, keys)
    return tf.ensure_shape(tf.io.decode_jpeg(parsed["image"], channels=3), [SIZE, SIZE, 3]), parsed["class"]


def tutorial_gzip(pattern: str) -> turns.Reader:
    """The tutorial's way: GZIP, interleave, a parse for each record, float32, single images."""
    import tensorflow as tf

    def as_float(image: Any, label: Any) -> Any:
        return tf.cast(image, tf.float32) / 255.0, label

    names = tf.data.Dataset.list_files(pattern)
    records = names.interleave(
        lambda name: tf.data.TFRecordDataset(name, compression_type="GZIP"), num_parallel_calls=tf.data.AUTOTUNE
    )
    examples = records.shuffle(SHUFFLED).map(example, tf.data.AUTOTUNE).map(as_float, tf.data.AUTOTUNE)
    return sizes(examples.batch(1).prefetch(tf.data.AUTOTUNE))


def tutorial_plain(pattern: str) -> turns.Reader:
    """The same with plain shards read in parallel, uint8, and batches of 64."""
    import tensorflow as tf

    records = tf.data.TFRecordDataset(tf.io.gfile.glob(pattern), num_parallel_reads=tf.data.AUTOTUNE)
    examples = records.shuffle(SHUFFLED).map(example, num_parallel_calls=tf.data.AUTOTUNE)
    return sizes(examples.batch(BATCH).prefetch(tf.data.AUTOTUNE))


def tfds(url: str) -> turns.Reader:
    """TFDS without its cache."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(url)
    config = tfds.ReadConfig(try_autocache=False)
    dataset = builder.as_dataset(split="train", shuffle_files=True, as_supervised=True, read_config=config)
    return sizes(dataset.shuffle(SHUFFLED).batch(BATCH).prefetch(tf.data.AUTOTUNE))


def files(root: str) -> turns.Reader:
    """Individual files from the local disk, at the size that they have."""
    import tutorial

    return sizes(tutorial.files_at_once(root, BATCH, SIZE))


def stubbed(kind: str) -> Any:
    """For `with_rows`: a stub in the place of decoding, which fills nothing.

    Args:
        kind: `nothing`, or `sleep`: 270 µs in which other threads run, as while libjpeg-turbo decodes.
    """
    sleep_s = {"nothing": 0.0, "sleep": DECODING_S}[kind]

    def decode(encoded: Any, row: Any, seed: int) -> None:
        if sleep_s:
            time.sleep(sleep_s)

    def change(rows: Any) -> Any:
        rows.decode = decode
        return rows

    return change


def engine(url: str, kind: str, threads: int, batch: int = BATCH) -> turns.Reader:
    """The engine of all doors, with a stub in the place of decoding and any number of threads."""
    import reader

    batches = reader.train_batches(url, "train", global_batch_size=batch).with_rows(stubbed(kind))
    found = [0] * len(batches.classes)

    def read() -> Iterable[int]:
        begin = batches.next_loop
        for _, labels in batches.read(begin, threads=threads):
            found[int(labels[0])] += 1
            yield len(labels)
        batches.end(begin)
        assert len(found) == 1 or sum(map(bool, found)) > 1, "labels aren't filled"

    return read
