"""One image in, one image out, with Pillow: bytes to bytes, no storage, no Beam. `codec` is the way through."""

from beam_pipeline.images.codec import (
    FORMATS,
    ICC_POLICIES,
    SUBSAMPLING,
    WHOLE,
    WITHOUT_METADATA,
    EncodedImage,
    ImageOptions,
    Source,
    check_size,
    codec_versions,
    convert,
)

__all__ = [
    "FORMATS",
    "ICC_POLICIES",
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
