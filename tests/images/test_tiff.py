"""TIFFs of every kind, by hand: their picture is stored or they are rejected, and none is read as another picture."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from beam_pipeline.errors import Reject
from beam_pipeline.images import convert
from tests.images import tiffs
from tests.images.test_codec import OWN_SIZE, opened, rejected
from tests.images.tiffs import DEFLATE, FLOAT, LZW, NONE, PACKBITS, SIGNED, UNSIGNED, page, tiff

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")
HEIGHT, WIDTH = 9, 21
RANDOM = np.random.default_rng(1)


class Kind(NamedTuple):
    photometric: int
    samples: int
    extra: tuple[int, ...]
    shown: Callable[[np.ndarray], np.ndarray] | None  # channels of 0–255 → RGB


def gray(values: np.ndarray) -> np.ndarray:
    return values[..., [0, 0, 0]]


def over_white(colours: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return colours * (alpha / 255) + 255 - alpha


def of_ycbcr(values: np.ndarray) -> np.ndarray:
    """ITU-T T.871."""
    luma, blue, red = values[..., 0], values[..., 1] - 128, values[..., 2] - 128
    return np.stack([luma + 1.402 * red, luma - 0.344136 * blue - 0.714136 * red, luma + 1.772 * blue], -1)


# fmt: off
KINDS = {
    "gray": Kind(1, 1, (), gray),
    "white is zero": Kind(0, 1, (), lambda v: 255 - gray(v)),
    "gray, alpha": Kind(1, 2, (2,), lambda v: over_white(gray(v), v[..., 1:])),
    "gray, premultiplied": Kind(1, 2, (1,), lambda v: gray(v) + 255 - v[..., 1:]),
    "gray, extra": Kind(1, 2, (0,), gray),
    "RGB": Kind(2, 3, (), lambda v: v),
    "RGBA": Kind(2, 4, (2,), lambda v: over_white(v[..., :3], v[..., 3:])),
    "RGBA, unnamed": Kind(2, 4, (), lambda v: over_white(v[..., :3], v[..., 3:])),
    "RGBA, premultiplied": Kind(2, 4, (1,), lambda v: v[..., :3] + 255 - v[..., 3:]),
    "RGB, extra": Kind(2, 4, (0,), lambda v: v[..., :3]),
    "RGB, 2 extra": Kind(2, 5, (0, 0), lambda v: v[..., :3]),
    "RGBA, extra": Kind(2, 5, (2, 0), lambda v: over_white(v[..., :3], v[..., 3:4])),
    "palette": Kind(3, 1, (), None),
    "palette, alpha": Kind(3, 2, (2,), None),
    "CMYK": Kind(5, 4, (), lambda v: (255 - v[..., :3]) * (255 - v[..., 3:]) / 255),
    "CMYK, extra": Kind(5, 5, (0,), lambda v: (255 - v[..., :3]) * (255 - v[..., 3:4]) / 255),
    "YCbCr": Kind(6, 3, (), of_ycbcr),
}
FORMATS = [*((UNSIGNED, bits) for bits in (1, 2, 4, 8, 12, 16, 32)), *((SIGNED, bits) for bits in (8, 16, 32)),
           *((FLOAT, bits) for bits in (16, 32, 64))]
# Kind → bits of unsigned integers → of how many of 32 files the picture is stored; all others are rejected.
STORED: dict[str, dict[int, int]] = {
    "gray": {1: 32, 2: 32, 4: 32, 8: 32, 12: 16, 16: 32}, "white is zero": {1: 32, 2: 32, 4: 32, 8: 32, 16: 32},
    "gray, alpha": {8: 16}, "gray, premultiplied": {}, "gray, extra": {1: 12, 2: 12, 4: 12, 8: 12, 12: 6, 16: 12},
    "RGB": {8: 32, 16: 32}, "RGBA": {8: 32, 16: 32}, "RGBA, unnamed": {8: 18, 16: 16},
    "RGBA, premultiplied": {8: 32, 16: 32}, "RGB, extra": {8: 28, 16: 32}, "RGB, 2 extra": {8: 28, 16: 16},
    "RGBA, extra": {8: 22}, "palette": {1: 32, 2: 32, 4: 32, 8: 32}, "palette, alpha": {8: 16},
    "CMYK": {8: 32, 16: 32}, "CMYK, extra": {8: 28, 16: 16}, "YCbCr": {8: 32},
}
# fmt: on


def drawn(kind: Kind, format: int, bits: int, **how: Any) -> tuple[bytes, np.ndarray]:
    """A TIFF of random pixels, and what should be stored of it."""
    bits_shown = min(bits, 16)  # of more, and of floats, nothing is stored
    values = RANDOM.integers(0, 1 << bits_shown, (HEIGHT, WIDTH, kind.samples))
    if kind.extra == (1,):
        values[..., :-1] = np.minimum(values[..., :-1], values[..., -1:])
    channels = values >> (bits - 8) if bits >= 8 else values * 255 / ((1 << bits) - 1)
    tags: dict[int, Any] = {530: [1, 1]} if kind.photometric == tiffs.YCBCR else {}
    if kind.shown:
        expected = np.clip(kind.shown(channels.astype(float)), 0, 255)
    else:
        palette = RANDOM.integers(0, 1 << 16, (3, 1 << min(bits, 8)))
        tags[320] = palette.ravel().tolist()
        values[..., 0] &= 255
        colours = np.moveaxis(palette[:, values[..., 0]] >> 8, 0, -1)
        expected = over_white(colours, channels[..., 1:]) if kind.samples == 2 else colours
    if format == FLOAT:
        values = values / 65535
    if format == SIGNED:
        values = values - (1 << bits_shown - 1)
    return tiff(
        page(values, kind.photometric, bits, format, extra=kind.extra, tags=tags, **how), order=how["order"]
    ), expected


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_stored_or_rejected(name: str) -> None:
    found: Counter[int] = Counter()
    ways = itertools.product((False, True), ((NONE, 0), (LZW, 0), (DEFLATE, 1), (PACKBITS, 0)), "<>", (None, (16, 16)))
    for (planar, (compression, predictor), order, tile), (format, bits) in itertools.product(ways, FORMATS):
        if (name.startswith("palette") and format != UNSIGNED) or (
            format != UNSIGNED and compression in (LZW, PACKBITS)
        ):
            continue
        how = {"planar": planar, "compression": compression, "order": order, "tile": tile, "rows": 4}
        how["predictor"] = bool(predictor) and format != FLOAT and bits in (8, 16, 32)
        data, expected = drawn(KINDS[name], format, bits, **how)
        case = (name, format, bits, how)
        try:
            stored = opened(convert(data, OWN_SIZE).data)
        except Reject as reject:
            assert reject.reason in ("unsupported", "decode_error"), case
            continue
        assert np.abs(stored - expected).max() <= 2, case
        assert format == UNSIGNED, case
        found[bits] += 1
    assert found == STORED[name]


def stored(data: bytes) -> np.ndarray:
    return opened(convert(data, OWN_SIZE).data).astype(float)


def colours(height: int = HEIGHT, width: int = WIDTH, bits: int = 8, samples: int = 3) -> np.ndarray:
    return RANDOM.integers(0, 1 << bits, (height, width, samples))


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize(("photometric", "samples", "bits"), [(0, 1, 1), (1, 1, 4), (1, 1, 16), (3, 1, 8), (2, 3, 8)])
def test_bits_may_be_in_reverse_order(photometric: int, samples: int, bits: int, planar: bool) -> None:
    values = colours(bits=bits, samples=samples)
    tags = {320: RANDOM.integers(0, 1 << 16, 3 << bits).tolist()} if photometric == tiffs.PALETTE else {}
    plain = page(values, photometric, bits, planar=planar, tags=tags)
    turned = [bytes(int(f"{byte:08b}"[::-1], 2) for byte in part) for part in plain[273]]
    assert np.array_equal(stored(tiff(plain | {266: 2, 273: turned})), stored(tiff(plain)))


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_planes_of_16_bits_are_turned(orientation: int) -> None:
    values = colours(bits=16)
    upright = np.rot90(values >> 8, {1: 0, 3: 2, 6: -1}[orientation])
    assert np.array_equal(stored(tiff(page(values, bits=16, planar=True, tags={274: orientation}))), upright)


def test_ycbcr_of_halved_chroma_is_no_rgb() -> None:
    luma, blue, red = colours(4, 6, samples=1)[..., 0], *(RANDOM.integers(100, 156, (2, 3)) for _ in range(2))
    luma = luma // 2 + 64
    blocks = [
        bytes([*luma[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].ravel(), blue[row, column], red[row, column]])
        for row in range(2)
        for column in range(3)
    ]
    full = np.stack([luma, *(np.repeat(np.repeat(one, 2, 0), 2, 1) for one in (blue, red))], -1)
    data = tiff(page(full, tiffs.YCBCR) | {273: [b"".join(blocks)]})
    assert np.abs(stored(data) - np.clip(of_ycbcr(full.astype(float)), 0, 255)).max() <= 2


def test_a_palette_of_8_bits_is_not_black() -> None:
    palette = RANDOM.integers(0, 256, (3, 256))
    values = colours(samples=1)
    data = tiff(page(values, tiffs.PALETTE, tags={320: palette.ravel().tolist()}))
    assert np.array_equal(stored(data), np.moveaxis(palette[:, values[..., 0]], 0, -1))


LARGE, SMALL = colours(24, 32), colours(6, 8)
COPY, MASK, OLD_COPY = {254: 1}, {254: 4}, {255: 2}
RAW_PHOTO = page(LARGE[..., :1], 32803, 16)


def small(**tags: Any) -> dict[int, Any]:
    return page(SMALL, tags=COPY | {int(tag[1:]): value for tag, value in tags.items()})


# fmt: off
PAGES = {
    "thumbnail, page": [small(), page(LARGE)],
    "thumbnail of the old tag, page": [page(SMALL, tags=OLD_COPY), page(LARGE)],
    "mask, page": [page(SMALL, tags=MASK), page(LARGE)],
    "2 thumbnails, page": [small(), small(), page(LARGE)],
    "thumbnail with its picture below": [small(_330=[small(), page(LARGE)])],
    "thumbnail that doesn't say so, with its picture below": [page(SMALL, tags={330: [page(LARGE)]})],
    "picture with thumbnails below": [page(LARGE, tags={330: [small()]})],
    "picture with an unnamed thumbnail below": [page(LARGE, tags={330: [page(SMALL)]})],
    "pages of a document": [page(LARGE, tags={254: 2}), page(SMALL, tags={254: 2})],
    "compressed picture": [small(), page(LARGE, compression=LZW, rows=5)],
    "planes of 16 bits": [small(_330=[page(LARGE * 256, bits=16, planar=True)])],
}
# fmt: on


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize(("order", "big"), [("<", False), (">", False), ("<", True)])
def test_the_picture_is_stored_and_not_its_thumbnail(pages: str, order: str, big: bool) -> None:
    if pages == "planes of 16 bits" and order == ">":
        return  # `page` wrote the other order
    assert np.array_equal(stored(tiff(*PAGES[pages], order=order, big=big)), LARGE)


def test_size_and_orientation_are_those_of_the_picture() -> None:
    image = convert(tiff(small(_274=3), page(LARGE, tags={274: 6})), OWN_SIZE)
    assert image.source == ("TIFF", 32, 24)
    assert np.array_equal(opened(image.data), np.rot90(LARGE, -1))


def test_memory_is_that_of_the_picture() -> None:
    large = page(LARGE, compression=DEFLATE, tile=(16, 16), tags={322: 40_000, 323: 40_000})
    assert rejected(tiff(small(), large))[0] == "too_many_pixels"


IMAGEJ, OME = (
    b"ImageJ=1.54f\nimages=3\nchannels=3\nmode=composite\n\0",
    b'<OME><Pixels ID="0" SizeC="3" SizeZ="1"/></OME>\0',
)
FLAT = colours(samples=1)


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (tiff(small()), "TIFF whose first page is a thumbnail"),
        (tiff(small(_330=[small(), RAW_PHOTO])), "TIFF of 1 x 16-bit integers (camera raw)"),
        (tiff(small(_50706=[1, 4, 0, 0])), "DNG"),
        (tiff(*[page(FLAT, 1, tags={270: IMAGEJ})] * 3), "TIFF with each of 3 channels in pages of its own"),
        (tiff(*[page(FLAT, 1, tags={270: OME})] * 3), "TIFF with each of 3 channels in pages of its own"),
        (tiff(page(FLAT - 128, 1, format=SIGNED)), "TIFF of 1 x 8-bit signed integers (gray): white level unknown"),
        (tiff(page(FLAT, 1, 16, SIGNED)), "TIFF of 1 x 16-bit signed integers (gray): white level unknown"),
        (tiff(page(FLAT, 1, 32)), "TIFF of 1 x 32-bit integers (gray): white level unknown"),
        (tiff(page(FLAT, 1, 32, FLOAT)), "TIFF of 1 x 32-bit floats (gray): white level unknown"),
        (tiff(page(FLAT, 1, 16, FLOAT)), "TIFF of 1 x 16-bit floats (gray)"),
        (tiff(page(colours(samples=2), 1, 16, extra=(2,))), "TIFF of 2 x 16-bit integers (gray)"),
        (tiff(page(colours(), tiffs.LAB, planar=True)), "TIFF of 3 x 8-bit integers (Lab in planes)"),
        (tiff(page(LARGE, bits=16, order=">"), order=">", big=True), "big-endian BigTIFF"),
    ],
)
def test_what_is_rejected_says_what_it_is(data: bytes, detail: str) -> None:
    assert rejected(data) == ("unsupported", detail)


@pytest.mark.parametrize("compression", [9, 32908, 34712, 50001, 65000])
def test_a_compression_that_pillow_lacks_is_rejected_before_libtiff_complains(
    compression: int, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tiff(page(LARGE) | {259: compression})
    assert rejected(data) == ("unsupported", f"TIFF of compression {compression}")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "description", [b"ImageJ=1.54f\nslices=3\n\0", b'<OME><Pixels SizeC="1" SizeZ="3"/></OME>\0', b"channels=3\0"]
)
def test_slices_are_pages_of_which_the_first_is_stored(description: bytes) -> None:
    data = tiff(*[page(FLAT, 1, tags={270: description}), page(255 - FLAT, 1)])
    assert np.array_equal(stored(data), gray(FLAT))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("tile", [None, (16, 16)])
def test_a_missing_strip_tile_or_plane_is_not_black(bits: int, planar: bool, tile: tuple[int, int] | None) -> None:
    values = np.full((32, 48, 3), (1 << bits) - 1, np.uint16 if bits == 16 else np.uint8)
    complete = page(values, bits=bits, planar=planar, tile=tile, rows=None if tile else 8)
    assert opened(convert(tiff(complete), OWN_SIZE).data).min() == 255
    pieces = 324 if tile else 273
    assert rejected(tiff({**complete, pieces: complete[pieces][:-1]}))[0] == "decode_error"
