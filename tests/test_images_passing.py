"""What is stored as it was compressed, what is cut out of it, what makes it be encoded anew; kept metadata."""

from __future__ import annotations

import io
import itertools
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin, TiffImagePlugin

from beam_pipeline.errors import Reject
from beam_pipeline.images import ImageOptions, containers, convert
from beam_pipeline.images.containers import COM, EndsEarly, jpeg_parts, png_parts
from tests.kinds import UPRIGHT, animation, every_kind, png_chunk, turned, without_part
from tests.make import encoded, noise, picture
from tests.profiles import gray_profile, wide_profile
from tests.test_images import OWN_SIZE, pixels

JPEG = OWN_SIZE._replace(format="jpeg")
PNG = OWN_SIZE
JPEG_GRAY = JPEG._replace(channels=1, keep_metadata=True)
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
        ("jpeg_progressive", JPEG._replace(progressive=True)),
        ("jpeg", JPEG._replace(size=(36, 48))),
        ("jpeg", JPEG._replace(size=(36, 48), resize_mode="pad")),
        ("jpeg", JPEG._replace(size=(100, 100), resize_mode="longer")),  # never enlarges
        ("jpeg", JPEG._replace(jpeg_quality=10, optimize=True)),
        ("jpeg_gray", JPEG._replace(channels=1)),
        ("png", PNG),
        ("png_8bit", PNG._replace(channels=1)),
    ],
)
def test_what_fits_goes_in_bit_for_bit(kind: str, options: ImageOptions) -> None:
    data = every_kind()[kind]
    seen: list[Image.Image] = []
    image = convert(data, options, look=seen.append)
    assert (image.data, image.passed) == (data, "whole")
    assert np.array_equal(np.asarray(seen[0].convert("RGB")), pixels(data)), "the pixels are still looked at"


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (every_kind()["jpeg"], PNG),
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
        (every_kind()["png_8bit"], PNG),
        (every_kind()["png_palette"], PNG),
        (every_kind()["png_rgb_16bit"], PNG),
        (every_kind()["png_rgba"], PNG),
        (every_kind()["png_transparent_colour"], PNG),
        (every_kind()["png_exif"], PNG),
        (every_kind()["png_animated"], PNG),
    ],
)
def test_what_does_not_fit_is_encoded_anew(data: bytes, options: ImageOptions) -> None:
    assert convert(data, options).passed is None


def test_a_thumbnail_in_the_jfif_header_is_not_let_through() -> None:
    data = encoded(UPRIGHT)
    thumbnail = b"\xff\xe0" + (16 + 3).to_bytes(2, "big") + data[6:18] + b"\1\1" + b"\x99\x98\x97"
    image = convert(data[:2] + thumbnail + data[20:], JPEG)
    assert image.passed is None
    assert b"\x99\x98\x97" not in image.data


@pytest.mark.parametrize("data", [with_everything(), animation("MPO", exif=EXIF)], ids=["everything", "two pictures"])
def test_metadata_is_cut_out_and_the_compressed_pixels_stay(data: bytes) -> None:
    image = convert(data, JPEG)
    assert image.passed == "without_metadata"
    assert b"SECRET" not in image.data
    assert image.data.endswith(b"\xff\xd9")
    assert image.data.count(b"\xff\xd8\xff") == 1
    assert np.array_equal(pixels(image.data), pixels(data))
    assert convert(image.data, JPEG)[::4] == (image.data, "whole")


def test_text_chunks_are_cut_out_of_a_png() -> None:
    data = encoded(UPRIGHT, "PNG", pnginfo=TEXT, exif=EXIF, dpi=(300, 300))
    image = convert(data, PNG)
    assert image.passed == "without_metadata"
    assert [part.kind for part in png_parts(image.data)] == [b"IHDR", b"IDAT", b"IEND"]
    assert np.array_equal(pixels(image.data), np.asarray(UPRIGHT))


def test_kept_metadata_lets_the_whole_file_through_but_for_what_hangs_behind_it() -> None:
    data = with_everything()
    image = convert(data, JPEG._replace(keep_metadata=True))
    assert data.startswith(image.data)
    assert b"ftypmp42" not in image.data
    found = Image.open(io.BytesIO(image.data))
    assert found.info["comment"] == b"SECRET"
    assert found.getexif()[0x010F] == "SECRET"
    whole = encoded(UPRIGHT, exif=EXIF)
    assert convert(whole, JPEG._replace(keep_metadata=True))[::4] == (whole, "whole")


def test_an_unused_profile_goes_even_where_metadata_stays() -> None:
    broken = encoded(UPRIGHT, icc_profile=b"no profile", comment=b"c")
    found = Image.open(io.BytesIO(convert(broken, JPEG._replace(keep_metadata=True)).data))
    assert "icc_profile" not in found.info
    assert found.info["comment"] == b"c"
    kept = encoded(UPRIGHT, icc_profile=wide_profile())
    assert convert(kept, JPEG._replace(icc="keep"))[::4] == (kept, "whole")


@pytest.mark.parametrize(("source", "format"), list(itertools.product(("JPEG", "PNG", "WEBP"), ("jpeg", "png"))))
def test_kept_metadata_of_a_turned_picture_says_upright(source: str, format: str) -> None:
    exif = turned(6)
    exif[0x010F] = "a camera"
    exif.get_ifd(0x8825)[1] = "N"
    data = encoded(UPRIGHT.transpose(Image.Transpose.ROTATE_90), source, exif=exif, xmp=b"<x>\xc3\xa9</x>")
    image = convert(data, OWN_SIZE._replace(format=format, size=(18, 24), keep_metadata=True))
    found = Image.open(io.BytesIO(image.data))
    found.load()
    kept = found.getexif()
    assert (found.size, kept[0x0112], kept[0x010F]) == ((24, 18), 1, "a camera")
    assert kept.get_ifd(0x8825)[1] == "N"
    if source != "PNG":
        assert found.info["xmp"] == b"<x>\xc3\xa9</x>"


def test_metadata_that_no_segment_holds_is_left_out() -> None:
    large = encoded(UPRIGHT, "PNG", exif=b"Exif\0\0" + b"MM\0*\0\0\0\x08\0\0" + bytes(70_000))
    image = convert(large, JPEG._replace(keep_metadata=True))
    assert "exif" not in Image.open(io.BytesIO(image.data)).info


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
@pytest.mark.parametrize(
    "key", [b"exif", b"xmp", b"transparency", b"icc_profile", b"interlace", b"bbox", b"comment", b"gamma", b"dpi"]
)
def test_a_text_of_a_png_is_nothing_but_a_text(kind: str, key: bytes) -> None:
    """Whatever its keyword is: Pillow files it with what it found out itself."""
    options = OWN_SIZE._replace(channels=1, keep_metadata=True)
    plain = convert(png_with(), options)
    before, behind = png_with(TEXTS[kind](key)), png_with()
    behind = behind[:-12] + TEXTS[kind](key) + behind[-12:]
    for data in (before, behind):
        assert convert(data, options).data == plain.data
        assert convert(data, options._replace(format="jpeg")).data == convert(png_with(), JPEG_GRAY).data


def test_a_text_hides_no_true_orientation_or_colour() -> None:
    turned_png = encoded(UPRIGHT.transpose(Image.Transpose.ROTATE_90), "PNG", exif=turned(6), transparency=(0, 0, 0))
    texts = b"".join(make(key) for make in TEXTS.values() for key in (b"exif", b"transparency", b"interlace"))
    behind = turned_png[:-12] + texts + turned_png[-12:]
    assert convert(behind, PNG) == convert(turned_png, PNG)


def test_comment_and_xmp_of_a_png_are_kept_where_metadata_is() -> None:
    xmp = png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<x/>")
    data = png_with(png_chunk(b"tEXt", b"Comment\0a comment"), xmp)
    found = Image.open(io.BytesIO(convert(data, JPEG_GRAY).data)).info
    assert (found["comment"], found["xmp"]) == (b"a comment", b"<x/>")


@pytest.mark.parametrize("format", ["jpeg", "png"])
@pytest.mark.parametrize(("tag", "kind"), [(700, 2), (700, 3), (700, 5), (34675, 2), (34675, 3), (34675, 4)])
def test_metadata_of_a_tiff_that_is_of_another_type_is_ignored(tag: int, kind: int, format: str) -> None:
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags.tagtype[tag] = kind
    tags[tag] = "text" if kind == 2 else 7
    data = encoded(UPRIGHT, "TIFF", tiffinfo=tags)
    plain = encoded(UPRIGHT, "TIFF")
    for options in (OWN_SIZE._replace(format=format), OWN_SIZE._replace(format=format, keep_metadata=True, icc="keep")):
        assert convert(data, options).data == convert(plain, options).data


def test_large_text_of_a_png_does_not_cost_the_picture() -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("history", "x" * 3_000_000, zip=True)
    assert convert(encoded(UPRIGHT, "PNG", pnginfo=text), PNG).passed == "without_metadata"


def test_a_png_with_a_wrong_crc_is_not_let_through() -> None:
    wrong = png_chunk(b"tIME", b"\0\0\0\0\0\0\0")[:-1] + b"\0"
    data = encoded(UPRIGHT, "PNG")
    with pytest.raises(ValueError, match="wrong CRC"):
        list(png_parts(data[:33] + wrong + data[33:]))


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


@pytest.mark.filterwarnings("ignore:::PIL")  # pytest takes back the filter that the codec sets
@pytest.mark.parametrize("kind", sorted(every_kind()))
def test_a_file_cut_anywhere_is_called_truncated(kind: str) -> None:
    data = every_kind()[kind]
    assert not containers.ends_early(data, convert(data, PNG).source.format)
    signature = 26 if kind.startswith("bmp") else 12
    for end in range(signature, len(data) - 20, len(data) // 60):  # all but the last bytes, which may be a trailer
        try:
            convert(data[:end], PNG)
        except Reject as reject:
            assert reject.reason == "truncated", (end, reject.detail)
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
    assert containers.ended_jpeg(data[:-2]) == data
    assert containers.ended_jpeg(data) == data


@pytest.mark.parametrize("order", ["II", "MM"])
@pytest.mark.parametrize("prefix", [b"", b"Exif\0\0"])
def test_orientation_is_read_and_reset_in_place(order: str, prefix: bytes) -> None:
    exif = turned(8)
    exif[0x010F] = "a camera"
    exif.endian = "<" if order == "II" else ">"
    data = prefix + exif.tobytes().removeprefix(b"Exif\0\0")
    found = containers.orientation(data)
    assert found is not None
    assert found.value == 8
    upright = containers.upright_exif(data)
    assert len(upright) == len(data)
    assert containers.orientation(upright) == found._replace(value=1)


@pytest.mark.parametrize(
    "exif", [b"", b"Exif\0\0", b"MM\0*", b"MM\0*\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff", b"x" * 99]
)
def test_exif_without_an_orientation_has_none(exif: bytes) -> None:
    assert containers.orientation(exif) is None
    assert containers.upright_exif(exif) == exif
