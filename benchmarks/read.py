"""Rate of `train_dataset` against its ceilings, alternating in one process.

    python benchmarks/read.py [IMAGES] [--count 6400] [--batch_size 64] [--repeats 9]

IMAGES is a folder of class folders (drawn pictures without); its files are repeated up to the count and converted.

A ceiling does a case's work on each image (`tf.io.decode_jpeg`, for random_resized_crop `tf.io.decode_and_crop_jpeg`
and the resize) in the same batched map over the same image bytes in memory, same batch and threads. Wall clock on
shared cores jumps, so CPU seconds come beside it; medians of the repeats after a warm-up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import material
import numpy as np
import psutil
import tensorflow as tf

import reader
from reader.decode import batch_decoder
from reader.example import parse_example
from reader.order import augment_seeds
from reader.runs import RunReader


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=6400)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as scratch:
        source = material.images(flags.images, Path(scratch), flags.count)
        measure(reader.load_info(material.dataset(source, Path(scratch))), flags.batch_size, flags.repeats)


def measure(info: reader.DatasetInfo, batch_size: int, repeats: int) -> None:
    """Run every case and its ceiling in turn and print medians."""
    begin = time.perf_counter()
    next(iter(reader.train_dataset(info, "train", global_batch_size=batch_size)))
    print(f"first batch after {time.perf_counter() - begin:.2f} s")
    height, width = info.image.min_size or (0, 0)
    crop = reader.augment.random_resized_crop()
    augments: dict[str, Any] = {"plain": None, "flip": reader.augment.flip, "flip_crop": reader.augment.flip_crop}
    datasets: dict[str, Any] = {}
    for name, augment in {**augments, "random_resized_crop": crop}.items():
        datasets[f"{name}, ceiling"] = ceiling(info, "train", batch_size, (height, width), augment)
        datasets[name] = reader.train_dataset(
            info, "train", global_batch_size=batch_size, image_size=(height, width), augment=augment
        )
    images = info.steps_per_epoch("train", batch_size) * batch_size
    wall: dict[str, list[float]] = {name: [] for name in datasets}
    cpu: dict[str, list[float]] = {name: [] for name in datasets}
    memory = []
    for _ in range(repeats + 1):
        for name, dataset in datasets.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in dataset:
                pass
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
        memory.append(psutil.Process().memory_info().rss >> 20)
    print(f"{images} images an iteration, batch {batch_size}, {repeats} repeats; RSS MB {memory}")
    for name in datasets:
        seconds, cpu_seconds = (statistics.median(times[name][1:]) for times in (wall, cpu))
        of_ceiling = [median_ratio(times[f"{name.split(',')[0]}, ceiling"], times[name]) for times in (wall, cpu)]
        print(
            f"{name:28} {images / seconds:7.0f} images/s, {cpu_seconds / images * 1e6:5.0f} us CPU an image; "
            f"of its ceiling: {of_ceiling[0]:.3f} by wall clock, {of_ceiling[1]:.3f} by CPU"
        )


def median_ratio(ceilings: list[float], times: list[float]) -> float:
    """Of neighbouring runs, without the first."""
    return statistics.median(c / t for c, t in zip(ceilings[1:], times[1:], strict=True))


def ceiling(
    info: reader.DatasetInfo, split: str, batch_size: int, size: tuple[int, int], augment: Any
) -> tf.data.Dataset:
    """The work on each image alone, for as many images from memory."""
    table = info.run_table(split)
    count = info.steps_per_epoch(split, batch_size) * batch_size
    records = RunReader(info.shard_storage, table).read(np.arange(count))
    images = [parse_example(record)["image"][0] for record in records]
    seeds = augment_seeds(np.arange(count), 0, 0)
    dataset = tf.data.Dataset.from_tensor_slices((images, seeds)).batch(batch_size, drop_remainder=True)
    decode = batch_decoder(info.image, size, "crop", augment)
    return dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2)


if __name__ == "__main__":
    main()
