"""`on_error`: damage is named, or costs one record; nothing ends early in silence."""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import reader
from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, StorageError, UsageError
from beam_pipeline.examples import image_example, int64_feature
from reader.blocks import StepBlocks
from reader.storage import LocalStorage
from reader.stream import RecordStream, open_source
from tests.make import ROOT
from tests.reading.shards import CLASSES, make_dataset, make_record, train_stream

RECORDS = 256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(make_dataset(tmp_path / "1.0.0", {"train": [100, 156]}))


def offsets(folder: Path, shard: int) -> list[int]:
    index = folder / f"index/photos-train.tfrecord-0000{shard}-of-00002.idx"
    return [int(line.split()[0]) for line in index.read_text().splitlines()]


def shard_file(folder: Path, shard: int) -> Path:
    return folder / f"photos-train.tfrecord-0000{shard}-of-00002"


def flip(folder: Path, number: int, byte: int = 40) -> tuple[str, int, int]:
    """Flip a bit of a record of the split; returns file, number in the file and offset."""
    shard, within = (0, number) if number < 100 else (1, number - 100)
    path, offset = shard_file(folder, shard), offsets(folder, shard)[within]
    data = bytearray(path.read_bytes())
    data[offset + byte] ^= 1
    path.write_bytes(data)
    return str(path), within, offset


def spoil_image(folder: Path, number: int) -> None:
    """Make a record's image undecodable, its size, CRCs and everything else as they were."""
    path, offset = shard_file(folder, 0), offsets(folder, 0)[number]
    data = path.read_bytes()
    size = int.from_bytes(data[offset : offset + 8], "little")
    record = data[offset + 12 : offset + 12 + size]
    spoiled = record.replace(b"\xff\xd8\xff", b"\x00\x00\x00")
    assert spoiled != record
    path.write_bytes(data[:offset] + schema.frame(spoiled) + data[offset + size + 16 :])


def names(dataset: Any) -> list[int]:
    """Record numbers from file names."""
    return [int(name[-10:-4]) for batch in dataset for name in batch[0]["filename"].numpy()]


def train(folder: Path, on_error: str, batch: int = 32, **more: Any) -> Any:
    info = reader.load_info(str(folder))
    return reader.train_dataset(
        info, "train", global_batch_size=batch, features=["filename"], on_error=on_error, **more
    )


@pytest.mark.parametrize("number", [0, 99, 100, 150, 255])
def test_a_flip_is_raised_in_its_place_or_costs_one_record(
    folder: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = names(train(folder, "raise"))
    file, record, offset = flip(folder, number, byte=3 if number == 150 else 40)
    place = whole.index(number)
    handed_out = []
    with pytest.raises(tf.errors.OpError, match=rf"{file}: record {record} at byte {offset}: the CRC"):
        for batch in train(folder, "raise"):
            handed_out += names([batch])
    assert handed_out == whole[: place // 32 * 32]  # every batch before the damaged one
    dataset = train(folder, "skip")
    with caplog.at_level(logging.WARNING, "reader"):
        found = names(dataset)
    assert len(found) == len(whole) == RECORDS
    assert [name for i, name in enumerate(found) if i != place] == [name for i, name in enumerate(whole) if i != place]
    assert number not in found
    assert reader.skipped(dataset) == 1
    assert f"1 damaged records skipped in this epoch, 1 so far: {file}: record {record} at byte {offset}" in caplog.text
    names(dataset)  # another epoch: the same record, counted once
    assert reader.skipped(dataset.map(lambda *batch: batch)) == 1


def test_what_takes_a_place_depends_on_no_batch_host_or_resume(folder: Path) -> None:
    for number in (3, 70, 201):
        flip(folder, number)
    info = reader.load_info(str(folder))
    position = info.position("train", global_batch_size=32)
    whole = names(train(folder, "skip"))
    resumed = train(folder, "skip", position=reader.Position.from_json(position.after(5).to_json()))
    assert names(resumed)[: RECORDS - 5 * 32] == whole[5 * 32 :]
    hosts = Counter(name for host in range(2) for name in names(train(folder, "skip", 64, host=(host, 2))))
    assert hosts == Counter(whole)
    stream = train_stream(info, "train", position, 0, on_error="skip")
    records = [record for _ in range(8) for record in stream.take(32).records]
    assert [int(record.split(b".jpg")[0][-6:]) for record in records] == whole


@pytest.mark.parametrize("batch", [1, 32])
def test_an_image_that_does_not_decode_is_named_or_skipped(folder: Path, batch: int) -> None:
    for number in (7, 60):
        spoil_image(folder, number)
    whole = [name for name in names(train_dataset_of_records(folder)) if name not in (7, 60)]
    offset = offsets(folder, 0)
    where = "|".join(rf"record {number} at byte {offset[number]}" for number in (7, 60))
    with pytest.raises(tf.errors.OpError, match=rf"00000-of-00002: ({where}): the image doesn't decode \("):
        list(train(folder, "raise", batch))
    dataset = train(folder, "skip", batch)
    for _ in range(2):
        found = names(dataset)
        assert len(found) == RECORDS
        assert set(found) == set(whole)
        assert reader.skipped(dataset) == 2


def train_dataset_of_records(folder: Path) -> Any:
    """All names in file order, without decoding."""
    files = [str(shard_file(folder, shard)) for shard in (0, 1)]
    return [({"filename": record["filename"][None]}, 0) for record in reader.record_dataset(files)]


def test_a_record_that_is_no_example_is_named_or_skipped(tmp_path: Path) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [60, 60]}))
    path, offset = shard_file(folder, 0), offsets(folder, 0)[5]
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[offset : offset + 8], "little")
    lacking = image_example(image=b"x" * (size - 60), size=(1, 1), class_id=0, label=CLASSES[0], path="a/000005.jpg")
    assert len(lacking) != len(make_record(5, (16, 24)))
    nonsense = schema.frame(b"\xff" * size)
    data[offset : offset + len(nonsense)] = nonsense
    path.write_bytes(data)
    with pytest.raises(tf.errors.OpError, match=rf"record 5 at byte {offset}: it isn't an Example"):
        list(train(folder, "raise", 8))
    dataset = train(folder, "skip", 8)
    assert set(names(dataset)) == set(range(120)) - {5}
    assert reader.skipped(dataset) == 1


@pytest.mark.parametrize("cut", ["inside a record", "between records", "missing"])
def test_short_and_missing_files_are_found_at_open_and_lose_only_what_is_gone(
    folder: Path, cut: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, places = shard_file(folder, 1), offsets(folder, 1)
    size = path.stat().st_size
    if cut == "missing":
        path.unlink()
        lost, wrong = 156, "is missing"
    else:
        end = places[100] + (9 if cut == "inside a record" else 0)
        path.write_bytes(path.read_bytes()[:end])
        lost, wrong = 56, f"has {end} bytes"
    expected = f"{path} {wrong}, the manifest says {size}"
    for build in (reader.train_dataset, reader.eval_dataset):
        with pytest.raises(ImageShardsError, match=f"^{expected}: run the job again with --repair"):
            build(reader.load_info(str(folder)), "train", global_batch_size=32)
    with caplog.at_level(logging.WARNING, "reader"):
        dataset = train(folder, "skip")
        found = names(dataset)
    assert f"{expected}: what is lost of it is skipped" in caplog.text
    assert len(found) == RECORDS
    assert set(found) == set(range(RECORDS - lost))
    assert Counter(found).most_common(1)[0][1] < 10  # their places are dealt to all the others
    assert reader.skipped(dataset) == lost
    assert f"; and {lost - 10} more" in caplog.text
    info = reader.load_info(str(folder))
    evals = reader.eval_dataset(info, "train", global_batch_size=32, features=["filename"], on_error="skip")
    kept = [
        int(name[-10:-4])
        for inputs, _, weights in evals
        for name, weight in zip(inputs["filename"].numpy(), weights.numpy(), strict=True)
        if weight
    ]
    assert kept == list(range(RECORDS - lost))
    assert reader.skipped(evals) == lost


def test_evaluation_gives_a_skipped_record_weight_0_in_its_place(folder: Path) -> None:
    flip(folder, 10)
    spoil_image(folder, 20)
    evals = reader.eval_dataset(reader.load_info(str(folder)), "train", global_batch_size=60, on_error="skip")
    weights = np.concatenate([batch[2].numpy() for batch in evals])
    assert np.flatnonzero(weights == 0).tolist() == [10, 20, *range(RECORDS, 300)]
    assert reader.skipped(evals) == 2


def test_hosts_that_skip_evaluate_exactly_in_keras(folder: Path) -> None:
    import keras

    for number in (0, 3, 7, 130):
        flip(folder, number)
    spoil_image(folder, 20)
    skipped = {0, 3, 7, 20, 130}

    class SaysClass0(keras.layers.Layer):
        def call(self, images: Any) -> Any:
            return keras.ops.one_hot(keras.ops.zeros_like(images[:, 0, 0, 0], dtype="int32"), 3)

    model = keras.Sequential([keras.Input((16, 24, 3), dtype="uint8"), SaysClass0()])
    model.compile(loss="sparse_categorical_crossentropy", weighted_metrics=["sparse_categorical_accuracy"])
    right = total = 0.0
    for host in range(3):
        evals = reader.eval_dataset(
            reader.load_info(str(folder)), "train", global_batch_size=30, host=(host, 3), on_error="skip"
        )
        weight = sum(float(weights.numpy().sum()) for _, _, weights in evals)
        result = model.evaluate(evals, verbose=0, return_dict=True)
        right, total = right + weight * result["sparse_categorical_accuracy"], total + weight
    kept = [number for number in range(RECORDS) if number not in skipped]
    assert total == len(kept)
    assert right == pytest.approx(sum(number % 3 == 0 for number in kept))


def test_a_file_that_goes_while_it_is_read_is_named(folder: Path) -> None:
    dataset = train(folder, "raise")
    shard_file(folder, 0).unlink()
    with pytest.raises(tf.errors.OpError, match=r"00000-of-00002: record \d+ at byte \d+: the file is missing"):
        list(dataset)


def test_a_storage_that_fails_is_never_skipped_and_may_recover(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = train(folder, "skip")
    whole = names(train(folder, "raise"))

    def fail(*_: Any) -> bytes:
        raise StorageError("the bucket is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "read", fail)
        with pytest.raises(tf.errors.OpError, match="the bucket is on fire"):
            list(dataset)
    assert names(dataset) == whole
    assert reader.skipped(dataset) == 0


def test_a_storage_that_fails_in_the_first_block_is_asked_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try may last ten minutes: the iteration's other blocks don't ask again."""
    dataset = reader.train_dataset(reader.load_info(str(folder)), "train", global_batch_size=4)
    asked = []

    def fail(*arguments: Any) -> bytes:
        asked.append(arguments)
        raise StorageError("the bucket is on fire")

    monkeypatch.setattr("reader.sources._BLOCK_RECORDS", 4)
    many = reader.train_dataset(reader.load_info(str(folder)), "train", global_batch_size=4)
    monkeypatch.setattr(LocalStorage, "read", fail)
    for one in (dataset, many):
        asked.clear()
        with pytest.raises(tf.errors.OpError, match="the bucket is on fire"):
            list(one)
        assert len(asked) == 1


def test_a_damaged_record_is_named_though_storage_fails_behind_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that dies gives both: the block behind was asked for before the first batch was decoded."""
    info = reader.load_info(str(folder))
    source, position = open_source(info, "train"), info.position("train", global_batch_size=4, window_runs=1)
    blocks = StepBlocks(lambda step: RecordStream.train(source, position.after(step), 0), 4, 64, True, None)
    right: list[tuple[Any, ...]] = []

    def spoil(_: LocalStorage, *asked: Any) -> bytes:
        right.append(asked)
        if asked != right[0]:
            raise StorageError("the disk is gone")
        return bytes(asked[2] - asked[1])

    monkeypatch.setattr(LocalStorage, "read", spoil)
    assert blocks.take(-1, 0, 1, 1)[:2] == (0, 1)
    assert blocks.take(0, 1, 63, 1)[:2] == (1, 64)
    with pytest.raises(CorruptRecordError, match=": record"):
        blocks.again(0, lambda record: None)
    with pytest.raises(StorageError, match="the disk is gone"):
        blocks.again(1, lambda record: None)


@pytest.mark.parametrize("block_records", [4, 64])
def test_a_block_is_at_hand_when_a_batch_of_it_does_not_decode(
    folder: Path, block_records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_image(folder, 10)
    monkeypatch.setattr("reader.sources._BLOCK_RECORDS", block_records)
    read, again = StepBlocks._read_batch, []
    monkeypatch.setattr(StepBlocks, "_read_batch", lambda self, step: again.append(step) or read(self, step))
    dataset = train(folder, "skip", 4)
    assert len(names(dataset)) == RECORDS
    assert (reader.skipped(dataset), again) == (1, [])


def test_blocks_that_are_kept_are_those_of_one_dataset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow never lets go of a dataset: one for each evaluation must not keep its own."""
    monkeypatch.setattr("reader.sources.cpu_count", lambda: 2)  # more decode more batches at once, and keep more
    for _ in range(3):
        assert len(names(train(folder, "skip"))) == RECORDS
        assert len({serial for serial, _, _ in StepBlocks._kept}) <= 2
    assert 0 < len(StepBlocks._kept) <= 5


def test_a_missing_shard_costs_no_more_than_its_own_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [640] * 4}, size=(4, 4)))
    (missing,) = folder.glob("*-00002-of-*")
    missing.unlink()
    info = reader.load_info(str(folder))
    read, fetched = LocalStorage.read, []

    def counted(self: LocalStorage, path: str, *bounds: Any) -> bytes:
        data = read(self, path, *bounds)
        fetched.append(len(data))
        return data

    stream = train_stream(info, "train", info.position("train", global_batch_size=1), 0, on_error="skip")
    monkeypatch.setattr(LocalStorage, "read", counted)
    for _ in range(5):  # as tf.data asks for blocks
        stream.take(512)
    # Every run that is left, one for each that is missing, and the next epoch's first window.
    assert sum(fetched) < 1.5 * sum(shard.bytes for shard in info.splits["train"].shards)


def test_an_augments_own_error_is_not_the_images(folder: Path) -> None:
    def wrong(images: Any, seeds: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(seeds), -(2**31) + 1)]):
            return tf.identity(images)

    dataset = train(folder, "skip", augment=wrong)
    with pytest.raises(tf.errors.OpError, match="Condition x < y did not hold"):
        list(dataset)
    assert reader.skipped(dataset) == 0


def test_a_list_that_does_not_parse_is_named_or_skipped(tmp_path: Path) -> None:
    columns = [("tags", "int64", True, int64_feature, lambda number: [number] * (number % 3))]
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [60]}, columns=columns))
    (path,) = folder.glob("*.tfrecord-*")
    lines = [line.split() for line in next(folder.glob("index/*.idx")).read_text().splitlines()]
    offset, size = (int(number) for number in lines[5])
    data = path.read_bytes()
    record = data[offset + 12 : offset + size - 4]
    spoiled = record.replace(b"\x1a\x04\x0a\x02\x05\x05", b"\x12\x04\x0a\x02\x05\x05")  # another kind of list
    assert spoiled != record
    path.write_bytes(data[:offset] + schema.frame(spoiled) + data[offset + size :])

    def build(on_error: str) -> Any:
        info = reader.load_info(str(folder))
        names = ["filename", "tags"]
        return reader.train_dataset(info, "train", global_batch_size=12, features=names, on_error=on_error)

    with pytest.raises(tf.errors.OpError, match=rf"record 5 at byte {offset}: it isn't an Example with the dataset's"):
        list(build("raise"))
    dataset = build("skip")
    found = [
        (int(name[-10:-4]), tags.tolist())
        for inputs, _ in dataset
        for name, tags in zip(inputs["filename"].numpy(), inputs["tags"].numpy(), strict=True)
    ]
    assert len(found) == 60
    assert {number for number, _ in found} == set(range(60)) - {5}
    assert all(tags == [number] * (number % 3) for number, tags in found)
    assert reader.skipped(dataset) == 1


def test_nothing_right_is_an_error_not_a_loop(tmp_path: Path) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [20, 20]}))
    for shard in (0, 1):
        shard_file(folder, shard).write_bytes(b"")
    with pytest.raises(tf.errors.OpError, match="records drawn for a damaged one's place are damaged too"):
        list(train(folder, "skip", 8))


def test_a_stream_without_tensorflow_raises_what_is_damaged(folder: Path) -> None:
    file, record, offset = flip(folder, 30)
    info = reader.load_info(str(folder))
    stream = train_stream(info, "train", info.position("train", global_batch_size=1), 0)
    with pytest.raises(CorruptRecordError) as error:
        stream.take(RECORDS)
    assert (error.value.file, error.value.record, error.value.offset) == (file, record, offset)


def test_only_our_datasets_know_what_was_skipped(folder: Path) -> None:
    assert reader.skipped(train(folder, "raise").map(lambda *batch: batch)) == 0
    flip(folder, 3)
    both = [train(folder, "skip"), train(folder, "skip")]
    for one in both:
        list(one)
    assert reader.skipped(tf.data.Dataset.zip(tuple(both))) == 2
    with pytest.raises(UsageError, match=r"reader\.skipped\(RangeDataset\)|reader\.skipped\(_RangeDataset\)"):
        reader.skipped(tf.data.Dataset.range(3))
    with pytest.raises(UsageError, match="on_error='ignore': raise or skip"):
        train(folder, "ignore")


def test_the_reasons_are_those_that_are_documented(folder: Path) -> None:
    section = (ROOT / "docs" / "format.md").read_text().split("## What a reader says about damage")[1].split("\n## ")[0]
    documented = set(re.findall(r"^\| `([^`(…]+)", section, re.MULTILINE))
    flip(folder, 3)
    flip(folder, 4, byte=3)
    spoil_image(folder, 5)
    path, offset = shard_file(folder, 0), offsets(folder, 0)
    data = bytearray(path.read_bytes())
    size = offset[7] - offset[6] - schema.FRAME_BYTES
    data[offset[6] : offset[7]] = schema.frame(b"\xff" * size)
    size = offset[9] - offset[8] - schema.FRAME_BYTES
    other_class = make_record(8, (16, 24)).replace(b"\x0a\x01\x02", b"\x0a\x01\x09")
    assert other_class != make_record(8, (16, 24))
    data[offset[8] : offset[9]] = schema.frame(other_class)
    path.write_bytes(data)
    cut = shard_file(folder, 1)
    cut.write_bytes(cut.read_bytes()[: offsets(folder, 1)[140] + 20])
    info = reader.load_info(str(folder))
    evals = reader.eval_dataset(info, "train", global_batch_size=64, on_error="skip")
    list(evals)
    found = {plain(error.reason) for error in evals._imageshards_skips.records}
    cut.unlink()
    gone = reader.eval_dataset(info, "train", global_batch_size=64, on_error="skip")
    list(gone)
    found |= {plain(error.reason) for error in gone._imageshards_skips.records}
    assert found == {plain(reason) for reason in documented}


def plain(reason: str) -> str:
    """A reason without its numbers (N and M in the document) and what a library says."""
    return re.sub(r" \(.*|\b(\d+|N|M)\b", "", reason).strip()
