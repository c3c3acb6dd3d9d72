"""`record_dataset`: anybody's TFRecord files, plain and GZIP, local and remote."""

from __future__ import annotations

import gzip
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf

import reader
from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, UsageError
from reader.tfrecord_files import FileScan
from tests import make, servers
from tests.reading import foreign
from tests.reading.foreign import write_examples


def example(**features: Any) -> bytes:
    return bytes(foreign.example(**features).SerializeToString())


def photo(number: int) -> bytes:
    """`score` is absent in every third record, `tags` has 0 to 2 values."""
    features: dict[str, Any] = {"image": random.Random(number).randbytes(500), "label": number}
    features |= {"box": [0.5, 1.5, 2.5, float(number)], "tags": [b"a", b"b"][: number % 3]}
    return example(**features, **({"score": float(number)} if number % 3 else {}))


def photos(path: Path, count: int = 150, compression: str = "", first: int = 0) -> Path:
    return write_examples(path, *map(photo, range(first, first + count)), compression=compression)


def labels(dataset: tf.data.Dataset) -> list[int]:
    return [int(record["label"]) for record in dataset.as_numpy_iterator()]


def specs(dataset: tf.data.Dataset) -> dict[str, tuple[list[int | None], str]]:
    return {key: (spec.shape.as_list(), spec.dtype.name) for key, spec in dataset.element_spec.items()}


PHOTO_SPECS = {
    "box": ([None], "float32"),
    "image": ([], "string"),
    "label": ([], "int64"),
    "score": ([None], "float32"),
    "tags": ([None], "string"),
}


def check_photos(dataset: tf.data.Dataset, count: int) -> None:
    """Every record of `photo(0)` to `photo(count - 1)` once, each with its own values."""
    records = sorted(dataset.as_numpy_iterator(), key=lambda record: int(record["label"]))
    assert [record["label"] for record in records] == list(range(count))
    for number, record in enumerate(records):
        assert record["box"].tolist() == [0.5, 1.5, 2.5, number]
        assert record["score"].tolist() == ([number] if number % 3 else [])
        assert record["tags"].tolist() == [b"a", b"b"][: number % 3]
        assert record["image"] == random.Random(number).randbytes(500)


@pytest.mark.parametrize("compression", [pytest.param("", marks=pytest.mark.soak), "GZIP"])
def test_every_record_of_every_file_once_with_all_of_its_features(tmp_path: Path, compression: str) -> None:
    for shard in range(11):  # more than are read at once
        photos(tmp_path / f"part-{shard:02d}.tfrec", 70, compression, 70 * shard)
    dataset = reader.record_dataset(str(tmp_path / "*.tfrec"))
    assert specs(dataset) == PHOTO_SPECS
    for _ in range(2):
        check_photos(dataset, 770)
    order = labels(dataset)
    for shard in range(11):
        assert [label for label in order if label // 70 == shard] == list(range(70 * shard, 70 * shard + 70))
    one = reader.record_dataset([tmp_path / "part-01.tfrec"], keys=["label"])
    assert labels(one) == list(range(70, 140)) and specs(one) == {"label": ([], "int64")}


def test_plain_and_packed_files_in_one_pattern(tmp_path: Path) -> None:
    for place, compression in enumerate(("", "GZIP", "")):
        photos(tmp_path / f"{place}.tfrec", 70, compression, 70 * place)
    packed = [gzip.compress(photos(tmp_path / "tmp", 35, "", first).read_bytes()) for first in (210, 245)]
    (tmp_path / "3.tfrec").write_bytes(b"".join(packed))  # of two members
    (tmp_path / "4.tfrec").touch()
    check_photos(reader.record_dataset(f"{tmp_path}/*.tfrec"), 280)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_mapping_is_parsed_as_by_parse_single_example(tmp_path: Path, on_error: Any) -> None:
    path = photos(tmp_path / "a", 100)
    keys = {
        "label": tf.io.FixedLenFeature([], tf.int64),
        "box": tf.io.FixedLenFeature([2, 2], tf.float32),
        "score": tf.io.FixedLenFeature([], tf.float32, -1.0),
        "image": tf.io.VarLenFeature(tf.string),
    }
    for tags in (tf.io.RaggedFeature(tf.string), tf.io.FixedLenSequenceFeature([], tf.string, allow_missing=True)):
        dataset = reader.record_dataset(path, keys={**keys, "tags": tags}, on_error=on_error)
        for record, parsed in zip(tf.data.TFRecordDataset(str(path)), dataset, strict=True):
            wanted = tf.io.parse_single_example(record, {**keys, "tags": tags})
            for key in ("label", "box", "score", "tags"):
                np.testing.assert_array_equal(parsed[key], wanted[key])
            assert parsed["image"].values[0] == wanted["image"].values[0]


def test_a_published_dataset_is_its_shards(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / schema.MANIFEST_FILE).write_text("{}")
    for index in range(2):
        photos(tmp_path / schema.ShardName("photos", "train", index, 2).file, 50, "", 50 * index)
    for pattern in (tmp_path, f"{tmp_path}/", f"{tmp_path}/photos-train.*"):
        check_photos(reader.record_dataset(pattern), 100)


def test_files_are_read_once_whatever_way_they_are_named(tmp_path: Path) -> None:
    for first, name in enumerate(("a[1].tfrec", "a1.tfrec", "b  #.tfrec")):
        photos(tmp_path / name, 3, "", 3 * first)
    pattern: list[str | os.PathLike[str]] = [tmp_path / "a1.tfrec", f"file://{tmp_path}/*.tfrec", f"{tmp_path}/b*"]
    check_photos(reader.record_dataset(pattern), 9)
    assert labels(reader.record_dataset(f"{tmp_path}/a[1].tfrec")) == [0, 1, 2]
    assert labels(reader.record_dataset(f"{tmp_path}/a[0-9].tfrec")) == [3, 4, 5]


def test_features_are_inferred_from_several_files(tmp_path: Path) -> None:
    """Only the last of many files has a score."""
    for number in range(9):
        write_examples(tmp_path / f"part-{number}", *[example(label=number)] * 3)
    write_examples(tmp_path / "part-9", example(label=9, score=0.5))
    assert specs(reader.record_dataset(f"{tmp_path}/*")) == {"label": ([], "int64"), "score": ([None], "float32")}
    for number in (0, 3, 6, 9):
        (tmp_path / f"part-{number}").write_bytes(b"")
    assert sorted(labels(reader.record_dataset(f"{tmp_path}/*"))) == sorted([1, 2, 4, 5, 7, 8] * 3)
    write_examples(tmp_path / "part-7", b"\xff\xff")  # none of the few that are looked at before
    with pytest.raises(tf.errors.OpError, match=f"{tmp_path}/part-7: record 0 at byte 0: not a tf.train.Example"):
        list(reader.record_dataset(f"{tmp_path}/*"))


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    path = photos(tmp_path / "a", 3)
    one_type, two_types = tmp_path / "one", tmp_path / "two"
    write_examples(one_type, tf.train.Example())
    write_examples(two_types, example(label=1), example(label=b"cat"))
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("this is not a TFRecord file at all")
    write_examples(tmp_path / "other", b"\xff\xff")
    for pattern, options, kind, message in (
        (
            tmp_path / "none*",
            {},
            UsageError,
            r"no file matches .*none\*: .* holds a, empty, one, other, text and 1 more",
        ),
        ([], {}, UsageError, r"^pattern must name files, such as .*, got \[\]"),
        (path, {"on_error": "ignore"}, UsageError, "on_error must be raise or skip, got 'ignore'"),
        (path, {"keys": "image"}, UsageError, r"^keys must be a list such as \['image'\], .*, got 'image'$"),
        (path, {"keys": []}, UsageError, r"^keys must be a list such as .*, got \[\]$"),
        (
            path,
            {"keys": ["image", "x", "y"]},
            UsageError,
            "no feature x, y in .*a: it has box, image, label, score, tags",
        ),
        (one_type, {}, ImageShardsError, "one: record 0 and others: Examples without a value"),
        (two_types, {}, ImageShardsError, "two: record 1: feature 'label' is string, in records before it int64"),
        (tmp_path / "empty", {}, ImageShardsError, "empty: no record in 1 file"),
        (tmp_path / "text", {}, CorruptRecordError, "text: record 0 at byte 0: the CRC of the length is wrong"),
        (tmp_path / "other", {}, CorruptRecordError, r"other: record 0 at byte 0: not a tf\.train\.Example"),
    ):
        with pytest.raises(kind, match=message):
            reader.record_dataset(pattern, **options)


def test_a_record_that_lacks_a_feature_is_named_or_skipped(tmp_path: Path) -> None:
    """All of the first 100 records have a score; one later has none, in one the label is a text."""
    records = [example(label=number, score=number / 8) for number in range(120)]
    records += [example(label=120), example(label=121, score=0.5)]
    path = write_examples(tmp_path / "a", *records)
    with pytest.raises(tf.errors.OpError, match=r"/a: record 120, Feature: score .* is required"):
        list(reader.record_dataset(path))
    assert labels(reader.record_dataset(path, on_error="skip")) == [*range(120), 121]
    optional = {"label": tf.io.FixedLenFeature([], tf.int64), "score": tf.io.RaggedFeature(tf.float32)}
    assert [len(record["score"]) for record in reader.record_dataset(path, keys=optional)][119:] == [1, 0, 1]
    write_examples(path, *records, example(label=b"cat", score=0.5))
    with pytest.raises(tf.errors.OpError, match=r"/a: record 122, Key: label.* Data types don't match"):
        list(reader.record_dataset(path, keys=["label"]))
    assert labels(reader.record_dataset(path, keys=["label"], on_error="skip")) == list(range(122))


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


DAMAGE: dict[str, tuple[Callable[[Path, int], None], int, str]] = {
    "image bytes": (make.flip_byte, 20, "the CRC of the data is wrong"),
    "length": (make.flip_byte, 0, "the CRC of the length is wrong"),
    "end of file": (truncate, 20, "the file ends inside this record"),
}


def numbered(path: Path, count: int, compression: str = "") -> list[int]:
    """Writes records of a label only; returns the offset of each."""
    records = [example(label=number, pad=b"x" * 30) for number in range(count)]
    write_examples(path, *records, compression=compression)
    return [0, *np.cumsum([len(record) + schema.FRAME_BYTES for record in records]).tolist()]


@pytest.mark.parametrize("corrupt", [127, 128])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_corrupt_record_is_raised_behind_all_records_of_its_file_before_it(
    tmp_path: Path, kind: str, corrupt: int
) -> None:
    damage, inside, reason = DAMAGE[kind]
    offset = numbered(tmp_path / "a", 200)[corrupt]
    damage(tmp_path / "a", offset + inside)
    dataset = reader.record_dataset(tmp_path / "a")
    for _ in range(2):
        records = dataset.as_numpy_iterator()
        assert [next(records)["label"] for _ in range(corrupt)] == list(range(corrupt))
        with pytest.raises(tf.errors.OpError, match=f"/a: record {corrupt} at byte {offset}: {reason}"):
            next(records)


@pytest.mark.parametrize("damage", [make.flip_byte, truncate])
def test_a_damaged_gzip_file_is_named(tmp_path: Path, damage: Callable[[Path, int], None]) -> None:
    path = photos(tmp_path / "a", 500, "GZIP")
    dataset = reader.record_dataset(path)
    damage(path, path.stat().st_size // 2)
    with pytest.raises(tf.errors.OpError, match=r"/a: record \d+ at byte \d+: "):
        list(dataset)


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_a_scan_yields_all_before_the_end_of_a_truncated_file_and_its_checksum(
    tmp_path: Path, compression: str
) -> None:
    path = photos(tmp_path / "a", 500, compression)
    truncate(path, path.stat().st_size - 20)
    scan = FileScan(str(path))
    *valid, last = scan
    assert len(valid) > 450 and all(isinstance(frame.record, bytes) for frame in valid)
    assert isinstance(last.record, CorruptRecordError)
    assert (last.number, last.offset) == (len(valid), sum(len(frame.record) + schema.FRAME_BYTES for frame in valid))  # type: ignore[arg-type]
    assert scan.crc32c == google_crc32c.value(path.read_bytes())


def test_what_is_corrupt_is_skipped_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A record's data costs the record, a length what follows it in the file; other files stay complete."""
    offsets = numbered(tmp_path / "a", 200)
    make.flip_byte(tmp_path / "a", offsets[3] + 20)
    make.flip_byte(tmp_path / "a", offsets[150] + 1)
    photos(tmp_path / "b", 100, "GZIP", 1000)
    write_examples(tmp_path / "c", b"\xff\xff", example(label=2000))
    dataset = reader.record_dataset(f"{tmp_path}/?", keys=["label"], on_error="skip")
    caplog.clear()
    assert sorted(labels(dataset)) == [*range(3), *range(4, 150), *range(1000, 1100), 2000]
    assert sorted(caplog.messages) == [
        f"skipped: {tmp_path}/a: record 150 at byte {offsets[150]}: the CRC of the length is wrong, so the rest of the "
        "file is lost",
        f"skipped: {tmp_path}/a: record 3 at byte {offsets[3]}: the CRC of the data is wrong",
        f"skipped: {tmp_path}/c: record 0 at byte 0: not a tf.train.Example",
    ]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_file_that_vanished_ends_the_iteration(tmp_path: Path, on_error: Any) -> None:
    for name in ("a", "b"):
        photos(tmp_path / name)
    dataset = reader.record_dataset(f"{tmp_path}/?", on_error=on_error)
    (tmp_path / "b").unlink()
    with pytest.raises(tf.errors.OpError, match=f"{tmp_path}/b.* missing"):
        list(dataset)


def test_files_in_a_bucket(tmp_path: Path, gcs: servers.Gcs) -> None:
    bucket = gcs.new_bucket()
    for place, compression in enumerate(("", "GZIP")):
        photos(tmp_path / f"{place}.tfrec", 70, compression, 70 * place)
    gcs.put_folder(bucket, "a b", tmp_path)
    dataset = reader.record_dataset(f"gs://{bucket}/a b/*.tfrec")
    assert specs(dataset) == PHOTO_SPECS
    check_photos(dataset, 140)
    make.flip_byte(tmp_path / "0.tfrec", 30)
    gcs.put(bucket, "a b/0.tfrec", (tmp_path / "0.tfrec").read_bytes())
    with pytest.raises(tf.errors.OpError, match=f"gs://{bucket}/a b/0.tfrec: record 0 at byte 0: the CRC of the data"):
        list(dataset)
    with pytest.raises(UsageError, match=rf"no file matches gs://{bucket}/nothing/\*"):
        reader.record_dataset(f"gs://{bucket}/nothing/*")
