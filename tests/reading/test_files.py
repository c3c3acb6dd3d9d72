"""`image_files_dataset`: individual files, the baseline."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import reader
from beam_pipeline.errors import StorageError, UsageError
from tests import make, servers

CLASSES = {"ant": 30, "bee": 20, "cat": 15}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make.class_folders(tmp_path_factory.mktemp("files"), CLASSES, size=(30, 20))
    make.class_folders(folder / "cat", {"kittens": 5}, suffix="png", size=(40, 40))
    (folder / "notes.txt").write_text("no image")
    (folder / "lonely.jpg").write_bytes(make.encoded(make.picture()))
    return folder


def means(dataset: tf.data.Dataset) -> list[float]:
    """A number for each image, in order."""
    return [float(value) for images, _ in dataset for value in tf.reduce_mean(tf.cast(images, tf.float32), (1, 2, 3))]


@pytest.mark.parametrize("cache", [None, "memory", "disk"])
def test_every_file_once_in_each_iteration_in_another_order(folder: Path, cache: str | None, tmp_path: Path) -> None:
    where = str(tmp_path / "cache") if cache == "disk" else cache
    dataset = reader.image_files_dataset(str(folder), batch_size=32, image_size=16, cache=where)
    assert dataset.class_names == ["ant", "bee", "cat"] and len(dataset) == 3
    first, second = means(dataset), means(dataset)
    assert len(first) == 70 and sorted(first) == sorted(second) and first != second
    labels = np.concatenate([labels.numpy() for _, labels in dataset])
    assert Counter(labels.tolist()) == {0: 30, 1: 20, 2: 20}
    assert {images.shape[1:] for images, _ in dataset} == {(16, 16, 3)}
    assert bool(list(tmp_path.glob("cache/images-*.index"))) == (cache == "disk")


def test_pixels_and_labels_are_those_of_the_file(tmp_path: Path) -> None:
    """At the stored size exactly Pillow's; one of another size becomes its middle, scaled."""
    pictures = [make.picture(24, 16, seed) for seed in range(6)]
    for number, picture in enumerate(pictures):
        path = tmp_path / f"class {number}" / ("a.PNG" if number % 2 else "a#%20.jpeg")
        path.parent.mkdir()
        path.write_bytes(
            make.encoded(picture, "PNG") if number % 2 else make.encoded(picture, subsampling=0, quality=100)
        )
    (images, labels), *rest = reader.image_files_dataset(tmp_path, image_size=(16, 24))
    assert not rest and images.shape == (6, 16, 24, 3) and images.dtype == tf.uint8 and labels.dtype == tf.int64
    for image, label in zip(images.numpy(), labels.numpy(), strict=True):
        difference = np.abs(image.astype(int) - np.asarray(pictures[label]))
        assert difference.max() <= (0 if label % 2 else 4)
    (images, labels), *_ = reader.image_files_dataset(tmp_path, image_size=8)
    for image, label in zip(images.numpy(), labels.numpy(), strict=True):
        middle = np.asarray(pictures[label].resize((8, 8), Image.Resampling.BILINEAR, (4, 0, 20, 16)))
        assert np.abs(image.astype(int) - middle).max() <= 4


def test_a_disk_cache_is_read_by_the_next_process_but_not_for_other_files(folder: Path, tmp_path: Path) -> None:
    where = str(tmp_path / "cache")
    images = make.class_folders(tmp_path / "images", {"ant": 4})
    first = means(reader.image_files_dataset(str(images), image_size=16, cache=where))
    for path in images.rglob("*.jpg"):
        path.write_bytes(b"\0" * path.stat().st_size)
    assert sorted(means(reader.image_files_dataset(str(images), image_size=16, cache=where))) == sorted(first)
    (images / "ant" / "0003.jpg").write_bytes(make.encoded(make.picture(seed=9)))
    with pytest.raises(tf.errors.OpError, match=r"/images/ant/000[012]\.jpg: the image doesn't decode \("):
        means(reader.image_files_dataset(images, image_size=16, cache=tmp_path / "cache"))


def test_files_in_a_bucket_are_one_request_each(folder: Path, gcs: servers.Gcs) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "photos", folder)
    dataset = reader.image_files_dataset(f"gs://{bucket}/photos", image_size=16)
    before = len(gcs.requests())
    assert sorted(means(dataset)) == sorted(means(reader.image_files_dataset(str(folder), image_size=16)))
    assert len([one for one in gcs.requests()[before:] if one.object_read]) == 70
    with pytest.raises(UsageError, match=f"^gs://{bucket}/nothing: no such folder$"):
        reader.image_files_dataset(f"gs://{bucket}/nothing")
    with pytest.raises(StorageError, match=r"^gs://no-such-bucket: there is no such bucket"):
        reader.image_files_dataset("gs://no-such-bucket/photos")


def test_what_cannot_be_used_says_why(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for root, message in (
        (tmp_path, "no image in class folders there; images end in .jpg, .jpeg, .jpe, .jfif, .png"),
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path / "notes.txt", "no such folder"),
    ):
        with pytest.raises(UsageError, match=f"^{root}: {message}$"):
            reader.image_files_dataset(root)
    for name, value, message in (
        ("image_size", 0, r"image_size must be a side or \(height, width\) in pixels, got 0"),
        ("image_size", None, r"image_size must be a side or \(height, width\) in pixels, got None"),
        ("batch_size", 0, "batch_size must be an integer from 1, got 0"),
        ("batch_size", 1.5, r"batch_size must be an integer from 1, got 1\.5"),
        ("cache", "", "cache='': give a local folder, 'memory' or None"),
        ("cache", "gs://bucket/x", "cache='gs://bucket/x': give a local folder, 'memory' or None"),
    ):
        with pytest.raises(UsageError, match=f"^{message}$"):
            reader.image_files_dataset(folder, **{name: value})  # type: ignore[arg-type]
