"""What holds for any image and any options: the promised shape, one answer each time, nothing raised but a reject."""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, JpegImagePlugin

from beam_pipeline.images import FORMATS, SUBSAMPLING, ImageOptions, convert, geometry
from beam_pipeline.images.geometry import RESIZE_MODES
from beam_pipeline.images.resize import RESAMPLING
from tests.images import reference
from tests.images.kinds import cmyk, every_kind, turned
from tests.images.mutations import case, outcome
from tests.images.profiles import gray_profile, ink_profile, wide_profile
from tests.images.test_codec import DEFAULTS, OWN_SIZE, pixels, rejected
from tests.make import encoded, picture

FUZZ = 400
PROFILES = {"RGB": wide_profile(), "RGBA": wide_profile(), "L": gray_profile(1.8), "CMYK": ink_profile()}


class Drawn(NamedTuple):
    """A file, and its (height, width) once it is upright."""

    data: bytes
    size: tuple[int, int]


@st.composite
def images(draw: st.DrawFn) -> Drawn:
    """A file of any size and orientation, some with a profile, JPEGs of any quality, subsampling and coding."""
    mode = draw(st.sampled_from(("RGB", "L", "CMYK", "RGBA", "LA", "P", "1")))
    sides = st.integers(1, 120) if draw(st.integers(0, 9)) else st.integers(300, 600)
    width, height, orientation = draw(sides), draw(sides), draw(st.integers(1, 8))
    format, options = "PNG", {"exif": turned(orientation)}
    if mode in PROFILES and draw(st.booleans()):
        options["icc_profile"] = PROFILES[mode]
    if mode in ("RGB", "L", "CMYK"):
        format = "JPEG"
        options |= {"quality": draw(st.integers(1, 100)), "progressive": draw(st.booleans())}
        options |= {"subsampling": draw(st.integers(0, 2)), "optimize": draw(st.booleans())}
    image = picture(width, height, seed=width + height)
    image = cmyk(image) if mode == "CMYK" else image.convert(mode)
    upright = (width, height) if orientation > 4 else (height, width)
    return Drawn(encoded(image, format, **options), upright)


sides = st.integers(1, 70) | st.integers(200, 400)
any_options = st.builds(
    DEFAULTS._replace,
    size=st.none() | st.tuples(sides, sides),
    resize_mode=st.sampled_from(RESIZE_MODES),
    resample=st.sampled_from(sorted(RESAMPLING)),
    background=st.none() | st.tuples(*[st.integers(0, 255)] * 3),
    channels=st.sampled_from((1, 3)),
    format=st.sampled_from(sorted(FORMATS)),
    jpeg_quality=st.integers(1, 100),
    jpeg_subsampling=st.sampled_from(sorted(SUBSAMPLING)),
    optimize=st.booleans(),
    allow_truncated=st.booleans(),
)


def promised(size: tuple[int, int], options: ImageOptions) -> tuple[int, int]:
    """(height, width) of what is stored of an upright image: `docs/format.md`, Sizes, said in another way."""
    target, mode = options.size, options.resize_mode
    if target is None:
        return size
    if mode in ("stretch", "crop", "pad"):
        return target
    scales = [wanted / side for wanted, side in zip(target, size, strict=True)]
    scale = min(1.0, max(scales) if mode == "shorter" else min(scales))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


@settings(max_examples=60)
@given(images(), any_options)
def test_any_image_gives_the_promised_shape_and_the_same_bytes_twice(image: Drawn, options: ImageOptions) -> None:
    first, second = convert(image.data, options), convert(image.data, options)
    assert first == second
    assert (first.height, first.width) == promised(image.size, options)
    assert (first.source.height, first.source.width) == image.size
    found = Image.open(io.BytesIO(first.data))
    assert (found.format, found.mode) == (options.format.upper(), {1: "L", 3: "RGB"}[options.channels])
    assert found.size == (first.width, first.height)
    assert found.getexif().get(0x0112, 1) == 1
    assert first.passthrough or "icc_profile" not in found.info
    if options.format == "jpeg" and not first.passthrough:
        assert "progressive" not in found.info
        if options.channels == 3:
            assert JpegImagePlugin.get_sampling(found) == SUBSAMPLING[options.jpeg_subsampling]


@settings(max_examples=30)
@given(
    st.sampled_from(("stretch", "crop")),
    st.sampled_from(("bilinear", "bicubic", "lanczos", "hamming")),
    st.tuples(st.integers(40, 90), st.integers(40, 90)),
    st.tuples(st.integers(24, 60), st.integers(24, 60)),  # so large that nothing is averaged before the filter
)
def test_pixels_are_where_a_float_resize_puts_them(mode: str, resample: str, size, target) -> None:
    image = picture(*size, seed=size[0])
    plan = geometry.fit(size, target, mode)
    exact = reference.resize(np.asarray(image), plan.size, plan.box, resample)
    options = DEFAULTS._replace(size=target, resize_mode=mode, resample=resample)
    found = pixels(convert(encoded(image, "PNG"), options).data)
    assert np.abs(found - np.clip(exact, 0, 255)).mean() < 1.2, "half a pixel off would be more than 2"


KNOWN_TO_VARY = "tiff_1bit_fax"  # libtiff shows memory that nobody wrote to if the codes are corrupt


@pytest.mark.filterwarnings("ignore:::PIL")
def test_damaged_files_are_rejected_or_converted_and_nothing_else() -> None:
    """benchmarks/fuzz_images.py does it 100,000 times and more, each worker in a process of its own."""
    options = DEFAULTS._replace(max_pixels=1 << 22)
    outcomes = set()
    for number in range(FUZZ):
        some = case(7, number, options)
        what = outcome(some)
        outcomes.add(what[0])
        if number % 10 == 0 and some.kind != KNOWN_TO_VARY:
            assert outcome(some) == what, number
    assert outcomes >= {"converted", "decode_error", "truncated", "not_an_image", "unsupported", "too_many_pixels"}


def test_limits_come_before_the_memory() -> None:
    """Headers that claim much: rejected by number, before anything of that size is asked for."""
    webp = bytearray(every_kind()["webp_animated"])
    webp[24:30] = (39_999).to_bytes(3, "little") * 2
    assert rejected(bytes(webp)) == ("too_many_pixels", "40000x40000 pixels, --max_pixels 178956970")
    tall = encoded(Image.new("L", (1, 70_000)), "PNG")
    found = rejected(tall, OWN_SIZE._replace(format="jpeg"))
    assert found == ("too_many_pixels", "1x70000 pixels, a JPEG's sides end at 65500")
    assert convert(tall, OWN_SIZE).height == 70_000


def test_no_memory_is_a_reject_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> None:
        raise MemoryError

    data = encoded(picture())
    with monkeypatch.context() as patch:
        patch.setattr(geometry, "resize", out_of_memory)
        assert rejected(data) == ("out_of_memory", f"JPEG of 48x36 pixels, {len(data)} bytes")
    assert convert(data, DEFAULTS).height == 40, "its neighbours don't notice"


@pytest.mark.parametrize("mode", ["crop", "stretch"])
def test_bands_of_a_large_image_with_alpha_have_no_seams(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image, alpha = picture(1003, 777, seed=3), picture(1003, 777, seed=4).convert("L")
    image.putalpha(alpha)
    data = encoded(image, "PNG", compress_level=1)
    options = DEFAULTS._replace(size=(50, 60), resize_mode=mode, background=(0, 0, 0))
    monkeypatch.setattr(geometry, "_BAND_PIXELS", 1 << 30)
    whole = convert(data, options)
    monkeypatch.setattr(geometry, "_BAND_PIXELS", 20_000)
    assert convert(data, options) == whole
    plan = geometry.fit((1003, 777), (50, 60), mode)
    premultiplied = np.asarray(image)[..., :3] * (np.asarray(alpha)[..., None] / 255)
    exact = reference.resize(premultiplied, plan.size, plan.box, "bilinear")
    assert np.abs(pixels(whole.data) - exact).mean() < 1.2
