"""Draws a folder of photo-like pictures to try the whole product on, without a download.

    python -m beam_pipeline.sample_data DIR [--images 600] [--classes 5] [--seed 0] [--broken 3]

Each class is a shape, a handful of which lie on each picture, in any colour, on any ground: a small network learns
the classes in a minute, and nobody learns them from colours. Beside the pictures lie a few files that no decoder
reads, as in any real bucket. The same arguments and the same Pillow give the same bytes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from random import Random

from PIL import Image

from beam_pipeline.errors import UsageError
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
        images: at least one a class; dealt to the classes in turn.
        classes: 1 to `len(SHAPES)`.
        seed: another seed, other pictures. Picture number i is the same for any number of images.
        broken: files beside them that can't be decoded; by default one to 200 images and at most 3, which the
            pipeline's default `--max_reject_fraction` of 0.01 lets pass.

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
    pictures = [_picture_path(number, labels, seed) for number in range(images)]
    breakages = [_broken_path(number, labels) for number in range(broken)]
    _make_room(folder, pictures + breakages)
    for label in labels:
        (folder / label).mkdir(exist_ok=True)

    def draw(number: int) -> None:
        path = pictures[number]
        (folder / path).write_bytes(picture_bytes(PurePosixPath(path).parent.name, number, seed))

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow draws without the GIL
        for _ in pool.map(draw, range(images)):
            pass
    for number, path in enumerate(breakages):
        (folder / path).write_bytes(_broken_bytes(number, labels, seed))
    return broken


def _picture_path(number: int, labels: Sequence[str], seed: int) -> str:
    label = labels[number % len(labels)]
    return f"{label}/{label}_{number:05d}{_Kind(number, seed).suffix}"


def _broken_path(number: int, labels: Sequence[str]) -> str:
    label = labels[number % len(labels)]
    return f"{label}/broken_{number:03d}_{BROKEN_KINDS[number % len(BROKEN_KINDS)]}.jpg"


def _make_room(folder: Path, files: list[str]) -> None:
    """Make `folder` unless it is there.

    Raises:
        UsageError: it is a file, or holds other files than `files`: the same call again may overwrite its own.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if others := sorted(found - set(files)):
        raise UsageError(f"{folder} holds other files, such as {others[0]!r}; name a new or an empty folder")


class _Kind:
    """What picture number `number` is like as a file: its size, format, quality and orientation."""

    def __init__(self, number: int, seed: int) -> None:
        random = Random(f"kind {seed} {number}")
        self.size = random.choice(_SIZES)
        self.png = random.random() < 0.08
        self.grey = random.random() < 0.05
        self.orientation = random.choice(list(_ORIENTATIONS)) if not self.png and random.random() < 0.06 else None
        self.quality = random.choice((70, 80, 85, 90, 95))
        self.suffix = ".png" if self.png else random.choice((".jpg", ".jpg", ".jpg", ".jpeg", ".JPG"))


def picture_bytes(label: str, number: int, seed: int) -> bytes:
    """One encoded picture of class `label`, a key of `SHAPES`: a JPEG, or a PNG for one in twelve."""
    kind = _Kind(number, seed)
    image = draw_scene(SHAPES[label], kind.size, Random(f"scene {seed} {number}"))
    if kind.grey:
        image = image.convert("L")
    encoded = io.BytesIO()
    if kind.png:
        image.save(encoded, "PNG", compress_level=1)
        return encoded.getvalue()
    exif = Image.Exif()
    if kind.orientation is not None:
        image = image.transpose(_ORIENTATIONS[kind.orientation])
        exif[_EXIF_ORIENTATION] = kind.orientation
    image.save(encoded, "JPEG", quality=kind.quality, exif=exif)
    return encoded.getvalue()


def _broken_bytes(number: int, labels: Sequence[str], seed: int) -> bytes:
    kind = BROKEN_KINDS[number % len(BROKEN_KINDS)]
    if kind == "empty":
        return b""
    if kind == "text":
        return b"<html><body>404: the photo that was here is gone</body></html>\n"
    image = draw_scene(SHAPES[labels[number % len(labels)]], _SIZES[0], Random(f"broken {seed} {number}"))
    encoded = io.BytesIO()
    image.save(encoded, "JPEG")
    return encoded.getvalue()[: encoded.tell() // 2]
