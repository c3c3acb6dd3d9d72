"""Which JPEGs are stored as they were compressed, what is cut out of them; PNG texts; files that end early."""

from __future__ import annotations

import io
import zlib
from collections import Counter
from functools import cache

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from beam_pipeline.errors import Reject
from beam_pipeline.images import ImageOptions, convert
from beam_pipeline.images.codec import channel_sums
from beam_pipeline.images.containers import COM, jpeg_segments
from tests.images.kinds import SIDEWAYS, UPRIGHT, animation, every_kind, png_chunk, turned, without_segment
from tests.images.profiles import gray_profile
from tests.images.test_codec import OWN_SIZE, pixels, rejected
from tests.make import encoded, noise, picture

JPEG = OWN_SIZE._replace(format="jpeg")
PNG = OWN_SIZE
EXIF = turned(1)
EXIF[0x010F] = "SECRET"
XMP = b"<x:xmpmeta xmlns:x='adobe:ns:meta/'>SECRET</x:xmpmeta>"
FILM = b"\0\0\0\x18ftypmp42" + b"SECRET" * 50
WITH_METADATA = {
    "everything": encoded(UPRIGHT, exif=EXIF, comment=b"SECRET", xmp=XMP) + FILM,
    "two pictures": animation("MPO", exif=EXIF),
}


def jpeg(**changes: object) -> ImageOptions:
    return JPEG._replace(**changes)  # type: ignore[arg-type]


# fmt: off
UNCHANGED = [
    *((kind, JPEG) for kind in ("jpeg", "jpeg_444", "jpeg_422", "jpeg_411", "jpeg_restarts")),
    ("jpeg", jpeg(size=(36, 48))), ("jpeg", jpeg(size=(36, 48), resize_mode="pad")),
    ("jpeg", jpeg(size=(100, 100), resize_mode="longer")),  # never enlarges
    ("jpeg", jpeg(jpeg_quality=10, optimize=True)), ("jpeg_gray", jpeg(channels=1)),
]
AGAIN = [
    ("jpeg", PNG), ("png", PNG), ("jpeg", jpeg(size=(36, 47))), ("jpeg", jpeg(size=(48, 48), resize_mode="pad")),
    ("jpeg", jpeg(channels=1)), ("jpeg_gray_profile", jpeg(channels=1)),
    ("jpeg_without_end", jpeg(allow_truncated=True)), ("jpeg_with_thumbnail", JPEG),
    *((f"jpeg_{kind}", JPEG) for kind in ("gray", "progressive", "arithmetic", "rgb", "cmyk", "profile")),
    ("png", JPEG), ("jpeg_exif", JPEG),  # which is turned on its side
]
# fmt: on


@cache
def files() -> dict[str, bytes]:
    kinds = every_kind()
    data = kinds["jpeg"]
    thumbnail = b"\xff\xe0" + (16 + 3).to_bytes(2, "big") + data[6:18] + b"\1\1" + b"\x99\x98\x97"
    return kinds | {
        "jpeg_gray_profile": encoded(UPRIGHT.convert("L"), icc_profile=gray_profile(1.0)),
        "jpeg_without_end": data[:-1],
        "jpeg_with_thumbnail": data[:2] + thumbnail + data[20:],  # in its JFIF header
    }


@pytest.mark.parametrize(("kind", "options"), UNCHANGED)
def test_what_fits_goes_in_bit_for_bit(kind: str, options: ImageOptions) -> None:
    data = files()[kind]
    image = convert(data, options, with_sums=True)
    assert (image.data, image.passthrough) == (data, "whole")
    assert image.sums == channel_sums(Image.open(io.BytesIO(data))), "the pixels are still looked at"


@pytest.mark.parametrize(("kind", "options"), AGAIN)
def test_what_does_not_fit_is_encoded_again(kind: str, options: ImageOptions) -> None:
    image = convert(files()[kind], options)
    assert image.passthrough is None
    assert b"\x99\x98\x97" not in image.data


@pytest.mark.parametrize("kind", WITH_METADATA)
def test_metadata_is_cut_out_and_the_compressed_pixels_stay(kind: str) -> None:
    data = WITH_METADATA[kind]
    image = convert(data, JPEG)
    assert image.passthrough == "without_metadata"
    assert b"SECRET" not in image.data
    assert image.data.endswith(b"\xff\xd9") and image.data.count(b"\xff\xd8\xff") == 1
    assert np.array_equal(pixels(image.data), pixels(data))
    again = convert(image.data, JPEG)
    assert (again.data, again.passthrough) == (image.data, "whole")


def png_with(*chunks: bytes) -> bytes:
    """`UPRIGHT` with chunks before its pixels."""
    data = encoded(UPRIGHT, "PNG")
    return data[:33] + b"".join(chunks) + data[33:]


TEXTS = {
    "tEXt": lambda key, text: png_chunk(b"tEXt", key + b"\0" + text),
    "zTXt": lambda key, text: png_chunk(b"zTXt", key + b"\0\0" + zlib.compress(text)),
    "iTXt": lambda key, text: png_chunk(b"iTXt", key + b"\0\0\0\0\0" + text),
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("key", [b"exif", b"transparency", b"icc_profile", b"interlace", b"bbox"])
def test_a_text_of_a_png_is_nothing_but_a_text(kind: str, key: bytes) -> None:
    """Whatever its keyword is: Pillow files it with what it found out itself."""
    sideways = encoded(SIDEWAYS, "PNG", exif=turned(6), transparency=(0, 0, 0))
    text = TEXTS[kind](key, b"a text")
    for options in (OWN_SIZE._replace(channels=1), JPEG):
        for data in (png_with(), sideways):
            expected = convert(data, options)
            assert convert(data[:33] + text + data[33:], options) == expected
            assert convert(data[:-12] + text + data[-12:], options) == expected


@pytest.mark.parametrize("kind", TEXTS)
def test_exif_that_is_a_text_turns_a_png(kind: str) -> None:
    """As ImageMagick and older tools write it: https://exiftool.org/TagNames/PNG.html."""
    exif = turned(6).tobytes()
    chunk = TEXTS[kind](b"Raw profile type exif", f"\nexif\n{len(exif):8d}\n{exif.hex()}\n".encode())
    side = encoded(SIDEWAYS, "PNG")
    for data in (side[:33] + chunk + side[33:], side[:-12] + chunk + side[-12:]):
        assert np.array_equal(pixels(convert(data, PNG).data), np.asarray(UPRIGHT))


def tiff_with(tag: int, kind: int) -> bytes:
    """`UPRIGHT` with a tag of a type that it doesn't have."""
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags.tagtype[tag] = kind
    tags[tag] = "text" if kind == 2 else 7
    return encoded(UPRIGHT, "TIFF", tiffinfo=tags)


INVALID_EXIF = (b"garbage", b"MM\0*\xff\xff\xff\xff", turned(0).tobytes(), turned(9).tobytes())
UNUSABLE = {
    **{f"XMP or profile of a TIFF, {tag} of type {kind}": tiff_with(tag, kind)
       for tag, kind in ((700, 2), (700, 3), (700, 5), (34675, 2), (34675, 3), (34675, 4))},
    "large text of a PNG": png_with(png_chunk(b"zTXt", b"history\0\0" + zlib.compress(b"x" * 3_000_000))),
    "large profile of a PNG": png_with(png_chunk(b"iCCP", b"name\0\0" + zlib.compress(bytes((1 << 20) + 1)))),
    **{f"EXIF of a PNG without a valid orientation, {number}":
       encoded(UPRIGHT, "PNG", exif=b"Exif\0\0" + exif.removeprefix(b"Exif\0\0"))
       for number, exif in enumerate(INVALID_EXIF)},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("kind", UNUSABLE)
def test_metadata_that_cannot_be_used_is_ignored(kind: str) -> None:
    plain = encoded(UPRIGHT, "TIFF" if "TIFF" in kind else "PNG")
    for options in (JPEG, PNG):
        assert convert(UNUSABLE[kind], options) == convert(plain, options)


# The first of several pictures is there before the file ends.
COMPLETE_WHEN_CUT = {"jpeg_two_pictures", "gif_animated", "png_animated", "tiff_pages"}


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("kind", sorted(every_kind()))
def test_a_file_cut_anywhere_is_rejected(kind: str) -> None:
    """As truncated, if Pillow says so; few of its decoders tell it of a file that is cut in its header."""
    data, reasons = every_kind()[kind], Counter()
    for end in range(
        26 if kind.startswith("bmp") else 12, len(data) - 20, len(data) // 60
    ):  # the last may be a trailer
        try:
            convert(data[:end], PNG)
        except Reject as reject:
            reasons[reject.reason] += 1
        else:
            assert kind in COMPLETE_WHEN_CUT, end
    assert set(reasons) <= {"truncated", "decode_error", "unsupported"}
    if kind.startswith(("jpeg", "png", "bmp")) and kind != "jpeg_arithmetic":
        assert reasons["truncated"] > 0.8 * reasons.total()


def test_fill_bytes_before_a_marker_belong_to_no_segment() -> None:
    data = encoded(noise(16, 16), comment=b"c")
    place = next(part.start for part in jpeg_segments(data) if part.kind == COM)
    filled = data[:place] + b"\xff\xff" + data[place:]
    assert convert(filled, JPEG).data == convert(data, JPEG).data == without_segment(data, COM)


@pytest.mark.parametrize("kind", [0x00, 0xD0, 0xD7])
def test_a_jpeg_with_a_marker_without_a_length_between_segments_is_encoded_again(kind: int) -> None:
    plain = encoded(picture())
    image = convert(plain[:2] + bytes([0xFF, kind]) + plain[2:], OWN_SIZE)
    assert image.passthrough is None and np.array_equal(pixels(image.data), pixels(plain))


def test_a_jpeg_without_its_last_marker_has_a_picture_if_that_is_allowed() -> None:
    data = encoded(picture())
    assert rejected(data[:-20], JPEG)[0] == "truncated"
    truncated = convert(data[:-2], jpeg(allow_truncated=True, jpeg_quality=100)).data
    assert np.abs(pixels(truncated).astype(int) - pixels(data)).max() < 9
