"""Rate of `train_dataset` against the decode-only ceiling, alternating in one process.

    python benchmarks/read.py [IMAGES] [--count 6400] [--batch_size 64] [--repeats 9]

IMAGES is a folder of class folders (drawn pictures without); its files are repeated up to the count and converted.

Ceiling: `tf.io.decode_jpeg(INTEGER_ACCURATE)` in the same batched map over the same image bytes in memory, same batch
and threads. Wall clock on shared cores jumps, so CPU seconds come beside it; medians of the repeats after a warm-up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import material
import numpy as np
import psutil
import tensorflow as tf

import reader
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
        measure(reader.load_info(material.dataset(source, Path(scratch))), flags.batch_size, flags.repeats)


def measure(info: reader.DatasetInfo, batch_size: int, repeats: int) -> None:
    """Run every case in turn and print medians."""
    begin = time.perf_counter()
    ours = reader.train_dataset(info, "train", global_batch_size=batch_size)
    next(iter(ours))
    print(f"first batch after {time.perf_counter() - begin:.2f} s")
    cases = {"ceiling": ceiling(info, "train", batch_size), "train_dataset": ours}
    for name in ("flip", "flip_crop"):
        cases[name] = reader.train_dataset(
            info, "train", global_batch_size=batch_size, augment=getattr(reader.augment, name)
        )
    images = info.steps_per_epoch("train", batch_size) * batch_size
    wall: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    memory = []
    for _ in range(repeats + 1):
        for name, dataset in cases.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in dataset:
                pass
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
        memory.append(psutil.Process().memory_info().rss >> 20)
    print(f"{images} images an iteration, batch {batch_size}, {repeats} repeats; RSS MB {memory}")
    for name in cases:
        seconds, cpu_seconds = (statistics.median(times[name][1:]) for times in (wall, cpu))
        ratios = [
            statistics.median(c / o for c, o in zip(times["ceiling"][1:], times[name][1:], strict=True))
            for times in (wall, cpu)
        ]
        print(
            f"{name:14} {images / seconds:7.0f} images/s, {cpu_seconds / images * 1e6:5.0f} us CPU an image; "
            f"of the ceiling: {ratios[0]:.3f} by wall clock, {ratios[1]:.3f} by CPU"
        )


def ceiling(info: reader.DatasetInfo, split: str, batch_size: int) -> tf.data.Dataset:
    """Decoding alone, of as many images from memory."""
    table = info.run_table(split)
    count = info.steps_per_epoch(split, batch_size) * batch_size
    records = RunReader(info.storage, table).read(np.arange(count))
    images = [parse_example(record)["image"][0] for record in records]
    dataset = tf.data.Dataset.from_tensor_slices(images).batch(batch_size, drop_remainder=True)
    return dataset.map(batch_decoder(info.image, None, "crop"), num_parallel_calls=tf.data.AUTOTUNE).prefetch(2)


if __name__ == "__main__":
    main()
