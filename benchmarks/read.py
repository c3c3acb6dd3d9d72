"""Rate of `train_dataset` against its ceilings, alternating in one process.

    python benchmarks/read.py [IMAGES] [--count 6400] [--batch_size 64] [--repeats 9]

IMAGES is a folder of class folders (drawn pictures without); its files are repeated up to the count and converted.

A ceiling does a case's work on each image (`tf.io.decode_jpeg`, for random_resized_crop `tf.io.decode_and_crop_jpeg`
and the resize) in the same batched map over the same image bytes in memory, same batch and threads. Wall clock on
shared cores jumps, so CPU seconds come beside it; medians of the repeats after a warm-up, ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import material
import numpy as np
import psutil

import reader
from reader.bench import ceilings
from reader.bench.measure import Runnable, measure, ratio
from reader.decode import batch_decoder
from reader.example import parse_example
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
        compare(reader.load_info(material.dataset(source, Path(scratch))), flags.batch_size, flags.repeats)


def compare(info: reader.DatasetInfo, batch_size: int, repeats: int) -> None:
    """Run every case and its ceiling in turn and print medians."""
    begin = time.perf_counter()
    next(iter(reader.train_dataset(info, "train", global_batch_size=batch_size)))
    print(f"first batch after {time.perf_counter() - begin:.2f} s")
    size = info.image.min_size or (0, 0)
    crop = reader.augment.random_resized_crop()
    augments = {"plain": None, "flip": reader.augment.flip, "flip_crop": reader.augment.flip_crop}
    images = info.steps_per_epoch("train", batch_size) * batch_size
    records = RunReader(info.shard_storage, info.run_table("train")).read(np.arange(images))
    encoded = [parse_example(record)["image"][0] for record in records]
    datasets: dict[str, Any] = {}
    for name, augment in {**augments, "random_resized_crop": crop}.items():
        work = batch_decoder(info.image, size, "crop", augment)
        datasets[f"{name}, ceiling"] = ceilings.of_images(encoded, work, batch_size)()
        datasets[name] = reader.train_dataset(
            info, "train", global_batch_size=batch_size, image_size=size, augment=augment
        )
    runnables = {name: Runnable(dataset, batch_size) for name, dataset in datasets.items()}
    rates = measure(runnables, images, repeats, lambda line: None)
    rss_mb = psutil.Process().memory_info().rss / 1e6
    print(f"{images} images an iteration, batch {batch_size}, {repeats} repeats; RSS {rss_mb:,.0f} MB")
    for name, rate in rates.items():
        by_clock, by_cpu = ratio(rate, rates[f"{name.partition(',')[0]}, ceiling"])
        slowest, fastest = rate.spread
        print(
            f"{name:28} {rate.images_per_s:6.0f} images/s ({slowest:.0f} to {fastest:.0f}), CPU s/1,000 "
            f"{rate.cpu_per_1000:.3f}; of its ceiling: {by_clock:.3f} by wall clock, {by_cpu:.3f} by CPU"
        )


if __name__ == "__main__":
    main()
