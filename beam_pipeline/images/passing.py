"""What goes from a source into the stored file as it is: compressed pixels that fit already, and metadata.

Nothing here decodes: the caller has, and knows that pixels which may pass are whole, upright and of the right size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import PngImagePlugin

from beam_pipeline.images import colour, containers
from beam_pipeline.images.containers import (
    APP0,
    APP2,
    APP14,
    APP15,
    COM,
    SOF_BASELINE,
    SOF_EXTENDED,
    SOF_PROGRESSIVE,
    JpegFrame,
)

_JFIF, _JFIF_BYTES = b"JFIF\0", 14  # without a thumbnail
_ADOBE, _ADOBE_BYTES, _ADOBE_YCBCR = b"Adobe", 12, 1
_ICC = b"ICC_PROFILE\0"
# PNG chunks that hold pixels; the others are metadata. A palette of an RGB image is only a suggestion.
_PIXELS = frozenset({b"IHDR", b"IDAT", b"IEND"})
_OTHER_PIXELS = frozenset({b"tRNS", b"acTL", b"fcTL", b"fdAT"})  # transparency, animation
_PNG_COLOUR_TYPES = {1: 0, 3: 2}
_LONGEST_JPEG_SEGMENT = 65_533
_XMP_PREFIX_BYTES = 29
_XMP_KEY = "XML:com.adobe.xmp"


def passed_jpeg(data: bytes, channels: int, progressive: bool, keep_metadata: bool, keep_profile: bool) -> bytes | None:
    """A JPEG without what has to go, or None where it must be encoded anew.

    It passes if it is baseline or extended Huffman-coded with 8 bits (or progressive, where that is asked for),
    YCbCr or gray, well-formed up to its end, and has no thumbnail in its JFIF header.

    Args:
        data: the file.
        channels: that are stored, 1 or 3.
        progressive: whether progressive files may pass; readers take longer to decode them.
        keep_metadata: EXIF, XMP, comments and the rest stay; what follows the picture goes in any case.
        keep_profile: the ICC profile stays.
    """
    kinds = {SOF_BASELINE, SOF_EXTENDED} | ({SOF_PROGRESSIVE} if progressive else set())
    frame = containers.jpeg_frame(data)
    if frame is None or frame.kind not in kinds or (frame.bits, frame.components) != (8, channels):
        return None
    kept = []
    try:
        for part in containers.jpeg_parts(data):
            body = data[part.start + 4 : part.end]
            if _is_unusual(int(part.kind), body, frame):
                return None
            if _stays(int(part.kind), body, keep_metadata, keep_profile):
                kept.append(data[part.start : part.end])
    except ValueError:
        return None
    return b"".join(kept)


def _is_unusual(kind: int, body: bytes, frame: JpegFrame) -> bool:
    """Whether a segment of a JPEG makes its colours something else than YCbCr or gray, or hides a thumbnail."""
    if kind == APP0 and body.startswith(_JFIF):
        return len(body) != _JFIF_BYTES
    if kind == APP14 and body.startswith(_ADOBE):
        return len(body) != _ADOBE_BYTES or body[-1] != (_ADOBE_YCBCR if frame.components == 3 else 0)
    return frame.ids == b"RGB"


def _stays(kind: int, body: bytes, keep_metadata: bool, keep_profile: bool) -> bool:
    if kind == APP2 and body.startswith(_ICC):
        return keep_profile
    if kind == COM or APP0 <= kind <= APP15:
        return keep_metadata or (kind == APP0 and body.startswith(_JFIF)) or (kind == APP14 and body.startswith(_ADOBE))
    return True


def passed_png(data: bytes, channels: int, keep_metadata: bool, keep_profile: bool) -> bytes | None:
    """A PNG without what has to go, or None where it must be encoded anew.

    It passes if it is RGB (gray for 1 channel) of 8 bits without transparency or animation, with right CRCs.

    Args: as `passed_jpeg`.
    """
    kept = [containers.PNG_SIGNATURE]
    try:
        for part in containers.png_parts(data):
            if part.kind == b"IHDR" and tuple(data[part.start + 16 : part.start + 18]) != (
                8,
                _PNG_COLOUR_TYPES[channels],
            ):
                return None
            if part.kind in _OTHER_PIXELS:
                return None
            if part.kind in _PIXELS or (keep_profile if part.kind == b"iCCP" else keep_metadata):
                kept.append(data[part.start : part.end])
    except ValueError:
        return None
    return b"".join(kept)


def kept_metadata(
    info: Mapping[Any, Any], mode: str, format: str, keep_metadata: bool, keep_profile: bool
) -> dict[str, Any]:
    """What of a source's metadata is written with newly encoded pixels, as arguments of `Image.save`.

    Args:
        info: as Pillow read it.
        mode: of the finished pixels, which a profile must fit.
        format: `jpeg` or `png`; what no segment of a JPEG can hold is left out.
        keep_metadata: EXIF (of an upright picture), XMP and comment.
        keep_profile: the ICC profile.
    """
    kept: dict[str, Any] = {}
    profile = info.get("icc_profile")
    if keep_profile and profile and colour.fits(profile, mode):
        kept["icc_profile"] = profile
    if not keep_metadata:
        return kept
    exif, xmp, comment = (info.get(key) for key in ("exif", "xmp", "comment"))
    if exif:
        whole = containers.EXIF_PREFIX + containers.upright_exif(exif).removeprefix(containers.EXIF_PREFIX)
        if format == "png" or len(whole) <= _LONGEST_JPEG_SEGMENT:
            kept["exif"] = whole
    if format == "png":
        return kept | ({"pnginfo": _png_text(xmp, comment)} if xmp or comment else {})
    if xmp and len(xmp) <= _LONGEST_JPEG_SEGMENT - _XMP_PREFIX_BYTES:
        kept["xmp"] = xmp
    if comment and len(comment) <= _LONGEST_JPEG_SEGMENT:
        kept["comment"] = comment
    return kept


def _png_text(xmp: bytes | None, comment: bytes | str | None) -> PngImagePlugin.PngInfo:
    text = PngImagePlugin.PngInfo()
    if xmp:
        text.add_itxt(_XMP_KEY, xmp.decode("utf-8", "replace"))
    if comment:
        text.add_text("Comment", comment if isinstance(comment, str) else comment.decode("utf-8", "replace"))
    return text
