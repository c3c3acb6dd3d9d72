"""The estimate of `--plan_only` against what run.json says of the finished job, and that against a server's log.

    python benchmarks/cost.py PHOTOS [--count 3000] [--repeats 3]

Plan and job in turns on fake-gcs-server, in processes of their own, medians: photos as they are, pictures of 64x64
pixels, photos enlarged to 2 and 12 megapixels, 500 classes, and a version with a base. The server's log is counted by
operation, as a bill is: an upload is one in however many parts, deleting is free. The last table is what a million
images cost by it, and an epoch over single files and over shards, whose requests are counted for one epoch of each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server that tests use

import material
from PIL import Image

from beam_pipeline import storage
from beam_pipeline.storage.usage import load_prices
from tests import make, servers
from tests.servers import Gcs, Request

_NUMBER = r"([\d,.]+)"
_UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
# An epoch of shards, and of single files.
_SHARDS = """
import sys
import imageshards
info = imageshards.load_info(sys.argv[1])
batches = iter(imageshards.train_batches(info, "train", global_batch_size=64))
for _ in range(info.splits["train"].records // 64):
    next(batches)
"""
_FILES = """
import sys
from reader.files import image_files_dataset
for _ in image_files_dataset(sys.argv[1]):
    pass
"""


class Counts(NamedTuple):
    """What a plan expects, a job says it used, or a server has seen."""

    cpu_s: float
    lists_and_writes: float
    reads: float
    bytes_read: float
    bytes_written: float


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-cost-") as scratch:
        log = Path(scratch) / "log"
        with servers.fake_gcs(log) as url:
            os.environ["STORAGE_EMULATOR_HOST"] = url
            gcs = Gcs(url, log)
            print("| input | | CPU s | requests that list or write | that read | bytes read | bytes written |")
            print("|---|---|---|---|---|---|---|")
            used = {}
            for name, folder in inputs(flags.photos, Path(scratch), flags.count).items():
                source = gcs.new_bucket()
                gcs.put_folder(source, "images", folder)
                used[name] = report(name, gcs, f"gs://{source}/images", flags.repeats)
                if name == "photos":
                    with_base(gcs, source, folder, flags.repeats)
                    epochs = two_epochs(gcs, source, flags.count)
        print_dollars(used)
        print(epochs)


def print_dollars(used: dict[str, tuple[int, Counts]]) -> None:
    """What a million images of three sizes cost on Dataflow, by what was measured and the package's prices."""
    rates = load_prices().at()
    core_hour = rates.dataflow_vcpu_hour.dollars + 4 * rates.dataflow_memory_gb_hour.dollars
    print("\n| a million images of | CPU-hours | cores, $ | requests, $ | together, $ |\n|---|---|---|---|---|")
    for name in ("photos", "2 MP", "12 MP"):
        images, counts = used[name]
        hours = counts.cpu_s / images * 1e6 / 3600
        cores, requests = hours * core_hour, rates.requests(1000, 1e6)
        print(f"| {name} | {hours:.2f} | {cores:.2f} | {requests:.2f} | {cores + requests:.2f} |")


def two_epochs(gcs: Gcs, source: str, images: int) -> str:
    """Requests of an epoch over shards and over single files, and their price for a million images."""
    target, found = gcs.new_bucket(), []
    command("--input", f"gs://{source}/images", "--output", f"gs://{target}", "--name", "bench", "--num_shards", "2")
    for name, code, url in (
        ("shards", _SHARDS, f"gs://{target}/bench/1.0.0"),
        ("single files", _FILES, f"gs://{source}/images"),
    ):
        before = len(gcs.requests())
        subprocess.run([sys.executable, "-c", code, url], check=True, capture_output=True)
        lists, reads = counted(gcs.requests()[before:])
        price = load_prices().at().requests(lists, reads) / images * 1e6
        found.append(f"| {name} | {lists:,} | {reads:,} | {price:.4f} | {90 * price:.2f} |")
    title = f"| an epoch of {images:,} images | requests that list | that read | a million images, $ | 90 epochs, $ |"
    return "\n".join(["", title, "|---|---|---|---|---|", *found])


def inputs(photos: Path, scratch: Path, count: int) -> dict[str, Path]:
    """Folders of class folders by name."""
    made = {"photos": material.images(photos, scratch / "photos", count)}
    small = scratch / "small"
    make.class_folders(small, dict.fromkeys("abcdefghij", 30), size=(64, 64))
    made["64 x 64"] = material.images(small, scratch / "64", 2 * count)
    for name, size, fewer in (("2 MP", (1632, 1224), 6), ("12 MP", (4000, 3000), 20)):
        large = scratch / f"large {name}"
        for number, path in enumerate(sorted(photos.rglob("*.*"))[:24]):
            target = large / "abc"[number % 3] / f"{number}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.open(path).convert("RGB").resize(size, Image.Resampling.BICUBIC).save(target, quality=90)
        made[name] = material.images(large, scratch / name, max(600, count // fewer))
    make.class_folders(scratch / "many", {f"class_{number:03d}": 4 for number in range(500)}, size=(64, 64))
    made["500 classes"] = scratch / "many"
    return made


def report(name: str, gcs: Gcs, images: str, repeats: int, *more: str) -> tuple[int, Counts]:
    """Plan and job in turns; prints a row of each, of the server, and of their ratios; returns what the job used."""
    planned, used, seen, per_image = [], [], [], 0
    for turn in range(repeats):
        # Another seed samples other images.
        bucket, flags = gcs.new_bucket(), ["--input", images, "--name", "bench", "--seed", str(turn), *more]
        output = ["--output", f"gs://{bucket}"] if not more else []
        planned.append(expected(command(*flags, *output, "--plan_only")))
        before = len(gcs.requests())
        command(*flags, *output)
        requests = gcs.requests()[before:]
        place, version = (more[1].removeprefix("gs://"), more[3]) if more else (bucket, "1.0.0")
        run = json.loads(gcs.get(place, f"bench/{version}/run.json"))
        used.append(Counts(**{field: run["used"][field] for field in Counts._fields}))
        seen.append(counted(requests))
        per_image = run["images"]
        if more:  # the next turn writes the same version
            store = storage.open_storage(f"gs://{place}")
            for file in list(store.files(url := f"gs://{place}/bench/{version}")):
                store.delete(f"{url}/{file.path}")
    ratios = [[theirs / ours for ours, theirs in zip(*pair, strict=True)] for pair in zip(used, planned, strict=True)]
    print(row(f"{name}, {per_image:,}", "plan", median(planned)))
    print(row("", "job", median(used)))
    print(row("", "server", (None, *median(seen))))
    spreads = [f"{statistics.median(one):.3f} ({min(one):.3f} – {max(one):.3f})" for one in zip(*ratios, strict=True)]
    print(f"| | plan / job | {' | '.join(spreads)} |", flush=True)
    return per_image, Counts(*median(used))


def with_base(gcs: Gcs, source: str, folder: Path, repeats: int) -> None:
    """A version with 1 % more images than its base."""
    target = gcs.new_bucket()
    for seed in range(repeats):
        flags = ("--name", "bench", "--seed", str(seed), "--version", f"1.0.{seed}", "--base", "none")
        command("--input", f"gs://{source}/images", "--output", f"gs://{target}", *flags)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    gcs.put_folder(source, "grown", folder)
    for path in files[::100]:
        gcs.put(source, f"grown/{path.parent.name}/more_{path.name}", path.read_bytes()[:-2] + b"\xff\xd9")
    report("photos, 1 % more than the base", gcs, f"gs://{source}/grown", repeats,
           "--output", f"gs://{target}", "--version", "1.1.0")  # fmt: skip


def command(*arguments: str) -> str:
    """What the command prints."""
    done = subprocess.run([sys.executable, "-m", "beam_pipeline", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def expected(text: str) -> Counts:
    """What a plan's text says."""

    def number(pattern: str) -> float:
        found = re.search(pattern, text)
        assert found, (pattern, text)
        return float(found[1].replace(",", "")) * _UNITS.get(found[2] if found.re.groups > 1 else "", 1)

    return Counts(
        number(f"{_NUMBER} CPU-seconds: "),
        number(f"{_NUMBER} that list or write"),
        number(f"{_NUMBER} requests? that read"),
        number(f"reads {_NUMBER} (\\w+)"),
        number(f"writes {_NUMBER} (\\w+)"),
    )


def counted(requests: list[Request]) -> tuple[int, int]:
    """Operations that list or write, and that read, of a server's log."""
    lists = sum(one.listed_prefix is not None for one in requests)
    uploads = sum(one.method == "POST" and "uploadType=" in one.target for one in requests)
    return lists + uploads, sum(one.method in ("GET", "HEAD") for one in requests) - lists


def median(rows: list[Any]) -> list[float]:
    """The median of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def row(name: str, what: str, values: Any) -> str:
    """A line of the table."""
    cells = ["" if one is None else f"{one:,.1f}" if index == 0 else f"{one:,.0f}" for index, one in enumerate(values)]
    return f"| {name} | {what} | {' | '.join([*cells, '', ''][:5])} |"


if __name__ == "__main__":
    main()
