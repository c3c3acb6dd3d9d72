"""Finished pixels to the bytes of a JPEG or PNG."""

from __future__ import annotations

import io

from PIL import Image

from beam_pipeline.errors import Reject
from beam_pipeline.images.options import SUBSAMPLING, ImageOptions
from beam_pipeline.schema import RejectReason


def encode(pixels: Image.Image, options: ImageOptions) -> bytes:
    """Encode finished pixels.

    Args:
        pixels: `RGB` or `L`.
        options: the format, and how.

    Raises:
        Reject: `out_of_memory`.
    """
    pixels.info = {}  # comments, profiles and EXIF of the source would otherwise be written
    try:
        if options.format == "png":
            out = io.BytesIO()
            pixels.save(out, "PNG", optimize=options.optimize)
            return out.getvalue()
        try:
            return _jpeg(pixels, options, options.optimize)
        except OSError:
            if not options.optimize:
                raise
            # libjpeg wants room for the whole file where it searches for codes, and Pillow gives it a byte a pixel (two
            # from quality 95 on): enough for photos. Noise, which has no smaller codes, gets the usual ones.
            return _jpeg(pixels, options, optimize=False)
    except MemoryError:
        raise Reject(RejectReason.OUT_OF_MEMORY, f"{pixels.width}x{pixels.height} pixels to encode") from None


def _jpeg(pixels: Image.Image, options: ImageOptions, optimize: bool) -> bytes:
    out = io.BytesIO()
    subsampling = SUBSAMPLING[options.jpeg_subsampling]
    pixels.save(out, "JPEG", quality=options.jpeg_quality, subsampling=subsampling, optimize=optimize)
    return out.getvalue()
