"""Decoding and augmenting: Pillow's pixels at the stored size, geometry of resizing, and what users may do wrong."""

from __future__ import annotations

import io
from random import Random
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

import reader
from beam_pipeline.errors import UsageError
from beam_pipeline.images import resize
from beam_pipeline.sample_data import SHAPES, draw_scene
from reader import augment
from reader.info import ImageInfo
from reader.order import augment_seeds
from reader.pixels import ImageDecoder, UndecodableImageError, decode_pixels
from tests.reading.shards import draw, make_dataset


def scene(number: int, size: tuple[int, int] = (375, 500)) -> np.ndarray:
    """A picture like a photo: edges, texture, grain."""
    shape = list(SHAPES.values())[number]
    return np.asarray(draw_scene(shape, (500, 375), Random(number)).resize(size[::-1]))


def saved(pixels: np.ndarray, kind: str, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def by_pillow(encoded: bytes, channels: int) -> np.ndarray:
    pixels = np.asarray(Image.open(io.BytesIO(encoded)).convert("L" if channels == 1 else "RGB"))
    return pixels if channels == 3 else pixels[:, :, None]


def decoded(encoded: bytes, channels: int, size: tuple[int, int], is_foreign: bool = True) -> np.ndarray:
    """By the decoder of a dataset of this size, in a row between two others."""
    info = ImageInfo("jpeg", channels, size, size, (), ())
    rows = np.full((3, *size, channels), 77, np.uint8)
    ImageDecoder(info, is_foreign=is_foreign)(memoryview(encoded), rows[1], 0)
    assert (rows[[0, 2]] == 77).all()
    return rows[1]


SAVED: dict[str, dict[str, Any]] = {
    **{name: {"subsampling": name} for name in ("444", "422", "420", "440", "411")},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_blocks": 3},
    "restart rows, progressive": {"restart_marker_rows": 1, "progressive": True},
    "Adobe RGB": {"keep_rgb": True},
    "CMYK": {"mode": "CMYK"},
    "grey": {"mode": "L"},
    "optimized": {"optimize": True, "quality": 100},
    "quality 1": {"quality": 1},
    "EXIF orientation": {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"},
    **{f"PNG {mode}": {"kind": "PNG", "mode": mode} for mode in ("RGB", "RGBA", "L", "LA", "P", "1")},
    "PNG transparent palette": {"kind": "PNG", "mode": "P", "transparency": 3},
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", SAVED)
def test_images_decode_to_pillows_pixels(name: str, channels: int) -> None:
    for size in [(64, 96), (61, 97), (1, 1), (7, 300)]:
        pixels, options = scene(0, size), dict(SAVED[name])
        if "subsampling" in options:
            encoded = simplejpeg.encode_jpeg(pixels, 90, "RGB", options["subsampling"])
        else:
            encoded = saved(pixels, options.pop("kind", "JPEG"), **options)
        is_own = (name, channels) in (("420", 3), ("grey", 1))  # as the job writes them: the header isn't looked at
        for is_foreign in (True, False) if is_own else (True,):
            assert np.array_equal(decoded(encoded, channels, size, is_foreign), by_pillow(encoded, channels))


@pytest.mark.parametrize("channels", [1, 3])
def test_png_grey_of_16_bits_keeps_its_upper_8(channels: int) -> None:
    values = np.arange(64 * 96, dtype=np.uint16).reshape(64, 96) * 10
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    expected = np.repeat((values >> 8).astype(np.uint8)[:, :, None], channels, 2)
    assert np.array_equal(decoded(buffer.getvalue(), channels, (64, 96)), expected)


JPEG = saved(scene(1, (64, 96)), "JPEG", quality=90)
PNG = saved(scene(0, (64, 96)), "PNG")


def with_frame_byte(offset: int, value: int) -> bytes:
    """The JPEG with a byte after its frame header's marker changed: 0 is the kind of coding, 3 the bits a sample."""
    data = bytearray(JPEG)
    data[data.index(b"\xff\xc0") + 1 + offset] = value
    return bytes(data)


@pytest.mark.parametrize(
    "encoded",
    [
        *(b"", b"\0", b"no image", b"\xff\xd8\xff" + bytes(9)),
        *(JPEG[:2], JPEG[:30], JPEG[:-2], JPEG[: len(JPEG) // 2], PNG[: len(PNG) // 2], PNG[:40]),
        *(with_frame_byte(3, 12), with_frame_byte(0, 0xC3), with_frame_byte(0, 0xCB)),
    ],
)
def test_what_pillow_refuses_is_one_line(encoded: bytes) -> None:
    with pytest.raises(Exception) as error:
        by_pillow(encoded, 3)
    for is_foreign in (True, False):
        with pytest.raises(UndecodableImageError, match=r"^the image doesn't decode \(\w+\)$") as ours:
            decoded(encoded, 3, (64, 96), is_foreign)
        assert type(error.value).__name__ in str(ours.value)


def test_a_jpeg_is_refused_or_decoded_as_pillow_does_wherever_it_is_changed() -> None:
    random, refused = Random(0), 0
    for _ in range(400):
        data = bytearray(JPEG)
        data[random.randrange(len(data))] = random.randrange(256)
        cut = bytes(data[: random.choice([len(data), len(data), random.randrange(len(data))])])
        try:
            expected = by_pillow(cut, 3)
        except Exception:
            expected = None
        for is_foreign in (True, False):
            try:
                found = decode_pixels(cut, 3, is_foreign=is_foreign)
            except UndecodableImageError:
                refused += 1
                assert expected is None
            else:
                assert expected is not None and found.shape == expected.shape
                # A changed colour space is read as the manifest says, if it comes from our own job.
                assert not is_foreign or np.array_equal(found, expected)
    assert 100 < refused < 700


@pytest.mark.parametrize("image_format", ["jpeg", "png"])
@pytest.mark.parametrize("size", [(64, 95), (96, 64), (8, 8), (200, 300)])
def test_an_image_of_another_shape_than_the_manifest_says_is_refused(size: tuple[int, int], image_format: str) -> None:
    image, encoded = ImageInfo(image_format, 3, (64, 96), (64, 96), (), ()), draw(1, size, image_format)
    for row, decode in (((64, 96, 3), ImageDecoder(image)), ((32, 32, 3), ImageDecoder(image, 32))):
        with pytest.raises(
            UndecodableImageError, match=rf"^the image is {size[0]}x{size[1]}, the manifest says 64x96$"
        ):
            decode(encoded, np.empty(row, np.uint8), 0)


# --- resizing


def resized(pixels: np.ndarray, size: tuple[int, int], mode: str) -> np.ndarray:
    """What the decoder makes of an image that is stored as PNG."""
    channels = pixels.shape[2]
    info = ImageInfo("png", channels, pixels.shape[:2], pixels.shape[:2], (), ())
    row = np.full((*size, channels), 77, np.uint8)
    stored = saved(pixels[:, :, 0] if channels == 1 else pixels, "PNG", "L" if channels == 1 else "RGB")
    ImageDecoder(info, size, mode)(stored, row, 0)
    return row


def bilinear(
    pixels: np.ndarray | Image.Image, size: tuple[int, int], box: tuple[float, ...] | None = None
) -> np.ndarray:
    """Pillow's own resize to (height, width)."""
    image = (
        pixels
        if isinstance(pixels, Image.Image)
        else Image.fromarray(pixels.squeeze(-1) if pixels.shape[2] == 1 else pixels)
    )
    found = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR, box))
    return found[:, :, None] if found.ndim == 2 else found


@pytest.fixture(params=["compiled", "Pillow"])
def resizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs with the compiled resize, and as on a machine without it."""
    if request.param == "Pillow":
        monkeypatch.setattr(resize, "kernel", lambda: None)
    elif not resize.kernel():
        pytest.skip("the resize isn't compiled: install a C compiler, then `make setup`")
    return str(request.param)


@pytest.mark.parametrize(("size", "scale"), [((94, 125), 1), ((93, 125), 2), ((40, 60), 4), ((20, 31), 8), ((1, 1), 8)])
@pytest.mark.usefixtures("resizer")
def test_a_jpeg_much_larger_than_asked_for_is_decoded_smaller_as_the_writer_does(
    size: tuple[int, int], scale: int
) -> None:
    for options in ({}, {"mode": "L"}, {"mode": "CMYK"}, {"progressive": True}):
        encoded = saved(scene(1), "JPEG", **options)
        channels = 1 if options.get("mode") == "L" else 3
        row = np.empty((*size, channels), np.uint8)
        ImageDecoder(ImageInfo("jpeg", channels, (375, 500), (375, 500), (), ()), size, "stretch")(encoded, row, 0)
        image = Image.open(io.BytesIO(encoded))
        image.draft(image.mode, (500 // scale, 375 // scale))
        image.load()
        assert image.size == (-(-500 // scale), -(-375 // scale))
        expected = bilinear(image.convert("L" if channels == 1 else "RGB"), size, (0, 0, 500 / scale, 375 / scale))
        assert np.array_equal(row, expected)


def ramp(height: int, width: int, channels: int = 3) -> np.ndarray:
    """Rises to the right in the first channel and downwards in the second."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [x * 255 // width, y * 255 // height, np.full_like(x, 200)]
    return np.stack(planes[-channels:], -1).astype(np.uint8)


@pytest.mark.parametrize("shape", [(40, 80), (80, 40), (7, 9), (33, 33)])
def test_crop_keeps_the_middle_and_the_aspect(shape: tuple[int, int]) -> None:
    found = resized(ramp(*shape), (20, 20), "crop").astype(int)
    side = min(shape)
    for channel, axis_length, axis in ((0, shape[1], 0), (1, shape[0], 1)):
        line = found[:, :, channel].mean(axis=axis)
        low, high = ((axis_length - side) / 2 / axis_length, (axis_length + side) / 2 / axis_length)
        assert line[0] == pytest.approx(255 * low, abs=255 / side)
        assert line[-1] == pytest.approx(255 * high, abs=2 * 255 / side + 1)
    assert (found[:, :, 2] == 200).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("shape", "inner"), [((40, 80), (10, 20)), ((80, 40), (20, 10)), ((5, 5), (20, 20))])
def test_pad_keeps_everything_between_black_bars(shape: tuple[int, int], inner: tuple[int, int], channels: int) -> None:
    found = resized(ramp(*shape, channels), (20, 20), "pad")
    rows, columns = np.flatnonzero(found[:, 10, -1]), np.flatnonzero(found[10, :, -1])
    assert (len(rows), len(columns)) == inner
    assert abs(rows[0] - (19 - rows[-1])) <= 1
    assert abs(columns[0] - (19 - columns[-1])) <= 1


@pytest.mark.parametrize("mode", ["stretch", "crop", "pad"])
@pytest.mark.parametrize("channels", [1, 3])
def test_any_size_becomes_any_other(mode: str, channels: int) -> None:
    for size in ((1, 1), (1, 500), (500, 1), (224, 224), (3, 2)):
        for target in ((1, 1), (224, 224), (5, 300), (1, 7)):
            found = resized(np.full((*size, channels), 9, np.uint8), target, mode)
            assert found.shape == (*target, channels)
            assert set(np.unique(found)) <= ({9} if mode != "pad" else {0, 9}) and 9 in found


@pytest.mark.parametrize("image_format", ["jpeg", "png"])
@pytest.mark.parametrize("channels", [1, 3])
def test_stored_sizes_that_differ_are_resized_one_by_one(image_format: str, channels: int) -> None:
    sizes = [(20, 30), (60, 20), (33, 33), (20, 31)]
    image = ImageInfo(image_format, channels, (20, 20), (60, 33), (), ())
    decode = ImageDecoder(image, (24, 16), "crop")
    for number, size in enumerate(sizes * 2):
        encoded, row = draw(number, size, image_format, channels), np.empty((24, 16, channels), np.uint8)
        decode(encoded, row, 0)
        assert np.array_equal(row, resized(by_pillow(encoded, channels), (24, 16), "crop"))
    for size in ((20, 34), (61, 20)):
        with pytest.raises(
            UndecodableImageError, match=f"^the image is {size[0]}x{size[1]}, the manifest says at most"
        ):
            decode(draw(0, size, image_format, channels), row, 0)


# --- augmentation


SEEDS = augment_seeds(np.arange(400), 3, 1).tolist()


@pytest.mark.parametrize("shape", [(8, 10, 3), (7, 9, 1), (1, 1, 3), (5, 1, 3), (1, 5, 1), (3, 70, 3), (3, 70, 2)])
@pytest.mark.usefixtures("resizer")
def test_flip_mirrors_half_of_the_images(shape: tuple[int, int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    found = np.stack([augment.flip(image.copy(), seed) for seed in SEEDS])
    mirrored = (found == image[:, ::-1]).all((1, 2, 3))
    assert ((found == image).all((1, 2, 3)) | mirrored).all()
    assert shape[1] == 1 or 150 < mirrored.sum() < 250


@pytest.mark.parametrize("shape", [(16, 24, 3), (16, 24, 1)])
@pytest.mark.usefixtures("resizer")
def test_flip_crop_is_a_flip_of_an_image_shifted_by_an_eighth_at_most_and_black_behind(
    shape: tuple[int, int, int],
) -> None:
    image = np.random.default_rng(0).integers(1, 256, shape, np.uint8)
    padded = np.zeros((20, 30, shape[2]), np.uint8)
    padded[2:18, 3:27] = image
    crops = [padded[y : y + 16, x : x + 24] for y in range(5) for x in range(7)]
    expected = {one.tobytes() for crop in crops for one in (crop, _flipped_inside(crop))}
    found = [augment.flip_crop(image.copy(), seed).tobytes() for seed in SEEDS]
    assert set(found) <= expected and len(set(found)) > 60
    assert found == [augment.flip_crop(image.copy(), seed).tobytes() for seed in SEEDS]


def _flipped_inside(crop: np.ndarray) -> np.ndarray:
    """What is no padding, mirrored where it is."""
    rows, columns = np.flatnonzero(crop.any((1, 2))), np.flatnonzero(crop.any((0, 2)))
    out = crop.copy()
    inside = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    out[inside] = crop[inside][:, ::-1]
    return out


@pytest.mark.parametrize("size", [(224, 224), (300, 200), (50, 400), (2, 3), (1, 1)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (1.0, 1.0), (1e-9, 1e-9)])
def test_windows_are_inside_the_image(size: tuple[int, int], scale: tuple[float, float]) -> None:
    crop = augment.random_resized_crop(scale=scale)
    for seed in augment_seeds(np.arange(1000), 5, 2).tolist():
        top, left, height, width = crop.window(*size, seed)
        assert top >= 0 and left >= 0 and height >= 1 and width >= 1
        assert top + height <= size[0] and left + width <= size[1]


def test_area_and_ratio_are_drawn_as_asked() -> None:
    crop = augment.random_resized_crop()
    found = np.array([crop.window(1000, 1000, seed) for seed in augment_seeds(np.arange(3000), 5, 2).tolist()])
    area, ratio = found[:, 2] * found[:, 3] / 1e6, found[:, 3] / found[:, 2]
    assert 0.079 < area.min() < 0.1 and 0.9 < area.max() <= 1 and 0.45 < area.mean() < 0.52
    assert 0.749 < ratio.min() < 0.76 and 1.32 < ratio.max() < 1.335
    assert np.log(ratio).mean() == pytest.approx(0, abs=0.01)
    shares = found[:, :2] / np.maximum(1000 - found[:, 2:], 1)
    assert shares.mean() == pytest.approx(0.5, abs=0.02)
    assert abs(np.corrcoef(shares.T)[0, 1]) < 0.05


def test_if_no_window_fits_it_is_the_middle_with_an_allowed_ratio() -> None:
    crop = augment.random_resized_crop(scale=(0.9, 1.0))
    assert {crop.window(30, 1000, seed) for seed in SEEDS} == {(0, 480, 30, 40)}


@pytest.mark.parametrize("is_fixed_size", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.usefixtures("resizer")
def test_a_random_resized_crop_is_its_window_of_the_stored_image_then_the_augment(
    channels: int, is_fixed_size: bool
) -> None:
    image = ImageInfo("jpeg", channels, (48, 64) if is_fixed_size else (1, 1), (48, 64), (), ())
    crop = augment.random_resized_crop(scale=(0.3, 0.8), then=augment.flip)
    decode, row = ImageDecoder(image, (20, 24), augment=crop), np.empty((20, 24, channels), np.uint8)
    for number, seed in enumerate(SEEDS[:30]):
        encoded = draw(number, (48, 64), "jpeg", channels)
        decode(encoded, row, seed)
        top, left, height, width = crop.window(48, 64, seed)
        cropped = bilinear(by_pillow(encoded, channels), (20, 24), (left, top, left + width, top + height))
        assert np.array_equal(row, augment.flip(cropped.copy(), seed))


def test_arguments_of_augments_are_checked() -> None:
    for bounds in (0.5, (0.5, 1.5), (0.5, 0.2), ("a", "b"), (0.1, 0.2, 0.3), (0, 1)):
        with pytest.raises(UsageError, match=r"^scale must be the smallest and largest share of the area, .* got "):
            augment.random_resized_crop(scale=bounds)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^ratio must be the smallest and largest width over height, .* got 2$"):
        augment.random_resized_crop(ratio=2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"random_resized_crop: call it, then=imageshards.augment.random_resized_crop"):
        augment.random_resized_crop(then=augment.random_resized_crop)


# --- augments of users


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    return reader.load_info(make_dataset(tmp_path_factory.mktemp("photos") / "1.0.0", {"train": [40]}, size=(12, 16)))


def augmented(info: reader.DatasetInfo, function: Any, **more: Any) -> np.ndarray:
    return np.concatenate(
        [batch[0] for batch in reader.train_batches(info, "train", global_batch_size=8, augment=function, **more)]
    )


def fails(error: type[BaseException]) -> Any:
    def failing(image: Any, seed: int) -> Any:
        raise error("my own\nwords")

    return failing


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda image, seed: image[:4], r"returned uint8 \[4, 16, 3\]: it has to return uint8 \[12, 16, 3\]"),
        (lambda image, seed: image / 255, r"returned float64 \[12, 16, 3\]: it has to return uint8"),
        (lambda image, seed: None, "returned NoneType: it has to return uint8"),
        (lambda image, seed: [[1], [2, 3]], "ValueError"),
        (fails(StopIteration), "^failing failed: StopIteration: my own words$"),
        (fails(ValueError), "^failing failed: ValueError: my own words$"),
        (fails(UndecodableImageError), "^failing failed: UndecodableImageError: my own words$"),
        (fails(MemoryError), "^failing failed: MemoryError: my own words$"),
        (fails(GeneratorExit), "my own"),
    ],
)
def test_a_users_fault_is_one_line_and_never_a_corrupt_record(
    info: reader.DatasetInfo, function: Any, message: str, on_error: str
) -> None:
    kind = GeneratorExit if message == "my own" else UsageError
    with pytest.raises(kind, match=message) as error:
        augmented(info, function, on_error=on_error)
    assert kind is not UsageError or "\n" not in str(error.value)


def test_arrays_of_other_kinds_are_taken(info: reader.DatasetInfo) -> None:
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'imageshards[tensorflow]'")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'imageshards[torch]'")
    expected = 255 - augmented(info, None)
    for function in (
        lambda image, seed: 255 - image,
        lambda image, seed: tf.constant(255, tf.uint8) - image,
        lambda image, seed: 255 - torch.from_numpy(image),
        lambda image, seed: np.ascontiguousarray((255 - image)[:, ::-1])[:, ::-1],
        lambda image, seed: np.subtract(255, image, out=image),
        lambda image, seed: Image.fromarray(255 - image),
    ):
        assert np.array_equal(augmented(info, function), expected)
    mirrored = augmented(info, lambda image, seed: image[:, ::-1])  # a view of the row that it is stored in
    assert np.array_equal(mirrored, 255 - expected[:, :, ::-1])
