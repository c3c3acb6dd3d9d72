"""What reading leaves behind: memory, threads and descriptors before and after, for each door and for TensorFlow alone.

    python benchmarks/leaks.py [--times 300] [--epochs 50] [--doors numpy,tensorflow,jax,torch,keras,generator]

Drawn images. Each line is a process of its own that does the thing 20 times first, since pools and allocators fill
then: epochs of a small dataset; datasets that are made, read for a batch and dropped; epochs of a larger one.
`keras` is what its `fit` reads on JAX and PyTorch; on TensorFlow that is `tensorflow`. `generator` is TensorFlow
alone: a `from_generator` of ready batches, for what TensorFlow itself leaves behind.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil

import reader
from tests.reading.shards import make_dataset

WARM_UP = 20
BATCH = 32


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--doors", default=",".join(DOORS))
    parser.add_argument("--one", nargs=4, metavar=("DOOR", "WORK", "TIMES", "URL"), help="(one process's part)")
    flags = parser.parse_args()
    if flags.one:
        door, work, times, url = flags.one
        print(json.dumps(measure(DOORS[door], WORKS[work], int(times), url)))
        return
    with tempfile.TemporaryDirectory(prefix="imageshards-leaks-") as scratch:
        small = make_dataset(Path(scratch) / "small", {"train": [70, 58]}, size=(64, 64))
        large = make_dataset(Path(scratch) / "large", {"train": [2500, 1500]}, size=(160, 160))
        plan = {"iterations": (flags.times, small), "datasets": (flags.times, small), "epochs": (flags.epochs, large)}
        print("| | RSS, MB | threads | descriptors |\n|---|---|---|---|")
        for door, (work, (times, url)) in itertools.product(flags.doors.split(","), plan.items()):
            command = [sys.executable, __file__, "--one", door, work, str(times), url]
            done = subprocess.run(command, capture_output=True, text=True)  # TensorFlow says much
            if done.returncode:
                sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
            cells = (f"{before} → {after}" for before, after in zip(*json.loads(done.stdout), strict=True))
            print(f"| {door}: {times} {work} | {' | '.join(cells)} |", flush=True)


def numpy(url: str) -> object:
    """`train_batches`."""
    return reader.train_batches(url, "train", global_batch_size=BATCH, augment=reader.augment.flip)


def tensorflow(url: str) -> object:
    """`train_dataset`."""
    return reader.train_dataset(url, "train", global_batch_size=BATCH, augment=reader.augment.flip)


def jax(url: str) -> object:
    """`as_jax`, on one device."""
    import jax
    import numpy as np

    return reader.as_jax(numpy(url), jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",)))  # type: ignore[arg-type]


def torch(url: str) -> object:
    """A `DataLoader` over `as_torch`."""
    from torch.utils.data import DataLoader

    return DataLoader(reader.as_torch(numpy(url)), batch_size=None)  # type: ignore[arg-type]


class keras:
    """`fit_arguments` as a `fit` on JAX reads it."""

    def __init__(self, url: str) -> None:
        self._batches: Any = numpy(url)
        self._data = reader.keras.fit_arguments(self._batches)["x"]

    def __iter__(self) -> Iterator[object]:
        yield from (self._data[number] for number in range(len(self._batches)))
        self._data.on_epoch_end()


def generator(url: str) -> object:
    """`tf.data.Dataset.from_generator`."""
    import numpy as np
    import tensorflow as tf

    info = reader.load_info(url)
    assert info.image.min_size is not None
    images, labels = np.ones((BATCH, *info.image.min_size, 3), np.uint8), np.ones(BATCH, np.int64)
    signature = tf.TensorSpec(images.shape, tf.uint8), tf.TensorSpec(labels.shape, tf.int64)
    steps = info.steps_per_epoch("train", BATCH)
    batches = functools.partial(itertools.repeat, (images, labels), steps)
    return tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(2)


DOORS: dict[str, Callable[[str], object]] = {
    door.__name__: door for door in (numpy, tensorflow, jax, torch, keras, generator)
}


def iterations(door: Callable[[str], object], times: int, url: str) -> None:
    """One dataset, read to its end again and again."""
    dataset = door(url)
    for _ in range(times):
        for _ in dataset:  # type: ignore[attr-defined]
            pass


def datasets(door: Callable[[str], object], times: int, url: str) -> None:
    """Datasets that are dropped after a batch."""
    for _ in range(times):
        next(iter(door(url)))  # type: ignore[call-overload]


WORKS = {"iterations": iterations, "datasets": datasets, "epochs": iterations}


def measure(door: Callable[[str], object], work: Callable[..., None], times: int, url: str) -> tuple[list[int], ...]:
    """What there was before and after."""
    work(door, WARM_UP, url)
    before = counts()
    work(door, times, url)
    return before, counts()


def counts() -> list[int]:
    """RSS in MB, threads and descriptors, once what was dropped has had a second to end."""
    gc.collect()
    time.sleep(1)
    own = psutil.Process()
    return [own.memory_info().rss // 1_000_000, own.num_threads(), own.num_fds()]


if __name__ == "__main__":
    main()
