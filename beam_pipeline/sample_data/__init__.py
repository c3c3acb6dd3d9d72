"""Draws a folder of photo-like pictures to try everything on, without a download.

    python -m beam_pipeline.sample_data DIR [--images 600] [--classes 5] [--seed 0] [--broken 3]

Each class is a shape, and a handful of things of that shape are on each picture, in any colour, on any ground: a small
network learns the classes in a minute, and not by colour. With them come a few files that can't be decoded, as in any
real bucket. The same arguments and the same Pillow give the same bytes.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import NoReturn

from PIL import Image, ImageChops, ImageDraw, ImageFilter

from beam_pipeline.errors import EXIT_FAILED, EXIT_OK, UsageError, one_line

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


Point = tuple[float, float]
Colour = tuple[int, int, int]


# The shapes, as outlines around (0, 0) that fill a circle of radius 1 about evenly.


def _regular(corners: int, turn: float = 0.0) -> list[Point]:
    angles = [math.tau * (corner / corners + turn) for corner in range(corners)]
    return [(math.sin(angle), -math.cos(angle)) for angle in angles]


def _star() -> list[Point]:
    points = _regular(10)
    return [(x, y) if corner % 2 == 0 else (0.42 * x, 0.42 * y) for corner, (x, y) in enumerate(points)]


def _cross() -> list[Point]:
    arm = 0.3
    quarter = [(-arm, -1.0), (arm, -1.0), (arm, -arm)]
    turned = [quarter]
    for _ in range(3):
        turned.append([(-y, x) for x, y in turned[-1]])
    return [point for part in turned for point in part]


SHAPES: dict[str, list[Point]] = {
    "circle": _regular(48),
    "square": _regular(4, turn=0.125),
    "triangle": _regular(3),
    "star": _star(),
    "cross": _cross(),
}


def draw_scene(shape: list[Point], size: tuple[int, int], random: Random) -> Image.Image:
    """Some things of one shape lying on a ground, in soft light: RGB of `size` (width, height)."""
    ground, ground_colour = _draw_ground(size, random)
    things, mask = _draw_things(shape, size, ground_colour, random)
    short = min(size)

    shadow = Image.new("L", size)
    shadow.paste(mask, (short // 50 + 1, short // 40 + 2))
    shadow = shadow.filter(ImageFilter.GaussianBlur(short / 60)).point(lambda alpha: alpha * 0.6)
    ground.paste((12, 12, 20), mask=shadow)
    # A blurred mask is darker near the edge: things look rounded.
    rounding = mask.filter(ImageFilter.GaussianBlur(short / 45)).point(lambda alpha: 120 + alpha * 0.53)
    things = ImageChops.multiply(things, Image.merge("RGB", (rounding,) * 3))
    scene = Image.composite(things, ground, mask)

    light = Image.linear_gradient("L").rotate(random.uniform(0, 360), Image.Resampling.BILINEAR, fillcolor=128)
    light = light.crop((38, 38, 218, 218)).resize(size, Image.Resampling.BILINEAR).point(lambda v: 150 + v * 0.41)
    scene = ImageChops.multiply(scene, Image.merge("RGB", (light,) * 3))
    scene = scene.filter(ImageFilter.GaussianBlur(random.uniform(0.2, 0.9)))
    return ImageChops.overlay(scene, _draw_grain(size, random))


def _draw_ground(size: tuple[int, int], random: Random) -> tuple[Image.Image, Colour]:
    """A ground of two tones of one colour, mottled or grained like wood, and that colour."""
    tone = random.randint(50, 125)
    colour = (tone + random.randint(-45, 45), tone + random.randint(-45, 45), tone + random.randint(-45, 45))
    other = tuple(max(0, min(255, value + random.randint(-60, 60))) for value in colour)
    stretch = random.choice((1.0, 1.0, 0.2, 5.0))
    weights = Image.new("L", size, 0)
    for cells, share in ((4, 0.5), (14, 0.3), (50, 0.35)):
        across = max(2, round(cells * math.sqrt(stretch)))
        down = max(2, round(cells * size[1] / size[0] / math.sqrt(stretch)))
        noise = Image.frombytes("L", (across, down), random.randbytes(across * down))
        noise = noise.resize(size, Image.Resampling.BICUBIC)
        weights = ImageChops.add(weights, noise.point(lambda value, share=share: value * share))
    ground = Image.composite(Image.new("RGB", size, colour), Image.new("RGB", size, other), weights)
    for _ in range(random.randint(0, 4)):  # out of focus, without an outline that could be taken for a thing's
        _draw_blot(ground, random)
    return ground, colour


def _draw_blot(ground: Image.Image, random: Random) -> None:
    width, height = ground.size
    radius = random.uniform(0.1, 0.35) * min(width, height)
    blot = Image.radial_gradient("L").resize((round(2 * radius), round(random.uniform(1, 3) * radius)))
    blot = blot.point(lambda value: max(0, 170 - value) * 0.8)
    place = (random.randint(-20, width - 20), random.randint(-20, height - 20))
    ground.paste(tuple(random.randint(20, 235) for _ in range(3)), place, blot)


def _draw_things(
    shape: list[Point], size: tuple[int, int], ground: Colour, random: Random
) -> tuple[Image.Image, Image.Image]:
    """Three to six things of one shape, apart from each other: their colours (RGB) and where they are (L)."""
    width, height = size
    colours = Image.new("RGB", size)
    mask = Image.new("L", (2 * width, 2 * height))  # twice the size, for smooth outlines
    draw_colours, draw_mask = ImageDraw.Draw(colours), ImageDraw.Draw(mask)
    placed: list[tuple[float, float, float]] = []
    wanted = random.randint(3, 6)
    for _ in range(60):
        if len(placed) == wanted:
            break
        radius = random.uniform(0.14, 0.2) * min(size)
        x, y = random.uniform(radius, width - radius), random.uniform(radius, height - radius)
        if any(math.hypot(x - ox, y - oy) < radius + other + 3 for ox, oy, other in placed):
            continue
        placed.append((x, y, radius))
        box = (x - radius - 3, y - radius - 3, x + radius + 3, y + radius + 3)
        draw_colours.ellipse(box, fill=_colour_above(ground, random))
        angle = math.radians(random.uniform(-15, 15))
        cos, sin = math.cos(angle), math.sin(angle)
        outline = [(2 * (x + radius * (cos * a - sin * b)), 2 * (y + radius * (sin * a + cos * b))) for a, b in shape]
        draw_mask.polygon(outline, fill=255)
    return colours, mask.reduce(2)


def _colour_above(ground: Colour, random: Random) -> Colour:
    """Any colour lighter than the ground, so that things can be told from it in a grey picture too."""
    while True:
        colour = (random.randint(40, 255), random.randint(40, 255), random.randint(40, 255))
        if _brightness(colour) - _brightness(ground) > 60:
            return colour


def _brightness(colour: Colour) -> float:
    red, green, blue = colour
    return 0.3 * red + 0.59 * green + 0.11 * blue


def _draw_grain(size: tuple[int, int], random: Random) -> Image.Image:
    """A sensor's noise around middle grey, the same in all channels; a tile of it is repeated."""
    side = 128
    strength = random.uniform(0.02, 0.12)
    tile = Image.frombytes("L", (side, side), random.randbytes(side * side))
    tile = tile.point(lambda value: 128 + (value - 128) * strength)
    grain = Image.new("L", size)
    for x in range(0, size[0], side):
        for y in range(0, size[1], side):
            grain.paste(tile, (x, y))
    return Image.merge("RGB", (grain,) * 3)
