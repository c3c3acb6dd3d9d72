"""`imageshards diff` of two large versions: seconds, CPU and peak memory of the command.

    python benchmarks/diff.py [--images 10000000]

The versions have a manifest and record tables as the job writes them. Of the records only those exist, in sparse files,
whose names may be shown.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from beam_pipeline import schema
from beam_pipeline.inputs.references import order_key
from beam_pipeline.schema import example, table
from beam_pipeline.schema.manifest import builtins_of, file_sums, open_manifest, seal_manifest
from benchmarks import material

SHARD_IMAGES = 10_000
SHOWN = 5_000  # the first images, of which 1 % are more than 20
CLASSES = 10
LABELS = [f"class_{number}" for number in range(CLASSES)]
RECORD_BYTES = 200  # framed, of the first shards
# The peak of this program alone: what the kernel reports to its parent includes the parent's own memory.
MEASURED = """
import contextlib, io, json, resource, sys, time
start = time.perf_counter()
import imageshards
with contextlib.redirect_stdout(io.StringIO()) as printed:
    assert imageshards.main(["diff", *sys.argv[1:]]) == 1
assert printed.getvalue()  # no error
seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
found = "; ".join(line.rstrip(":") for line in printed.getvalue().splitlines() if line[0] not in " -")
print(json.dumps([round(seconds, 1), round(used.ru_utime + used.ru_stime, 1), int(peak) // 1000, found]))
"""
Images = dict[str, np.ndarray]  # a row an image: its class, its number in the file name, its MD5


def path_of(label: int, number: int) -> str:
    """The path of an image; all are equally long."""
    return f"{LABELS[label]}/{number:010d}.jpg"


def hashes(images: Images, seed: int) -> np.ndarray:
    """Order key and name hash of each image."""
    found = np.empty((len(images["label"]), 2), np.uint64)
    for row, one in enumerate(zip(images["label"].tolist(), images["number"].tolist(), strict=True)):
        path = path_of(*one)
        found[row] = order_key(path, seed), table.name_hash(path)
    return found


def publish(images: Images, template: Path, folder: Path, seed: int = 0) -> np.ndarray:
    """Write a version: its tables and a manifest like a real one's; returns the images' order."""
    known = images["hashes"] if seed == 0 else hashes(images, seed)
    order = np.argsort(known[:, 0])
    shard_count = -(-len(order) // SHARD_IMAGES)
    (folder / "index").mkdir(parents=True)
    shards, counts = [], np.bincount(images["label"], minlength=CLASSES)
    manifest = open_manifest((template / schema.MANIFEST_FILE).read_bytes(), str(template))
    one = next(iter(manifest["splits"].values()))["shards"][0]
    for number in range(shard_count):
        rows = order[number * SHARD_IMAGES : (number + 1) * SHARD_IMAGES]
        name = schema.ShardName("bench", "train", number, shard_count)
        records = len(rows)
        columns = {
            "order_key": known[rows, 0],
            "bytes": np.full(records, RECORD_BYTES),
            "class": images["label"][rows],
            "source_bytes": np.full(records, 110_000),
            "source_md5": images["md5"][rows],
            "source_height": np.full(records, 375),
            "source_width": np.full(records, 500),
            "source_format": np.full(records, table.SOURCE_FORMATS.index("JPEG")),
            "passthrough": np.zeros(records),
            "name": known[rows, 1],
        }
        data = table.table_bytes(table.COLUMNS, columns)
        (folder / name.table_file).write_bytes(data)
        sizes = {"records": records, "images": records, "bytes": records * RECORD_BYTES}
        shards.append({**one, **sizes, "file": name.file, "table": builtins_of(file_sums(data))})
    total = len(order)
    split = {"records": total, "bytes": total * RECORD_BYTES, "class_counts": counts.tolist(), "shards": shards}
    configuration = {**manifest["configuration"], "seed": seed}
    changed = {"classes": LABELS, "images": total, "records": total, "splits": {"train": split}}
    sealed = seal_manifest({**manifest, **changed, "configuration": configuration})
    (folder / schema.MANIFEST_FILE).write_bytes(sealed)
    return order


def write_records(images: Images, order: np.ndarray, folder: Path, numbers: np.ndarray) -> None:
    """Write the records of some images into the version's shards."""
    wanted = np.flatnonzero(np.isin(images["number"][order], numbers))
    for position in wanted.tolist():
        shard, row = divmod(position, SHARD_IMAGES)
        name = schema.ShardName("bench", "train", shard, -(-len(order) // SHARD_IMAGES))
        image = order[position]
        (folder / name.file).touch()
        with (folder / name.file).open("r+b") as file:
            file.seek(row * RECORD_BYTES)
            file.write(record(int(images["label"][image]), int(images["number"][image])))


def record(label: int, number: int) -> bytes:
    """A framed record whose image is a few zeros, so that all are equally long."""
    empty = example.image_example(
        image=b"\0" * 70, size=(224, 224), class_id=label, label=LABELS[label], path=path_of(label, number)
    )
    framed = schema.frame(empty)
    assert len(framed) == RECORD_BYTES, len(framed)
    return framed


# --- changes


def some(images: Images, share: float) -> np.ndarray:
    """Which images change."""
    return np.random.default_rng(1).random(len(images["label"])) < share


def more(images: Images) -> Images:
    """1 % more images."""
    added = draw(len(images["label"]) // 100, first=len(images["label"]))
    return {name: np.concatenate([column, added[name]]) for name, column in images.items()}


def fewer(images: Images) -> Images:
    """1 % fewer."""
    kept = ~some(images, 0.01)
    return {name: column[kept] for name, column in images.items()}


def replaced(images: Images) -> Images:
    """1 % with other bytes."""
    rows, md5 = some(images, 0.01), images["md5"].copy()
    md5[rows] = np.random.default_rng(2).integers(0, 256, (int(rows.sum()), 16), np.uint8)
    return {**images, "md5": md5}


def relabelled(images: Images) -> Images:
    """1 % in another class folder, under the same file name."""
    return moved(images, some(images, 0.01))


def class_renamed(images: Images) -> Images:
    """All images of a class, 10 %, in the folder of another."""
    return moved(images, images["label"] == 0)


def all_moved(images: Images) -> Images:
    """Every image in another folder."""
    return moved(images, np.full(len(images["label"]), True))


def other_seed(images: Images) -> Images:
    """The same images in another order."""
    return images


def moved(images: Images, rows: np.ndarray) -> Images:
    """These images in another class folder."""
    label, known = images["label"].copy(), images["hashes"].copy()
    label[rows] = (label[rows] + 1) % CLASSES
    known[rows] = hashes({"label": label[rows], "number": images["number"][rows]}, 0)
    return {**images, "label": label, "hashes": known}


CHANGES: dict[str, Callable[[Images], Images]] = {
    change.__name__: change for change in (more, fewer, replaced, relabelled, class_renamed, all_moved, other_seed)
}


def draw(count: int, first: int = 0) -> Images:
    """Images of all classes with random MD5s."""
    random = np.random.default_rng(first)
    images = {"label": random.integers(0, CLASSES, count), "number": np.arange(first, first + count)}
    md5 = random.integers(0, 256, (count, 16), np.uint8)
    return {**images, "md5": md5, "hashes": hashes(images, 0)}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000_000)
    parser.add_argument("--only", default=",".join(CHANGES))
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as scratch:
        folder = Path(scratch)
        template = Path(material.dataset(material.images(None, folder, 10), folder / "template"))
        images = draw(flags.images)
        order = publish(images, template, folder / "1.0.0")
        print(f"{flags.images:,} images, {SHARD_IMAGES:,} a shard")
        print("| change | seconds | CPU s | peak RSS, MB | found |")
        print("| --- | --- | --- | --- | --- |")
        for name in flags.only.split(","):
            changed = CHANGES[name](images)
            order_now = publish(changed, template, folder / "1.1.0", seed=int(name == "other_seed"))
            first = [one["number"][at[:SHOWN]] for one, at in ((images, order), (changed, order_now))]
            write_records(images, order, folder / "1.0.0", np.concatenate(first))
            write_records(changed, order_now, folder / "1.1.0", np.concatenate(first))
            command = [sys.executable, "-c", MEASURED, str(folder / "1.0.0"), str(folder / "1.1.0")]
            figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            print(f"| {name} | {' | '.join(map(str, figures))} |", flush=True)
            shutil.rmtree(folder / "1.1.0")


if __name__ == "__main__":
    main()
