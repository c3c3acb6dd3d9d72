"""The ways to read the same images that are compared.

A case's ceiling does its own work (decode, resize, augment, cast) on bytes that are in memory already, in one batched
map with the same batch, on every core: what lies between the two is what reading, checking and handing over cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from reader import augment
from reader.bench import ceilings
from reader.bench.latency import slow_names
from reader.bench.material import Material
from reader.dataset import train_dataset
from reader.decode import batch_decoder, decode_image, resize
from reader.files import image_files_dataset
from reader.info import DatasetInfo
from reader.parsing import RecordParser

Dataset = Any  # tf.data.Dataset: TensorFlow ships no types
Tensor = Any

_AUTOTUNE = tf.data.AUTOTUNE
PLAIN = "train_dataset"
FLIP_CROP = "train_dataset, flip_crop"


@dataclass(frozen=True, slots=True)
class Case:
    """One way to read.

    Attributes:
        name: as the table shows it.
        make: makes the dataset, of (images, …) batches without end or at least as many as are measured.
        make_ceiling: the same for its ceiling; None where nothing is decoded.
        batch_size: images in a batch.
        is_cached: the first iteration fills a cache, and has to come to its end.
    """

    name: str
    make: Callable[[], Dataset]
    make_ceiling: Callable[[], Dataset] | None
    batch_size: int
    is_cached: bool = False


def all_cases(
    material: Material, info: DatasetInfo, files: str, *, size: int, batch_size: int, cache: str, latency_s: float
) -> list[Case]:
    """Every way there is to read this dataset.

    Args:
        material: the images in other forms.
        info: of the dataset where it is to be read, which may be slower storage.
        files: folder or URL of individual files.
        size: side in pixels.
        cache: a new folder for the disk cache of individual files.
        latency_s: of a storage request.
    """
    return [
        *_individual(material, files, size, batch_size, cache),
        *_tutorials(material, size, batch_size, latency_s),
        *_ours(material, info, size, batch_size),
    ]


def _individual(material: Material, files: str, size: int, batch_size: int, cache: str) -> list[Case]:
    def make(kept: str | None) -> Callable[[], Dataset]:
        return lambda: image_files_dataset(files, batch_size=batch_size, image_size=size, cache=kept)

    ceiling = ceilings.of_files(material.files, size, batch_size, len(material.images))
    return [
        Case("individual files", make(None), ceiling, batch_size),
        Case("individual files, cached in memory", make("memory"), None, batch_size, is_cached=True),
        Case("individual files, cached on disk", make(cache), None, batch_size, is_cached=True),
    ]


def _tutorials(material: Material, size: int, batch_size: int, latency_s: float) -> list[Case]:
    """As https://keras.io/examples/keras_recipes/tfrecord and TensorFlow's guides read shards."""
    image, decode = material.info.image, batch_decoder(material.info.image, size)
    parse = RecordParser(material.info.image_key, material.info.class_key, {})

    def example(record: Tensor) -> tuple[Tensor, Tensor]:
        encoded, labels = parse(tf.expand_dims(record, 0))
        pixels = resize(decode_image(encoded[0], image.format, image.channels), size, size, "crop")
        return tf.cast(pixels, tf.float32) / 255.0, labels[0]

    def gzip() -> Dataset:
        names = slow_names(tf.data.Dataset.list_files(material.gzip_shards, seed=0), latency_s)
        records = names.interleave(
            lambda name: tf.data.TFRecordDataset(name, compression_type="GZIP"), num_parallel_calls=_AUTOTUNE
        )
        return records.shuffle(2048, seed=0).map(example, num_parallel_calls=_AUTOTUNE).batch(1).prefetch(_AUTOTUNE)

    def plain() -> Dataset:
        names = slow_names(tf.data.Dataset.list_files(material.plain_shards, shuffle=False), latency_s)
        records = tf.data.TFRecordDataset(names, num_parallel_reads=_AUTOTUNE).shuffle(2048, seed=0).batch(batch_size)
        decoded = records.map(parse, num_parallel_calls=_AUTOTUNE)
        return decoded.map(lambda encoded, labels: (decode(encoded), labels), num_parallel_calls=_AUTOTUNE).prefetch(2)

    def as_float(encoded: Tensor, _: Tensor) -> Tensor:
        return tf.cast(decode(encoded), tf.float32) / 255.0

    images = material.images
    return [
        Case("GZIP shards, the tutorial's way", gzip, ceilings.of_images(images, as_float, 1), 1),
        Case("plain shards, the tutorial's way", plain, ceilings.of_images(images, decode, batch_size), batch_size),
    ]


def _ours(material: Material, info: DatasetInfo, size: int, batch_size: int) -> list[Case]:
    def case(name: str, image_size: int | None, changed: Any) -> Case:
        work = batch_decoder(info.image, image_size, augment=changed)
        return Case(
            name,
            lambda: train_dataset(
                info, material.split, global_batch_size=batch_size, image_size=image_size, augment=changed
            ),
            ceilings.of_images(material.images, work, batch_size),
            batch_size,
        )

    cases = [
        case(PLAIN, size, None),
        case(FLIP_CROP, size, augment.flip_crop),
        case("train_dataset, random_resized_crop", size, augment.random_resized_crop()),
    ]
    if info.image.min_size == info.image.max_size:  # mixed sizes make no batch
        cases.append(case("train_dataset, image_size=None", None, None))
    return cases
