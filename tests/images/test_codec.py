"""The codec: upright in every resize mode, the cheap path like the exact one, nothing of the source carried along."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, JpegImagePlugin, PngImagePlugin

from beam_pipeline import images
from beam_pipeline.config import Config
from beam_pipeline.errors import Reject
from beam_pipeline.images import ImageOptions, convert
from beam_pipeline.images.geometry import RESIZE_MODES
from tests.images.kinds import png, png_chunk, turned
from tests.make import encoded, noise, picture

DEFAULTS = Config(input="in", output="out", name="x", image_size="40x60", image_format="png").image_options
OWN_SIZE = DEFAULTS._replace(size=None)
# How a camera held this way stores an upright picture: the inverse of what a viewer does.
AS_STORED = [
    None,
    "FLIP_LEFT_RIGHT",
    "ROTATE_180",
    "FLIP_TOP_BOTTOM",
    "TRANSPOSE",
    "ROTATE_90",
    "TRANSVERSE",
    "ROTATE_270",
]
ORIENTATIONS, ALL_MODES = range(1, 9), pytest.mark.parametrize("mode", RESIZE_MODES)


def opened(data: bytes) -> np.ndarray:
    """uint8 [height, width(, channels)] of an encoded image."""
    return np.asarray(Image.open(io.BytesIO(data)))


def pixels(data: bytes) -> np.ndarray:
    """uint8 [height, width, 3] of an encoded image."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def stored_with(orientation: int, upright: Image.Image) -> bytes:
    """A PNG whose pixels lie as the EXIF orientation says."""
    how = AS_STORED[orientation - 1]
    lying = upright.transpose(Image.Transpose[how]) if how else upright
    return encoded(lying, "PNG", exif=turned(orientation))


def rejected(data: bytes, options: ImageOptions = DEFAULTS) -> tuple[str, str]:
    with pytest.raises(Reject) as caught:
        convert(data, options)
    return str(caught.value.reason), caught.value.detail


@pytest.mark.parametrize("orientation", (1, 3, 6))
@ALL_MODES
def test_an_upright_picture_of_other_proportions_fills_the_target_as_the_mode_says(orientation: int, mode: str) -> None:
    # Left half black, right half white, twice as wide as the target's proportions.
    upright = Image.new("RGB", (120, 30))
    upright.paste((255, 255, 255), (60, 0, 120, 30))
    found = pixels(convert(stored_with(orientation, upright), DEFAULTS._replace(size=(30, 60), resize_mode=mode)).data)
    middle = found[len(found) // 2]
    assert middle[1].max() < 5 and middle[-2].min() > 250
    assert (found[0, 0].max(), found[0, -1].max()) == ((0, 0) if mode == "pad" else (0, 255))


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_pixels_are_exact_where_nothing_is_resized(orientation: int) -> None:
    upright = noise(13, 7)
    image = convert(stored_with(orientation, upright), OWN_SIZE)
    assert (image.height, image.width) == (7, 13)
    assert np.array_equal(pixels(image.data), np.asarray(upright))


@pytest.mark.parametrize("orientation", (1, 6))
@ALL_MODES
def test_decoding_at_a_fraction_gives_the_same_picture(mode: str, orientation: int, monkeypatch) -> None:
    # 1001 and 747 are no multiples of 8: the decoded size is rounded up.
    data = encoded(picture(1001, 747, seed=5), exif=turned(orientation))
    options = DEFAULTS._replace(size=(96, 96), resize_mode=mode)
    cheap = pixels(convert(data, options).data)
    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", lambda self, mode, size: None)
    exact = pixels(convert(data, options).data).astype(int)
    assert cheap.shape == exact.shape
    assert 0 < np.abs(cheap - exact).mean() < 1.0
    assert np.abs(cheap - exact).max() <= 16


def test_jpeg_is_what_pillow_writes_of_the_same_pixels() -> None:
    options = DEFAULTS._replace(format="jpeg", jpeg_quality=77, jpeg_subsampling="4:4:4")
    source = encoded(picture(60, 40), "PNG")
    expected = encoded(Image.open(io.BytesIO(source)), "JPEG", quality=77, subsampling=0)
    assert convert(source, options._replace(size=None)).data == expected


NOISE = np.random.default_rng(3).integers(0, 2, (512, 512, 3), dtype=np.uint8) * 255


@pytest.mark.parametrize(
    ("image", "quality"),
    [
        (picture(200, 100), 90),
        *((Image.fromarray(NOISE[:side, :side]), quality) for side, quality in ((512, 90), (224, 100))),
    ],
    ids=["picture", "noise", "small noise"],
)
def test_optimized_codes_change_no_pixel_and_noise_gets_the_usual_ones(image: Image.Image, quality: int) -> None:
    """libjpeg needs room for the complete file where codes are optimised; Pillow's guess is a byte a pixel."""
    options = OWN_SIZE._replace(format="jpeg", jpeg_quality=quality, jpeg_subsampling="4:4:4")
    data = encoded(image, "PNG")
    plain, optimized = (convert(data, options._replace(optimize=optimize)).data for optimize in (False, True))
    assert np.array_equal(pixels(optimized), pixels(plain))
    if image.size == (200, 100):
        assert len(optimized) < len(plain)
    else:
        assert len(optimized) > max(65_536, image.width * image.height), "it shows what it is to show"


@pytest.mark.parametrize("format", ["jpeg", "png"])
@pytest.mark.parametrize("size", [None, (20, 20)])
def test_metadata_of_the_source_is_stripped(format: str, size: tuple[int, int] | None) -> None:
    exif, text = Image.Exif(), PngImagePlugin.PngInfo()
    exif[0x010F] = "SECRET-CAMERA"
    text.add_text("Author", "SECRET-AUTHOR")
    more = {"exif": exif, "icc_profile": b"SECRET-PROFILE" * 20, "dpi": (300, 300)}
    for source in (
        encoded(picture(), comment=b"SECRET-COMMENT", **more),
        encoded(picture(), "PNG", pnginfo=text, **more),
    ):
        data = convert(source, DEFAULTS._replace(format=format, size=size)).data
        assert b"SECRET" not in data
        found = Image.open(io.BytesIO(data))
        found.load()
        resolution = {"dpi"} if size is None else set()  # the header of a JPEG that is stored as it was stays
        assert not set(found.info) - {"jfif", "jfif_version", "jfif_unit", "jfif_density"} - resolution
        assert size is None or found.info.get("jfif_density", (1, 1)) == (1, 1)


JPEG, PNG = encoded(picture(120, 90)), encoded(picture(120, 90), "PNG")


@pytest.mark.parametrize(
    ("data", "reason", "detail"),
    [
        (b"", "not_an_image", "0 bytes, beginning nowhere"),
        (b"GIF89a..", "decode_error", "GIF, 8 bytes"),
        (b"hello", "not_an_image", "5 bytes, beginning 68656c6c6f"),
        (JPEG[:900], "truncated", "JPEG of 120x90 pixels, 900 bytes"),
        (PNG[:8] + png_chunk(b"CgBI", bytes(4)) + PNG[8:], "unsupported", "iPhone PNG (CgBI)"),
        (PNG[:2000], "truncated", "PNG of 120x90 pixels, 2000 bytes"),
    ],
)
def test_what_is_no_image_is_rejected_with_reason_and_detail(data: bytes, reason: str, detail: str) -> None:
    assert rejected(data) == (reason, detail)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("width", "height", "most", "reason", "beginning"),
    [  # Pillow itself warns from 89 million pixels on and raises from 179 million
        (200, 51, 10_000, "too_many_pixels", ""),
        (40_000, 40_000, 50_000_000, "too_many_pixels", ""),
        (20_000, 10_000, 300_000_000, "truncated", "PNG of "),  # it gets as far as the decoder
    ],
)
def test_max_pixels_is_the_limit_and_is_checked_before_decoding(width, height, most, reason, beginning) -> None:
    found, detail = rejected(png(width, height, 8, 2, [b""]), DEFAULTS._replace(max_pixels=most))
    assert found == reason
    assert detail.startswith(f"{beginning}{width}x{height} pixels, ")


def test_a_file_over_the_byte_limit_is_rejected_by_its_size() -> None:
    options = DEFAULTS._replace(max_image_bytes=100)
    assert rejected(JPEG, options) == ("too_many_bytes", f"{len(JPEG)} bytes, --max_image_bytes 100")
    images.check_size(100, options)


def test_sums_are_of_the_pixels_before_they_are_encoded() -> None:
    for channels, shape in ((1, (40, 60, 1)), (3, (40, 60, 3))):
        image = convert(JPEG, DEFAULTS._replace(channels=channels), with_sums=True)
        values = opened(image.data).reshape(shape).astype(int)
        totals, squares = (tuple(values_.sum((0, 1)).tolist()) for values_ in (values, values**2))
        assert image.sums == images.ChannelSums(40 * 60, totals, squares)
    assert convert(JPEG, DEFAULTS).sums is None


def test_codec_versions_name_what_decides_the_bytes() -> None:
    versions = images.codec_versions()
    assert set(versions) >= {"pillow", "libjpeg_turbo"}
    assert all(versions.values())
