"""`record_dataset`: our files and anybody's, plain and GZIP."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import reader
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, UsageError
from reader.open_streams import OpenStreams
from reader.scanning import scan_file
from reader.storage import LocalStorage
from tests.reading import foreign
from tests.reading.foreign import KINDS
from tests.reading.shards import draw, make_dataset


def write(path: Path, count: int, compression: str = "") -> str:
    """A file as tutorials write it; `score` is absent in every third record, `tags` has 0 to 2 values."""
    with tf.io.TFRecordWriter(str(path), compression or None) as writer:
        for number in range(count):
            example = tf.train.Example()
            feature = example.features.feature
            feature["image/encoded"].bytes_list.value.append(draw(number, (8, 8)))
            feature["label"].int64_list.value.append(number)
            feature["box"].float_list.value.extend([0.5, 1.5, 2.5, number])
            feature["tags"].bytes_list.value.extend([b"a", b"b"][: number % 3])
            if number % 3:
                feature["score"].float_list.value.append(number)
            writer.write(example.SerializeToString())
    return str(path)


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_foreign_files_are_read_as_they_are(tmp_path: Path, compression: str) -> None:
    for shard in range(3):
        write(tmp_path / f"part-{shard}.tfrec", 150, compression)
    dataset = reader.record_dataset(str(tmp_path / "*.tfrec"))
    assert {key: (spec.shape.as_list(), spec.dtype.name) for key, spec in dataset.element_spec.items()} == {
        "box": ([None], "float32"),
        "image/encoded": ([], "string"),
        "label": ([], "int64"),
        "score": ([None], "float32"),
        "tags": ([None], "string"),
    }
    for _ in range(2):
        records = list(dataset.as_numpy_iterator())
        assert [record["label"] for record in records] == 3 * list(range(150))
    assert records[5]["box"].tolist() == [0.5, 1.5, 2.5, 5]
    assert [len(record["score"]) for record in records[:3]] == [0, 1, 1]
    assert [list(record["tags"]) for record in records[:3]] == [[], [b"a"], [b"a", b"b"]]
    assert records[7]["image/encoded"] == draw(7, (8, 8))
    only = reader.record_dataset([str(tmp_path / "part-1.tfrec")], keys=["label"])
    assert [record["label"] for record in only.as_numpy_iterator()] == list(range(150))


SCALAR, LIST = [], [None]
SPECS = {
    "tutorial": {
        "image": (SCALAR, "string"),
        "class": (SCALAR, "int64"),
        "label": (SCALAR, "string"),
        "size": (LIST, "int64"),
        "one_hot_class": (LIST, "float32"),
    },
    "keras": {"image": (SCALAR, "string"), "label": (SCALAR, "int64")},
    "tfds": {"image": (SCALAR, "string"), "label": (SCALAR, "int64"), "file_name": (SCALAR, "string")},
    "slim": {
        "image/encoded": (SCALAR, "string"),
        "image/class/label": (SCALAR, "int64"),
        "image/class/text": (SCALAR, "string"),
        "image/height": (SCALAR, "int64"),
        "image/object/bbox/xmin": (LIST, "float32"),
    },
}


@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kinds_of_files_that_are_around(tmp_path: Path, kind: str, compression: str) -> None:
    files = foreign.write(tmp_path / "files", kind, {"a": 5, "b": 2}, compression)
    dataset = reader.record_dataset(f"{files}/*")
    specs = {key: (spec.shape.as_list(), spec.dtype.name) for key, spec in dataset.element_spec.items()}
    assert specs == SPECS[kind]
    found = list(dataset.as_numpy_iterator())
    for number, record in enumerate(found):
        for key, feature in KINDS[kind](number).features.feature.items():
            values = getattr(feature, feature.WhichOneof("kind")).value
            assert np.atleast_1d(record[key]).tolist() == list(values)
    assert len(found) == 7


def test_labels_that_are_lists(tmp_path: Path) -> None:
    examples = [foreign.example(image=draw(number, (8, 8)), label=[number, 7][: 1 + number % 2]) for number in range(4)]
    dataset = reader.record_dataset(write_examples(tmp_path / "a", examples))
    assert [record["label"].tolist() for record in dataset.as_numpy_iterator()] == [[0], [1, 7], [2], [3, 7]]


def test_plain_and_packed_files_in_one_pattern(tmp_path: Path) -> None:
    for name, compression in (("a", ""), ("b", "GZIP"), ("c", "")):
        write(tmp_path / name, 70, compression)
    labels = [record["label"] for record in reader.record_dataset(f"{tmp_path}/?").as_numpy_iterator()]
    assert labels == 3 * list(range(70))


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_published_dataset_by_its_folder_or_a_pattern(tmp_path: Path, compression: str) -> None:
    folder = make_dataset(tmp_path / "1.0.0", {"train": [70, 30, 0]}, compression=compression, one_hot=True)
    for pattern in (folder, f"{folder}/photos-train.*"):
        records = list(reader.record_dataset(pattern).as_numpy_iterator())
        assert [record["filename"] for record in records] == [
            f"{['bird', 'cat', 'dog'][number % 3]}/{number:06d}.jpg".encode() for number in range(100)
        ]
        assert records[1]["size"].tolist() == [16, 24]
        assert records[1]["one_hot_class"].tolist() == [0, 1, 0]
        assert set(records[0]) == {"image", "class", "label", "size", "filename", "one_hot_class"}


def test_two_iterators_of_one_dataset(tmp_path: Path) -> None:
    dataset = reader.record_dataset(write(tmp_path / "a", 200), keys=["label"])
    pairs = [(one["label"], two["label"]) for one, two in zip(dataset, dataset.skip(1), strict=False)]
    assert pairs == [(number, number + 1) for number in range(199)]


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file matches .*none\*"):
        reader.record_dataset(str(tmp_path / "none*"))
    with pytest.raises(UsageError, match="on_error='ignore': raise or skip"):
        reader.record_dataset(str(tmp_path), on_error="ignore")  # type: ignore[arg-type]
    path = write(tmp_path / "a", 3)
    with pytest.raises(
        UsageError, match=r"no feature image, class in .*: it has box, image/encoded, label, score, tags"
    ):
        reader.record_dataset(path, keys=["image", "label", "class"])
    with pytest.raises(UsageError, match=r"^keys='image': give a list, such as \['image'\]$"):
        reader.record_dataset(path, keys="image")
    with pytest.raises(UsageError, match=r"^keys=\[\]: name a feature, or leave keys away"):
        reader.record_dataset(path, keys=[])
    with pytest.raises(UsageError, match=r"^no file is named by \[\]: give a pattern"):
        reader.record_dataset([])
    with pytest.raises(ImageShardsError, match="bare: the first records are Examples without a value"):
        reader.record_dataset(write_examples(tmp_path / "bare", [tf.train.Example()]))
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ImageShardsError, match="empty: no record in 1 files"):
        reader.record_dataset(str(tmp_path / "empty"))
    (tmp_path / "text").write_bytes(b"this is not a TFRecord file at all")
    with pytest.raises(CorruptRecordError, match="text: record 0 at byte 0"):
        reader.record_dataset(str(tmp_path / "text"))
    with tf.io.TFRecordWriter(str(tmp_path / "other")) as writer:
        writer.write(b"\xff\xff")
    with pytest.raises(ImageShardsError, match=r"other: record 0 at byte 0: not a tf\.train\.Example"):
        reader.record_dataset(str(tmp_path / "other"))


def write_examples(path: Path, examples: list[tf.train.Example | bytes]) -> str:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for example in examples:
            writer.write(example if isinstance(example, bytes) else example.SerializeToString())
    return str(path)


def labelled(label: int, score: float | None = None) -> tf.train.Example:
    example = tf.train.Example()
    example.features.feature["label"].int64_list.value.append(label)
    if score is not None:
        example.features.feature["score"].float_list.value.append(score)
    return example


def test_what_only_later_records_lack_or_have(tmp_path: Path) -> None:
    """All of the first 100 records have a score; the next one has none, and one is no Example at all."""
    whole = [labelled(number, number / 8) for number in range(120)]
    path = write_examples(tmp_path / "a", [*whole, labelled(120), b"\xff\xff", labelled(122, 0.5)])
    dataset = reader.record_dataset(path)
    assert dataset.element_spec["score"].shape == []
    with pytest.raises(
        tf.errors.OpError, match=r"a: record 120 at byte \d+: 'score' has 0 values, in the first records 1"
    ):
        list(dataset)
    skipping = reader.record_dataset(path, on_error="skip")
    assert [record["label"] for record in skipping.as_numpy_iterator()] == [*range(120), 122]
    assert reader.skipped(skipping) == 2
    optional = {"label": tf.io.FixedLenFeature([], tf.int64), "score": tf.io.RaggedFeature(tf.float32)}
    records = list(reader.record_dataset(path, keys=optional, on_error="skip").as_numpy_iterator())
    assert [len(record["score"]) for record in records[119:]] == [1, 0, 1]


def test_a_record_that_a_mapping_does_not_fit_is_named_and_skipped(tmp_path: Path) -> None:
    """In the middle of a block, twice; a text where a number is wanted in the last one."""
    text = foreign.example(label=b"cat", score=0.5)
    examples = [labelled(number, None if number in (3, 70) else number / 8) for number in range(80)]
    path = write_examples(tmp_path / "a", [*examples, text])
    keys = {"label": tf.io.FixedLenFeature([], tf.int64), "score": tf.io.FixedLenFeature([], tf.float32)}
    with pytest.raises(tf.errors.OpError, match=r"a: record 3 at byte \d+: it doesn't fit keys=.*: Feature: score"):
        list(reader.record_dataset(path, keys=keys))
    skipping = reader.record_dataset(path, keys=keys, on_error="skip")
    labels = [record["label"] for record in skipping.as_numpy_iterator()]
    assert labels == [number for number in range(80) if number not in (3, 70)]
    assert reader.skipped(skipping) == 3
    none = reader.record_dataset(path, keys={"nothing": tf.io.FixedLenFeature([], tf.int64)}, on_error="skip")
    assert (len(list(none)), reader.skipped(none)) == (0, 81)


def test_an_empty_list_of_another_type_is_named_and_skipped(tmp_path: Path) -> None:
    """As writers store that knew no type for a list without a value."""
    empty = labelled(1)
    empty.features.feature["score"].int64_list.SetInParent()
    path = write_examples(tmp_path / "a", [labelled(0, 0.5), empty, labelled(2)])
    with pytest.raises(
        tf.errors.OpError, match=r"a: record 1 at byte \d+: 'score' is an empty int64_list, .* a float_list; name other"
    ):
        list(reader.record_dataset(path))
    skipping = reader.record_dataset(path, on_error="skip")
    assert [record["label"] for record in skipping.as_numpy_iterator()] == [0, 2]
    assert reader.skipped(skipping) == 1
    assert len(list(reader.record_dataset(path, keys=["label"]))) == 3


def test_a_file_that_several_patterns_match_is_read_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, 3)
    pattern: list[str | Path] = [tmp_path / "b", f"{tmp_path}/*", f"{tmp_path}/a*"]
    dataset = reader.record_dataset(pattern, keys=["label"])
    assert [record["label"] for record in dataset.as_numpy_iterator()] == [0, 1, 2] * 2
    assert len(list(reader.record_dataset(tmp_path / "a"))) == 3


def test_a_file_whose_name_holds_brackets(tmp_path: Path) -> None:
    path = write(tmp_path / "a[1].tfrec", 3)
    write(tmp_path / "a1.tfrec", 5)
    assert len(list(reader.record_dataset(path))) == 3
    assert len(list(reader.record_dataset(str(tmp_path / "a[0-9].tfrec")))) == 5


def test_features_are_inferred_from_several_files(tmp_path: Path) -> None:
    """Only the last of many files has a score."""
    for number in range(9):
        write_examples(tmp_path / f"part-{number}", [labelled(number)] * 3)
    write_examples(tmp_path / "part-9", [labelled(9, 0.5)])
    spec = reader.record_dataset(str(tmp_path / "part-*")).element_spec
    assert (spec["label"].shape.rank, spec["score"].shape.rank) == (0, 1)
    for number in range(9):
        (tmp_path / f"part-{number}").write_bytes(b"")
    assert len(list(reader.record_dataset(str(tmp_path / "part-*")))) == 1


def test_one_feature_of_two_types_is_an_error(tmp_path: Path) -> None:
    text = tf.train.Example()
    text.features.feature["label"].bytes_list.value.append(b"cat")
    with pytest.raises(ImageShardsError, match="'label' is int64_list here and bytes_list there"):
        reader.record_dataset(write_examples(tmp_path / "a", [labelled(1), text]))


def test_damage_among_the_first_records_is_skipped_as_well(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a", 200))
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    write_examples(tmp_path / "b", [b"\xff\xff", labelled(200)])
    dataset = reader.record_dataset([str(path), str(tmp_path / "b")], keys=["label"], on_error="skip")
    assert [record["label"] for record in dataset.as_numpy_iterator()] == list(range(1, 201))
    assert reader.skipped(dataset) == 2
    assert len(list(dataset)) == 200
    assert reader.skipped(dataset) == 2


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_many_datasets_in_turns_read_their_files_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    """More than the streams that may wait: each is opened again where it was, not at its file's beginning."""
    path = write(tmp_path / "a", 200, compression)
    datasets = [reader.record_dataset(path, keys=["label"]) for _ in range(10)]
    reads = []
    read = LocalStorage.read

    def counted(self: LocalStorage, path: str, *bounds: int) -> bytes:
        reads.append(bounds)
        return read(self, path, *bounds)

    monkeypatch.setattr(LocalStorage, "read", counted)
    turns = tf.data.Dataset.choose_from_datasets(datasets, tf.data.Dataset.range(10).repeat(200))
    labels = [record["label"] for record in turns.as_numpy_iterator()]
    assert labels == [number for number in range(200) for _ in range(10)]
    assert len(reads) == 10
    monkeypatch.setattr("reader.open_streams._ABANDONED_STREAMS", -len(OpenStreams._served))  # none may wait
    found = [record["label"] for record in datasets[0].as_numpy_iterator()]
    assert found == list(range(200))


@pytest.mark.parametrize("wrong", [101, 127, 128, 199])
def test_damage_is_raised_behind_all_records_before_it(tmp_path: Path, wrong: int) -> None:
    write(tmp_path / "a", 200)
    path = tmp_path / "b"
    write(path, 200)
    frames = list(scan_file(LocalStorage(), str(path)))
    data = bytearray(path.read_bytes())
    data[frames[wrong].offset + 20] ^= 1
    path.write_bytes(data)
    dataset = reader.record_dataset([str(tmp_path / "a"), str(path)])
    for _ in range(2):
        records = dataset.as_numpy_iterator()
        assert [next(records)["label"] for _ in range(200 + wrong)] == [*range(200), *range(wrong)]
        with pytest.raises(tf.errors.OpError, match=rf"b: record {wrong} at byte \d+: the CRC of the data is wrong"):
            next(records)
