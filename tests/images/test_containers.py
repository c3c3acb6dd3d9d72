"""What of a JPEG is stored as it was compressed, what is cut out, what has it encoded again; its containers."""

from __future__ import annotations

import io
import zlib
from functools import cache

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from beam_pipeline.errors import Reject
from beam_pipeline.images import ImageOptions, containers, convert
from beam_pipeline.images.codec import channel_sums
from beam_pipeline.images.containers import COM, EndsEarly, jpeg_parts, png_parts
from tests.images.kinds import UPRIGHT, animation, every_kind, png_chunk, turned, without_part
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
WHOLE = [
    *((kind, JPEG) for kind in ("jpeg", "jpeg_444", "jpeg_422", "jpeg_411", "jpeg_restarts")),
    ("jpeg", jpeg(size=(36, 48))), ("jpeg", jpeg(size=(36, 48), resize_mode="pad")),
    ("jpeg", jpeg(size=(100, 100), resize_mode="longer")),  # never enlarges
    ("jpeg", jpeg(jpeg_quality=10, optimize=True)), ("jpeg_gray", jpeg(channels=1)),
]
ANEW = [
    ("jpeg", PNG), ("png", PNG), ("jpeg", jpeg(size=(36, 47))), ("jpeg", jpeg(size=(48, 48), resize_mode="pad")),
    ("jpeg", jpeg(channels=1)), ("jpeg_gray_profile", jpeg(channels=1)),
    ("jpeg_without_end", jpeg(allow_truncated=True)), ("jpeg_with_thumbnail", JPEG),
    *((f"jpeg_{kind}", JPEG) for kind in ("gray", "progressive", "arithmetic", "rgb", "cmyk", "profile")),
    ("png", JPEG), ("jpeg_exif", JPEG),  # which lies on its side
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


@pytest.mark.parametrize(("kind", "options"), WHOLE)
def test_what_fits_goes_in_bit_for_bit(kind: str, options: ImageOptions) -> None:
    data = files()[kind]
    image = convert(data, options, with_sums=True)
    assert (image.data, image.passthrough) == (data, "whole")
    assert image.sums == channel_sums(Image.open(io.BytesIO(data))), "the pixels are still looked at"


@pytest.mark.parametrize(("kind", "options"), ANEW)
def test_what_does_not_fit_is_encoded_anew(kind: str, options: ImageOptions) -> None:
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
    "tEXt": lambda key: png_chunk(b"tEXt", key + b"\0a text"),
    "zTXt": lambda key: png_chunk(b"zTXt", key + b"\0\0" + zlib.compress(b"a text")),
    "iTXt": lambda key: png_chunk(b"iTXt", key + b"\0\0\0\0\0a text"),
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("key", [b"exif", b"transparency", b"icc_profile", b"interlace", b"bbox"])
def test_a_text_of_a_png_is_nothing_but_a_text(kind: str, key: bytes) -> None:
    """Whatever its keyword is: Pillow files it with what it found out itself."""
    before, after = png_with(TEXTS[kind](key)), png_with()[:-12] + TEXTS[kind](key) + png_with()[-12:]
    for options in (OWN_SIZE._replace(channels=1), JPEG):
        assert convert(before, options) == convert(after, options) == convert(png_with(), options)


def test_a_text_hides_no_true_orientation_or_colour() -> None:
    side = encoded(UPRIGHT.transpose(Image.Transpose.ROTATE_90), "PNG", exif=turned(6), transparency=(0, 0, 0))
    texts = b"".join(make(key) for make in TEXTS.values() for key in (b"exif", b"transparency", b"interlace"))
    assert convert(side[:-12] + texts + side[-12:], PNG) == convert(side, PNG)


@pytest.mark.parametrize("kind", TEXTS)
def test_exif_that_is_a_text_turns_a_png(kind: str) -> None:
    """As ImageMagick and older tools write it: https://exiftool.org/TagNames/PNG.html."""
    exif = turned(6).tobytes()
    text = f"\nexif\n{len(exif):8d}\n{exif.hex()}\n".encode()
    bodies = {"tEXt": text, "zTXt": b"\0" + zlib.compress(text), "iTXt": b"\0\0\0\0" + text}
    chunk = png_chunk(kind.encode(), b"Raw profile type exif\0" + bodies[kind])
    side = encoded(UPRIGHT.transpose(Image.Transpose.ROTATE_90), "PNG")
    for data in (side[:33] + chunk + side[33:], side[:-12] + chunk + side[-12:]):
        assert np.array_equal(pixels(convert(data, PNG).data), np.asarray(UPRIGHT))
    broken = png_with(png_chunk(b"tEXt", b"Raw profile type exif\0\nexif\n 9\nno hexadecimal"))
    assert convert(broken, PNG) == convert(png_with(), PNG)


@pytest.mark.parametrize(("tag", "kind"), [(700, 2), (700, 3), (700, 5), (34675, 2), (34675, 3), (34675, 4)])
def test_metadata_of_a_tiff_that_is_of_another_type_is_ignored(tag: int, kind: int) -> None:
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags.tagtype[tag] = kind
    tags[tag] = "text" if kind == 2 else 7
    for options in (JPEG, PNG):
        data, plain = encoded(UPRIGHT, "TIFF", tiffinfo=tags), encoded(UPRIGHT, "TIFF")
        assert convert(data, options).data == convert(plain, options).data


def test_no_text_of_a_png_costs_the_picture_by_its_size() -> None:
    data = png_with(png_chunk(b"zTXt", b"history\0\0" + zlib.compress(b"x" * 3_000_000)))
    assert convert(data, PNG) == convert(png_with(), PNG)


def test_a_png_with_a_wrong_crc_is_rejected_unless_it_is_of_a_text() -> None:
    for chunk in (b"iCCP", b"tIME"):
        assert rejected(png_with(png_chunk(chunk, b"key\0\0\0\0")[:-1] + b"\0"), PNG)[0] == "decode_error"
    wrong = png_chunk(b"tEXt", b"key\0\0\0\0")[:-1] + b"\0"
    assert convert(png_with(wrong), PNG) == convert(png_with(), PNG)


# The first of several pictures is there before the file ends.
WHOLE_WHEN_CUT = {"jpeg_two_pictures", "gif_animated", "png_animated", "tiff_pages"}


def test_parts_of_a_jpeg_or_png_make_up_the_file() -> None:
    for kind, data in every_kind().items():
        if kind.startswith(("jpeg", "png")) and kind != "jpeg_two_pictures":
            start, parts = (b"", jpeg_parts(data)) if kind.startswith("jpeg") else (data[:8], png_parts(data))
            assert start + b"".join(data[part.start : part.end] for part in parts) == data, kind


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("kind", sorted(every_kind()))
def test_a_file_cut_anywhere_is_rejected(kind: str) -> None:
    """As truncated, if Pillow or the container says so; few formats tell it of a file that is cut in its header."""
    data = every_kind()[kind]
    assert not containers.ends_early(data, convert(data, PNG).source.format)
    signature, tells = (26 if kind.startswith("bmp") else 12), kind.startswith(("jpeg", "png", "bmp"))
    for end in range(signature, len(data) - 20, len(data) // 60):  # all but the last bytes, which may be a trailer
        try:
            convert(data[:end], PNG)
        except Reject as reject:
            assert reject.reason in (("truncated",) if tells else ("truncated", "decode_error", "unsupported")), end
        else:
            assert kind in WHOLE_WHEN_CUT, end


def test_fill_bytes_before_a_marker_belong_to_no_segment() -> None:
    data = encoded(noise(16, 16), comment=b"c")
    place = next(part.start for part in jpeg_parts(data) if part.kind == COM)
    filled = data[:place] + b"\xff\xff" + data[place:]
    assert [part.kind for part in jpeg_parts(filled)] == [part.kind for part in jpeg_parts(data)]
    assert convert(filled, JPEG).data == convert(data, JPEG).data == without_part(data, COM)


def test_a_jpeg_without_an_end_ends_early() -> None:
    data = encoded(picture())
    with pytest.raises(EndsEarly):
        list(jpeg_parts(data[:-2]))
    truncated = convert(data[:-2], jpeg(allow_truncated=True, jpeg_quality=100)).data
    assert np.abs(pixels(truncated).astype(int) - pixels(data)).max() < 9


@pytest.mark.parametrize("endian", ["<", ">"])
@pytest.mark.parametrize("prefix", [b"", b"Exif\0\0"])
def test_orientation_is_read_in_both_byte_orders(endian: str, prefix: bytes) -> None:
    exif = turned(8)
    exif[0x010F], exif.endian = "a camera", endian
    assert containers.orientation(prefix + exif.tobytes().removeprefix(b"Exif\0\0")) == 8


NO_ORIENTATION = [b"", b"Exif\0\0", b"MM\0*", b"MM\0*\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff", b"x" * 99]


@pytest.mark.parametrize("exif", [*NO_ORIENTATION, *(turned(number).tobytes() for number in (0, 9, 65535))])
def test_exif_without_an_orientation_is_upright(exif: bytes) -> None:
    assert containers.orientation(exif) == 1
