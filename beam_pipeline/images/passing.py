"""A JPEG's compressed pixels as they are, without its metadata: bit for bit, if it had none.

Nothing here decodes: the caller has, and knows that the pixels are whole, upright and of the right size.
"""

from __future__ import annotations

from beam_pipeline.images import containers
from beam_pipeline.images.containers import (
    APP0,
    APP14,
    APP15,
    COM,
    SOF_BASELINE,
    SOF_EXTENDED,
    JpegFrame,
)

_JFIF, _JFIF_BYTES = b"JFIF\0", 14  # without a thumbnail
_ADOBE, _ADOBE_BYTES, _ADOBE_YCBCR = b"Adobe", 12, 1


def passed_jpeg(data: bytes, channels: int) -> bytes | None:
    """A JPEG without its metadata, or None if it must be encoded anew.

    It passes if it is baseline or extended Huffman-coded with 8 bits, YCbCr or gray, well-formed up to its end, and has
    no thumbnail in its JFIF header. What follows the picture goes.

    Args:
        data: the file.
        channels: that are stored, 1 or 3.
    """
    frame = containers.jpeg_frame(data)
    if (
        frame is None
        or frame.kind not in (SOF_BASELINE, SOF_EXTENDED)
        or (frame.bits, frame.components) != (8, channels)
    ):
        return None
    kept = []
    try:
        for part in containers.jpeg_parts(data):
            body = data[part.start + 4 : part.end]
            if _is_unusual(int(part.kind), body, frame):
                return None
            if _stays(int(part.kind), body):
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


def _stays(kind: int, body: bytes) -> bool:
    if kind == COM or APP0 <= kind <= APP15:
        return (kind == APP0 and body.startswith(_JFIF)) or (kind == APP14 and body.startswith(_ADOBE))
    return True
