"""Encoded images → pixels of one size, many at a time, inside tf.data.

`INTEGER_ACCURATE` gives exactly Pillow's pixels at the default's cost. TensorFlow's JPEG kernel tells formats apart by
their first bytes and decodes PNG as well; only cropping while decoding is for JPEG alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from beam_pipeline.errors import UsageError
from reader.augment.crops import RandomResizedCrop, random_resized_crop
from reader.augment.per_image import PerImage
from reader.info import ImageInfo
from reader.sizes import check_resize_mode, target_size

Tensor = Any  # TensorFlow ships no types
Augment = Callable[[Tensor, Tensor], Tensor] | RandomResizedCrop
BatchDecoder = Callable[..., Tensor]

_JPEG = b"\xff\xd8\xff"


def batch_decoder(
    image: ImageInfo,
    image_size: int | tuple[int, int] | None,
    resize_mode: str = "crop",
    augment: Augment | None = None,
) -> BatchDecoder:
    """A function from encoded images string [b] (and seeds int32 [b, 2]) to uint8 [b, height, width, channels].

    Args:
        image: how the dataset's images are stored.
        image_size: side or (height, width) in pixels to resize to, None for the stored size.
        resize_mode: `stretch` to the size, `crop` the middle after scaling the shorter side, `pad` with black after
            scaling the longer side.
        augment: of `reader.augment`, or your own `f(images, seeds)`.

    Raises:
        UsageError: stored sizes are mixed and `image_size` is None, or an argument has no such value.
    """
    _check_augment(augment)
    if isinstance(augment, RandomResizedCrop):
        _check_augment(augment.then, "then")
    if isinstance(augment, RandomResizedCrop) and image_size is None:
        raise UsageError("random_resized_crop resizes its crops: give image_size")
    height, width = target_size(image, image_size)
    check_resize_mode(resize_mode)
    if isinstance(augment, RandomResizedCrop):
        return _then(_crop_decoder(image, (height, width), augment), augment.then)
    is_stored_size = image.min_size == image.max_size == (height, width)

    def decode(encoded: Tensor) -> Tensor:
        pixels = decode_image(encoded, image.format, image.channels)
        return pixels if is_stored_size else resize(pixels, height, width, resize_mode)

    return _then(_MapDecoder(lambda *_: (), decode, (height, width, image.channels)), augment)


def _check_augment(augment: Any, name: str = "augment") -> None:
    """Raises UsageError for what AutoGraph would only fail in later, with a page of text."""
    if augment is random_resized_crop or augment is RandomResizedCrop:
        raise UsageError(f"{name}={augment.__name__}: call it, {name}=reader.augment.random_resized_crop()")
    if getattr(augment, "__module__", "") == "reader.pillow":
        given = getattr(augment, "__name__", augment)
        raise UsageError(f"{name}={given}: that is reader.pillow's, for ShardDataset; take reader.augment's")
    if augment is not None and not isinstance(augment, RandomResizedCrop) and not callable(augment):
        raise UsageError(f"{name}={augment!r}: a function of (images, seeds), such as reader.augment.flip")


class _MapDecoder:
    """Decodes one image after the other, in one pass over the batch: the batches are what runs in parallel.

    Args:
        draw: (encoded string [b], seeds int32 [b, 2]) → tensors [b, …] that `decode` takes too.
        decode: (encoded string [], *what was drawn for it) → uint8 `shape`.
        shape: of an image.
        last: what is done to each image at once, while it lies in the CPU's cache.
    """

    def __init__(
        self,
        draw: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
        decode: Callable[..., Tensor],
        shape: tuple[int, int, int],
        last: PerImage | None = None,
    ) -> None:
        self.draw, self.decode, self.shape, self.last = draw, decode, shape, last

    def __call__(self, encoded: Tensor, seeds: Tensor | None = None) -> Tensor:
        drawn = self.draw(encoded, seeds)
        drawn_last = self.last.draw(seeds) if self.last is not None else ()

        def one(items: tuple[Tensor, ...]) -> Tensor:
            pixels = tf.ensure_shape(self.decode(*items[: 1 + len(drawn)]), self.shape)
            return pixels if self.last is None else self.last.apply(pixels, *items[1 + len(drawn) :])

        spec = tf.TensorSpec(self.shape, tf.uint8)
        return tf.map_fn(one, (encoded, *drawn, *drawn_last), fn_output_signature=spec, parallel_iterations=1)


def _then(decoder: _MapDecoder, augment: Any) -> BatchDecoder:
    """`decoder`, then `augment`."""
    if augment is None:
        return decoder
    if isinstance(augment, PerImage):
        return _MapDecoder(decoder.draw, decoder.decode, decoder.shape, augment)

    given = tf.function(augment)  # with AutoGraph, as users of tf.data are used to

    def decode(encoded: Tensor, seeds: Tensor) -> Tensor:
        images = decoder(encoded, seeds)
        return tf.ensure_shape(given(images, seeds), images.shape)

    return decode


def _crop_decoder(image: ImageInfo, size: tuple[int, int], augment: RandomResizedCrop) -> _MapDecoder:
    """Decodes the window of each image that `augment` chooses, and resizes it."""
    is_fixed_size = image.min_size is not None and image.min_size == image.max_size

    def windows(encoded: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
        if is_fixed_size:
            sizes = tf.tile(tf.constant([image.min_size], tf.int64), [tf.shape(encoded)[0], 1])
        else:
            spec = tf.TensorSpec([2], tf.int64)
            sizes = tf.map_fn(_stored_size, encoded, fn_output_signature=spec, parallel_iterations=1)
        return (augment.windows(sizes, seeds),)

    def decode(encoded: Tensor, window: Tensor) -> Tensor:
        def slice_png() -> Tensor:
            pixels = decode_image(encoded, image.format, image.channels)
            return tf.slice(pixels, [window[0], window[1], 0], [window[2], window[3], -1])

        def crop_jpeg() -> Tensor:
            return tf.io.decode_and_crop_jpeg(encoded, window, channels=image.channels, dct_method="INTEGER_ACCURATE")

        if image.format == "jpeg":
            pixels = crop_jpeg()
        elif image.format == "png":
            pixels = slice_png()
        else:
            pixels = tf.cond(_is_jpeg(encoded), crop_jpeg, slice_png)
        return resize(pixels, *size, "stretch")

    return _MapDecoder(windows, decode, (*size, image.channels))


def _is_jpeg(encoded: Tensor) -> Tensor:
    return tf.strings.substr(encoded, 0, len(_JPEG)) == _JPEG


def _stored_size(encoded: Tensor) -> Tensor:
    """Height and width int64 [2] of a JPEG (3 µs) or PNG (decoded for it)."""
    shape = tf.cond(
        _is_jpeg(encoded),
        lambda: tf.io.extract_jpeg_shape(encoded),
        lambda: tf.shape(tf.io.decode_png(encoded)),
    )
    return tf.cast(shape[:2], tf.int64)


def decode_image(encoded: Tensor, image_format: str, channels: int) -> Tensor:
    """string [] → uint8 [height, width, channels]; `image_format` is jpeg, png or mixed."""
    if image_format == "png":
        return tf.io.decode_png(encoded, channels=channels)
    return tf.io.decode_jpeg(encoded, channels=channels, dct_method="INTEGER_ACCURATE")


def resize(pixels: Tensor, height: int, width: int, mode: str) -> Tensor:
    """uint8 [h, w, c] → uint8 [height, width, c]; box filter when it shrinks (no aliasing), bilinear when it grows.

    From 500×375 to 224×224 the box filter costs 0.8 ms; TensorFlow's bilinear 1.9 with and 0.5 without antialiasing.
    """
    shape = tf.shape(pixels)
    size = tf.stack([height, width])
    if mode == "stretch":
        return _scale(pixels, size)
    ratios = tf.cast(size, tf.float64) / tf.cast(shape[:2], tf.float64)
    if mode == "crop":
        # The largest window of the wanted shape in the middle, then one resize: nothing outside it is computed.
        window = tf.maximum(tf.cast(tf.round(tf.cast(size, tf.float64) / tf.reduce_max(ratios)), tf.int32), 1)
        window = tf.minimum(window, shape[:2])
        begin = (shape[:2] - window) // 2
        return _scale(tf.slice(pixels, [begin[0], begin[1], 0], [window[0], window[1], -1]), size)
    inner = tf.cast(tf.round(tf.cast(shape[:2], tf.float64) * tf.reduce_min(ratios)), tf.int32)
    inner = tf.clip_by_value(inner, 1, size)
    before = (size - inner) // 2
    after = size - inner - before
    return tf.pad(_scale(pixels, inner), [[before[0], after[0]], [before[1], after[1]], [0, 0]])


def _scale(pixels: Tensor, size: Tensor) -> Tensor:
    shrinks = tf.reduce_all(tf.shape(pixels)[:2] >= size)
    scaled = tf.cond(
        shrinks,
        lambda: tf.image.resize(pixels, size, method="area"),
        lambda: tf.image.resize(pixels, size, method="bilinear"),
    )
    return tf.cast(tf.round(scaled), tf.uint8)
