"""Finished pixels to the bytes of a JPEG or PNG."""

from __future__ import annotations

import io
from typing import IO, Any

from PIL import Image, ImageFile

from beam_pipeline.errors import Reject
from beam_pipeline.images.options import SUBSAMPLING, ImageOptions
from beam_pipeline.schema import RejectReason

# The most that the densest pictures took is 3.3 bytes a pixel, and 4.6 where a side is one pixel long (noise of two
# values, quality 100, 4:4:4). Memory that isn't written to is none.
_MOST_BYTES_A_PIXEL = 8


def encode(pixels: Image.Image, metadata: dict[str, Any], options: ImageOptions) -> bytes:
    """Encode finished pixels.

    Args:
        pixels: `RGB` or `L`.
        metadata: further arguments of `Image.save`.
        options: the format, and how.

    Raises:
        Reject: `out_of_memory`.
    """
    pixels.info = {}  # comments, profiles and EXIF of the source would otherwise be written
    out = io.BytesIO()
    try:
        if options.format == "png":
            pixels.save(out, "PNG", optimize=options.optimize, **metadata)
            return out.getvalue()
        pixels.save(
            out,
            "JPEG",
            quality=options.jpeg_quality,
            subsampling=SUBSAMPLING[options.jpeg_subsampling],
            optimize=options.optimize,
            progressive=options.progressive,
            **metadata,
        )
    except MemoryError:
        raise Reject(RejectReason.OUT_OF_MEMORY, f"{pixels.width}x{pixels.height} pixels to encode") from None
    return out.getvalue()


_pillows_save = ImageFile._save


def _save(image: Image.Image, file: IO[bytes], tiles: list[Any], buffer_bytes: int = 0) -> None:
    """`ImageFile._save` with room for a whole JPEG whose codes are optimised.

    libjpeg can't pause while it writes one: what doesn't fit into the buffer is an error. Pillow's guess is a byte a
    pixel, which can be changed for all encoders of the process only (`MAXBLOCK`), and PNG divides its chunks by that.
    """
    config = getattr(image, "encoderinfo", {})
    if tiles[0].codec_name == "jpeg" and (config.get("optimize") or config.get("progressive")):
        buffer_bytes += _MOST_BYTES_A_PIXEL * image.width * image.height
    _pillows_save(image, file, tiles, buffer_bytes)


ImageFile._save = _save  # type: ignore[assignment]
