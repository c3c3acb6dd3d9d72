"""Small published datasets whose bytes never change: saved positions name the checksums of their shards."""

from __future__ import annotations

import base64
from pathlib import Path

from beam_pipeline.schema.example import image_example
from tests.reading import shards

# 8×8 pixels, the left side not the right one's mirror image. Constants: no release of an encoder changes them.
IMAGES = {
    "jpeg": base64.b64decode(
        "/9j/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxOUlNSMj5aYVpQYEpRUk//2wBDAQ4ODhMREyYVFS"
        "ZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT0//wAARCAAIAAgDASIAAhEBAxEB/8QAFQABAQAAAAAA"
        "AAAAAAAAAAAAAAb/xAAdEAABBAIDAAAAAAAAAAAAAAABAAIDBAURISJB/8QAFQEBAQAAAAAAAAAAAAAAAAAABAX/xAAbEQACAwADAAAAAAAAAAAAAA"
        "ABAwACBAURQf/aAAwDAQACEQMRAD8AnK2Nu5bNuqUHV2yCsJHGYuA0Ha8B57IiKW7l9eYhSrdACL1qrZ9iR7P/2Q=="
    ),
    "png": base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAMklEQVR42mM8ISfHwMDAwMBg8eiRiMYdBhhgYsABcEqwIHPe3FAhUQcDA8OHDzbkWg"
        "4AYwwIMMfOQJ4AAAAASUVORK5CYII="
    ),
}
CLASSES = ("ant", "bee", "cat", "dog", "eel")
# name → image format, and split → records in each shard.
DATASETS: dict[str, tuple[str, dict[str, list[int]]]] = {
    "large": ("jpeg", {"train": [1100, 37, 963, 800], "validation": [70, 60]}),
    "medium": ("png", {"train": [65, 0, 65], "validation": [20]}),
    "small": ("jpeg", {"train": [37], "validation": [5]}),
}


def make_dataset(folder: Path, name: str) -> str:
    """Write one of `DATASETS` into a new folder and return that. A record's file name is its number.

    Numbers of the split `validation` begin at 100,000.
    """
    image_format, splits = DATASETS[name]

    def record(split: str, number: int) -> tuple[int, bytes]:
        number += 100_000 * (split != "train")
        label = (number * 40503 >> 7) % len(CLASSES)
        image = IMAGES[image_format]
        return label, image_example(image=image, size=(8, 8), class_id=label, label=CLASSES[label], path=str(number))

    options = {"size": (8, 8), "image_format": image_format, "classes": CLASSES}
    return shards.make_dataset(folder, splits, record=record, **options)
