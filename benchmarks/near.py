"""Near-duplicates: what `imageshards duplicates --near` finds, and what it costs.

    python benchmarks/near.py table IMAGES [--count 300] [--image_size 224]
    python benchmarks/near.py scale 100000 [--keep FOLDER]

`table` writes a dataset of photos from IMAGES, a folder of class folders, and of a copy of each by every change, and
runs the command on it. `scale` makes small random pictures (64 x 64), of which each thousandth has a copy of quality
40, and says seconds, CPU and memory of the command.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import beam_pipeline
from beam_pipeline.schema.example import image_example
from reader.info import load_info
from reader.tools.duplicates import read_paths
from reader.tools.near import near_pairs
from reader.tools.pictures import statistics
from tests.reading import shards

RECORDS_PER_SHARD, COPIED = 10_000, 1_000


def cropped(image: Image.Image, part: float) -> Image.Image:
    """Without a part of width and height."""
    x, y = (int(side * part / 2) for side in image.size)
    return image.crop((x, y, image.width - x, image.height - y))


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "same": lambda image: image,
    "half": lambda image: image.resize((image.width // 2, image.height // 2)),
    "q40": lambda image: image,
    "brighter": lambda image: Image.eval(image, lambda value: min(255, int(value * 1.2))),
    "grey": lambda image: image.convert("L").convert("RGB"),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "crop5": lambda image: cropped(image, 0.05),
    "crop10": lambda image: cropped(image, 0.1),
}


def run(url: str, out: str) -> tuple[dict[str, object], dict[str, float]]:
    """What the command says, and its seconds, CPU and MB."""
    command = [sys.executable, "-m", "reader", "duplicates", url, "--near", "--out", out, "--json"]
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), {
        "wall_s": round(time.perf_counter() - begin, 1),
        "cpu_s": round(cpu, 1),
        "peak_mb": round(after.ru_maxrss / 1024),
        "exit": done.returncode,
    }


def number_of(path: str) -> str:
    """Which photo a file shows."""
    return Path(path).stem.partition("_")[0]


def table(images: Path, count: int, image_size: int, scratch: Path) -> dict[str, object]:
    """Each change: the part of copies that share a group with their photo; pairs of other photos in one group."""
    for number, file in enumerate(sorted(path for path in images.glob("*/*") if path.is_file())[:count]):
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        for name, change in CHANGES.items():
            path = scratch / "in" / name / f"{number:05d}_{name}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            change(image).save(path, quality=40 if name == "q40" else 90)
    config = {"input": str(scratch / "in"), "output": str(scratch / "out"), "name": "near", "image_size": image_size}
    manifest = beam_pipeline.run(beam_pipeline.Config(**config, splits="train=1"))
    assert manifest is not None
    _, cost = run(manifest.url, str(scratch / "list"))
    info = load_info(manifest.url)
    found = statistics(info)
    paths = [path.decode() for path in read_paths(info, list(found.splits), np.arange(len(found)))]
    photos = len({number_of(path) for path in paths})
    pairs = near_pairs(found)
    same = Counter(number_of(paths[a]) == number_of(paths[b]) for a, b in zip(pairs.first, pairs.second, strict=True))
    groups: dict[str, list[str]] = {}
    for line in (scratch / "list").read_text().splitlines():
        groups.setdefault(json.loads(line)["group"], []).append(json.loads(line)["path"])
    group_of = {path: group for group, members in groups.items() for path in members}
    recall = {}
    for name in CHANGES:
        of_change = {number_of(path): group_of.get(path) for path in paths if path.startswith(f"{name}/")}
        first = {number_of(path): group_of.get(path) for path in paths if path.startswith("same/")}
        recall[name] = sum(group is not None and group == first[key] for key, group in of_change.items()) / photos
    mixed = sum(len({number_of(path) for path in members}) > 1 for members in groups.values())
    total = len(paths) * (len(paths) - 1) // 2 - photos * len(CHANGES) * (len(CHANGES) - 1) // 2
    told = {"photos": photos, "records": len(paths), "pairs_of_other_photos": total}
    return told | {"of_these_near_by_hash": same[False], "groups_of_several_photos": mixed, "recall": recall} | cost


def picture(number: int, quality: int) -> bytes:
    """A small JPEG like no other."""
    noise = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((64, 64), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def record(_: str, number: int) -> tuple[int, bytes]:
    """Class and bytes of a record; each thousandth is a copy of the one before."""
    is_copy = number % COPIED == 1
    image = picture(number - is_copy, 40 if is_copy else 85)
    path = f"cat/{number:07d}.jpg"
    return 1, image_example(image=image, size=(64, 64), class_id=1, label="cat", path=path)


def scale(count: int, kept: Path | None, scratch: Path) -> dict[str, object]:
    """What the command costs on small random pictures."""
    folder = (kept or scratch) / f"random-{count}" / "1.0.0"
    if not (folder / "manifest.json").exists():
        parts = -(-count // RECORDS_PER_SHARD)
        per_shard = [count // parts + (index < count % parts) for index in range(parts)]
        shards.make_dataset(folder, {"train": per_shard}, size=(64, 64), record=record)
    said, cost = run(str(folder), str(scratch / "list"))
    return {"records": count, "copies": -(-(count - 1) // COPIED), "groups": said["groups"]} | cost


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    of_table, of_scale = verbs.add_parser("table"), verbs.add_parser("scale")
    of_table.add_argument("images", type=Path)
    of_table.add_argument("--count", type=int, default=300)
    of_table.add_argument("--image_size", type=int, default=224)
    of_scale.add_argument("count", type=int)
    of_scale.add_argument("--keep", type=Path, help="folder in which the dataset stays for the next run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.verb == "table":
            found = table(args.images, args.count, args.image_size, Path(scratch))
        else:
            found = scale(args.count, args.keep, Path(scratch))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
