"""Images and datasets to measure on: a folder that the caller names, or drawn ones, repeated by hard links."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # some programs use the servers of the tests

import beam_pipeline
from beam_pipeline.sample_data import draw_folder

SUFFIXES = (".jpg", ".jpeg", ".png")
KEPT = Path(__file__).parent.parent / "build" / "bench"


def images(given: Path | None, scratch: Path, count: int) -> Path:
    """A folder of class folders with `count` images: those of `given`, or 300 drawn ones, again and again.

    Args:
        given: folder of class folders, or None.
        scratch: an empty folder on the same disk, if links are to be links.
        count: how many files the result holds.
    """
    if given is None:
        given = scratch / "drawn"
        draw_folder(given, images=300, broken=0)
    target = scratch / "images"
    files = sorted(path for path in given.rglob("*") if path.suffix.lower() in SUFFIXES)
    for number in range(count):
        path = files[number * len(files) // count if count < len(files) else number % len(files)]
        link = target / path.parent.name / f"{number // len(files):04d}_{path.name}"
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, link)
        except OSError:
            shutil.copyfile(path, link)
    return target


def dataset(source: Path, scratch: Path, **flags: Any) -> str:
    """A published dataset of a folder of images; `flags` are fields of `Config`."""
    places = {"input": str(source), "output": str(scratch / "datasets"), "name": "bench"}
    manifest = beam_pipeline.run(beam_pipeline.Config(**places, **flags))
    assert manifest is not None
    return manifest.url


def kept(given: Path | None, count: int) -> tuple[str, Path]:
    """The dataset of `count` images, and a folder with the same stored bytes for other readers; both kept under build/.

    The folder holds `images.bin` (all encoded images), `offsets.npy` (int64 [count + 1]) and `labels.npy` (int64).
    """
    files = (
        sorted(f"{path}:{path.stat().st_size}" for path in given.rglob("*") if path.is_file()) if given else ["drawn"]
    )
    folder = KEPT / f"{count}-{hashlib.sha256(repr(files).encode()).hexdigest()[:12]}"
    if not (folder / "labels.npy").exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=KEPT) as scratch:
            print(f"converting {count:,} images", file=sys.stderr)
            source = images(given, Path(scratch), count)
            shutil.rmtree(folder, ignore_errors=True)
            _unpack(Path(dataset(source, folder)), folder)
    return str(folder / "datasets" / "bench" / "1.0.0"), folder


def _unpack(url: Path, folder: Path) -> None:
    """The images and labels of a dataset, read by TensorFlow alone."""
    import tensorflow as tf

    keys = {"image": tf.io.FixedLenFeature([], tf.string), "class": tf.io.FixedLenFeature([], tf.int64)}
    records = tf.data.TFRecordDataset(sorted(map(str, url.glob("*.tfrecord-*"))))
    labels, sizes = [], [0]
    with (folder / "images.bin").open("wb") as file:
        for batch in records.batch(256).map(lambda batch: tf.io.parse_example(batch, keys)).as_numpy_iterator():
            for image in batch["image"]:
                sizes.append(file.write(image))
            labels.append(batch["class"])
    np.save(folder / "offsets.npy", np.cumsum(sizes))
    np.save(folder / "labels.npy", np.concatenate(labels))
