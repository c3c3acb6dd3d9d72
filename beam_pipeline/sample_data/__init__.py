"""Draws a folder of photo-like pictures to try everything on, without a download.

    python -m beam_pipeline.sample_data DIR [--images 600] [--classes 5] [--seed 0] [--broken 3]

Each class is a shape, and a handful of things of that shape are on each picture, in any colour, on any ground: a small
network learns the classes in a minute, and not by colour. With them come a few files that can't be decoded, as in any
real bucket. The same arguments and the same Pillow give the same bytes.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import NoReturn

from PIL import Image

from beam_pipeline.errors import EXIT_FAILED, EXIT_OK, UsageError, one_line
from beam_pipeline.sample_data.scenes import SHAPES, draw_scene

DEFAULT_IMAGES = 600
DEFAULT_CLASSES = 5
BROKEN_KINDS = ("truncated", "text", "empty")
_SIZES = ((320, 240), (400, 300), (240, 320), (256, 256), (480, 320), (300, 400), (640, 480), (360, 360))
_ORIENTATIONS = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
_EXIF_ORIENTATION = 0x0112


def draw_folder(
    folder: Path,
    images: int = DEFAULT_IMAGES,
    classes: int = DEFAULT_CLASSES,
    seed: int = 0,
    broken: int | None = None,
) -> int:
    """Draw `images` pictures and some broken files into class folders of `folder`.

    Args:
        folder: made if it is missing; what the same call drew there before is overwritten.
        images: at least one a class; each class in turn gets one.
        classes: 1 to `len(SHAPES)`.
        seed: another seed, other pictures. Picture number i is the same for any number of images.
        broken: additional files that can't be decoded; by default one to 200 images and at most 3, which the
            pipeline's default `--max_reject_fraction` of 0.01 permits.

    Returns:
        The number of broken files.

    Raises:
        UsageError: a number is out of range, or `folder` holds other files.
    """
    if broken is None:
        broken = min(3, images // 200)
    if not 1 <= classes <= len(SHAPES):
        raise UsageError(f"--classes '{classes}': give a number from 1 to {len(SHAPES)}: there are no more shapes")
    if not classes <= images < 10**6:
        raise UsageError(f"--images '{images}': give a number from {classes} (one a class) to 999999")
    if not 0 <= broken < 1000:
        raise UsageError(f"--broken '{broken}': give a number from 0 to 999")
    labels = list(SHAPES)[:classes]
    pictures = [_Picture(labels[number % classes], number, seed) for number in range(images)]
    kinds = {f"{labels[i % classes]}/broken_{i:03d}_{BROKEN_KINDS[i % 3]}.jpg": i for i in range(broken)}
    _make_folders(folder, labels, {picture.path for picture in pictures} | kinds.keys())
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow draws without the GIL
        for _ in pool.map(lambda picture: (folder / picture.path).write_bytes(picture.encoded()), pictures):
            pass
    for path, number in kinds.items():
        (folder / path).write_bytes(_broken_bytes(number, labels, seed))
    return broken


def _make_folders(folder: Path, labels: Sequence[str], files: set[str]) -> None:
    """Make the class folders.

    Raises:
        UsageError: `folder` is a file, or holds other files than `files`: the same call again may overwrite its own.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a new or an empty folder")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if others := sorted(found - files):
        raise UsageError(f"{folder} holds other files, such as {others[0]!r}; name a new or an empty folder")
    for label in labels:
        (folder / label).mkdir(parents=True, exist_ok=True)


class _Picture:
    """What picture number `number` is like as a file: its size, format, quality and orientation."""

    def __init__(self, label: str, number: int, seed: int) -> None:
        random = Random(f"kind {seed} {number}")
        self._label, self._scene = label, f"scene {seed} {number}"
        self._size = random.choice(_SIZES)
        self._png = random.random() < 0.08
        self._gray = random.random() < 0.05
        self._orientation = random.choice(list(_ORIENTATIONS)) if not self._png and random.random() < 0.06 else None
        self._quality = random.choice((70, 80, 85, 90, 95))
        suffix = ".png" if self._png else random.choice((".jpg", ".jpg", ".jpg", ".jpeg", ".JPG"))
        self.path = f"{label}/{label}_{number:05d}{suffix}"

    def encoded(self) -> bytes:
        """A JPEG, or a PNG for one in twelve."""
        image = draw_scene(SHAPES[self._label], self._size, Random(self._scene))
        out, exif = io.BytesIO(), Image.Exif()
        if self._gray:
            image = image.convert("L")
        if self._png:
            image.save(out, "PNG", compress_level=1)
            return out.getvalue()
        if self._orientation is not None:
            image = image.transpose(_ORIENTATIONS[self._orientation])
            exif[_EXIF_ORIENTATION] = self._orientation
        image.save(out, "JPEG", quality=self._quality, exif=exif)
        return out.getvalue()


def _broken_bytes(number: int, labels: Sequence[str], seed: int) -> bytes:
    kind = BROKEN_KINDS[number % len(BROKEN_KINDS)]
    if kind == "empty":
        return b""
    if kind == "text":
        return b"<html><body>404: the photo that was here is gone</body></html>\n"
    out = io.BytesIO()
    scene = draw_scene(SHAPES[labels[number % len(labels)]], _SIZES[0], Random(f"broken {seed} {number}"))
    scene.save(out, "JPEG")
    return out.getvalue()[: out.tell() // 2]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as the pipeline does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see python -m beam_pipeline.sample_data --help")


def main(argv: Sequence[str] | None = None) -> int:
    """The command: returns its exit code."""
    started = time.monotonic()
    parser = _Parser(
        prog="python -m beam_pipeline.sample_data",
        description="Draw a folder of photo-like pictures in class folders, to try the pipeline on.",
        allow_abbrev=False,
    )
    shapes = f"the first 1 to {len(SHAPES)} of {', '.join(SHAPES)} (%(default)s)"
    broken_help = "additional files that can't be decoded (1 in 200 images, at most 3)"
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help="new or empty folder")
    add("--images", type=int, default=DEFAULT_IMAGES, metavar="N", help="pictures in all (%(default)s)")
    add("--classes", type=int, default=DEFAULT_CLASSES, metavar="K", help=shapes)
    add("--seed", type=int, default=0, metavar="S", help="another seed, other pictures (%(default)s)")
    add("--broken", type=int, metavar="N", help=broken_help)
    try:
        flags = parser.parse_args(argv)
        broken = draw_folder(flags.folder, flags.images, flags.classes, flags.seed, flags.broken)
    except UsageError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: can't draw into {flags.folder}: {one_line(error)}", file=sys.stderr)
        return EXIT_FAILED
    labels, seconds = ", ".join(list(SHAPES)[: flags.classes]), time.monotonic() - started
    print(f"{flags.folder}: {flags.images} pictures of {labels}; {broken} broken files ({seconds:.1f} s)")
    return EXIT_OK
