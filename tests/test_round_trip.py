"""From a folder to shards and back: every byte as TensorFlow writes it by hand, and read by TFDS."""

from __future__ import annotations

import hashlib
import io
import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from beam_pipeline import images, schema
from beam_pipeline.config import Config
from reader.example import parse_example
from tests import make

tf = pytest.importorskip("tensorflow", exc_type=ImportError)
tfds = pytest.importorskip("tensorflow_datasets", exc_type=ImportError)

FLAGS = ("--splits", "train=0.75,validation=0.25", "--num_shards", "train=3,validation=2", "--one_hot")
OPTIONS = Config(input="/x", output="/y", name="z", image_size=24, image_format="png").image_options
LABELS = ["ant", "bee", "cat", "größe"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images: JPEG and PNG of several sizes, turned ones, a gray one, nested folders, odd names; two broken."""
    folder = tmp_path_factory.mktemp("source") / "in"
    seeds = itertools.count()
    for label in LABELS:
        for number, (width, height) in enumerate([(64, 48), (30, 90), (200, 150), (24, 24), (25, 23)] * 3):
            picture = make.picture(width, height, next(seeds))
            exif = Image.Exif()
            if number % 4 == 1:
                exif[0x0112] = 1 + number % 8
            data, suffix = make.encoded(picture, exif=exif), "jpg"
            if number % 3 == 2:
                data, suffix = make.encoded(picture.convert("L") if number == 2 else picture, "PNG"), "png"
            path = folder / label / ("" if number % 5 else "nested #1") / f"{number} é.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    (folder / "bee" / "text.jpg").write_bytes(b"hello")
    cut = make.encoded(make.picture(90, 90))
    (folder / "cat" / "cut.jpg").write_bytes(cut[: len(cut) * 2 // 3])
    return folder


@pytest.fixture(scope="module")
def version(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = (*FLAGS, "--image_format", "png", "--max_reject_fraction", "0.1")
    return make.published(source, tmp_path_factory.mktemp("root"), *flags)


def hashed(path: str, key: bytes) -> int:
    """The design's hashes of a path, by hand."""
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8, key=key).digest(), "big")


def test_shards_are_the_frames_that_tensorflow_would_write(source: Path, version: Path, tmp_path: Path) -> None:
    # From the input alone: splits, keys, order, labels, codec, protobuf and framing by other hands than ours.
    assert (version / "class.labels.txt").read_text().splitlines() == LABELS
    manifest, expected = make.manifest(version), tmp_path / "shard"
    for shard in make.shard_files(version):
        name = schema.ShardName.parse(shard.name)
        assert name is not None
        cuts = [0, *map(int, manifest["plan"]["splits"][name.split]["cuts"]), 1 << 64]
        with tf.io.TFRecordWriter(str(expected)) as writer:
            for key, path in sorted((hashed(path, b"0"), path) for path in make.files(source)):
                split = "train" if hashed(path, b"imageshards split") < 3 << 62 else "validation"  # 3/4
                is_here = split == name.split and cuts[name.index] <= key < cuts[name.index + 1]
                if is_here and path not in ("bee/text.jpg", "cat/cut.jpg"):
                    writer.write(by_hand(source, path))
        assert shard.read_bytes() == expected.read_bytes()


def by_hand(source: Path, path: str) -> bytes:
    """The record of an image."""
    label, example = path.split("/")[0], tf.train.Example()
    feature = example.features.feature
    feature["image"].bytes_list.value.append(images.convert((source / path).read_bytes(), OPTIONS).data)
    feature["class"].int64_list.value.append(LABELS.index(label))
    feature["label"].bytes_list.value.append(label.encode())
    feature["size"].int64_list.value.extend([24, 24])
    feature["filename"].bytes_list.value.append(path.encode())
    feature["one_hot_class"].float_list.value.extend([float(one == label) for one in LABELS])
    return bytes(example.SerializeToString(deterministic=True))


def test_tfds_reads_the_version_by_its_folder_and_by_its_name(version: Path) -> None:
    root = str(version.parent.parent)
    counts = {split: content["records"] for split, content in make.manifest(version)["splits"].items()}
    builder = tfds.builder_from_directory(str(version))
    assert {name: split.num_examples for name, split in builder.info.splits.items()} == counts
    assert builder.info.features["class"].names == LABELS
    half = list(builder.as_dataset(split="train[:50%]", as_supervised=True))
    assert abs(len(half) - counts["train"] / 2) <= 1
    image, label = half[0]
    assert (image.shape, image.dtype) == ((24, 24, 3), tf.uint8)
    first = parse_example(next(iter(schema.unframe(make.shard_files(version)[0].read_bytes()))))
    assert [label.numpy()] == first["class"]
    assert np.array_equal(image.numpy(), np.asarray(Image.open(io.BytesIO(first["image"][0]))))
    splits = tfds.load("photos:1.0.0", data_dir=root)
    assert {name: len(split) for name, split in splits.items()} == counts
    example = next(iter(splits["validation"]))
    assert set(example) == set(schema.RECORD_KEYS) and example["one_hot_class"].shape == (4,)
    assert len(tfds.load("photos", data_dir=root, split="train+validation")) == 60


def test_tfds_reads_mixed_sizes_without_one_hot(source: Path, tmp_path: Path) -> None:
    version = make.published(source, tmp_path, "--image_size", "none", "--max_reject_fraction", "0.1")
    image = make.manifest(version)["image"]
    assert (image["min_size"], image["max_size"]) == ([23, 24], [150, 200])
    dataset = tfds.builder_from_directory(str(version)).as_dataset("train", as_supervised=True)
    assert len({tuple(image.shape) for image, _ in dataset}) > 3


def test_a_shard_without_records_and_a_state_folder_do_not_hinder_tfds(tmp_path: Path) -> None:
    folder = make.class_folders(tmp_path / "in", {"a": 4})
    (folder / "a" / "bad.jpg").write_bytes(b"bad")
    version = make.published(folder, tmp_path / "out", "--num_shards", "5", "--max_reject_fraction", "0.5")
    (version.parent / "_state" / "2.0.0").mkdir(parents=True)
    assert 0 in [shard["records"] for shard in make.manifest(version)["splits"]["train"]["shards"]]
    assert len(tfds.load("photos", data_dir=str(tmp_path / "out"), split="train")) == 4
