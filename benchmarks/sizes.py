"""What a stored size costs a training with random crops: bytes per image, and CPU to read it.

    python benchmarks/sizes.py [IMAGES] [--count 300] [--repeats 3]

Writes a dataset for each size and resize mode, then reads them in turns with random crops to 224 pixels.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import material
import turns
from turns import Case

import reader

WAYS = [("stretch", "224"), ("shorter", "256"), ("shorter", "320"), ("stretch", "none")]
READ_IMAGES = 4000


def main() -> None:
    """Print a row for each."""
    flags = turns.parser(__doc__, 300, 3).parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-sizes-") as scratch:
        source = material.images(flags.images, Path(scratch), flags.count)
        cases, stored = {}, {}
        for mode, size in WAYS:
            name = f"`--resize_mode {mode} --image_size {size}`"
            url = material.dataset(source, Path(scratch, f"{mode}-{size}"), resize_mode=mode, image_size=size)
            splits = reader.load_info(url).splits.values()
            stored[name] = f"{sum(shard.bytes for split in splits for shard in split.shards) / flags.count:,.0f}"
            cases[name] = Case("doors.numpy", {"url": url, "is_cropped": True})
        print(turns.table(turns.in_turns(cases, READ_IMAGES, flags.repeats), (), {"bytes per image": stored}))


if __name__ == "__main__":
    main()
