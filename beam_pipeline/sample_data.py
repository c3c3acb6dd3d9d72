"""Draws a folder of photo-like pictures to try everything on, without a download.

    python -m beam_pipeline.sample_data DIR [--images 600] [--classes 5] [--seed 0] [--broken 3]

Each class is a shape. A picture shows several things of that shape, in any colour on any background: a small network
learns the classes in a minute, and not by colour. A few files can't be decoded, as in any real bucket. The same
arguments and the same Pillow give the same bytes.
"""

from __future__ import annotations

import argparse
import functools
import io
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from PIL import Image, ImageChops, ImageDraw, ImageFilter

from beam_pipeline.errors import EXIT_OK, ImageShardsError, UsageError, print_error
from beam_pipeline.machine import cpu_count
from beam_pipeline.text import one_line

Point = tuple[float, float]
Colour = tuple[int, int, int]

_SIZES = ((320, 240), (400, 300), (240, 320), (256, 256), (480, 320), (300, 400), (640, 480), (360, 360))
_SUFFIXES = (".jpg",) * 8 + (".jpeg", ".JPG", ".png")
_ORIENTATIONS = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
_EXIF_ORIENTATION = 0x0112


def draw_folder(folder: Path, images: int = 600, classes: int = 5, seed: int = 0, broken: int | None = None) -> int:
    """Draw `images` pictures and some broken files into class folders of `folder`.

    Args:
        folder: created if it is missing; files of an earlier call are overwritten.
        images: at least one per class; the classes take turns.
        classes: 1 to `len(SHAPES)`.
        seed: of the pictures. Picture number i is the same for any number of images.
        broken: additional files that can't be decoded; by default one per 200 images and at most 3, which the default
            `--max_reject_fraction` of 0.01 permits.

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
        raise UsageError(f"--images '{images}': give a number from {classes} (one per class) to 999999")
    if not 0 <= broken < 1000:
        raise UsageError(f"--broken '{broken}': give a number from 0 to 999")
    labels = list(SHAPES)[:classes]
    contents: dict[str, Callable[[], bytes]] = {}
    for number in range(images):
        label = labels[number % classes]
        suffix = Random(f"suffix {seed} {number}").choice(_SUFFIXES)
        draw = functools.partial(_draw_file, label, suffix, f"picture {seed} {number}")
        contents[f"{label}/{label}_{number:05d}{suffix}"] = draw
    for number in range(broken):
        label, kind = labels[number % classes], list(_BROKEN)[number % len(_BROKEN)]
        draw = functools.partial(_BROKEN[kind], label, f"broken {seed} {number}")
        contents[f"{label}/broken_{number:03d}_{kind}.jpg"] = draw
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a new or an empty folder")
    existing = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if others := sorted(existing - contents.keys()):
        raise UsageError(f"{folder} holds other files, such as {others[0]!r}; name a new or an empty folder")
    for label in labels:
        (folder / label).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(cpu_count()) as pool:  # Pillow draws without the GIL
        for _ in pool.map(lambda path: (folder / path).write_bytes(contents[path]()), contents):
            pass
    return broken


def _draw_file(label: str, suffix: str, seed: str) -> bytes:
    """A picture of any size, some gray, as a PNG or as a JPEG of any quality, some with an EXIF orientation."""
    random = Random(seed)
    image = draw_scene(SHAPES[label], random.choice(_SIZES), random)
    out, exif = io.BytesIO(), Image.Exif()
    if random.random() < 0.05:
        image = image.convert("L")
    if suffix == ".png":
        image.save(out, "PNG", compress_level=1)
        return out.getvalue()
    if random.random() < 0.06:
        orientation = random.choice(list(_ORIENTATIONS))
        image = image.transpose(_ORIENTATIONS[orientation])
        exif[_EXIF_ORIENTATION] = orientation
    image.save(out, "JPEG", quality=random.choice((70, 80, 85, 90, 95)), exif=exif)
    return out.getvalue()


def _draw_truncated(label: str, seed: str) -> bytes:
    data = _draw_file(label, ".jpg", seed)
    return data[: len(data) // 2]


# Kind of a broken file → a function from class and seed to its content.
_BROKEN: dict[str, Callable[[str, str], bytes]] = {
    "truncated": _draw_truncated,
    "text": lambda *_: b"<html><body>404: the photo that was here is gone</body></html>\n",
    "empty": lambda *_: b"",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command: returns its exit code."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m beam_pipeline.sample_data",
        description="Draw a folder of photo-like pictures in class folders, to try the pipeline on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help="new or empty folder")
    add("--images", type=int, default=600, metavar="N", help="pictures in all")
    add("--classes", type=int, default=5, metavar="K", help=f"the first 1 to {len(SHAPES)} of {', '.join(SHAPES)}")
    add("--seed", type=int, default=0, metavar="S", help="another seed, other pictures")
    broken_help = "additional files that can't be decoded (1 in 200 images, at most 3)"
    add("--broken", type=int, default=argparse.SUPPRESS, metavar="N", help=broken_help)
    flags = parser.parse_args(argv)
    try:
        broken = draw_folder(**vars(flags))
    except UsageError as error:
        return print_error(error)
    except OSError as error:
        return print_error(ImageShardsError(f"can't draw into {flags.folder}: {one_line(error)}"))
    labels, seconds = ", ".join(list(SHAPES)[: flags.classes]), time.monotonic() - started
    print(f"{flags.folder}: {flags.images} pictures of {labels}; {broken} broken files ({seconds:.1f} s)")
    return EXIT_OK


def _regular(corners: int, turn: float = 0.0) -> list[Point]:
    angles = [math.tau * (corner / corners + turn) for corner in range(corners)]
    return [(math.sin(angle), -math.cos(angle)) for angle in angles]


_STAR = [(x, y) if corner % 2 == 0 else (0.42 * x, 0.42 * y) for corner, (x, y) in enumerate(_regular(10))]
_CROSS = [(-0.3, -1), (0.3, -1), (0.3, -0.3), (1, -0.3), (1, 0.3), (0.3, 0.3),
          (0.3, 1), (-0.3, 1), (-0.3, 0.3), (-1, 0.3), (-1, -0.3), (-0.3, -0.3)]  # fmt: skip
# Outlines around (0, 0) in a circle of radius 1, of about equal area.
SHAPES: dict[str, list[Point]] = {
    "circle": _regular(48),
    "square": _regular(4, turn=0.125),
    "triangle": _regular(3),
    "star": _STAR,
    "cross": _CROSS,
}


def draw_scene(shape: list[Point], size: tuple[int, int], random: Random) -> Image.Image:
    """Several things of one shape on a mottled background, in uneven light, with noise: RGB of (width, height)."""
    tone = random.randint(50, 125)
    colours = [_near(tone, random), _near(tone, random)]
    weights = Image.new("L", size)
    for cells in (4, 14, 50):
        mottle = _noise((cells, cells), random).resize(size, Image.Resampling.BICUBIC)
        weights = ImageChops.add(weights, mottle.point(lambda value: value * 0.4))
    scene = Image.composite(Image.new("RGB", size, colours[0]), Image.new("RGB", size, colours[1]), weights)

    things, mask = _draw_things(shape, size, tone, random)
    shadow = ImageChops.offset(mask, min(size) // 40).filter(ImageFilter.GaussianBlur(min(size) / 60))
    scene.paste((12, 12, 20), mask=shadow.point(lambda alpha: alpha * 0.6))
    scene.paste(things, mask=mask)

    light = Image.linear_gradient("L").rotate(random.uniform(0, 360), fillcolor=128).crop((38, 38, 218, 218))
    light = light.resize(size).point(lambda value: 150 + value * 0.41)
    scene = ImageChops.multiply(scene, Image.merge("RGB", [light] * 3))
    scene = scene.filter(ImageFilter.GaussianBlur(random.uniform(0.2, 0.9)))
    strength = random.uniform(0.02, 0.12)
    grain = _noise(size, random).point(lambda value: 128 + (value - 128) * strength)
    return ImageChops.overlay(scene, Image.merge("RGB", [grain] * 3))


def _near(tone: int, random: Random) -> Colour:
    return tone + random.randint(-50, 50), tone + random.randint(-50, 50), tone + random.randint(-50, 50)


def _noise(size: tuple[int, int], random: Random) -> Image.Image:
    return Image.frombytes("L", size, random.randbytes(size[0] * size[1]))


def _draw_things(
    shape: list[Point], size: tuple[int, int], tone: int, random: Random
) -> tuple[Image.Image, Image.Image]:
    """Several things of one shape that don't overlap: their colours (RGB) and their mask (L).

    Each is lighter than the background's `tone`, so that it is visible in a gray picture, too.
    """
    width, height = size
    colours = Image.new("RGB", size)
    mask = Image.new("L", (2 * width, 2 * height))  # twice the size, for smooth outlines
    drawn: list[tuple[float, float, float]] = []
    for _ in range(random.randint(8, 40)):
        radius = random.uniform(0.14, 0.2) * min(size)
        x, y = random.uniform(radius, width - radius), random.uniform(radius, height - radius)
        if any(math.hypot(x - near_x, y - near_y) < radius + reach + 3 for near_x, near_y, reach in drawn):
            continue
        drawn.append((x, y, radius))
        colour = _near(min(205, tone + random.randint(80, 130)), random)
        ImageDraw.Draw(colours).circle((x, y), radius + 3, fill=colour)
        angle = math.radians(random.uniform(-15, 15))
        cos, sin = radius * math.cos(angle), radius * math.sin(angle)
        outline = [(2 * (x + cos * a - sin * b), 2 * (y + sin * a + cos * b)) for a, b in shape]
        ImageDraw.Draw(mask).polygon(outline, fill=255)
    return colours, mask.reduce(2)


if __name__ == "__main__":
    sys.exit(main())
