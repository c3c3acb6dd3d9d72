"""What of a JPEG is stored as it was compressed, what is cut out, what makes it be encoded anew; its containers."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin, TiffImagePlugin

from beam_pipeline.errors import Reject
from beam_pipeline.images import ImageOptions, containers, convert
from beam_pipeline.images.codec import channel_sums
from beam_pipeline.images.containers import COM, EndsEarly, jpeg_parts, png_parts
from tests.images.kinds import UPRIGHT, animation, every_kind, png_chunk, turned, without_part
from tests.images.profiles import gray_profile
from tests.images.test_codec import OWN_SIZE, pixels
from tests.make import encoded, noise, picture

JPEG = OWN_SIZE._replace(format="jpeg")
PNG = OWN_SIZE
EXIF = turned(1)
EXIF[0x010F] = "SECRET"
TEXT = PngImagePlugin.PngInfo()
TEXT.add_text("Author", "SECRET")


def with_everything() -> bytes:
    """A JPEG with metadata of all kinds, and a film behind it."""
    xmp = b"<x:xmpmeta xmlns:x='adobe:ns:meta/'>SECRET</x:xmpmeta>"
    data = encoded(UPRIGHT, exif=EXIF, comment=b"SECRET", xmp=xmp)
    return data + b"\0\0\0\x18ftypmp42" + b"SECRET" * 50


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("jpeg", JPEG),
        ("jpeg_444", JPEG),
        ("jpeg_422", JPEG),
        ("jpeg_411", JPEG),
        ("jpeg_restarts", JPEG),
        ("jpeg", JPEG._replace(size=(36, 48))),
        ("jpeg", JPEG._replace(size=(36, 48), resize_mode="pad")),
        ("jpeg", JPEG._replace(size=(100, 100), resize_mode="longer")),  # never enlarges
        ("jpeg", JPEG._replace(jpeg_quality=10, optimize=True)),
        ("jpeg_gray", JPEG._replace(channels=1)),
    ],
)
def test_what_fits_goes_in_bit_for_bit(kind: str, options: ImageOptions) -> None:
    data = every_kind()[kind]
    image = convert(data, options, with_sums=True)
    assert (image.data, image.passthrough) == (data, "whole")
    assert image.sums == channel_sums(Image.open(io.BytesIO(data))), "the pixels are still looked at"


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (every_kind()["jpeg"], PNG),
        (every_kind()["png"], PNG),
        (every_kind()["png"], JPEG),
        (every_kind()["jpeg"], JPEG._replace(size=(36, 47))),
        (every_kind()["jpeg"], JPEG._replace(size=(48, 48), resize_mode="pad")),
        (every_kind()["jpeg"], JPEG._replace(channels=1)),
        (every_kind()["jpeg_gray"], JPEG),
        (every_kind()["jpeg_progressive"], JPEG),
        (every_kind()["jpeg_arithmetic"], JPEG),
        (every_kind()["jpeg_rgb"], JPEG),
        (every_kind()["jpeg_cmyk"], JPEG),
        (every_kind()["jpeg_exif"], JPEG),  # it lies on its side
        (every_kind()["jpeg_profile"], JPEG),
        (encoded(UPRIGHT.convert("L"), icc_profile=gray_profile(1.0)), JPEG._replace(channels=1)),
        (every_kind()["jpeg"][:-1], JPEG._replace(allow_truncated=True)),
    ],
)
def test_what_does_not_fit_is_encoded_anew(data: bytes, options: ImageOptions) -> None:
    assert convert(data, options).passthrough is None


def test_a_thumbnail_in_the_jfif_header_is_not_let_through() -> None:
    data = encoded(UPRIGHT)
    thumbnail = b"\xff\xe0" + (16 + 3).to_bytes(2, "big") + data[6:18] + b"\1\1" + b"\x99\x98\x97"
    image = convert(data[:2] + thumbnail + data[20:], JPEG)
    assert image.passthrough is None
    assert b"\x99\x98\x97" not in image.data


@pytest.mark.parametrize("data", [with_everything(), animation("MPO", exif=EXIF)], ids=["everything", "two pictures"])
def test_metadata_is_cut_out_and_the_compressed_pixels_stay(data: bytes) -> None:
    image = convert(data, JPEG)
    assert image.passthrough == "without_metadata"
    assert b"SECRET" not in image.data
    assert image.data.endswith(b"\xff\xd9")
    assert image.data.count(b"\xff\xd8\xff") == 1
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
@pytest.mark.parametrize("key", [b"exif", b"xmp", b"transparency", b"icc_profile", b"interlace", b"bbox", b"gamma"])
def test_a_text_of_a_png_is_nothing_but_a_text(kind: str, key: bytes) -> None:
    """Whatever its keyword is: Pillow files it with what it found out itself."""
    before, after = png_with(TEXTS[kind](key)), png_with()[:-12] + TEXTS[kind](key) + png_with()[-12:]
    for options in (OWN_SIZE._replace(channels=1), JPEG):
        assert convert(before, options) == convert(after, options) == convert(png_with(), options)


def test_a_text_hides_no_true_orientation_or_colour() -> None:
    turned_png = encoded(UPRIGHT.transpose(Image.Transpose.ROTATE_90), "PNG", exif=turned(6), transparency=(0, 0, 0))
    texts = b"".join(make(key) for make in TEXTS.values() for key in (b"exif", b"transparency", b"interlace"))
    behind = turned_png[:-12] + texts + turned_png[-12:]
    assert convert(behind, PNG) == convert(turned_png, PNG)


@pytest.mark.parametrize("kind", TEXTS)
def test_exif_that_is_a_text_turns_a_png(kind: str) -> None:
    """As ImageMagick and older tools write it: https://exiftool.org/TagNames/PNG.html."""
    exif = turned(6).tobytes()
    text = f"\nexif\n{len(exif):8d}\n{exif.hex()}\n".encode()
    bodies = {"tEXt": text, "zTXt": b"\0" + zlib.compress(text), "iTXt": b"\0\0\0\0" + text}
    on_its_side = encoded(UPRIGHT.transpose(Image.Transpose.ROTATE_90), "PNG")
    for place in (33, len(on_its_side) - 12):
        data = (
            on_its_side[:place]
            + png_chunk(kind.encode(), b"Raw profile type exif\0" + bodies[kind])
            + on_its_side[place:]
        )
        assert np.array_equal(pixels(convert(data, PNG).data), np.asarray(UPRIGHT))
    broken = png_with(png_chunk(b"tEXt", b"Raw profile type exif\0\nexif\n 9\nno hexadecimal"))
    assert convert(broken, PNG) == convert(png_with(), PNG)


@pytest.mark.parametrize("format", ["jpeg", "png"])
@pytest.mark.parametrize(("tag", "kind"), [(700, 2), (700, 3), (700, 5), (34675, 2), (34675, 3), (34675, 4)])
def test_metadata_of_a_tiff_that_is_of_another_type_is_ignored(tag: int, kind: int, format: str) -> None:
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags.tagtype[tag] = kind
    tags[tag] = "text" if kind == 2 else 7
    data = encoded(UPRIGHT, "TIFF", tiffinfo=tags)
    plain = encoded(UPRIGHT, "TIFF")
    options = OWN_SIZE._replace(format=format)
    assert convert(data, options).data == convert(plain, options).data


def test_no_text_of_a_png_costs_the_picture_by_its_size() -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("history", "x" * 3_000_000, zip=True)
    plain = convert(encoded(UPRIGHT, "PNG"), PNG)
    assert convert(encoded(UPRIGHT, "PNG", pnginfo=text), PNG) == plain


def test_a_png_with_a_wrong_crc_is_rejected_unless_it_is_of_a_text() -> None:
    for chunk in (b"iCCP", b"tIME"):
        with pytest.raises(Reject) as caught:
            convert(png_with(png_chunk(chunk, b"key\0\0\0\0")[:-1] + b"\0"), PNG)
        assert caught.value.reason == "decode_error"
    wrong = png_chunk(b"tEXt", b"key\0\0\0\0")[:-1] + b"\0"
    assert convert(png_with(wrong), PNG) == convert(png_with(), PNG)


# --- the containers themselves

# The first of several pictures is there before the file ends.
WHOLE_WHEN_CUT = {"jpeg_two_pictures", "gif_animated", "png_animated", "tiff_pages"}


def test_segments_of_a_jpeg_make_up_the_file() -> None:
    for kind, data in every_kind().items():
        if kind.startswith("jpeg_two"):
            continue
        if kind.startswith("jpeg"):
            assert b"".join(data[part.start : part.end] for part in jpeg_parts(data)) == data, kind
        elif kind.startswith("png"):
            assert data[:8] + b"".join(data[part.start : part.end] for part in png_parts(data)) == data, kind


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("kind", sorted(every_kind()))
def test_a_file_cut_anywhere_is_rejected(kind: str) -> None:
    """As truncated, if Pillow or the container says so; few formats tell it of a file that is cut in its header."""
    data = every_kind()[kind]
    assert not containers.ends_early(data, convert(data, PNG).source.format)
    signature = 26 if kind.startswith("bmp") else 12
    for end in range(signature, len(data) - 20, len(data) // 60):  # all but the last bytes, which may be a trailer
        try:
            convert(data[:end], PNG)
        except Reject as reject:
            told = kind.startswith(("jpeg", "png", "bmp"))
            reasons = ("truncated",) if told else ("truncated", "decode_error", "unsupported")
            assert reject.reason in reasons, (end, reject.detail)
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
    truncated = JPEG._replace(allow_truncated=True, jpeg_quality=100)
    assert np.abs(pixels(convert(data[:-2], truncated).data).astype(int) - pixels(data)).max() < 9


@pytest.mark.parametrize("order", ["II", "MM"])
@pytest.mark.parametrize("prefix", [b"", b"Exif\0\0"])
def test_orientation_is_read_in_both_byte_orders(order: str, prefix: bytes) -> None:
    exif = turned(8)
    exif[0x010F] = "a camera"
    exif.endian = "<" if order == "II" else ">"
    assert containers.orientation(prefix + exif.tobytes().removeprefix(b"Exif\0\0")) == 8


@pytest.mark.parametrize(
    "exif", [b"", b"Exif\0\0", b"MM\0*", b"MM\0*\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff", b"x" * 99]
)
def test_exif_without_an_orientation_is_upright(exif: bytes) -> None:
    assert containers.orientation(exif) == 1
