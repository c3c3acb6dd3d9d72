"""Near-duplicates: what `imageshards duplicates --near` finds, and what it costs.

    python benchmarks/near.py table IMAGES [--changes half,q40] [--count 300] [--image_size 224]
    python benchmarks/near.py scale 100000

`table` writes, for every change, a dataset of photos from IMAGES, a folder of class folders, and of a changed copy of
each, and runs the command on it. `scale` makes small random pictures (64 x 64), of which each thousandth has a copy of
quality 40, and says seconds, CPU and memory of the command.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import beam_pipeline
from beam_pipeline.schema.example import image_example
from reader.info import load_info
from reader.tools.near import near_pairs
from reader.tools.pictures import statistics
from reader.tools.read import read_paths
from tests.reading import shards

RECORDS_PER_SHARD, COPIED = 10_000, 1_000


def cropped(image: Image.Image, part: float) -> Image.Image:
    """Without a part of width and height."""
    x, y = (int(side * part / 2) for side in image.size)
    return image.crop((x, y, image.width - x, image.height - y))


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "half": lambda image: image.resize((image.width // 2, image.height // 2)),
    "q40": lambda image: image,
    "brighter": lambda image: Image.eval(image, lambda value: min(255, int(value * 1.2))),
    "grey": lambda image: image.convert("L").convert("RGB"),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "crop5": lambda image: cropped(image, 0.05),
    "crop10": lambda image: cropped(image, 0.1),
    "corner5": lambda image: image.crop((image.width // 20, image.height // 20, image.width, image.height)),
}


def run(url: str, out: str) -> tuple[dict[str, object], dict[str, float]]:
    """What the command says, and its seconds, CPU and MB."""
    command = [sys.executable, "-m", "reader", "duplicates", url, "--near", "--out", out, "--json"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    return json.loads(said), {
        "wall_s": round(time.perf_counter() - begin, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mb": round(usage.ru_maxrss / 1024),  # not below that of this process, which it began as
        "exit": os.waitstatus_to_exitcode(status),
    }


def table(files: Sequence[Path], changes: Sequence[str], image_size: int, scratch: Path) -> Iterator[dict[str, object]]:
    """For each change, of the photos and their copies: the part of copies that are near and named, and other pairs."""
    for name in changes:
        folder, change = scratch / name, CHANGES[name]
        for number, file in enumerate(files):
            with Image.open(file) as opened:
                image = opened.convert("RGB")
            for kind, changed in (("photo", image), ("copy", change(image))):
                path = folder / "in" / kind / f"{number:05d}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                changed.save(path, quality=40 if (kind, name) == ("copy", "q40") else 90)
        config: dict[str, Any] = {"input": str(folder / "in"), "output": str(folder / "out"), "image_size": image_size}
        manifest = beam_pipeline.run(beam_pipeline.Config(**config, name="near", splits="train=1"))
        assert manifest is not None
        yield {"change": name} | of_change(manifest.url, len(files), folder / "list")


def of_change(url: str, photos: int, out: Path) -> dict[str, object]:
    """What the command names, and what its hashes alone would."""
    _, cost = run(url, str(out))
    groups: dict[str, list[str]] = {}
    for line in map(json.loads, out.read_text().splitlines()):
        groups.setdefault(line["group"], []).append(Path(line["path"]).stem)
    info = load_info(url)
    found = statistics(info)
    paths = read_paths(info, list(found.splits), np.arange(len(found)))
    shown = [Path(path.decode()).stem for path in paths]
    pairs = near_pairs(found)
    by_hash = {(shown[a], shown[b]) for a, b in zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)}
    return {
        "near_by_hash": round(sum(a == b for a, b in by_hash) / photos, 3),
        "named": round(sum(len(group) > len(set(group)) for group in groups.values()) / photos, 3),
        "other_pairs": (2 * photos) * (2 * photos - 1) // 2 - photos,
        "other_pairs_near_by_hash": sum(a != b for a, b in by_hash),
        "groups_of_several_photos": sum(len(set(group)) > 1 for group in groups.values()),
        "cpu_s": cost["cpu_s"],
    }


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


def scale(count: int, scratch: Path) -> dict[str, object]:
    """What the command costs on small random pictures."""
    folder, parts = scratch / "1.0.0", -(-count // RECORDS_PER_SHARD)
    per_shard = [count // parts + (index < count % parts) for index in range(parts)]
    shards.make_dataset(folder, {"train": per_shard}, size=(64, 64), record=record, with_names=True)
    said, cost = run(str(folder), str(scratch / "list"))
    return {"records": count, "copies": -(-(count - 1) // COPIED), "groups": said["groups"]} | cost


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    of_table, of_scale = verbs.add_parser("table"), verbs.add_parser("scale")
    of_table.add_argument("images", type=Path)
    of_table.add_argument("--changes", default=",".join(CHANGES))
    of_table.add_argument("--count", type=int, default=300)
    of_table.add_argument("--image_size", type=int, default=224)
    of_scale.add_argument("count", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.verb == "table":
            files = sorted(path for path in args.images.glob("*/*") if path.is_file())[: args.count]
            found = table(files, args.changes.split(","), args.image_size, Path(scratch))
        else:
            found = iter([scale(args.count, Path(scratch))])
        for line in found:
            print(json.dumps(line))


if __name__ == "__main__":
    main()
