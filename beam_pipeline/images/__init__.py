"""One image in, one image out, with Pillow: bytes to bytes, no storage, no Beam. `codec` is the way through."""

from beam_pipeline.images.codec import (
    WHOLE,
    WITHOUT_METADATA,
    EncodedImage,
    Source,
    check_size,
    codec_versions,
    convert,
)
from beam_pipeline.images.options import FORMATS, SUBSAMPLING, ImageOptions

__all__ = [
    "FORMATS",
    "SUBSAMPLING",
    "WHOLE",
    "WITHOUT_METADATA",
    "EncodedImage",
    "ImageOptions",
    "Source",
    "check_size",
    "codec_versions",
    "convert",
]
