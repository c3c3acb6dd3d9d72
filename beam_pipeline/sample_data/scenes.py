"""Draws one picture of the sample data: a handful of things of one shape on a mottled ground, in soft light.

Everything random comes from the caller's generator, and only Pillow draws: the same generator gives the same pixels.
"""

from __future__ import annotations

import math
from random import Random

from PIL import Image, ImageChops, ImageDraw, ImageFilter

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
