"""`show`: a grid of a dataset's images with labels and sizes, as a picture or as blocks in a terminal."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from reader.example import ImageFinder
from reader.info import DatasetInfo
from reader.records import InvalidRecordError
from reader.tools.scan import decode_image, open_split

_TILE, _CAPTION, _GAP, _FONT_SIZE = 160, 32, 8, 11  # pixels; a caption is below its tile
_TERMINAL_TILE = 24  # columns, and as many half rows
_UPPER_HALF = "▀"


class Shown(NamedTuple):
    """One record to show: its number in the split, its image, class name, and (height, width) as stored."""

    number: int
    image: Image.Image
    label: str
    size: tuple[int, int]


def choose(info: DatasetInfo, split: str, count: int, seed: int = 0) -> list[Shown]:
    """Some records of a split, drawn at random by `seed`, in file order.

    Raises:
        UsageError: no such split.
        ImageShardsError: a shard is missing or cut, or one of these records is corrupt.
    """
    reader = open_split(info, split)
    total = reader.table.total
    numbers = np.array(sorted(random.Random(seed).sample(range(total), min(count, total))))
    find, shown = ImageFinder(info.image_key, info.class_key), []
    for number, run, index in zip(numbers.tolist(), *reader.table.runs_of(numbers), strict=True):
        found = reader.read(int(run))
        record = found.record(int(index))
        try:
            encoded, label = find(record)
            pixels = decode_image(encoded, info.image.channels).pixels
        except ValueError as error:  # an InvalidRecordError too
            raise found.located(int(index), InvalidRecordError(str(error))) from None
        name = info.classes[label] if 0 <= label < info.num_classes else f"class {label}"
        image = Image.fromarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)).copy())
        shown.append(Shown(number, image, name, (image.height, image.width)))
    return shown


def grid(records: Sequence[Shown]) -> Image.Image:
    """One image of all, about as wide as high, each with its class, size and number in the split below."""
    columns = max(1, round(len(records) ** 0.5 * 1.2))
    rows = -(-len(records) // columns)
    step_x, step_y = _TILE + _GAP, _TILE + _CAPTION + _GAP
    sheet = Image.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), "white")
    draw, font = ImageDraw.Draw(sheet), _font()
    for index, record in enumerate(records):
        left, top = _GAP + index % columns * step_x, _GAP + index // columns * step_y
        sheet.paste(_tile(record.image, _TILE, "white"), (left, top))
        label = record.label
        while draw.textlength(label, font) > _TILE:
            label = f"{label[:-2]}…"
        draw.text((left, top + _TILE + 2), label, "black", font)
        height, width = record.size
        draw.text((left, top + _TILE + 16), f"{height} x {width}  record {record.number}", "dimgrey", font)
    return sheet


def blocks(records: Sequence[Shown], columns: int | None = None) -> str:
    """The same for a terminal with 24-bit colours: a character is two pixels, one above the other.

    Args:
        columns: characters a line; None for the terminal's.
    """
    across = max(1, (columns or shutil.get_terminal_size().columns) // (_TERMINAL_TILE + 1))
    lines: list[str] = []
    for start in range(0, len(records), across):
        row = records[start : start + across]
        lines += [" ".join(parts) for parts in zip(*(_half_blocks(record.image) for record in row), strict=True)]
        captions = [f"{height}x{width} record {number}" for number, _, _, (height, width) in row]
        lines.append(" ".join(f"{record.label[:_TERMINAL_TILE]:{_TERMINAL_TILE}}" for record in row))
        lines.append(" ".join(f"{caption:{_TERMINAL_TILE}}" for caption in captions))
    return "\n".join(lines)


def _tile(image: Image.Image, side: int, colour: str) -> Image.Image:
    """A square with the image in its middle, smaller if it has to be."""
    small, tile = image.copy(), Image.new("RGB", (side, side), colour)
    small.thumbnail((side, side))
    tile.paste(small, ((side - small.width) // 2, (side - small.height) // 2))
    return tile


def _half_blocks(image: Image.Image) -> list[str]:
    pixels = np.asarray(_tile(image, _TERMINAL_TILE, "black"))
    return [
        "".join(
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]}m\x1b[48;2;{b[0]};{b[1]};{b[2]}m{_UPPER_HALF}"
            for a, b in zip(pixels[y], pixels[y + 1], strict=True)
        )
        + "\x1b[0m"
        for y in range(0, _TERMINAL_TILE, 2)
    ]


def _font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    try:
        return ImageFont.truetype("DejaVuSans.ttf", _FONT_SIZE)  # if it is installed: it has the most letters
    except OSError:
        return ImageFont.load_default(_FONT_SIZE)
