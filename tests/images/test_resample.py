"""The compiled resize: Pillow's pixels for any image, box and memory layout, and an error for anything else."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from beam_pipeline.images import convert, resize
from beam_pipeline.images.geometry import RESIZE_MODES
from beam_pipeline.images.resize import RESAMPLING, kernel
from benchmarks.resample_cases import FILTERS, case, fails
from tests.images.kinds import every_kind
from tests.images.test_codec import DEFAULTS
from tests.make import encoded, picture

KERNEL = kernel()
pytestmark = pytest.mark.skipif(KERNEL is None, reason="the resize is not compiled here")

CASES, MAX_SIDE = 1000, 300
SQUARE = (0.0, 0.0, 8.0, 8.0)


def noise(height: int, width: int, channels: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, channels), np.uint8)


@pytest.mark.parametrize("name", FILTERS)
def test_random_images_get_the_pixels_that_pillow_gives_them(name: str) -> None:
    """`benchmarks/resample_cases.py` compares any number of them."""
    for number in range(CASES):
        some = case(0, number, name, MAX_SIDE)
        assert fails(some, [KERNEL]) == [], some


@pytest.mark.parametrize(
    ("width", "new_width", "left", "right"), [(31, 7, 8, 17.5), (28, 5, 14, 23.5), (31, 6, 12, 31), (195, 24, 84, 128)]
)
def test_a_pixel_on_the_edge_of_a_box_is_counted_as_pillow_counts_it(
    width: int, new_width: int, left: float, right: float
) -> None:
    """If a compiler fuses multiplications and additions, these boxes have other pixels."""
    pixels, out = noise(1, width, 3), np.empty((1, new_width, 3), np.uint8)
    KERNEL.resize(pixels, out, (left, 0.0, right, 1.0), "box", (1, width))
    wanted = Image.fromarray(pixels).resize((new_width, 1), Image.Resampling.BOX, (left, 0, right, 1))
    assert out.tobytes() == wanted.tobytes()


def test_white_stays_white_under_so_many_weights_that_their_rounding_adds_up() -> None:
    """41,734 weights of 1/41,734, each rounded up: their sum of white is 256."""
    out = np.empty((1, 1, 3), np.uint8)
    KERNEL.resize(np.full((1, 41_734, 3), 255, np.uint8), out, (0.0, 0.0, 41_734.0, 1.0), "box", (1, 41_734))
    assert out.tolist() == [[[255, 255, 255]]]


@pytest.mark.parametrize("channels", [1, 3])
def test_mirrored_rows_are_reversed_and_nothing_else_is_written(channels: int) -> None:
    for width in range(1, 70):
        memory = noise(3, width + 20, channels)
        wanted = memory.copy()
        wanted[:, 10:-10] = wanted[:, 10:-10][:, ::-1]
        KERNEL.mirror(memory[:, 10:-10])
        assert (memory == wanted).all(), width


def test_threads_resize_at_the_same_time() -> None:
    pixels = noise(200, 300, 3)
    wanted = Image.fromarray(pixels).resize((100, 80), Image.Resampling.BILINEAR).tobytes()

    def resized(_: int) -> bytes:
        out = np.empty((80, 100, 3), np.uint8)
        KERNEL.resize(pixels, out, (0.0, 0.0, 300.0, 200.0), "bilinear", (200, 300))
        return out.tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(resized, range(64))) == {wanted}


@pytest.mark.parametrize(
    "box",
    [
        (math.nan, 0, 8, 8), (0, 0, math.nan, 8), (0, 0, math.inf, 8), (-math.inf, 0, 8, 8), (-1e-30, 0, 8, 8),
        (0, -1, 8, 8), (0, 0, 8.001, 8), (0, 0, 8, 9), (5, 0, 4, 8), (0, 5, 8, 4), (0, 0, 1e300, 8),
    ],
)  # fmt: skip
def test_a_box_outside_of_the_image_is_refused(box: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="edges inside"):
        KERNEL.resize(noise(8, 8, 3), np.empty((4, 4, 3), np.uint8), box, "box", (8, 8))


def capsule(mode: str) -> object:
    return Image.new(mode, (8, 8)).__arrow_c_array__()[1]


READ_ONLY = np.frombuffer(bytes(48), np.uint8).reshape(4, 4, 3)
OUT = np.empty((4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    ("source", "out", "size", "name"),
    [
        (noise(8, 8, 3), OUT, (8, 8), "nearest"), (noise(8, 8, 3), OUT, (8, 9), "box"),
        (noise(8, 8, 1), OUT, (8, 8), "box"), (noise(8, 8, 4), OUT, (8, 8), "box"),
        (noise(8, 8, 3)[:, :, 0], OUT, (8, 8), "box"), (noise(8, 8, 3).astype(np.float32), OUT, (8, 8), "box"),
        (noise(8, 16, 3)[:, ::2], OUT, (8, 8), "box"), (noise(8, 8, 3)[:, ::-1], OUT, (8, 8), "box"),
        (noise(8, 8, 3)[:, :, ::-1], OUT, (8, 8), "box"), (capsule("RGB"), OUT, (8, 9), "box"),
        (capsule("RGB"), OUT[:, :, :1], (8, 8), "box"), (capsule("L"), OUT, (8, 8), "box"),
        (noise(8, 8, 3), READ_ONLY, (8, 8), "box"), (noise(8, 8, 3), OUT[:0], (8, 8), "box"),
        (noise(8, 8, 3), OUT[:, ::2], (8, 8), "box"), (np.empty((0, 8, 3), np.uint8), OUT, (0, 8), "box"),
        (noise(8, 8, 3), OUT, (-8, 8), "box"), (noise(8, 8, 3), OUT, (1 << 40, 1 << 40), "box"),
        (b"bytes", OUT, (8, 8), "box"), ("text", OUT, (8, 8), "box"),
    ],
)  # fmt: skip
def test_what_is_no_image_of_bytes_is_refused(
    source: object, out: np.ndarray, size: tuple[int, int], name: str
) -> None:
    with pytest.raises((ValueError, TypeError, BufferError)):
        KERNEL.resize(source, out, SQUARE, name, size)


@pytest.mark.soak
def test_every_file_is_stored_with_the_same_bytes_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    large = {  # several blocks of memory, averaged first, taller than 100 times its width
        "large": picture(2100, 2100), "reduced": picture(700, 500), "tall": picture(5, 700), "wide": picture(700, 5),
    }  # fmt: skip
    filters = list(RESAMPLING)
    files = [(name, data, filters[number % len(filters)]) for number, (name, data) in enumerate(every_kind().items())]
    for name, image in large.items():
        files += [(name, encoded(image, "PNG"), resample) for resample in filters[: 2 if name == "large" else None]]
    sizes, jobs = ((40, 50), (1100, 1200), (7, 300)), []
    for number, (name, data, resample) in enumerate(files):
        mode, size = RESIZE_MODES[number % len(RESIZE_MODES)], sizes[number % 3]
        options = DEFAULTS._replace(size=size, resize_mode=mode, resample=resample, channels=1 + 2 * (number % 2))
        jobs.append((name, data, options))
    compiled = [convert(data, options).data for _, data, options in jobs]
    monkeypatch.setattr(resize, "kernel", lambda: None)
    for (name, data, options), expected in zip(jobs, compiled, strict=True):
        assert convert(data, options).data == expected, (name, options)
