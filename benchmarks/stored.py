"""The encoded images and labels that `material.kept` left: for readers that know no TFRecords. Needs NumPy only."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

SIZE, BATCH, WORKERS, SHARDS = 224, 64, 2, 8
SHUFFLED = 2048  # records in the shuffle buffers of the readers that have one


def stored(folder: str) -> tuple[list[bytes], list[int]]:
    """All encoded images in memory, and their labels."""
    data = (Path(folder) / "images.bin").read_bytes()
    offsets = np.load(Path(folder) / "offsets.npy").tolist()
    images = [data[begin:end] for begin, end in pairwise(offsets)]
    return images, np.load(Path(folder) / "labels.npy").tolist()
