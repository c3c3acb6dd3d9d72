"""Colours against float64 references: ICC profiles, inks, transparency; two threads; what broken profiles do."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageCms

from beam_pipeline.images import colour, convert
from tests.images.kinds import UPRIGHT, cmyk, with_alpha
from tests.images.profiles import (
    gray_profile,
    ink_colours,
    ink_profile,
    srgb_of_adobe_rgb,
    srgb_of_lab,
    srgb_of_linear,
    wide_profile,
)
from tests.images.test_codec import OWN_SIZE, pixels
from tests.make import ROOT, done, encoded, noise

RAMP = Image.frombytes("L", (256, 1), bytes(range(256)))


def stored(image: Image.Image, profile: bytes | None = None, **changes: object) -> np.ndarray:
    """Float [height, width, 3] of what is stored of an image."""
    data = encoded(image, "TIFF", icc_profile=profile)
    return pixels(convert(data, OWN_SIZE._replace(**changes)).data).astype(float)  # type: ignore[arg-type]


def test_a_wide_profile_is_converted_as_a_float_computation_says() -> None:
    source = noise(64, 48)
    expected = srgb_of_adobe_rgb(np.asarray(source).astype(float))
    assert np.abs(stored(source, wide_profile()) - expected).max() <= 2


@pytest.mark.parametrize("exponent", [1.0, 1.8])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_gray_profile_keeps_gray_neutral(exponent: float, channels: int) -> None:
    found = stored(RAMP, gray_profile(exponent), channels=channels)
    assert (found[..., :1] == found).all()
    expected = srgb_of_linear((np.arange(256) / 255) ** exponent)
    assert np.abs(found[0, :, 0] - expected).max() <= 2


def test_gray_pixels_with_an_rgb_profile_mean_equal_channels() -> None:
    found = stored(RAMP, wide_profile())[0, :, 0]
    expected = srgb_of_adobe_rgb(np.repeat(np.arange(256)[:, None], 3, axis=1).astype(float))[:, 1]
    assert np.abs(found - expected).max() <= 2


def test_inks_with_a_profile_are_what_the_profile_measured() -> None:
    corners = [(c, m, y, k) for c in (0, 255) for m in (0, 255) for y in (0, 255) for k in (0, 255)]
    inks = Image.new("CMYK", (16 * len(corners), 16))
    for number, ink in enumerate(corners):
        inks.paste(ink, (16 * number, 0, 16 * number + 16, 16))
    found = stored(inks, ink_profile())[8, 8::16]
    colours = ink_colours().reshape(16, 3)
    expected = srgb_of_lab(colours, black=colours[-1, 0])
    inside = ((expected > 3) & (expected < 252)).all(axis=1)  # what sRGB can't show is mapped, each system its own way
    assert inside.sum() >= 4
    assert np.abs(found - expected)[inside].max() <= 6
    assert np.abs(found - expected).mean() <= 4
    naive = stored(inks)[8, 8::16]
    assert np.abs(naive - expected).mean() > 20, "the profile makes a difference"


def test_srgb_under_another_name_changes_no_pixel() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert np.array_equal(stored(noise(31, 17), profile), np.asarray(noise(31, 17)))


# fmt: off
UNUSABLE = {
    "empty": b"", "text": b"no profile", "cut": wide_profile()[:300], "zeros": wide_profile()[:128] + bytes(200),
    "for inks, on RGB": ink_profile(), "large": wide_profile() + bytes(4 << 20),
}
# fmt: on


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_profile_that_cannot_be_used_is_ignored(kind: str) -> None:
    source = noise(31, 17)
    for _ in range(2):  # then from the cache
        assert np.array_equal(stored(source, UNUSABLE[kind] or None), np.asarray(source))


def test_the_profile_is_applied_to_what_shows_not_to_the_background() -> None:
    orange = (255, 128, 10)
    found = stored(with_alpha(UPRIGHT), wide_profile(), background=orange)
    assert (found[:, 0] == orange).all()
    assert np.abs(found[:, -1] - srgb_of_adobe_rgb(np.asarray(UPRIGHT).astype(float))[:, -1]).max() <= 2


@pytest.mark.parametrize("resample", ["bilinear", "lanczos", "box"])
def test_hidden_colours_do_not_bleed_into_visible_ones(resample: str) -> None:
    # The left half is transparent, and would be red.
    image = Image.new("RGBA", (80, 20), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (40, 0, 80, 20))
    found = stored(image, size=(5, 15), resample=resample, background=(0, 0, 0))
    assert found[..., 0].max() == 0
    assert found[..., 2].max() == 255


def test_two_threads_get_what_one_gets() -> None:
    profiles = (wide_profile(), None, wide_profile())
    sources = [encoded(noise(200, 150, seed), "PNG", icc_profile=profiles[seed % 3]) for seed in range(12)]
    sources += [encoded(cmyk(noise(120, 90, seed)), icc_profile=ink_profile()) for seed in range(6)]
    options = OWN_SIZE._replace(size=(50, 50))
    alone = [convert(data, options) for data in sources]
    colour._conversion.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda data: convert(data, options), sources * 5)) == alone * 5


def test_warnings_of_pillow_neither_leak_nor_reject() -> None:
    """Under `python -W error` too: a truncated EXIF makes Pillow warn while it reads the resolution."""
    code = """
from PIL import Image
from tests.images.test_codec import OWN_SIZE
from tests.make import encoded
from beam_pipeline.images import convert, formats
formats.hide_warnings()
exif = b"Exif\\0\\0MM\\0*\\0\\0\\0\\x08\\0\\x05\\x01\\x1a\\0\\x05\\0\\0\\0\\x01\\0\\0\\xff\\xff"
jpeg = encoded(Image.new("RGB", (9, 9)), exif=exif)
assert convert(jpeg, OWN_SIZE).height == 9
assert convert(jpeg, OWN_SIZE._replace(size=(5, 5))).height == 5
assert convert(encoded(Image.new("P", (9, 9)), "PNG", transparency=b"\\0" * 3), OWN_SIZE).height == 9
"""
    assert done(sys.executable, "-W", "error", "-c", code, cwd=ROOT, timeout=60).stderr == ""
