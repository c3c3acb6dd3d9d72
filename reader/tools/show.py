"""`show`: a grid of a dataset's images with their labels and sizes."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from reader.decode import decode_pixels, stored_shape
from reader.example import ImageFinder
from reader.info import DatasetInfo, as_info
from reader.position import integer
from reader.records import InvalidRecordError
from reader.tools.checks import read_records

_TILE, _CAPTION, _GAP, _FONT_SIZE = 160, 32, 8, 11  # pixels; a caption is below its tile


class Shown(NamedTuple):
    """One record to show: its number in the split, its image, class name, and (height, width) as stored."""

    number: int
    image: Image.Image
    label: str
    size: tuple[int, int]


def show(
    info: DatasetInfo | str | os.PathLike[str], split: str = "train", *, count: int = 20, seed: int = 0
) -> Image.Image:
    """A grid of some images of a split with their labels and sizes, for a notebook or to be saved.

    Args:
        info: what `load_info` returned, or the URL.
        split: TFDS split string.
        count: how many images.
        seed: decides which.

    Raises:
        UsageError: no such split, or no image is asked for.
        ImageShardsError: a shard is missing or truncated, or one of these records is corrupt.
    """
    return grid(choose(as_info(info), split, count, seed))


def choose(info: DatasetInfo, split: str, count: int, seed: int = 0) -> list[Shown]:
    """Some records of a split, drawn at random by `seed`, in file order.

    Raises:
        UsageError: no such split, or `count` is below 1.
        ImageShardsError: a shard is missing or truncated, or one of these records is corrupt.
    """
    integer("count", count, 1)
    find, shown = ImageFinder(info.image_key, info.class_key), []
    for number, run, index in read_records(
        info, split, lambda total: np.sort(random.Random(seed).sample(range(total), min(count, total)))
    ):
        record = run.record(index)
        try:
            encoded, label = find(record)
            stored_shape(encoded, info.image.channels)  # which refuses a header that would take all memory
            pixels = decode_pixels(encoded, info.image.channels)
        except ValueError as error:  # an InvalidRecordError too
            raise run.located(index, InvalidRecordError(str(error))) from None
        name = info.classes[label] if 0 <= label < info.num_classes else f"class {label}"
        image = Image.fromarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)).copy())
        shown.append(Shown(number, image, name, (image.height, image.width)))
    return shown


def grid(records: Sequence[Shown]) -> Image.Image:
    """One image of all, about as wide as high; below each its class, size and number in the split."""
    columns = max(1, round(len(records) ** 0.5 * 1.2))
    rows = -(-len(records) // columns)
    step_x, step_y = _TILE + _GAP, _TILE + _CAPTION + _GAP
    sheet = Image.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    try:
        font = ImageFont.truetype("DejaVuSans.ttf", _FONT_SIZE)  # if it is installed: it has the most letters
    except OSError:
        font = ImageFont.load_default(_FONT_SIZE)  # type: ignore[assignment]
    for index, record in enumerate(records):
        left, top = _GAP + index % columns * step_x, _GAP + index // columns * step_y
        tile = record.image.copy()
        tile.thumbnail((_TILE, _TILE))
        sheet.paste(tile, (left + (_TILE - tile.width) // 2, top + (_TILE - tile.height) // 2))
        label = record.label
        while draw.textlength(label, font) > _TILE:
            label = f"{label[:-2]}…"
        draw.text((left, top + _TILE + 2), label, "black", font)
        height, width = record.size
        draw.text((left, top + _TILE + 16), f"{height} x {width}  record {record.number}", "dimgrey", font)
    return sheet
