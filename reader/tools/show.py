"""`show`: a grid of a dataset's images with labels and sizes, as a picture or as blocks in a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from reader import order
from reader.batches import open_source
from reader.decode import decode_pixels
from reader.example import ImageFinder
from reader.info import DatasetInfo
from reader.records import InvalidRecordError

_TILE, _CAPTION, _GAP, _FONT_SIZE = 160, 32, 8, 11  # pixels; a caption is below its tile
_TERMINAL_TILE = 24  # columns, and as many half rows
_UPPER_HALF = "▀"

_Font = ImageFont.ImageFont | ImageFont.FreeTypeFont


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
    reader = open_source(info, split).reader
    table = reader.table
    draws = order.splitmix64(order.stream_key(seed, 0, "show"), np.arange(8 * count)) % np.uint64(table.total)
    numbers = np.sort(np.array(list(dict.fromkeys(draws.tolist()))[:count], np.int64))
    if table.total <= 2 * count:
        numbers = np.arange(table.total)[:: max(1, table.total // count)][:count]
    find, shown = ImageFinder(info.image_key, info.class_key), []
    for number, run, index in zip(numbers.tolist(), *table.runs_of(numbers), strict=True):
        found = reader.read(int(run))
        record = found.record(int(index))
        try:
            encoded, label = find(record)
            pixels = decode_pixels(encoded, info.image.channels)
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
        tile = record.image.copy()
        tile.thumbnail((_TILE, _TILE))
        sheet.paste(tile, (left + (_TILE - tile.width) // 2, top + (_TILE - tile.height) // 2))
        draw.text((left, top + _TILE + 2), _fit(record.label, draw, font), "black", font)
        height, width = record.size
        draw.text((left, top + _TILE + 16), f"{height} x {width}  record {record.number}", "dimgrey", font)
    return sheet


def blocks(records: Sequence[Shown], columns: int | None = None) -> str:
    """The same for a terminal with 24-bit colours: a character is two pixels, one above the other.

    Args:
        columns: characters a line; None for the terminal's.
    """
    across = max(1, (columns or shutil.get_terminal_size().columns) // (_TERMINAL_TILE + 1))
    lines = []
    for start in range(0, len(records), across):
        row = records[start : start + across]
        lines += [" ".join(parts) for parts in zip(*(_half_blocks(record.image) for record in row), strict=True)]
        captions = [f"{height}x{width} record {number}" for number, _, _, (height, width) in row]
        lines.append(" ".join(f"{record.label[:_TERMINAL_TILE]:{_TERMINAL_TILE}}" for record in row))
        lines.append(" ".join(f"{caption:{_TERMINAL_TILE}}" for caption in captions))
    return "\n".join(lines)


def _half_blocks(image: Image.Image) -> list[str]:
    tile = image.copy()
    tile.thumbnail((_TERMINAL_TILE, _TERMINAL_TILE))
    canvas = Image.new("RGB", (_TERMINAL_TILE, _TERMINAL_TILE))
    canvas.paste(tile, ((_TERMINAL_TILE - tile.width) // 2, (_TERMINAL_TILE - tile.height) // 2))
    pixels = np.asarray(canvas)
    return [
        "".join(
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]}m\x1b[48;2;{b[0]};{b[1]};{b[2]}m{_UPPER_HALF}"
            for a, b in zip(pixels[y], pixels[y + 1], strict=True)
        )
        + "\x1b[0m"
        for y in range(0, _TERMINAL_TILE, 2)
    ]


def _font() -> _Font:
    """The font of Matplotlib, which has far more letters than Pillow's own, without importing that."""
    matplotlib = find_spec("matplotlib")
    if matplotlib is not None and matplotlib.origin is not None:
        path = Path(matplotlib.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        if path.exists():
            return ImageFont.truetype(path, _FONT_SIZE)
    return ImageFont.load_default(_FONT_SIZE)


def _fit(text: str, draw: ImageDraw.ImageDraw, font: _Font) -> str:
    """The text, cut if it is wider than a tile."""
    if draw.textlength(text, font) <= _TILE:
        return text
    while draw.textlength(f"{text}…", font) > _TILE:
        text = text[:-1]
    return f"{text}…"
