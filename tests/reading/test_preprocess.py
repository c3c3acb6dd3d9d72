"""`decode`: a new photo has the pixels that its record would have, whatever it is and however the dataset is stored."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import reader
from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.images import ImageOptions
from beam_pipeline.images.memory import SHARED
from beam_pipeline.schema import canonical_json
from reader.pixels import ImageDecoder
from tests import make
from tests.images import kinds, test_memory
from tests.reading.shards import each_record, make_dataset

# Flags of the writer → image_size and resize_mode of the reader.
WAYS: dict[str, tuple[int | tuple[int, int] | None, str]] = {
    "--image_size 64": (None, "crop"),
    "--image_size 120 --resize_mode crop --jpeg_quality 75": ((48, 40), "stretch"),
    "--image_size 60 --resize_mode shorter --channels 1 --jpeg_subsampling 4:4:4": (32, "crop"),
    "--image_size none --image_format png": (32, "pad"),
}


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of every kind; then JPEG, PNG, turned, CMYK and grey ones of several sizes; and broken ones."""
    folder = tmp_path_factory.mktemp("preprocess") / "photos"
    files = {f"{name}.jpg": data for name, data in kinds.every_kind().items()}
    for number, size in enumerate([(320, 240), (97, 150), (64, 64), (30, 50)] * 2):
        picture = Image.blend(make.picture(*size, seed=number), make.noise(*size, seed=number), 0.3)
        files |= {
            f"{number}.jpg": make.encoded(picture, quality=80 + number),
            f"{number}.png": make.encoded(picture, "PNG"),
            f"turned{number}.jpg": make.encoded(picture, exif=kinds.turned(number + 1)),
            f"cmyk{number}.jpg": make.encoded(kinds.cmyk(picture)),
            f"grey{number}.jpg": make.encoded(picture.convert("L")),
        }
    files |= {name: data for name, (_, data) in kinds.broken().items()}
    (folder / "any").mkdir(parents=True)
    for name, data in files.items():
        (folder / "any" / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("flags", WAYS)
def test_a_photo_has_the_pixels_of_its_record_or_the_reason_of_its_reject(
    flags: str, every_kind: Path, tmp_path: Path
) -> None:
    image_size, mode = WAYS[flags]
    version = make.published(every_kind, tmp_path, *flags.split(), "--max_reject_fraction", "1")
    info, equal = reader.load_info(version), []
    batches = reader.eval_batches(
        info, "train", global_batch_size=32, image_size=image_size, resize_mode=mode, features=["filename"]
    )
    for one in each_record(batches):
        decoded = reader.decode((every_kind / one["filename"].decode()).read_bytes(), info, image_size, mode)
        equal.append(np.array_equal(one["image"], decoded))
    assert equal == [True] * len(equal) and len(equal) >= 75
    rejects = make.rejects(version)
    assert len(rejects) == 20
    for one in rejects:
        with pytest.raises(ValueError, match=rf"\({one['reason']}\)$"):
            reader.decode((every_kind / one["path"]).read_bytes(), info, image_size, mode)


def test_a_photo_larger_than_all_that_are_stored_is_decoded(every_kind: Path, tmp_path: Path) -> None:
    small = make.class_folders(tmp_path / "small", {"ant": 2}, size=(40, 30))
    info = reader.load_info(make.published(small, tmp_path, "--image_size", "none"))
    assert info.image.min_size == info.image.max_size == (30, 40)
    large = (every_kind / "any" / "0.jpg").read_bytes()
    assert reader.decode(large, info).shape == (30, 40, 3)


def test_options_of_a_manifest_are_those_of_the_job() -> None:
    config = Config(input="in", output="out", name="x", image_size="48x40", background="#102030", resize_mode="pad")
    assert ImageOptions.of(json.loads(canonical_json(config.fingerprint()))) == config.image_options


def test_heic_without_its_extra_is_one_line_with_the_extra(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(ImageShardsError, match=r"^unsupported HEIF: install imageshards\[heic\] \(unsupported\)$"):
        reader.decode(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(60), original)


def test_a_manifest_without_the_writer_s_flags_is_told(tmp_path: Path) -> None:
    url = make_dataset(tmp_path / "1.0.0", {"train": [3]}, size=(16, 16))
    with pytest.raises(ImageShardsError, match="manifest doesn't say which 'image_size' it was written with"):
        reader.decode(b"", url)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An index of files that pass for a third party's, 24x36 pixels."""
    folder = tmp_path_factory.mktemp("third")
    source = make_dataset(folder / "1.0.0", {"train": [5]}, size=(24, 36))
    return reader.index(f"{source}/*.tfrecord-*", folder / "index").info


def test_for_third_party_shards_an_upright_photo_is_decoded_as_a_record(index: Any) -> None:
    encoded, decoded = reader.records(index, "train", decode=False), reader.records(index, "train", image_size=16)
    for number in range(5):
        assert np.array_equal(reader.decode(encoded[number]["image"], index, 16), decoded[number]["image"])


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_for_third_party_shards_a_photo_is_turned_upright(format: str, index: Any) -> None:
    upright = make.picture(36, 24, seed=3)
    sideways = upright.transpose(Image.Transpose.ROTATE_90)
    options: dict[str, Any] = {"quality": 100, "subsampling": 0} if format == "JPEG" else {}
    options |= {"lossless": True} if format == "WEBP" else {}
    pixels = reader.decode(make.encoded(sideways, format, exif=kinds.turned(6), **options), index)
    assert np.abs(pixels.astype(int) - np.asarray(upright)).max() <= (4 if format == "JPEG" else 0)


def test_for_third_party_shards_what_is_no_image_is_told(index: Any) -> None:
    for name, (_, data) in kinds.broken().items():
        if name != "floats.tif":  # Pillow makes something of it
            with pytest.raises(ValueError, match=r" \(\w+\)$"):
                reader.decode(data, index)


BOMBS = {  # how each path of `decode` is taken; tests/images/test_memory.py has every kind
    "webp": test_memory.webp_claiming(10_000, 10_000),
    "rgb.png": kinds.png(13_300, 13_300, 8, 2, [b""]),
    "progressive.jpg": test_memory.claiming(make.encoded(make.picture(64, 64), progressive=True, subsampling=0)),
    "turned.jpg": test_memory.claiming(make.encoded(make.picture(64, 64), exif=kinds.turned(6)), 13_300, 13_300),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_for_third_party_shards_a_photo_takes_no_more_memory_than_in_the_writer(kind: str, index: Any) -> None:
    with pytest.raises(ValueError, match=r"^too many pixels, .* permits 1024 MiB \(too_many_pixels\)$"):
        reader.decode(BOMBS[kind], index)


@pytest.mark.parametrize(("format", "mebibytes"), [("JPEG", 109), ("PNG", 183)])
def test_for_third_party_shards_large_photos_wait_for_each_other_until_they_are_decoded(
    format: str, mebibytes: int, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo, held = make.encoded(Image.new("RGB", (4800, 4000)), format), []
    make.before(monkeypatch, ImageDecoder, "__call__", lambda *_: held.append(SHARED._reserved >> 20))
    assert reader.decode(photo, index, 16).shape == (16, 16, 3)
    assert (held, SHARED._reserved) == ([mebibytes], 0)


@pytest.mark.parametrize("arguments", [{"image_size": 0}, {"resize_mode": "zoom"}])
def test_the_error_of_an_argument_is_the_reader_s(arguments: dict[str, Any], original: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        reader.decode(b"", original, **arguments)


def test_a_path_in_place_of_bytes_is_a_usage_error(original: Path) -> None:
    with pytest.raises(UsageError, match=r"^decode takes the content of an image file as bytes, got str$"):
        reader.decode("photo.jpg", original)  # type: ignore[arg-type]
