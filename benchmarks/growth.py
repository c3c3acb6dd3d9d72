"""A new version with a base compared with the same one without: CPU of the complete command, and one hash.

    python benchmarks/growth.py [IMAGES] [--count 6000] [--repeats 3] [--image_size 224]

A change is made to the input of version 1.0.0, or to the flags. From the CPU of each command that of a job of ten
images is subtracted.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import material
import memory
import turns

from reader.tools.describe import dataset_hash

CHANGES: dict[str, Callable[[list[Path]], list[str]]] = {}
FLAGS = ["--splits", "train=0.8,validation=0.2", "--num_shards", "train=6,validation=3"]


def change(function: Callable[[list[Path]], list[str]]) -> Callable[[list[Path]], list[str]]:
    """One of the changes: of every hundredth file, or of the flags, which it returns."""
    CHANGES[function.__name__] = function
    return function


@change
def nothing(files: list[Path]) -> list[str]:
    """Not a thing."""
    return []


@change
def more(files: list[Path]) -> list[str]:
    """One percent more images."""
    for file in files:
        shutil.copy(file, file.with_name(f"new-{file.name}"))
    return []


@change
def fewer(files: list[Path]) -> list[str]:
    """One percent fewer."""
    for file in files:
        file.unlink()
    return []


@change
def relabelled(files: list[Path]) -> list[str]:
    """One percent in another class folder."""
    folders = sorted({file.parent for file in files})
    for file in files:
        file.rename(folders[folders.index(file.parent) - 1] / f"moved-{file.name}")
    return []


@change
def replaced(files: list[Path]) -> list[str]:
    """By the picture of the next, in as many bytes if there is room behind it."""
    contents = [file.read_bytes() for file in files]
    for file, own, other in zip(files, contents, [*contents[1:], contents[0]], strict=True):
        file.unlink()  # a link
        file.write_bytes(other.ljust(len(own), b"\0"))
    return []


@change
def class_inserted(files: list[Path]) -> list[str]:
    """A class before all others, so that every id changes."""
    folder = files[0].parent.with_name("0 first")
    folder.mkdir()
    shutil.copy(files[0], folder)
    return []


@change
def other_shares(files: list[Path]) -> list[str]:
    """Other splits."""
    return ["--splits", "train=0.7,validation=0.3"]


@change
def other_shards(files: list[Path]) -> list[str]:
    """Other shards."""
    return ["--num_shards", "train=9,validation=2"]


def write(images: str, output: str, *more: str) -> float:
    """CPU seconds of the command and its children."""
    command = [sys.executable, "-m", "beam_pipeline", "--input", images, "--output", output, "--name", "bench"]
    return memory.watch([*command, *FLAGS, *more], Path(f"{output}.log")).cpu_s


def compare(
    case: str, ten: float, repeats: int, plain: Callable[[], float], based: Callable[[], float], urls: list[str]
) -> None:
    """Run both jobs in turns, print a row, and delete what they wrote."""
    runs, hashes = [], set()
    for _ in range(repeats):
        runs.append((plain() - ten, based() - ten))
        for url in urls:
            hashes.add(dataset_hash(url))
            shutil.rmtree(url)
    ratios = sorted(ours / theirs for theirs, ours in runs)
    seconds = " | ".join(f"{median(column):.1f}" for column in zip(*runs, strict=True))
    spread = f"{median(ratios):.3f} ({ratios[0]:.3f} – {ratios[-1]:.3f})"
    print(f"| {case} | {seconds} | {spread} | {len(hashes) == 1} |", flush=True)


def main() -> None:
    """Print a row for each change."""
    parser = turns.parser(__doc__, 6000, 3)
    parser.add_argument("--image_size", default="224")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as folder:
        scratch, size = Path(folder), ["--image_size", flags.image_size]
        images = material.images(flags.images, scratch / "first", flags.count)
        few = material.images(flags.images, scratch / "few", 10)
        ten = median(write(str(few), f"{scratch}/ten{turn}", *size) for turn in range(3))
        write(str(images), f"{scratch}/base", *size)
        print(f"{flags.count:,} images, {flags.repeats} turns; CPU of ten images: {ten:.2f} s, subtracted")
        print("| change | without a base, s | with, s | ratio | one hash |\n| --- | --- | --- | --- | --- |")
        for case, change_input in CHANGES.items():
            changed, plain, base = scratch / case, f"{scratch}/plain", f"{scratch}/base-{case}"
            shutil.copytree(images, changed, copy_function=os.link)
            shutil.copytree(scratch / "base", base, copy_function=os.link)
            files = sorted(path for path in changed.rglob("*") if path.is_file())[::100]
            version = [*size, *change_input(files), "--version", "1.1.0"]
            without = partial(write, str(changed), plain, *version, "--base", "none")
            based = partial(write, str(changed), base, *version)
            compare(case, ten, flags.repeats, without, based, [f"{root}/bench/1.1.0" for root in (plain, base)])
            shutil.rmtree(changed)
            shutil.rmtree(base)


if __name__ == "__main__":
    main()
