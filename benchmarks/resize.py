"""The compiled resize compared with Pillow's: alone, in the codec, and in the reader's random crops.

    python benchmarks/resize.py [IMAGES] [--count 100] [--repeats 9]

IMAGES is a folder of photos (drawn pictures without). The ways run in turns in one thread; CPU µs per image, median
(least – most), and the quality of the result compared with a resize in float64. Their pixels are compared, too. It
prints Markdown for RESULTS.md.
"""

from __future__ import annotations

import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import turns
from material import images as material
from PIL import Image
from turns import spread

import beam_pipeline
from beam_pipeline import images
from beam_pipeline.images import resize
from reader.augment import random_resized_crop
from reader.info import ImageInfo
from reader.pixels import ImageDecoder, decode_pixels
from tests.images import reference

SIZES = ((500, 224), (500, 160), (1000, 224), (256, 224))  # width of 4:3, side of a square
STORED = (224, 256, 384, None)


class Task(NamedTuple):
    """One image: what is measured, which gives pixels or a file, and the pixels that float64 gives."""

    run: Callable[[], Any]
    exact: Callable[[], np.ndarray] | None = None


def main() -> None:
    """Measure and print."""
    given = turns.parser(__doc__, 100, 9).parse_args()
    if not resize.kernel():
        sys.exit("the resize isn't compiled: install a C compiler, then `make setup`")
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as scratch:
        folder = material(given.images, Path(scratch), given.count)
        photos = [path.read_bytes() for path in sorted(folder.rglob("*.*"))]
    print("| | Pillow, µs | compiled, µs | times as fast | dB |\n|---|---|---|---|---|")
    for width, side in SIZES:
        tasks = [alone(data, width, side) for data in photos[:20]]
        compare(f"resize {width}×{width * 3 // 4} → {side}", tasks, given.repeats)
    options = options_of(224)
    compare("file → JPEG of 224", [Task(partial(images.convert, data, options)) for data in photos], given.repeats)
    for stored in STORED:
        tasks = [crop(images.convert(data, options_of(stored)), seed) for seed, data in enumerate(photos)]
        compare(f"random crop → 224, stored {stored or 'as it is'}", tasks, given.repeats)
    print("\n| scratch memory off a multiple of 32 bytes by | 0, µs | 1, µs | 16, µs |\n|---|---|---|---|")
    for stored in filter(None, STORED):
        offsets(stored, [images.convert(data, options_of(stored)).data for data in photos], given.repeats)


def options_of(size: int | None) -> images.ImageOptions:
    """The codec's options for squares of a size."""
    return beam_pipeline.Config(input="in", output="out", name="bench", image_size=size or "none").image_options


def alone(data: bytes, width: int, side: int) -> Task:
    """The filter, from a Pillow image to a Pillow image."""
    image = Image.open(io.BytesIO(data)).convert("RGB").resize((width, width * 3 // 4), Image.Resampling.LANCZOS)
    size, box = (side, side), (0, 0, *image.size)
    exact = partial(reference.resize, np.asarray(image), size, box, "bilinear")
    return Task(partial(resize.resize_image, image, size, "bilinear", box), exact)


def crop(image: images.EncodedImage, seed: int) -> Task:
    """The reader's decoder with a random crop of one stored image."""
    size, row, augment = (image.height, image.width), np.empty((224, 224, 3), np.uint8), random_resized_crop()
    decode = ImageDecoder(ImageInfo("jpeg", 3, size, size, (), ()), 224, augment=augment, is_foreign=False)

    def run() -> np.ndarray:
        decode(image.data, row, seed)
        return row.copy()

    def exact() -> np.ndarray:
        top, left, height, width = augment.window(*size, seed)
        pixels = decode_pixels(image.data, 3)
        return reference.resize(pixels, (224, 224), (left, top, left + width, top + height), "bilinear")

    return Task(run, exact)


def compare(title: str, tasks: Sequence[Task], rounds: int) -> None:
    """Print a row: both ways in turns, whose results must be equal."""
    us: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for compiled, measured in us.items():
            with by(compiled):
                start = time.thread_time()
                for task in tasks:
                    task.run()
                measured.append((time.thread_time() - start) / len(tasks) * 1e6)
    results = {}
    for compiled in us:
        with by(compiled):
            results[compiled] = [task.run() for task in tasks]
    for one, other in zip(*results.values(), strict=True):
        assert one == other if isinstance(one, images.EncodedImage) else np.array_equal(one, other)
    pairs = zip(tasks, results[True], strict=True)
    db = [reference.psnr(np.asarray(result), task.exact()) for task, result in pairs if task.exact]
    ratios = [slow / fast for slow, fast in zip(us[False], us[True], strict=True)]
    figures = (spread(us[False]), spread(us[True]), spread(ratios, ".2f"), f"{statistics.fmean(db):.1f}" if db else "")
    print(f"| {title} | {' | '.join(figures)} |", flush=True)


def offsets(side: int, encoded: Sequence[bytes], rounds: int) -> None:
    """Print a row: decoding into scratch memory that begins at these offsets, and resizing from there to 224."""
    row, memory = np.empty((224, 224, 3), np.uint8), np.empty(side * side * 3 + 64, np.uint8)
    us: dict[int, list[float]] = {0: [], 1: [], 16: []}
    for _ in range(rounds):
        for offset, measured in us.items():
            begin = -memory.ctypes.data % 32 + offset
            scratch = memory[begin : begin + side * side * 3].reshape(side, side, 3)
            start = time.thread_time()
            for data in encoded:
                decode_pixels(data, 3, scratch, is_foreign=False)
                resize.resize_into(scratch, (10, 10, side - 30, side - 20), row)
            measured.append((time.thread_time() - start) / len(encoded) * 1e6)
    print(f"| decode {side} → 224 | {' | '.join(map(spread, us.values()))} |", flush=True)


def by(compiled: bool) -> AbstractContextManager[object]:
    """In this block the compiled resize is used, or Pillow's."""
    return nullcontext() if compiled else mock.patch.object(resize, "kernel", lambda: None)


if __name__ == "__main__":
    sys.exit(main())
