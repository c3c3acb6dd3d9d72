"""`show`: a grid of a dataset's images with their labels and sizes, and what augmentation makes of them."""

from __future__ import annotations

import base64
import io
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.schema.manifest import FOREIGN_KEY
from beam_pipeline.text import name_line
from reader import order
from reader.augment import BY_NAME, Augment
from reader.example import ImageFinder
from reader.hosts import integer
from reader.info import DatasetInfo, as_info
from reader.pixels import Encoded, ImageDecoder, Pixels, decode_pixels, stored_shape, target_size
from reader.runs import Integers, InvalidRecordError
from reader.select import Classes, select
from reader.tools.checks import read_records

_TILE, _CAPTION, _GAP, _FONT_SIZE = 160, 32, 8, 11  # pixels; a tile is at most a square, its caption below it


class Shown(NamedTuple):
    """One record to show.

    Attributes:
        number: of the record in the split.
        image: as stored.
        label: class name.
        size: (height, width) as stored, in pixels.
        augmented: what `train_batches` makes of it in each epoch, from the first.
    """

    number: int
    image: Image.Image
    label: str
    size: tuple[int, int]
    augmented: tuple[Image.Image, ...] = ()


def show(
    info: DatasetInfo | str | os.PathLike[str],
    split: str = "train",
    *,
    count: int = 20,
    seed: int = 0,
    augment: Augment | str | None = None,
    image_size: int | tuple[int, int] | None = None,
    epochs: int = 4,
    classes: Classes = None,
) -> Image.Image:
    """A grid of some images of a split with their labels and sizes, for a notebook or to be saved.

    With `augment`, to the right of each image is what `train_batches` makes of it with the same `split`, `seed`,
    `augment` and `image_size`, epoch after epoch.

    Args:
        info: what `load_info` returned, or the URL.
        split: TFDS split string.
        count: how many images.
        seed: decides which, and is augmentation's.
        augment: `f(image, seed)`, of `reader.augment` or your own, or what `--augment` of `imageshards train` takes;
            None shows the stored images only.
        image_size: side or (height, width) in pixels of the augmented images; None for the stored size.
        epochs: how many of them are shown.
        classes: show these only; as of `train_batches`.

    Raises:
        UsageError: no such split or class, no image or epoch is asked for, the augment failed, or stored sizes are
            mixed and augmentation needs `image_size`.
        ImageShardsError: a shard is missing or truncated, or one of these records is corrupt.
    """
    function: Any = BY_NAME.get(augment, augment) if isinstance(augment, str) else augment
    return grid(choose(as_info(info), split, count, seed, function, image_size, epochs, classes))


def choose(
    info: DatasetInfo,
    split: str,
    count: int,
    seed: int = 0,
    augment: Augment | None = None,
    image_size: int | tuple[int, int] | None = None,
    epochs: int = 4,
    classes: Classes = None,
) -> list[Shown]:
    """Some records of a split, drawn at random by `seed`, in file order. Args and Raises as `show`."""
    integer("count", count, 1)
    integer("seed", seed)
    integer("epochs", epochs, 1)
    if augment is None and image_size is not None:
        raise UsageError("image_size is the size of augmented images: give augment, too")
    decode = None
    if augment is not None:
        size, is_foreign = target_size(info.image, image_size), FOREIGN_KEY in info.manifest
        decode = ImageDecoder(info.image, size, augment=augment, is_foreign=is_foreign)
    find, shown = ImageFinder(info.image_key, info.class_key), []
    selection = select(info, split, classes)

    def drawn(total: int) -> Integers:
        there = range(total) if selection is None else selection.numbers().tolist()
        return np.sort(random.Random(seed).sample(there, min(count, len(there))))

    for number, run, index in read_records(info, split, drawn):
        record = run.record(index)
        try:
            encoded, label = find(record)
            stored_shape(encoded, info.image.channels)  # which refuses a header that would take all memory
            image = _image(decode_pixels(encoded, info.image.channels))
            augmented = () if decode is None else _augmented(decode, encoded, number, seed, epochs)
        except UsageError:  # of the augment
            raise
        except ValueError as error:  # an InvalidRecordError too
            raise run.located(index, InvalidRecordError(str(error))) from None
        name = info.classes[label] if 0 <= label < info.num_classes else f"class {label}"
        if selection is not None and 0 <= label < info.num_classes:
            name = selection.classes[selection.labels[label]]
        shown.append(Shown(number, image, name, (image.height, image.width), augmented))
    return shown


def _augmented(decode: ImageDecoder, encoded: Encoded, number: int, seed: int, epochs: int) -> tuple[Image.Image, ...]:
    """A record's image as `train_batches` yields it in each epoch."""
    images = []
    for epoch in range(epochs):
        row = np.empty(decode.shape, np.uint8)
        decode(encoded, row, int(order.augment_seeds(np.array([number]), seed, epoch)[0]))
        images.append(_image(row))
    return tuple(images)


def _image(pixels: Pixels) -> Image.Image:
    """uint8 [height, width, 1 or 3] as RGB."""
    return Image.fromarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)).copy())


def grid(records: Sequence[Shown]) -> Image.Image:
    """One image of all, about as wide as high; below each its class, size and number in the split.

    Augmented images are to the right of theirs, in the same row.
    """
    tiles = [tile for record in records for tile in _tiles(record)]
    return tiled(tiles, len(tiles) // len(records))


def tiled(tiles: Sequence[tuple[Image.Image, str, str]], in_group: int = 1) -> Image.Image:
    """One image of many, each above its title and its details; those of a group are in the same row."""
    tiles = [(_small(image), name_line(title), name_line(details)) for image, title, details in tiles]
    columns = max(1, round((len(tiles) / in_group**2) ** 0.5 * 1.2)) * in_group
    rows = -(-len(tiles) // columns)
    tile_height = max(image.height for image, *_ in tiles)
    step_x, step_y = _TILE + _GAP, tile_height + _CAPTION + _GAP
    sheet = Image.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    try:
        font = ImageFont.truetype("DejaVuSans.ttf", _FONT_SIZE)  # if it is installed: it has the most letters
    except OSError:
        font = ImageFont.load_default(_FONT_SIZE)  # type: ignore[assignment]
    for index, (image, title, details) in enumerate(tiles):
        left, top = _GAP + index % columns * step_x, _GAP + index // columns * step_y
        sheet.paste(image, (left, top + tile_height - image.height))
        while draw.textlength(title, font) > _TILE:
            title = f"{title[:-2]}…"
        while draw.textlength(details, font) > _TILE:
            details = f"…{details[2:]}"
        draw.text((left, top + tile_height + 2), title, "black", font)
        draw.text((left, top + tile_height + 16), details, "dimgrey", font)
    return sheet


def html(title: str, read: Callable[[], Iterable[Mapping[str, Any]]]) -> str:
    """A title and a grid of the first of `imageshards.records`, for a notebook; or why these can't be read."""
    try:
        shown = []
        for number, one in enumerate(read()):
            image = _image(one["image"])
            shown.append(Shown(number, image, one["label"], (image.height, image.width)))
        out = io.BytesIO()
        grid(shown).save(out, "JPEG", quality=90)
        drawn = f'<img src="data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}">'
    except ImageShardsError as error:
        drawn = escape(str(error))
    return f"<p>{escape(title)}</p>{drawn}"


def _tiles(record: Shown) -> Iterator[tuple[Image.Image, str, str]]:
    """(image, first line, second line) of a record and of each augmented version of it."""
    height, width = record.size
    yield record.image, record.label, f"{height} x {width}  record {record.number}"
    for epoch, image in enumerate(record.augmented):
        yield image, f"augmented, epoch {epoch}", f"{image.height} x {image.width}"


def _small(image: Image.Image) -> Image.Image:
    small = image.copy()
    small.thumbnail((_TILE, _TILE))
    return small
