"""Opens the picture of a TIFF, and rejects what Pillow would take for another one.

https://www.itu.int/itudoc/itu-t/com16/tiff-fx/docs/tiff6.pdf
"""

from __future__ import annotations

import io
import re
import struct

from PIL import ImagePalette, TiffTags
from PIL import TiffImagePlugin as plugin
from PIL.TiffImagePlugin import ImageFileDirectory_v2 as Tags
from PIL.TiffImagePlugin import TiffImageFile

from beam_pipeline.errors import Reject
from beam_pipeline.schema import RejectReason

_SUBFILE, _OLD_SUBFILE, _SUB_IFDS, _DNG_VERSION = 254, 255, 330, 50706
_COPY_OR_MASK, _OLD_COPY = 1 | 4, 2
_PAGES = 64  # that are looked at
_COLOURS = {0: "gray", 1: "gray", 2: "RGB", 3: "palette", 5: "CMYK", 6: "YCbCr", 8: "Lab", 32803: "camera raw"}
WHITE_IS_ZERO, _BLACK_IS_ZERO, YCBCR = 0, 1, 6
_VALUES = {1: "integers", 2: "signed integers", 3: "floats"}
_SIGNED, _PREMULTIPLIED = 2, 1
_WEBP = 50001  # libtiff in Pillow's wheels lacks it, and says so on stderr
# How ImageJ and OME say that channels are pages.
_CHANNELS = re.compile(r'(?:\AImageJ=.*?^channels=|<OME\b.*?\bSizeC=")(\d+)', re.DOTALL | re.MULTILINE)


def open_tiff(data: bytes) -> TiffImageFile:
    """Read the header of the picture: of the first page that isn't a thumbnail.

    Raises:
        Reject: `unsupported`.
        Exception: whatever Pillow raises for a corrupt file.
    """
    data, tags = _picture(data)
    bits, samples = _number(tags, plugin.BITSPERSAMPLE), _number(tags, plugin.SAMPLESPERPIXEL)
    colours, values = _number(tags, plugin.PHOTOMETRIC_INTERPRETATION, -1), _number(tags, plugin.SAMPLEFORMAT)
    channels = _CHANNELS.search(str(tags.get(plugin.IMAGEDESCRIPTION, "")))
    if channels and int(channels[1]) > samples:
        raise _unsupported(f"TIFF with each of {channels[1]} channels in pages of its own")
    compression = _number(tags, plugin.COMPRESSION)
    if compression not in plugin.COMPRESSION_INFO or compression == _WEBP:
        raise _unsupported(f"TIFF of compression {compression}")
    planar = _number(tags, plugin.PLANAR_CONFIGURATION) == 2
    if planar and samples == 1:
        data, planar = _with_tag(data, tags, plugin.PLANAR_CONFIGURATION, 1), False
    inverted = (tags.prefix, colours, bits, samples) == (b"MM", WHITE_IS_ZERO, 16, 1)  # Pillow reads it of "II" only
    if inverted:
        data = _with_tag(data, tags, plugin.PHOTOMETRIC_INTERPRETATION, _BLACK_IS_ZERO)
    what = f"TIFF of {samples} x {bits}-bit {_VALUES.get(values, 'values')}"
    what += f" ({_COLOURS.get(colours, f'photometric {colours}')}{' in planes' if planar else ''})"
    try:
        image = TiffImageFile(io.BytesIO(data))
    except SyntaxError as error:
        if planar or "unknown" in str(error):
            raise _unsupported(what) from None
        raise
    if image.mode in ("I", "F") or (bits, values) == (8, _SIGNED):
        raise _unsupported(f"{what}: white level unknown")
    if inverted:
        image.tag_v2[plugin.PHOTOMETRIC_INTERPRETATION] = WHITE_IS_ZERO
    if image.mode in ("P", "PA") and max(tags[plugin.COLORMAP]) < 256:  # of 8 bits, where 16 should be
        image.palette = ImagePalette.raw("RGB;L", bytes(tags[plugin.COLORMAP]))
    if compression == 1 and _lacks_pieces(tags, samples if planar else 1):  # which would be black
        raise ValueError("strips or tiles are missing")
    if not _is_readable(image, bits, planar):
        raise _unsupported(what)
    return image


def _lacks_pieces(tags: Tags, planes: int) -> bool:
    """Whether there are fewer strips or tiles than the picture has."""
    width, height = _number(tags, plugin.IMAGEWIDTH), _number(tags, plugin.IMAGELENGTH)
    is_tiled = plugin.TILEWIDTH in tags
    across = _number(tags, plugin.TILEWIDTH) if is_tiled else width
    down = _number(tags, plugin.TILELENGTH if is_tiled else plugin.ROWSPERSTRIP, height)
    offsets = tags.get(plugin.TILEOFFSETS if is_tiled else plugin.STRIPOFFSETS, ())
    pieces = -(-width // max(across, 1)) * -(-height // max(down, 1)) * planes
    return isinstance(offsets, tuple) and len(offsets) < pieces


def _is_readable(image: TiffImageFile, bits: int, planar: bool) -> bool:
    """Whether Pillow reads the pixels, if need be by libtiff.

    Its own decoder takes YCbCr for RGB, and each plane for 8 bits; libtiff mixes up the planes of other modes than RGB.
    """
    tags, raw = image.tag_v2, bool(image.tile) and image.tile[0].codec_name == "raw"
    extra = _number(tags, plugin.EXTRASAMPLES, -1)
    is_plain = raw and (bits, _number(tags, plugin.FILLORDER)) == (8, 1) and extra != _PREMULTIPLIED
    unknown_alpha = image.mode == "RGBA" and extra < 0 and (not is_plain or plugin.TILEWIDTH in tags)
    one_band = raw and len(image.getbands()) == 1
    if planar and (image.mode in ("LA", "PA", "LAB") or unknown_alpha or one_band):
        return False
    is_ycbcr = image.mode == "RGB" and tags.get(plugin.PHOTOMETRIC_INTERPRETATION) == YCBCR
    if raw and (is_ycbcr or (planar and not is_plain)):
        pixels = "RGBX" if is_ycbcr else image.mode + ";16N" * (bits == 16)
        box, args = (0, 0, tags[plugin.IMAGEWIDTH], tags[plugin.IMAGELENGTH]), (pixels, "raw", False, tags.offset)
        image.tile = [image.tile[0]._replace(codec_name="libtiff", extents=box, offset=0, args=args)]
        image.use_load_libtiff = True
    return True


def _picture(data: bytes) -> tuple[bytes, Tags]:
    """The file, beginning with the page that holds the picture, and that page's tags."""
    if data.startswith(b"MM\0+"):
        raise _unsupported("big-endian BigTIFF")
    pages = [_tags(data)]
    if _DNG_VERSION in pages[0]:
        raise _unsupported("DNG")
    offsets = pages[0].get(_SUB_IFDS, ())
    offsets = (offsets if isinstance(offsets, tuple) else (offsets,))[:_PAGES]
    children = [_tags(data, offset) for offset in offsets if isinstance(offset, int) and 0 < offset < len(data)]
    page = max((child for child in children if not _is_copy(child)), key=_area, default=None)
    if not _is_copy(pages[0]) and (page is None or _area(page) <= _area(pages[0])):
        return data, pages[0]
    while page is None or _is_copy(page):
        if not pages[-1].next or len(pages) > _PAGES:
            raise _unsupported("TIFF whose first page is a thumbnail")
        pages.append(page := _tags(data, pages[-1].next))
    offset = struct.pack(_offset_format(data), page.offset)
    return data[: len(offset)] + offset + data[2 * len(offset) :], page


def _tags(data: bytes, offset: int = 0) -> Tags:
    """The tags of the page at an offset; of the first one without."""
    tags, file = Tags(data[: 2 * struct.calcsize(_offset_format(data))]), io.BytesIO(data)
    file.seek(offset or tags.next)
    tags.load(file)
    return tags


def _is_copy(tags: Tags) -> bool:
    return bool(_number(tags, _SUBFILE, 0) & _COPY_OR_MASK) or _number(tags, _OLD_SUBFILE, 0) == _OLD_COPY


def _area(tags: Tags) -> int:
    return _number(tags, plugin.IMAGEWIDTH) * _number(tags, plugin.IMAGELENGTH)


def _number(tags: Tags, tag: int, default: int = 1) -> int:
    """The first value of a tag, which may be of any type."""
    value = tags.get(tag, default)
    value = value[0] if isinstance(value, tuple) and value else value
    return value if isinstance(value, int) else default


def _with_tag(data: bytes, tags: Tags, tag: int, value: int) -> bytes:
    """The file with another value of a tag that has one."""
    kind, offset = tags.tagtype[tag], _offset_format(data)
    entry = f"{offset[0]}HH{offset[1]}{'I' if kind == TiffTags.LONG else 'H'}"
    old, new = (struct.pack(entry, tag, kind, 1, number) for number in (tags[tag], value))
    return data[: tags.offset] + data[tags.offset :].replace(old, new, 1)


def _offset_format(data: bytes) -> str:
    """How `struct` reads an offset: of 8 bytes in a BigTIFF."""
    return ("<" if data[:1] == b"I" else ">") + ("Q" if data[2] == 43 else "I")


def _unsupported(what: str) -> Reject:
    return Reject(RejectReason.UNSUPPORTED, what)
