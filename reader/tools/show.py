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
from beam_pipeline.text import name_line
from reader import order
from reader.augment import BY_NAME, Augment
from reader.example import ImageFinder
from reader.hosts import integer
from reader.info import DatasetInfo, load_info
from reader.pixels import Encoded, ImageDecoder, Pixels, decode_pixels, stored_shape, target_size
from reader.select import Classes, select
from reader.tools.read import checked_table, filename_of, read_records

# Pixels. A tile is at most a square, with lines of text below it.
_TILE, _LINE, _GAP, _FONT_SIZE = 160, 14, 8, 11


class Shown(NamedTuple):
    """One record to show.

    Attributes:
        number: of the record in the split.
        image: as stored.
        label: class name.
        size: (height, width) as stored, in pixels.
        file: that the image was written from, "" if the dataset is an index.
        augmented: what `train_batches` makes of it in each epoch, from the first.
    """

    number: int
    image: Image.Image
    label: str
    size: tuple[int, int]
    file: str = ""
    augmented: tuple[Image.Image, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """All but the images."""
        height, width = self.size
        return {"record": self.number, "file": self.file, "label": self.label, "height": height, "width": width}


def show(
    dataset: DatasetInfo | str | os.PathLike[str],
    split: str = "train",
    *,
    count: int = 20,
    seed: int = 0,
    augment: Augment | str | None = None,
    image_size: int | tuple[int, int] | None = None,
    epochs: int = 4,
    classes: Classes = None,
) -> Image.Image:
    """A grid of some images of a split with their labels, sizes, record numbers and files, for a notebook.

    With `augment`, to the right of each image is what `train_batches` makes of it with the same `split`, `seed`,
    `augment` and `image_size`, epoch after epoch.

    Args:
        dataset: what `load_info` returned, or the URL.
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
    return grid(choose(dataset, split, count, seed, augment, image_size, epochs, classes))


def choose(
    dataset: DatasetInfo | str | os.PathLike[str],
    split: str,
    count: int,
    seed: int = 0,
    augment: Augment | str | None = None,
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
    if isinstance(augment, str) and augment not in BY_NAME:
        raise UsageError(f"augment {augment!r}: choose one of {', '.join(BY_NAME)}")
    info, decode = load_info(dataset), None
    if augment is not None:
        function: Any = BY_NAME[augment] if isinstance(augment, str) else augment
        size = target_size(info.image, image_size)
        decode = ImageDecoder(info.image, size, augment=function, is_foreign=info.is_index)
    find, selection = ImageFinder(info.image_key, info.class_key), select(info, split, classes)
    available = range(info.records(split)) if selection is None else selection.numbers().tolist()
    drawn = np.sort(random.Random(seed).sample(available, min(count, len(available))))

    def shown(index: int, record: bytes) -> Shown:
        number, (encoded, label) = int(drawn[index]), find(record)
        stored_shape(encoded, info.image.channels)  # which refuses a header that would take all memory
        image = as_rgb(decode_pixels(encoded, info.image.channels))
        augmented = () if decode is None else _augmented(decode, encoded, number, seed, epochs)
        name = info.classes[label] if 0 <= label < info.num_classes else f"class {label}"
        if selection is not None and 0 <= label < info.num_classes:
            name = selection.classes[selection.labels[label]]
        file = "" if info.is_index else filename_of(record).decode("utf-8", "surrogateescape")
        return Shown(number, image, name, (image.height, image.width), file, augmented)

    return list(read_records(checked_table(info, split, drawn), shown))


def _augmented(decode: ImageDecoder, encoded: Encoded, number: int, seed: int, epochs: int) -> tuple[Image.Image, ...]:
    """A record's image as `train_batches` yields it in each epoch."""
    images = []
    for epoch in range(epochs):
        row = np.empty(decode.shape, np.uint8)
        decode(encoded, row, int(order.augment_seeds(np.array([number]), seed, epoch)[0]))
        images.append(as_rgb(row))
    return tuple(images)


def as_rgb(pixels: Pixels) -> Image.Image:
    """uint8 [height, width, 1 or 3] as RGB."""
    return Image.fromarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)).copy())


def grid(records: Sequence[Shown]) -> Image.Image:
    """One image of all, about as wide as high; below each its class, size, number in the split, and file.

    Augmented images are to the right of theirs, in the same row.
    """
    tiles = [tile for record in records for tile in _tiles(record)]
    return tiled(tiles, len(tiles) // len(records))


def tiled(tiles: Iterable[tuple[Any, ...]], in_group: int = 1) -> Image.Image:
    """One image of many, each above its title and further lines; those of a group are in the same row.

    Args:
        tiles: (image, title, further lines …).
    """
    tiles = [(image.copy(), *map(name_line, lines)) for image, *lines in tiles]
    for image, *_ in tiles:
        image.thumbnail((_TILE, _TILE))
    columns = max(1, round((len(tiles) / in_group**2) ** 0.5 * 1.2)) * in_group
    rows = -(-len(tiles) // columns)
    tile_height = max(image.height for image, *_ in tiles)
    step_x, step_y = _TILE + _GAP, tile_height + 4 + _LINE * (max(map(len, tiles)) - 1) + _GAP
    sheet = Image.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    try:
        font = ImageFont.truetype("DejaVuSans.ttf", _FONT_SIZE)  # if it is installed: it has the most letters
    except OSError:
        font = ImageFont.load_default(_FONT_SIZE)  # type: ignore[assignment]
    for index, (image, title, *lines) in enumerate(tiles):
        left, top = _GAP + index % columns * step_x, _GAP + index // columns * step_y
        sheet.paste(image, (left, top + tile_height - image.height))
        while draw.textlength(title, font) > _TILE:
            title = f"{title[:-2]}…"
        draw.text((left, top + tile_height + 2), title, "black", font)
        for number, line in enumerate(lines, 1):
            while draw.textlength(line, font) > _TILE:
                line = f"…{line[2:]}"
            draw.text((left, top + tile_height + 2 + _LINE * number), line, "dimgrey", font)
    return sheet


def html(title: str, read: Callable[[], Iterable[Mapping[str, Any]]]) -> str:
    """A title and a grid of the first of `imageshards.records`, for a notebook; or why these can't be read."""
    try:
        shown = []
        for number, one in enumerate(read()):
            image = as_rgb(one["image"])
            shown.append(Shown(number, image, one["label"], (image.height, image.width), one.get("filename", "")))
        out = io.BytesIO()
        grid(shown).save(out, "JPEG", quality=90)
        drawn = f'<img src="data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}">'
    except ImageShardsError as error:
        drawn = escape(str(error))
    return f"<p>{escape(title)}</p>{drawn}"


def _tiles(record: Shown) -> Iterator[tuple[Any, ...]]:
    """The image and its lines, of a record and of each augmented version of it."""
    height, width = record.size
    yield record.image, record.label, f"{height} x {width}  record {record.number}", *[record.file] * bool(record.file)
    for epoch, image in enumerate(record.augmented):
        yield image, f"augmented, epoch {epoch}", f"{image.height} x {image.width}"
