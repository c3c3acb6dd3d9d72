"""What holds for any image and any options: the promised shape, one answer each time, nothing raised but a reject."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from beam_pipeline.errors import Reject
from beam_pipeline.images import ImageOptions, convert, geometry
from beam_pipeline.images.geometry import RESAMPLING, RESIZE_MODES
from benchmarks import reference
from tests.kinds import cmyk, turned
from tests.make import encoded, noise, picture
from tests.mutations import Case, case, outcome
from tests.test_images import DEFAULTS, pixels

FUZZ = 800
FORMATS_OF = {
    "RGB": ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "AVIF"),
    "L": ("JPEG", "PNG", "BMP", "TIFF", "GIF"),
    "1": ("PNG", "BMP", "TIFF"),
    "P": ("PNG", "BMP", "GIF", "TIFF"),
    "RGBA": ("PNG", "WEBP", "TIFF", "AVIF"),
    "LA": ("PNG", "TIFF"),
    "CMYK": ("JPEG", "TIFF"),
    "I;16": ("PNG", "TIFF"),
}
KEEPS_EXIF = {"JPEG", "PNG", "WEBP", "AVIF"}


def source(mode: str, width: int, height: int) -> Image.Image:
    """A picture of a mode."""
    image = picture(width, height, seed=width + height)
    if mode == "CMYK":
        return cmyk(image)
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    return image.convert(mode)


@st.composite
def images(draw: st.DrawFn) -> tuple[bytes, tuple[int, int]]:
    """A file, and its (height, width) once it is upright."""
    mode = draw(st.sampled_from(sorted(FORMATS_OF)))
    format = draw(st.sampled_from(FORMATS_OF[mode]))
    width, height = draw(st.integers(1, 120)), draw(st.integers(1, 120))
    orientation = draw(st.integers(1, 8)) if format in KEEPS_EXIF else 1
    options = {"exif": turned(orientation)} if format in KEEPS_EXIF else {}
    data = encoded(source(mode, width, height), format, **options)
    return data, (width, height) if orientation > 4 else (height, width)


targets = st.one_of(st.none(), st.tuples(st.integers(1, 70), st.integers(1, 70)))


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


@settings(max_examples=150, deadline=None)
@given(
    images(),
    targets,
    st.sampled_from(RESIZE_MODES),
    st.sampled_from(sorted(RESAMPLING)),
    st.sampled_from((1, 3)),
    st.sampled_from(("jpeg", "png")),
    st.booleans(),
)
def test_any_image_gives_the_promised_shape_and_the_same_bytes_twice(
    image: tuple[bytes, tuple[int, int]], target, mode: str, resample: str, channels: int, format: str, keep: bool
) -> None:
    data, size = image
    options = DEFAULTS._replace(
        size=target, resize_mode=mode, resample=resample, channels=channels, format=format, keep_metadata=keep
    )
    first, second = convert(data, options), convert(data, options)
    assert first == second
    assert (first.height, first.width) == promised(size, options)
    assert (first.source.height, first.source.width) == size
    found = Image.open(io.BytesIO(first.data))
    assert (found.format, found.mode) == (format.upper(), {1: "L", 3: "RGB"}[channels])
    assert found.size == (first.width, first.height)


@settings(max_examples=60, deadline=None)
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


def test_half_a_pixel_off_would_be_seen() -> None:
    image = picture(90, 60, seed=3)
    shifted = reference.resize(np.asarray(image), (24, 16), (1.5, 1.5, 90, 60), "bilinear")
    found = pixels(convert(encoded(image, "PNG"), DEFAULTS._replace(size=(16, 24))).data)
    assert np.abs(found - np.clip(shifted, 0, 255)).mean() > 2


@pytest.mark.parametrize("sides", [(500, 375), (1000, 750), (2000, 1500)])
def test_cheap_reductions_cost_less_than_a_third_of_a_decibel(sides: tuple[int, int]) -> None:
    """The stored JPEG against a float64 resize, beside Pillow's plain path (benchmarks/codec.py does it on photos)."""
    grain = Image.blend(picture(*sides, seed=5), noise(*sides, seed=6), 0.15)
    data = encoded(grain, quality=92)
    options = DEFAULTS._replace(size=(224, 224), format="jpeg")
    decoded = Image.open(io.BytesIO(data)).convert("RGB")
    exact = reference.resize(np.asarray(decoded), (224, 224), (0, 0, *sides), "bilinear")
    plain = encoded(decoded.resize((224, 224), Image.Resampling.BILINEAR), quality=90, subsampling=2)
    ours = convert(data, options).data
    assert reference.psnr(pixels(ours), exact) >= reference.psnr(pixels(plain), exact) - 0.3


# --- damage

KNOWN_TO_VARY = "tiff_1bit_fax"  # libtiff shows memory that nobody wrote to where the codes are damaged


@pytest.mark.filterwarnings("ignore:::PIL")
def test_damaged_files_are_rejected_or_converted_and_nothing_else() -> None:
    """benchmarks/fuzz_images.py does it 200,000 times, each worker in a process of its own."""
    options = DEFAULTS._replace(max_pixels=1 << 22)
    outcomes = set()
    for number in range(FUZZ):
        some = case(7, number, options)
        what = outcome(some)
        outcomes.add(what[0])
        if number % 10 == 0 and some.kind != KNOWN_TO_VARY:
            assert outcome(some) == what, number
    assert outcomes >= {"converted", "decode_error", "truncated", "not_an_image", "unsupported", "too_many_pixels"}


def test_the_fuzz_would_notice_a_wrong_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.mutations

    wrong = convert(encoded(picture()), DEFAULTS)._replace(height=1)
    monkeypatch.setattr(tests.mutations, "convert", lambda data, options: wrong)
    with pytest.raises(AssertionError):
        outcome(Case("x", b"", DEFAULTS))


def test_limits_come_before_the_memory() -> None:
    """Headers that claim much: rejected by number, before anything of that size is asked for."""
    from tests.kinds import every_kind

    webp = bytearray(every_kind()["webp_animated"])
    webp[24:30] = b"\xff" * 6
    with pytest.raises(Reject) as caught:
        convert(bytes(webp), DEFAULTS)
    assert caught.value.detail == "16777216x16777216 pixels, --max_pixels 178956970"
    tall = encoded(Image.new("L", (1, 70_000)), "PNG")
    with pytest.raises(Reject) as caught:
        convert(tall, DEFAULTS._replace(size=None, format="jpeg"))
    assert (caught.value.reason, caught.value.detail) == (
        "too_many_pixels",
        "1x70000 pixels, a JPEG's sides end at 65500",
    )
    assert convert(tall, DEFAULTS._replace(size=None)).height == 70_000


def test_no_memory_is_a_reject_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> None:
        raise MemoryError

    data = encoded(picture())
    monkeypatch.setattr(geometry, "resize", out_of_memory)
    with pytest.raises(Reject) as caught:
        convert(data, DEFAULTS)
    assert (caught.value.reason, caught.value.detail) == ("out_of_memory", f"JPEG, {len(data)} bytes")
    monkeypatch.undo()
    assert convert(data, DEFAULTS).height == 40, "its neighbours don't notice"


@pytest.mark.parametrize("mode", ["crop", "stretch"])
def test_bands_of_a_large_image_with_alpha_have_no_seams(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = picture(1003, 777, seed=3)
    alpha = picture(1003, 777, seed=4).convert("L")
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
