"""The table "What is stored" in docs/format.md, row by row: each kind of input against pixels computed apart."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from beam_pipeline.errors import Reject
from beam_pipeline.images import EncodedImage, convert
from tests.images.kinds import UPRIGHT, broken, every_kind, heic_kinds, png, png_chunk, with_alpha
from tests.images.profiles import srgb_of_adobe_rgb
from tests.images.test_codec import DEFAULTS, OWN_SIZE
from tests.make import ROOT, encoded

EXACT = np.asarray(UPRIGHT).astype(float)
GRAY = np.repeat(np.asarray(UPRIGHT.convert("L")).astype(float)[..., None], 3, axis=2)
FADE = np.asarray(with_alpha(UPRIGHT)).astype(float)[..., 3:] / 255
ON_WHITE = EXACT * FADE + 255 * (1 - FADE)
KINDS = every_kind()


def stored(kind: str, **changes: object) -> np.ndarray:
    """Float [height, width, 3] of what is stored of a kind, losslessly and in its own size."""
    image = convert(KINDS[kind], OWN_SIZE._replace(**changes))  # type: ignore[arg-type]
    found = np.asarray(Image.open(io.BytesIO(image.data)))
    assert found.shape[:2] == (image.height, image.width)
    return found.astype(float)


def near(kinds: str, expected: np.ndarray, mean: float, most: float = 256) -> None:
    """The stored pixels of some kinds differ from the expected ones by no more than this."""
    for kind in kinds.split():
        found = stored(kind)
        assert found.shape == expected.shape, kind
        assert np.abs(found - expected).mean() <= mean, (kind, np.abs(found - expected).mean())
        assert np.abs(found - expected).max() <= most, kind


def reject(data: bytes) -> str:
    with pytest.raises(Reject) as caught:
        convert(data, OWN_SIZE)
    return str(caught.value.reason)


def jpegs() -> None:
    near("jpeg jpeg_progressive jpeg_444 jpeg_422 jpeg_restarts", EXACT, 2, 20)
    small = np.asarray(Image.fromarray(EXACT.astype(np.uint8)).resize((24, 18))).shape
    assert stored("jpeg_411").shape == stored("jpeg_arithmetic").shape == small
    # Both were made of the same picture: they have the same luma, but not the same detail of chroma.
    assert np.abs(stored("jpeg_411", channels=1) - stored("jpeg_arithmetic", channels=1)).mean() < 1


def jpegs_in_rgb() -> None:
    near("jpeg_rgb tiff_jpeg", EXACT, 1, 8)


def gray() -> None:
    near("jpeg_gray", GRAY, 1, 6)
    near("png_8bit", GRAY, 0)
    for kind in ("jpeg_gray", "png_8bit"):
        found = stored(kind)
        assert (found[..., :1] == found).all()


def few_bits() -> None:
    for depth in (1, 2, 4):
        levels = (1 << depth) - 1
        expected = np.floor(GRAY / 2 ** (8 - depth)) * 255 / levels
        near(f"png_{depth}bit", expected, 0)
    bilevel = stored("tiff_1bit_fax")
    assert set(np.unique(bilevel)) == {0, 255}
    assert np.abs(bilevel.mean() - GRAY.mean()) < 6  # dithered


def sixteen_bits() -> None:
    near("png_16bit tiff_16bit tiff_16bit_big_endian", GRAY, 0)
    near("tiff_12bit", GRAY, 1, 1)  # 255 isn't a divisor of 4095 × 256
    near("png_rgb_16bit", EXACT, 0)
    row = np.array([0, 255, 256, 32767, 32768, 65535], ">u2")
    found = np.asarray(Image.open(io.BytesIO(convert(png(6, 1, 16, 0, [row.tobytes()]), OWN_SIZE).data)))
    assert found[0, :, 0].tolist() == [0, 0, 1, 127, 128, 255]


def inks() -> None:
    near("jpeg_cmyk jpeg_cmyk_unmarked tiff_cmyk", EXACT, 1, 10)
    near("jpeg_ycck", EXACT, 1.5, 12)


def lab() -> None:
    near("tiff_lab", EXACT, 1.5, 30)


def profiles() -> None:
    near("jpeg_profile", srgb_of_adobe_rgb(EXACT), 3, 40)
    managed = srgb_of_adobe_rgb(EXACT) * FADE + 255 * (1 - FADE)
    near("png_profile", managed, 0.6, 3)


def palettes() -> None:
    expected = np.asarray(UPRIGHT.quantize(64).convert("RGB")).astype(float)
    near("png_palette bmp_palette gif", expected, 0)


def transparency() -> None:
    near("png_rgba tiff_deflate_alpha webp_lossless_alpha", ON_WHITE, 0.4, 1)
    near("avif_alpha", ON_WHITE, 3)
    near("png_gray_alpha", GRAY * FADE + 255 * (1 - FADE), 0.5, 2)
    palette = np.asarray(with_alpha(UPRIGHT).quantize(64).convert("RGBA")).astype(float)
    alpha = palette[..., 3:] / 255
    near("png_palette_alpha", palette[..., :3] * alpha + 255 * (1 - alpha), 0.5, 1)
    transparent = np.asarray(Image.open(io.BytesIO(KINDS["gif_transparent"])).convert("RGBA")).astype(float)
    assert 0 < (transparent[..., 3] == 0).mean() < 1
    near("gif_transparent", np.where(transparent[..., 3:] == 0, 255, transparent[..., :3]), 0)
    near("png_transparent_colour", np.where((EXACT == 0).all(axis=2, keepdims=True), 255, EXACT), 0)
    assert (stored("png_rgba", background=(10, 20, 30))[:, 0] == (10, 20, 30)).all()


def first_pictures() -> None:
    near("webp_animated png_animated tiff_pages", EXACT, 0)
    near("gif_animated", EXACT, 8)
    near("jpeg_two_pictures", EXACT, 4)


def turned() -> None:
    near("png_exif tiff_turned", EXACT, 0)
    near("jpeg_exif", EXACT, 2)
    if heic_kinds():
        near("heic_turned", EXACT, 6)


def whole_files() -> None:
    near("png bmp tiff tiff_lzw", EXACT, 0)
    near("webp avif", EXACT, 3)
    if heic_kinds():
        near("heic", EXACT, 6)


def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    data = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(60)
    with pytest.raises(Reject) as caught:
        convert(data, OWN_SIZE)
    assert (caught.value.reason, caught.value.detail) == (
        "unsupported",
        "HEIF: install imageshards[heic] on the workers",
    )


def unsupported() -> None:
    files = [data for reason, data in broken().values() if reason == "unsupported"]
    files += [encoded(UPRIGHT.convert(mode), "TIFF") for mode in ("I", "F")]
    files += [b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(60), b"\xff\x0a" + bytes(60), b"\0\0\1\0\1\0" + bytes(60)]
    files += [b"v/1\1" + bytes(60), b"II*\0\x10\0\0\0CR\2\0" + bytes(60), b"\0\0\0\x18ftypcrx \0\0\0\1crx isom"]
    assert {reject(data) for data in files} == {"unsupported"}


def fitting() -> None:
    for kind, format in (("jpeg", "jpeg"), ("jpeg_444", "jpeg")):
        image = convert(KINDS[kind], OWN_SIZE._replace(format=format))
        assert (image.data, image.passthrough) == (KINDS[kind], "whole")


def cut_off() -> None:
    for name, (reason, data) in broken().items():
        if reason == "truncated":
            assert reject(data) == "truncated", name
    for kind in ("jpeg", "jpeg_progressive", "png", "gif", "bmp", "tiff"):
        data = KINDS[kind][: len(KINDS[kind]) * 3 // 4]
        image: EncodedImage = convert(data, OWN_SIZE._replace(allow_truncated=True))
        found = np.asarray(Image.open(io.BytesIO(image.data))).astype(float)
        expected = stored(kind)
        assert found.shape == expected.shape, kind
        first = -1 if kind == "bmp" else 0  # rows of a BMP go upwards
        assert np.abs(found[first] - expected[first]).mean() < 25, kind  # a progressive one lacks detail everywhere
        assert np.abs(found - expected).mean() > 0.5, kind


# The first column of the table → its test.
ROWS: dict[str, Callable[..., None]] = {
    "JPEG, baseline or progressive, 4:4:4 to 4:1:1, restart markers, arithmetic": jpegs,
    "JPEG of RGB, also in TIFF": jpegs_in_rgb,
    "gray": gray,
    "1, 2 or 4 bits": few_bits,
    "16 bits, PNG or TIFF of either byte order; gray of 12 bits, TIFF": sixteen_bits,
    "CMYK or YCCK, JPEG or TIFF": inks,
    "Lab TIFF": lab,
    "an ICC profile": profiles,
    "a palette": palettes,
    "transparency: alpha, palette, one colour": transparency,
    "animated GIF, WebP, PNG; TIFF of pages; JPEG of several pictures": first_pictures,
    "turned by EXIF, TIFF or HEIC": turned,
    "PNG, BMP, TIFF, WebP, AVIF, HEIC": whole_files,
    "HEIC without the extra": without_extra,
    "JPEG of 12 bits or lossless, 32-bit and float TIFF, JPEG 2000 and XL, PSD, SVG, PDF, ICO, camera raw": unsupported,
    "a JPEG for `jpeg` that fits already": fitting,
    "a file that ends early": cut_off,
}


def documented_rows() -> list[str]:
    """The first column of the table."""
    text = (ROOT / "docs" / "format.md").read_text()
    section = text.split("## What is stored\n")[1].split("\n**Sizes.**")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \|$", section, re.MULTILINE)
    assert rows[0] == "input"
    return rows[1:]


def test_the_table_has_a_test_for_each_row() -> None:
    assert documented_rows() == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_what_the_table_says(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = ROWS[row]
    if check is without_extra:
        check(monkeypatch)
    else:
        check()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_can_be_resized_and_made_gray(kind: str) -> None:
    for channels in (1, 3):
        for format in ("jpeg", "png"):
            image = convert(KINDS[kind], DEFAULTS._replace(channels=channels, format=format))
            found = Image.open(io.BytesIO(image.data))
            assert (found.mode, found.size) == ({1: "L", 3: "RGB"}[channels], (60, 40))


def test_one_channel_is_the_luma_of_three() -> None:
    for kind in ("png", "png_16bit", "webp_lossless_alpha", "tiff_cmyk", "gif", "png_profile"):
        colour = np.asarray(Image.fromarray(stored(kind).astype(np.uint8)).convert("L")).astype(float)
        assert np.abs(stored(kind, channels=1) - colour).max() <= 1, kind
    assert np.abs(stored("jpeg", channels=1) - stored("jpeg").mean(axis=2)).mean() < 30
    luma = np.asarray(Image.open(io.BytesIO(KINDS["jpeg"])).convert("L")).astype(float)
    assert np.abs(stored("jpeg", channels=1) - luma).max() <= 3, "decoded without its chroma"


@pytest.mark.parametrize(("depth", "key"), [(1, 1), (2, 3), (4, 10), (8, 100), (16, 0x8000)])
def test_the_transparent_gray_of_a_png_counts_in_its_own_depth(depth: int, key: int) -> None:
    rows = {1: b"\x40", 2: b"\x1b", 4: b"\x0a\x5f", 8: bytes([0, 100, 200, 255]), 16: b"\0\0\x80\0\x80\1\xff\xff"}
    data = png(4, 1, depth, 0, [rows[depth]], png_chunk(b"tRNS", key.to_bytes(2, "big")))
    plain = png(4, 1, depth, 0, [rows[depth]])
    background = (1, 2, 3)
    found = np.asarray(Image.open(io.BytesIO(convert(data, OWN_SIZE._replace(background=background)).data)))[0]
    shown = np.asarray(Image.open(io.BytesIO(convert(plain, OWN_SIZE).data)))[0]
    transparent = {1: [1], 2: [3], 4: [1], 8: [1], 16: [1]}[depth]
    for place in range(4):
        assert found[place].tolist() == (list(background) if place in transparent else shown[place].tolist()), place
