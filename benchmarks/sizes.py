"""What a stored size costs a training with random crops: bytes per image, and CPU to read it.

    python benchmarks/sizes.py [IMAGES] [--count 300] [--repeats 3]

Writes a dataset for each size and resize mode, then reads them in turns by `train_batches` with
`image_size=224, augment=random_resized_crop(then=flip)`: CPU µs of the process an image, medians.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import material
from stored import BATCH, SIZE

import beam_pipeline
import reader

WAYS = [("stretch", "224"), ("shorter", "256"), ("shorter", "320"), ("stretch", "none")]
READ_IMAGES = 4000


def main() -> None:
    """Print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-sizes-") as scratch:
        source = material.images(flags.images, Path(scratch), flags.count)
        urls, spent = [], [[] for _ in WAYS]
        for number, (mode, size) in enumerate(WAYS):
            common = {"input": str(source), "output": scratch, "name": f"way_{number}"}
            manifest = beam_pipeline.run(beam_pipeline.Config(resize_mode=mode, image_size=size, **common))
            assert manifest is not None
            urls.append(manifest.url)
        for _ in range(flags.repeats):
            for url, found in zip(urls, spent, strict=True):
                found.append(cpu_us(url))
        for (mode, size), url, found in zip(WAYS, urls, spent, strict=True):
            info = reader.load_info(url)
            stored = sum(shard.bytes for split in info.splits.values() for shard in split.shards) / flags.count
            print(f"--resize_mode {mode} --image_size {size}: {stored:,.0f} bytes, ", end="")
            print(f"{median(found):,.0f} CPU µs ({min(found):,.0f} to {max(found):,.0f})")


def cpu_us(url: str) -> float:
    """CPU µs per image."""
    crop = reader.augment.random_resized_crop(then=reader.augment.flip)
    batches = reader.train_batches(url, "train", global_batch_size=BATCH, image_size=SIZE, augment=crop).repeat()
    next(batches)
    cpu, images = time.process_time(), 0
    while images < READ_IMAGES:
        images += len(next(batches)[0])
    spent = 1e6 * (time.process_time() - cpu) / images
    batches.close()
    return spent


if __name__ == "__main__":
    main()
