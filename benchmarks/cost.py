"""CPU-hours of a million images, times Google's list price, and what reading their files costs.

    python benchmarks/cost.py PHOTOS [--count 2000] [--repeats 3]

A job over `--count` images and one over three times as many take turns on fake-gcs-server, each in a process of its
own. Counted is the process' CPU time per image between the two, so without its start. (With `--count` from 2,000 to
3,000 both samples have about 64 images.)
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gs
import material
import memory
import turns
from PIL import Image

from tests.servers import Gcs

# List prices in dollars on 2026-11-24. https://cloud.google.com/dataflow/pricing: batch, us-central1, as Apache Beam
# 2.77.0 quotes them in testing/load_tests/dataflow_cost_consts.py; a core of e2-standard has 4 GB.
VCPU_HOUR, GB_HOUR, GB_PER_CORE = 0.056, 0.003557, 4
# https://cloud.google.com/storage/pricing-examples: us-east1, standard storage, class B; an archived copy.
READ = 0.0004 / 1000


def main() -> None:
    """Print a table."""
    flags = turns.parser(__doc__, 2000, 3).parse_args()
    core_hour, reads = VCPU_HOUR + GB_PER_CORE * GB_HOUR, 1e6 * READ
    with tempfile.TemporaryDirectory(prefix="imageshards-cost-") as scratch, gs.server() as gcs:
        print("| a million images of | CPU-hours | of these `cpu_s` of run.json | cores, $ | reads, $ | together, $ |")
        print("|---|---|---|---|---|---|")
        for name, folder, count in inputs(flags.images, Path(scratch), flags.count):
            hours, converting = (seconds * 1e6 / 3600 for seconds in cpu_s_per_image(gcs, folder, count, flags.repeats))
            cores = hours * core_hour
            print(f"| {name} | {hours:.2f} | {converting:.2f} | {cores:.2f} | {reads:.2f} | {cores + reads:.2f} |")


def inputs(photos: Path, scratch: Path, count: int) -> Iterator[tuple[str, Path, int]]:
    """Photos as they are, and enlarged: a name, a folder of them, and how many to convert at first."""
    yield "photos", photos, count
    for name, size in (("2 MP, enlarged", (1632, 1224)), ("12 MP, enlarged", (4000, 3000))):
        folder = scratch / name
        for number, path in enumerate(sorted(photos.rglob("*.*"))[:24]):
            target = folder / "abc"[number % 3] / f"{number}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.open(path).convert("RGB").resize(size, Image.Resampling.BICUBIC).save(target, quality=90)
        yield name, folder, count // 3


def cpu_s_per_image(gcs: Gcs, pictures: Path, count: int, repeats: int) -> tuple[float, float]:
    """CPU seconds of the process for each further image, and those that run.json has of it; medians."""
    places = []
    for images in (count, 3 * count):
        with tempfile.TemporaryDirectory(prefix="imageshards-cost-") as folder:
            gcs.put_folder(
                bucket := gcs.new_bucket(), "images", material.images(pictures, Path(folder) / "images", images)
            )
        places.append(f"gs://{bucket}/images")
    found = []
    for _ in range(repeats):
        (few, few_told), (many, many_told) = (job(gcs, place) for place in places)
        found.append(((many - few) / (2 * count), (many_told - few_told) / (2 * count)))
    process, told = zip(*found, strict=True)
    return statistics.median(process), statistics.median(told)


def job(gcs: Gcs, images: str) -> tuple[float, float]:
    """CPU seconds of a job's process, and those that its run.json has."""
    target = gcs.new_bucket()
    flags = ["--input", images, "--output", f"gs://{target}", "--name", "bench"]
    used = memory.watch([sys.executable, "-m", "beam_pipeline", *flags], Path(os.devnull)).cpu_s
    return used, json.loads(gcs.get(target, "bench/1.0.0/run.json"))["cpu_s"]


if __name__ == "__main__":
    main()
