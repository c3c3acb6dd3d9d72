"""One job over a folder with every kind of image and 20 broken files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import reader
from beam_pipeline import schema
from beam_pipeline.conversion.decoder import Decoder
from beam_pipeline.images import convert
from imageshards import main as reader_command
from tests.images.kinds import broken, every_kind, png
from tests.images.test_codec import OWN_SIZE
from tests.images.tiffs import page, tiff
from tests.make import class_folders, job, manifest, published, rejects, same_each_time, shard_files

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")
SUFFIXES = {"jpeg": "jpg", "tiff": "tif"}
MANY_REJECTS = ("--max_reject_fraction", "0.5")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes: every kind, and the broken files among 30 good ones."""
    folder = tmp_path_factory.mktemp("bucket")
    class_folders(folder, {"mixed": 30})
    (folder / "kinds").mkdir()
    for kind, data in every_kind().items():
        suffix = kind.split("_")[0]
        (folder / "kinds" / f"{kind}.{SUFFIXES.get(suffix, suffix)}").write_bytes(data)
    for name, (_, data) in broken().items():
        (folder / "mixed" / name).write_bytes(data)
    (folder / "mixed" / "notes.txt").write_text("not listed")
    return folder


def test_every_kind_gets_a_record_and_every_broken_file_its_reason(bucket: Path, tmp_path: Path) -> None:
    version = published(bucket, tmp_path / "out", *MANY_REJECTS)
    content = manifest(version)
    reasons = Counter(reason for reason, _ in broken().values())
    assert len(broken()) == 20
    assert content["rejects"] == {"by_reason": dict(reasons), "environment": 0}
    assert content["images"] == len(every_kind()) + 30 + 20
    assert content["records"] == len(every_kind()) + 30
    assert {line["path"]: line["reason"] for line in rejects(version)} == {
        f"mixed/{name}": reason for name, (reason, _) in broken().items()
    }
    assert all(" 0x" not in line["detail"] for line in rejects(version))
    formats = content["source"]["formats"]
    assert sum(formats.values()) == content["records"]
    assert formats["JPEG"] == sum(kind.startswith("jpeg") for kind in every_kind()) + 30
    assert content["source"]["min_size"] == [18, 24]
    assert content["source"]["max_size"] == [36, 48]
    assert reader_command(["verify", str(version)]) == 0


def test_extensions_say_what_is_listed(bucket: Path, tmp_path: Path) -> None:
    version = published(bucket, tmp_path / "out", "--extensions", ".WEBP,gif", *MANY_REJECTS)
    content = manifest(version)
    assert content["configuration"]["extensions"] == ["gif", "webp"]
    assert set(content["source"]["formats"]) == {"GIF", "WEBP"}


def test_gray_datasets_have_one_channel_everywhere(bucket: Path, tmp_path: Path) -> None:
    version = published(bucket, tmp_path / "out", "--channels", "1", *MANY_REJECTS)
    content = manifest(version)
    assert content["image"]["channels"] == 1
    assert len(content["image"]["mean"]) == len(content["image"]["std"]) == 1
    shape = json.loads((version / schema.FEATURES_FILE).read_bytes())["featuresDict"]["features"]["image"]["image"]
    assert shape["shape"]["dimensions"] == ["24", "24", "1"]
    images, labels = next(iter(reader.train_batches(str(version), "train", global_batch_size=8)))
    assert (images.shape, images.dtype.name, labels.shape) == ((8, 24, 24, 1), "uint8", (8,))
    assert images.std() > 10


def test_images_that_fit_are_counted_and_not_encoded_again(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "in", {"a": 5, "b": 4})
    stripped = source / "a" / "0000.jpg"
    data = stripped.read_bytes()
    stripped.write_bytes(data[:2] + b"\xff\xfe\0\x09private" + data[2:])
    version = published(source, tmp_path / "out", "--image_size", "none")
    assert manifest(version)["image"]["passed_through"] == {"whole": 8, "without_metadata": 1}
    records = b"".join(schema.unframe(shard_files(version)[0].read_bytes()))
    for path in source.rglob("*.jpg"):
        assert (data if path == stripped else path.read_bytes()) in records
    again = published(source, tmp_path / "again", "--image_size", "none")
    assert same_each_time(version) == same_each_time(again)


def test_images_of_16_bits_that_hold_fewer_are_told(tmp_path: Path) -> None:
    """Gray, RGB and alpha, PNG and TIFF; in a retry after a crash, too, whose images a child process decodes."""
    source = class_folders(tmp_path / "in", {"a": 20})
    values = np.random.default_rng(0).integers(0, 4096, (36, 48, 4))
    for number, (shift, channels) in enumerate(((0, 1), (0, 3), (0, 4), (4, 1), (4, 3))):
        part = values[..., :channels] << shift
        (source / "a" / f"{number}.tif").write_bytes(
            tiff(page(part, 2 if channels > 1 else 1, 16, extra=(2,) * (channels == 4)))
        )
        rows = [row.astype(">u2").tobytes() for row in part]
        (source / "a" / f"{number}.png").write_bytes(png(48, 36, 16, {1: 0, 3: 2, 4: 6}[channels], rows))
    finished = job(source, tmp_path / "out")
    assert finished.code == 0
    fix = "without a value above 4095, stored nearly black: scale files of 10 or 12 bits to 16 first"
    assert f"warning: 6 of 10 images of 16 bits {fix}\n" in finished.err
    answer = Decoder(OWN_SIZE, None, isolated=True).convert("x", (source / "a" / "0.tif").read_bytes(), b"")
    assert (answer.bits_used, convert((source / "a" / "3.png").read_bytes(), OWN_SIZE).bits_used) == (12, 16)
