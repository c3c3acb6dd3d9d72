"""The table "What is stored" in docs/format.md, row by row: each kind of input against pixels computed apart."""

from __future__ import annotations

import io
import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from beam_pipeline.images import convert
from tests.images.kinds import UPRIGHT, broken, every_kind, heic_kinds, png, png_chunk, with_alpha
from tests.images.profiles import srgb_of_adobe_rgb
from tests.images.test_codec import DEFAULTS, OWN_SIZE, opened, rejected
from tests.make import ROOT, encoded

EXACT = np.asarray(UPRIGHT).astype(float)
GRAY = np.repeat(np.asarray(UPRIGHT.convert("L")).astype(float)[..., None], 3, axis=2)
FADE = np.asarray(with_alpha(UPRIGHT)).astype(float)[..., 3:] / 255
KINDS = every_kind()


def on_white(colours: np.ndarray, alpha: np.ndarray = FADE) -> np.ndarray:
    return colours * alpha + 255 * (1 - alpha)


def as_floats(image: Image.Image, mode: str) -> np.ndarray:
    return np.asarray(image.convert(mode)).astype(float)


def stored(kind: str, **changes: object) -> np.ndarray:
    """Float [height, width, 3] of what is stored of a kind, losslessly and in its own size."""
    image = convert(KINDS[kind], OWN_SIZE._replace(**changes))  # type: ignore[arg-type]
    found = opened(image.data)
    assert found.shape[:2] == (image.height, image.width)
    return found.astype(float)


def near(kinds: str, expected: np.ndarray, mean: float, most: float = 256) -> None:
    """The stored pixels of some kinds differ from the expected ones by no more than this."""
    for kind in kinds.split():
        if kind.startswith("heic") and not heic_kinds():
            continue
        found = stored(kind)
        assert found.shape == expected.shape, kind
        assert np.abs(found - expected).mean() <= mean, (kind, np.abs(found - expected).mean())
        assert np.abs(found - expected).max() <= most, kind


def one_luma_of_two_jpegs() -> None:
    assert stored("jpeg_411").shape == stored("jpeg_arithmetic").shape == (18, 24, 3)
    # Both were made of the same picture: they have the same luma, but not the same detail of chroma.
    assert np.abs(stored("jpeg_411", channels=1) - stored("jpeg_arithmetic", channels=1)).mean() < 1


def few_bits() -> None:
    for depth in (1, 2, 4):
        near(f"png_{depth}bit", np.floor(GRAY / 2 ** (8 - depth)) * 255 / ((1 << depth) - 1), 0)
    bilevel = stored("tiff_1bit_fax")
    assert set(np.unique(bilevel)) == {0, 255}
    assert np.abs(bilevel.mean() - GRAY.mean()) < 6  # dithered


def highest_of_sixteen_bits() -> None:
    row = np.array([0, 255, 256, 32767, 32768, 65535], ">u2")
    found = opened(convert(png(6, 1, 16, 0, [row.tobytes()]), OWN_SIZE).data)
    assert found[0, :, 0].tolist() == [0, 0, 1, 127, 128, 255]


def transparency() -> None:
    palette = as_floats(with_alpha(UPRIGHT).quantize(64), "RGBA")
    near("png_palette_alpha", on_white(palette[..., :3], palette[..., 3:] / 255), 0.5, 1)
    transparent = as_floats(Image.open(io.BytesIO(KINDS["gif_transparent"])), "RGBA")
    assert 0 < (transparent[..., 3] == 0).mean() < 1
    near("gif_transparent", np.where(transparent[..., 3:] == 0, 255, transparent[..., :3]), 0)
    near("png_transparent_colour", np.where((EXACT == 0).all(axis=2, keepdims=True), 255, EXACT), 0)
    assert (stored("png_rgba", background=(10, 20, 30))[:, 0] == (10, 20, 30)).all()


def without_extra() -> None:
    data = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pillow_heif", None)
        assert rejected(data) == ("unsupported", "HEIF: install imageshards[heic] on the workers")


def unsupported() -> None:
    files = [data for reason, data in broken().values() if reason == "unsupported"]
    files += [encoded(UPRIGHT.convert(mode), "TIFF") for mode in ("I", "F")]
    files += [b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(60), b"\xff\x0a" + bytes(60), b"\0\0\1\0\1\0" + bytes(60)]
    files += [b"v/1\1" + bytes(60), b"II*\0\x10\0\0\0CR\2\0" + bytes(60), b"\0\0\0\x18ftypcrx \0\0\0\1crx isom"]
    assert {rejected(data)[0] for data in files} == {"unsupported"}


def cut_off() -> None:
    for name, (reason, data) in broken().items():
        assert reason != "truncated" or rejected(data)[0] == "truncated", name
    for kind in ("jpeg", "jpeg_progressive", "png", "gif", "bmp", "tiff"):
        data = KINDS[kind][: len(KINDS[kind]) * 3 // 4]
        found = opened(convert(data, OWN_SIZE._replace(allow_truncated=True)).data).astype(float)
        expected = stored(kind)
        assert found.shape == expected.shape, kind
        first = -1 if kind == "bmp" else 0  # rows of a BMP go upwards
        assert np.abs(found[first] - expected[first]).mean() < 25, kind  # a progressive one lacks detail everywhere
        assert np.abs(found - expected).mean() > 0.5, kind


# The first column of the table → what `near` compares, and other checks.
# fmt: off
ROWS: dict[str, list[tuple[Any, ...] | Callable[[], None]]] = {
    "JPEG, baseline or progressive, 4:4:4 to 4:1:1, restart markers, arithmetic": [
        ("jpeg jpeg_progressive jpeg_444 jpeg_422 jpeg_restarts", EXACT, 2, 20), one_luma_of_two_jpegs],
    "JPEG of RGB, also in TIFF": [("jpeg_rgb tiff_jpeg", EXACT, 1, 8)],
    "gray": [("jpeg_gray", GRAY, 1, 6), ("png_8bit", GRAY, 0)],
    "1, 2 or 4 bits": [few_bits],
    "16 bits, PNG or TIFF of either byte order; gray of 12 bits, TIFF": [
        ("png_16bit tiff_16bit tiff_16bit_big_endian", GRAY, 0), ("png_rgb_16bit", EXACT, 0),
        ("tiff_12bit", GRAY, 1, 1), highest_of_sixteen_bits],  # 255 isn't a divisor of 4095 × 256
    "CMYK or YCCK, JPEG or TIFF": [
        ("jpeg_cmyk jpeg_cmyk_unmarked tiff_cmyk", EXACT, 1, 10), ("jpeg_ycck", EXACT, 1.5, 12)],
    "Lab TIFF, not in planes": [("tiff_lab", EXACT, 1.5, 30)],
    "YCbCr TIFF; TIFF in planes: gray, palette, RGB, CMYK": [],  # test_tiff.py
    "an ICC profile": [
        ("jpeg_profile", srgb_of_adobe_rgb(EXACT), 3, 40), ("png_profile", on_white(srgb_of_adobe_rgb(EXACT)), 0.6, 3)],
    "a palette": [("png_palette bmp_palette gif", as_floats(UPRIGHT.quantize(64), "RGB"), 0)],
    "transparency: alpha, palette, one colour": [
        ("png_rgba tiff_deflate_alpha webp_lossless_alpha", on_white(EXACT), 0.4, 1),
        ("avif_alpha", on_white(EXACT), 3), ("png_gray_alpha", on_white(GRAY), 0.5, 2), transparency],
    "animated GIF, WebP, PNG; TIFF of pages; JPEG of several pictures": [
        ("webp_animated png_animated tiff_pages", EXACT, 0),
        ("gif_animated", EXACT, 8), ("jpeg_two_pictures", EXACT, 4)],
    "turned by EXIF, TIFF or HEIC": [
        ("png_exif tiff_turned", EXACT, 0), ("jpeg_exif", EXACT, 2), ("heic_turned", EXACT, 6)],
    "PNG, BMP, TIFF, WebP, AVIF, HEIC": [
        ("png bmp tiff tiff_lzw", EXACT, 0), ("webp avif", EXACT, 3), ("heic", EXACT, 6)],
    "HEIC without the extra": [without_extra],
    "JPEG of 12 bits, JPEG 2000 and XL, PSD, SVG, PDF, ICO, camera raw, PNG of iPhone apps (`CgBI`)": [unsupported],
    "TIFF of signed integers, 32-bit integers or floats; of 16-bit gray with alpha; in planes: gray or palette "
    "with alpha, Lab; whose channels are pages (ImageJ, OME); that holds only a thumbnail; "
    "compressed as WebP": [unsupported],
    "BMP of 2 bits, of JPEG or PNG inside, of rare masks: 4444, 10 bits per channel, RGBX, ARGB": [],  # test_bmp.py
    "a JPEG for `jpeg` that fits already": [],  # test_containers.py
    "a PNG or JPEG with broken metadata": [],  # test_rescue.py
    "a JPEG that lacks only its last marker (EOI)": [],  # test_rescue.py
    "a file that ends early": [cut_off],
}
# fmt: on


def test_the_table_has_a_test_for_each_row() -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    section = text.split("## What is stored\n")[1].split("\n**Stored without")[0]
    assert re.findall(r"^\| (.+?) \| .+ \|$", section, re.MULTILINE) == ["input", *ROWS]


@pytest.mark.parametrize("row", ROWS)
def test_what_the_table_says(row: str) -> None:
    for check in ROWS[row]:
        if isinstance(check, tuple):
            near(*check)
        else:
            check()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_can_be_resized_and_made_gray(kind: str) -> None:
    for (channels, mode), format in itertools.product(((1, "L"), (3, "RGB")), ("jpeg", "png")):
        found = Image.open(io.BytesIO(convert(KINDS[kind], DEFAULTS._replace(channels=channels, format=format)).data))
        assert (found.mode, found.size) == (mode, (60, 40))


def test_one_channel_is_the_luma_of_three() -> None:
    for kind in ("png", "png_16bit", "webp_lossless_alpha", "tiff_cmyk", "gif", "png_profile"):
        luma = as_floats(Image.fromarray(stored(kind).astype(np.uint8)), "L")
        assert np.abs(stored(kind, channels=1) - luma).max() <= 1, kind
    luma = as_floats(Image.open(io.BytesIO(KINDS["jpeg"])), "L")
    assert np.abs(stored("jpeg", channels=1) - luma).max() <= 3, "decoded without its chroma"


@pytest.mark.parametrize(
    ("depth", "row", "key", "transparent"),
    [
        (1, b"\x40", 1, 1),
        (2, b"\x1b", 3, 3),
        (4, b"\x0a\x5f", 10, 1),
        (8, bytes([0, 100, 200, 255]), 100, 1),
        (16, b"\0\0\x80\0\x80\1\xff\xff", 0x8000, 1),
    ],
)
def test_the_transparent_gray_of_a_png_counts_in_its_own_depth(depth: int, row: bytes, key: int, transparent: int):
    chunk = png_chunk(b"tRNS", key.to_bytes(2, "big"))
    found = opened(convert(png(4, 1, depth, 0, [row], chunk), OWN_SIZE._replace(background=(1, 2, 3))).data)[0]
    expected = opened(convert(png(4, 1, depth, 0, [row]), OWN_SIZE).data)[0].copy()
    expected[transparent] = (1, 2, 3)
    assert np.array_equal(found, expected)
