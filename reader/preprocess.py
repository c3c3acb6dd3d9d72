"""New photos as a model knows them: converted to the bytes that a dataset's writer would store, decoded by its reader.

    pixels = imageshards.decode(photo, info, image_size=224)

Pixels that a model was trained on, and those that it sees later, are equal only if they took the same way: JPEG
encoding, and the filter of each of the two resizes, move some photos to another class.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Mapping
from typing import Any, Literal, get_type_hints

import numpy as np
from msgspec import convert, defstruct

from beam_pipeline import images, storage
from beam_pipeline.errors import ImageShardsError, Reject, UsageError
from beam_pipeline.images import ImageOptions, formats, geometry, memory
from beam_pipeline.images.resize import RESAMPLING
from beam_pipeline.schema import RejectReason
from beam_pipeline.text import one_line, plural
from reader.info import DatasetInfo, ImageInfo, load_info
from reader.pixels import MAX_PIXELS, ImageDecoder, Pixels, UndecodableImageError, in_8_bits, target_size
from reader.tools.rejects import in_words

_OWN_SIZES = ("shorter", "longer")  # resize modes that leave each image its own size
_CHOICES: dict[str, Any] = {"resize_mode": geometry.RESIZE_MODES, "resample": RESAMPLING, "format": images.FORMATS}
_KINDS = get_type_hints(ImageOptions) | {name: Literal[tuple(values)] for name, values in _CHOICES.items()}
_Options = defstruct("_Options", [*_KINDS.items()])
# Limits for photos of a third-party dataset, the writer's defaults; what isn't kept as it is becomes a PNG.
_INDEX = ImageOptions(None, "stretch", "bilinear", None, 3, "png", 90, "4:2:0", False, MAX_PIXELS, 256 << 20, False)


class PhotoError(ImageShardsError, ValueError):
    """A photo that the dataset's writer would reject; says why."""


class Preprocessing:
    """The way from a photo's file to the pixels of a batch. Thread-safe.

    Args:
        dataset: `configuration`, `image` and `codec` of a manifest.
        is_index: whether the manifest is of third-party shards, whose images nobody knows how to make.
        image_size: (height, width) in pixels of the result.
        resize_mode: of the reader: `crop`, `stretch` or `pad`.

    Raises:
        ImageShardsError: something else than `imageshards write` made the manifest.
    """

    def __init__(
        self, dataset: Mapping[str, Any], is_index: bool, image_size: tuple[int, int], resize_mode: str = "crop"
    ) -> None:
        stored, channels = dataset["image"], dataset["image"]["channels"]
        self.options = None if is_index else _options(dataset["configuration"], channels)
        self.limits = self.options or _INDEX._replace(channels=channels)
        is_fixed = self.options is not None and self.options.resize_mode not in _OWN_SIZES
        size = self.options.size if self.options and is_fixed else None
        # A photo may be larger than all that are stored.
        image = ImageInfo(stored["format"], channels, size, size, (), ())
        self._decode = ImageDecoder(image, image_size, resize_mode, is_foreign=is_index)
        self._codec: Mapping[str, str] = dataset["codec"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of the result."""
        return self._decode.shape

    @functools.cached_property
    def mismatch_warning(self) -> str:
        """Why a photo's pixels may differ from the dataset's; "" if they can't."""
        if self.options is None:
            return (
                "the dataset is an index of third-party shards, which don't say how their images were made: photos are "
                "decoded, turned by their EXIF orientation and resized by the reader"
            )
        here = images.codec_versions()
        lossy = {name: was for name, was in self._codec.items() if not name.startswith("zlib")}
        other = [f"{name} {was} (here {here[name]})" for name, was in lossy.items() if here.get(name, was) != was]
        return f"the dataset was written with {', '.join(other)}: pixels may differ from it" if other else ""

    def _stored(self, data: bytes, reserve: memory.Reserve) -> bytes:
        """What the writer would store of a photo. Raises `Reject`."""
        if self.options is None:
            return _upright(data, self.limits, reserve)
        return images.convert(data, self.options, reserve).data

    def decode(self, data: bytes) -> Pixels:
        """A photo's file as uint8 `shape`. Raises PhotoError."""
        pixels = np.empty(self.shape, np.uint8)
        try:
            with contextlib.ExitStack() as held:  # until it is decoded again: it may be as large as the photo
                self._decode(self._stored(data, lambda size: held.enter_context(memory.SHARED.held(size))), pixels, 0)
        except Reject as reject:
            raise PhotoError(why(reject)) from None
        except UndecodableImageError as error:
            raise PhotoError(f"{error} ({RejectReason.DECODE_ERROR})") from None
        return pixels


def why(reject: Reject) -> str:
    """A reject in a few words, with its reason: `truncated JPEG (truncated)`."""
    return f"{in_words(reject.reason, reject.detail.removesuffix(' on the workers'))} ({reject.reason})"


def image_files(folder: str) -> dict[str, int]:
    """Path below a folder → bytes, in order, of its image files by their suffixes as the writer takes them.

    Raises:
        UsageError: there is none; says what there is.
    """
    url, files = storage.normalize(folder), dict[str, int]()
    with contextlib.suppress(FileNotFoundError):
        if storage.scheme_of(url) != "http":  # which lists no folders
            files = {file.path: file.bytes for file in storage.open_storage(url).files(url, every_name=True)}
    if not files:
        raise UsageError(f"{folder!r}: no such file or folder, or it is empty")
    shown = sorted(path for path in files if not path.startswith(".") and "/." not in path)
    images = [path for path in shown if os.path.splitext(path)[1][1:].strip().lower() in formats.EXTENSIONS]
    if not images:
        other = f"{plural(len(shown), 'file')} without an image suffix, {len(files) - len(shown):,} hidden"
        raise UsageError(
            f"{folder!r}: no image in this folder ({other}); images end in {', '.join(formats.EXTENSIONS)}"
        )
    return {path: files[path] for path in images}


def decode(
    data: bytes,
    dataset: DatasetInfo | str | os.PathLike[str],
    image_size: int | tuple[int, int] | None = None,
    resize_mode: str = "crop",
) -> Pixels:
    """A new photo as `train_batches` would yield it, had it been in the dataset: for a service of your own.

    The photo is converted to the bytes that the dataset's writer would store, with its size, colours and JPEG encoding,
    and decoded by the reader: with the same versions of the image libraries, the pixels are equal.

    Args:
        data: the content of an image file, of any kind that `imageshards write` reads.
        dataset: what `load_info` returned; or the URL, whose manifest is then read at each call.
        image_size, resize_mode: as training had them in `train_batches`.

    Returns:
        uint8 [height, width, channels].

    Raises:
        ValueError: the writer would reject the photo: it is an `ImageShardsError` of one line with the reason.
        UsageError: stored sizes are mixed and `image_size` is None, or an argument's value is invalid.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise UsageError(f"decode takes the content of an image file as bytes, got {type(data).__name__}")
    info = load_info(dataset)
    size = target_size(info.image, image_size)
    return Preprocessing(info.manifest, info.is_index, size, resize_mode).decode(data)


def _options(flags: Mapping[str, Any], channels: int) -> ImageOptions:
    """The image options of a dataset. Raises ImageShardsError if one is missing or invalid."""
    try:
        options = ImageOptions.of({**flags, "channels": channels})
        convert(options._asdict(), _Options)
        return options
    except KeyError as flag:
        raise ImageShardsError(f"the dataset's manifest doesn't say which {flag} it was written with") from None
    except ValueError as error:
        raise ImageShardsError(f"the dataset's manifest has an invalid image option: {one_line(error)}") from None


def _upright(data: bytes, limits: ImageOptions, reserve: memory.Reserve) -> bytes:
    """A photo as a third-party record would hold it: unchanged, or as PNG if it is turned, or no JPEG or PNG."""
    images.check_size(len(data), limits)
    name, size, channels = formats.recognise(data), None, limits.channels
    try:
        image = formats.open_image(data, name)
        size = image.size
        if size[0] * size[1] > MAX_PIXELS:
            raise Reject(RejectReason.TOO_MANY_PIXELS, f"{size[0]}x{size[1]} pixels, more than {MAX_PIXELS}")
        is_kept = name == "JPEG" and formats.orientation(image) == 1
        memory.reserve_memory(image, size, data, limits._replace(format="jpeg") if is_kept else limits, reserve)
        if name != "JPEG":  # metadata may follow the pixels; a TIFF is turned as it is loaded
            formats.load(image, allow_truncated=False)
        orientation = formats.orientation(image)
        if orientation == 1 and name in ("JPEG", "PNG"):
            return data
        out = io.BytesIO()
        turned = geometry.upright(in_8_bits(image).convert("L" if channels == 1 else "RGB"), orientation)
        turned.info = {}
        turned.save(out, "PNG", compress_level=1)
        return out.getvalue()
    except Reject:
        raise
    except Exception as error:
        raise formats.why_broken(data, name, size, error) from None
