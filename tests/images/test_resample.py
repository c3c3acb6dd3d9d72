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
from tests.images.kinds import every_kind
from tests.images.resamples import case, fails
from tests.images.test_codec import DEFAULTS
from tests.make import encoded, picture

KERNEL = kernel()
pytestmark = pytest.mark.skipif(KERNEL is None, reason="the resize is not compiled here")

CASES, MAX_SIDE = 1000, 300
SQUARE = (0.0, 0.0, 8.0, 8.0)


def noise(height: int, width: int, channels: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, channels), np.uint8)


def test_random_images_get_the_pixels_that_pillow_gives_them() -> None:
    """`benchmarks/resample_cases.py` compares any number of them."""
    for number in range(CASES):
        some = case(0, number, MAX_SIDE)
        assert fails(some, [KERNEL]) == [], some


@pytest.mark.parametrize("columns", [True, False])
def test_pillow_sums_so_many_weights_that_their_rounding_adds_up(columns: bool) -> None:
    """41,734 weights of about 1/41,734, each rounded: their sum of white may be 256, which the kernel doesn't clip."""
    shape = (1, 41_734, 3) if columns else (41_734, 1000, 3)
    white, box = np.full(shape, 255, np.uint8), (0.0, 0.0, float(shape[1]), float(shape[0]))
    out = np.empty((1, 1, 3), np.uint8)
    with pytest.raises(ValueError, match="scale up to 4000"):
        KERNEL.resize(white, out, box, shape[:2])
    resize.resize_into(white, box, out)
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
        KERNEL.resize(pixels, out, (0.0, 0.0, 300.0, 200.0), (200, 300))
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
        KERNEL.resize(noise(8, 8, 3), np.empty((4, 4, 3), np.uint8), box, (8, 8))


def capsule(mode: str) -> object:
    return Image.new(mode, (8, 8)).__arrow_c_array__()[1]


READ_ONLY = np.frombuffer(bytes(48), np.uint8).reshape(4, 4, 3)
OUT = np.empty((4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    ("source", "out", "size"),
    [
        (noise(8, 8, 3), OUT, (8, 9)),
        (noise(8, 8, 1), OUT, (8, 8)), (noise(8, 8, 4), OUT, (8, 8)),
        (noise(8, 8, 3)[:, :, 0], OUT, (8, 8)), (noise(8, 8, 3).astype(np.float32), OUT, (8, 8)),
        (noise(8, 16, 3)[:, ::2], OUT, (8, 8)), (noise(8, 8, 3)[:, ::-1], OUT, (8, 8)),
        (noise(8, 8, 3)[:, :, ::-1], OUT, (8, 8)), (capsule("RGB"), OUT, (8, 9)),
        (capsule("RGB"), OUT[:, :, :1], (8, 8)), (capsule("L"), OUT, (8, 8)),
        (noise(8, 8, 3), READ_ONLY, (8, 8)), (noise(8, 8, 3), OUT[:0], (8, 8)),
        (noise(8, 8, 3), OUT[:, ::2], (8, 8)), (np.empty((0, 8, 3), np.uint8), OUT, (0, 8)),
        (noise(8, 8, 3), OUT, (-8, 8)), (noise(8, 8, 3), OUT, (1 << 40, 1 << 40)),
        (b"bytes", OUT, (8, 8)), ("text", OUT, (8, 8)),
    ],
)  # fmt: skip
def test_what_is_no_image_of_bytes_is_refused(source: object, out: np.ndarray, size: tuple[int, int]) -> None:
    with pytest.raises((ValueError, TypeError, BufferError)):
        KERNEL.resize(source, out, SQUARE, size)


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
