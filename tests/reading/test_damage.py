"""`on_error`: damage is named in its position, or costs one record whose row another takes; nothing ends in silence."""

from __future__ import annotations

import logging
import re
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reader
from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, StorageError
from beam_pipeline.schema.example import int64_feature
from beam_pipeline.storage.local import LocalStorage
from reader.skips import Skips
from tests.reading.shards import draw, make_dataset, make_record, numbers_in, offsets

RECORDS = 256
Change = Callable[[bytes], bytes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(make_dataset(tmp_path / "1.0.0", {"train": [100, 156]}))


def shard_file(folder: Path, shard: int) -> Path:
    return folder / f"photos-train.tfrecord-0000{shard}-of-00002"


class Place:
    """Where a record of the split is."""

    def __init__(self, folder: Path, number: int) -> None:
        shard, self.record = (0, number) if number < 100 else (1, number - 100)
        self.path = shard_file(folder, shard)
        begins = [*offsets(folder, self.path.name), self.path.stat().st_size]
        self.offset, self.end = begins[self.record : self.record + 2]

    def __str__(self) -> str:
        return f"{self.path}: record {self.record} at byte {self.offset}"

    def damage(self, change: Change) -> None:
        """Put other bytes, as many, into the frame's place."""
        data = self.path.read_bytes()
        frame = data[self.offset : self.end]
        assert len(change(frame)) == len(frame) and change(frame) != frame
        self.path.write_bytes(data[: self.offset] + change(frame) + data[self.end :])


def flip(byte: int) -> Change:
    def change(frame: bytes) -> bytes:
        at = byte % len(frame)
        return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]

    return change


def content(change: Change) -> Change:
    """Of the record; the CRCs are those of what it becomes."""
    return lambda frame: schema.frame(change(frame[12:-4]))


def other_image(change: Change) -> Change:
    def changed(record: bytes) -> bytes:
        begin = record.index(b"\xff\xd8\xff")
        image = record[begin : record.index(b"\xff\xd9", begin) + 2]
        return record.replace(image, change(image).ljust(len(image), b"\0"))

    return content(changed)


def other_class(record: bytes) -> bytes:
    return re.sub(rb"(\x05class\x12.\x1a.\x0a\x01).", b"\\g<1>\x09", record, flags=re.DOTALL)


DAMAGE: dict[str, tuple[Change, str]] = {
    "length": (flip(0), "the CRC of the length is wrong"),
    "high length": (flip(7), "the CRC of the length is wrong"),
    "CRC of the length": (flip(9), "the CRC of the length is wrong"),
    "data": (flip(40), "the CRC of the data is wrong"),
    "CRC of the data": (flip(-2), "the CRC of the data is wrong"),
    "image": (other_image(lambda image: image[3:]), r"the image doesn't decode \(UnidentifiedImageError\)"),
    "cut image": (other_image(lambda image: image[: len(image) // 2]), r"the image doesn't decode \(\w+\)"),
    "shape": (other_image(lambda image: draw(1, (8, 12))), "the image is 8x12, the manifest says 16x24"),
    "class": (content(other_class), "class 9: there are 3"),
    "feature": (
        content(lambda record: record.replace(b"\x05image\x12", b"\x05imago\x12")),
        r"it isn't an Example with the dataset's features \(no 'image' or no 'class'",
    ),
    "two records": (
        lambda frame: schema.frame(b"") + schema.frame(bytes(len(frame) - 2 * schema.FRAME_BYTES)),
        "2 records are where the index has one",
    ),
    "nonsense": (
        content(lambda record: b"\xff" * len(record)),
        r"it isn't an Example with the dataset's features \(",
    ),
}


def train(folder: Path, on_error: str = "skip", batch: int = 32, **more: Any) -> Any:
    options = {"global_batch_size": batch, "features": ["filename"], "on_error": on_error, **more}
    return reader.train_batches(str(folder), "train", **options)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_raised_in_its_position_or_costs_one_record(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    number, expected = 137, numbers_in(train(folder))
    damage, reason = DAMAGE[kind]
    place = Place(folder, number)
    place.damage(damage)
    at = expected.index(number)
    for batch in (1, 32, 256):
        found: list[int] = []
        with pytest.raises(CorruptRecordError, match=f"^{re.escape(str(place))}: {reason}") as error:
            for one in train(folder, "raise", batch):
                found += numbers_in([one])
        assert (error.value.file, error.value.record) == (str(place.path), place.record)
        assert error.value.offset == place.offset and "\n" not in str(error.value)
        assert found == expected[: at // batch * batch]  # every batch before it
    batches = train(folder)
    with caplog.at_level(logging.WARNING, "reader"):
        found = numbers_in(batches)
    assert number not in found and len(found) == RECORDS
    assert [one for i, one in enumerate(found) if i != at] == [one for i, one in enumerate(expected) if i != at]
    assert f"skipped 1 corrupt record, 1 so far: {place}: " in caplog.text
    numbers_in(batches)  # another epoch: the same record, counted once
    assert batches.skipped == 1
    evals = reader.eval_batches(str(folder), "train", global_batch_size=60, on_error="skip", features=["filename"])
    rows = [row for batch in evals for row in zip(numbers_in([batch]), batch[2], strict=True)]
    assert [row for row, (_, weight) in enumerate(rows) if not weight] == [number, *range(RECORDS, 300)]
    assert [name for name, weight in rows if weight] == [one for one in range(RECORDS) if one != number]
    with pytest.raises(CorruptRecordError, match=reason):
        list(reader.eval_batches(str(folder), "train", global_batch_size=60))


def test_the_first_of_several_is_raised_at_any_batch_size(folder: Path) -> None:
    expected = numbers_in(train(folder))
    for number in (3, 99, 100, 201, 255):
        Place(folder, number).damage(flip(40))
    first = min((3, 99, 100, 201, 255), key=expected.index)
    for batch in (1, 7, 32, 250, 1000):
        with pytest.raises(CorruptRecordError, match=re.escape(f"{Place(folder, first)}: ")):
            list(train(folder, "raise", batch))


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize(("number", "end_of_run"), [(0, 64), (99, 100), (110, 164), (163, 164), (255, 256)])
def test_a_corrupt_length_costs_one_record_or_without_a_text_index_the_rest_of_its_run(
    folder: Path, number: int, end_of_run: int, with_index: bool
) -> None:
    place = Place(folder, number)
    place.damage(flip(1))
    if not with_index:
        (folder / f"index/{place.path.name}.idx").unlink()
    batches = train(folder)
    lost = set(range(RECORDS)) - set(numbers_in(batches))
    assert lost == set(range(number, number + 1 if with_index else end_of_run)) and batches.skipped == len(lost)


def test_substitutes_depend_on_no_batch_host_thread_or_resume(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (3, 70, 201):
        Place(folder, number).damage(flip(40))
    augment: Any = {"augment": reader.augment.flip_crop}

    def rows(batches: Any) -> list[tuple[int, bytes]]:
        return [
            row for batch in batches for row in zip(numbers_in([batch]), map(bytes, batch[0]["image"]), strict=True)
        ]

    batches = train(folder, seed=4, **augment)
    expected = rows(batches)
    position = reader.Position.from_json(batches.position_at(5).to_json())
    assert rows(train(folder, position=position, **augment))[: RECORDS - 5 * 32] == expected[5 * 32 :]
    monkeypatch.setattr("reader.stream.cpu_count", lambda: 16)
    for hosts in (1, 2, 3, 4):
        some = (train(folder, batch=8 * hosts, host=(host, hosts), seed=4, **augment) for host in range(hosts))
        found = Counter(row for batches in some for row in rows(batches))
        assert found <= Counter(expected) and found.total() == RECORDS // (8 * hosts) * 8 * hosts


@pytest.mark.parametrize("how", ["inside a record", "between records", "missing", "replaced"])
def test_short_missing_and_replaced_files_are_found_at_open_and_lose_only_what_is_gone(
    folder: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, place = shard_file(folder, 1), Place(folder, 200)
    size, lost = path.stat().st_size, 156
    if how == "missing":
        path.unlink()
        wrong = "is missing"
    elif how == "replaced":
        other = make_record(0, (16, 24), split="validation")
        path.write_bytes(schema.frame(other) * 200)
        wrong = f"has {path.stat().st_size} bytes"
    else:
        end = place.offset + (9 if how == "inside a record" else 0)
        path.write_bytes(path.read_bytes()[:end])
        lost, wrong = 56, f"has {end} bytes"
    expected = f"{path} {wrong}, the manifest says {size}"
    for build in (reader.train_batches, reader.eval_batches):
        with pytest.raises(ImageShardsError, match=f"^{re.escape(expected)}: run the job again with --repair"):
            build(str(folder), "train", global_batch_size=32)
    with caplog.at_level(logging.WARNING, "reader"):
        batches = train(folder)
        found = numbers_in(batches)
    assert f"{expected}: the records that it lacks are skipped" in caplog.text
    assert f" and {lost - 10} more" in caplog.text
    assert len(found) == RECORDS and set(found) == set(range(RECORDS - lost)) and batches.skipped == lost
    assert Counter(found).most_common(1)[0][1] < 10  # all the others share their rows
    evals = reader.eval_batches(str(folder), "train", global_batch_size=32, features=["filename"], on_error="skip")
    kept = [number for batch in evals for number, weight in zip(numbers_in([batch]), batch[2], strict=True) if weight]
    assert kept == list(range(RECORDS - lost)) and evals.skipped == lost


def test_a_file_that_goes_while_it_is_read_is_named(folder: Path) -> None:
    batches = train(folder, "raise")
    shard_file(folder, 0).unlink()
    with pytest.raises(CorruptRecordError, match=r"00000-of-00002: record \d+ at byte \d+: the file is missing$"):
        list(batches)


@pytest.mark.parametrize("batch", [4, 32, 256])
def test_a_storage_that_fails_is_never_skipped_is_asked_little_and_may_recover(
    folder: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    batches, asked = train(folder, batch=batch, window_runs=1), []
    expected = numbers_in(train(folder, batch=batch, window_runs=1))

    def fail(*arguments: Any) -> bytes:
        asked.append(arguments)
        raise StorageError("the bucket is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "read_range", fail)
        with pytest.raises(StorageError, match=r"^the bucket is on fire$"):
            list(batches)
    assert len(asked) <= 3  # each try may last ten minutes
    assert numbers_in(batches) == expected and batches.skipped == 0


def test_a_missing_shard_costs_no_more_than_its_own_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [640] * 4}, size=(4, 4)))
    next(folder.glob("*-00002-of-*")).unlink()
    read, fetched = LocalStorage.read_range, []

    def counted(self: LocalStorage, *arguments: Any) -> Any:
        data = read(self, *arguments)
        fetched.append(len(data))
        return data

    batches = train(folder)
    monkeypatch.setattr(LocalStorage, "read_range", counted)
    assert len(numbers_in(batches)) == 2560 and batches.skipped == 640
    # Every run that is left, and one for each that is missing.
    assert sum(fetched) < 1.3 * sum(shard.bytes for shard in reader.load_info(folder).splits["train"].shards)


def test_a_list_of_another_type_is_named_or_skipped(tmp_path: Path) -> None:
    columns = [("tags", "int64", True, int64_feature, lambda number: [number] * (number % 3))]
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [60, 0]}, columns=columns))
    place = Place(folder, 5)
    other = content(lambda record: record.replace(b"\x1a\x04\x0a\x02\x05\x05", b"\x12\x04\x0a\x02\x05\x05"))
    place.damage(other)
    with pytest.raises(CorruptRecordError, match=f"{re.escape(str(place))}: it isn't an Example with the dataset's"):
        list(train(folder, "raise", 12, features=["tags"]))
    found = {}
    for batch in train(folder, batch=12, features=["filename", "tags"]):
        found.update(zip(numbers_in([batch]), batch[0]["tags"], strict=True))
    assert set(found) == set(range(60)) - {5}
    assert all(tags.tolist() == [number] * (number % 3) for number, tags in found.items())


def test_a_split_without_a_valid_record_is_an_error_not_a_loop(tmp_path: Path) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [20, 20]}))
    for shard in (0, 1):
        shard_file(folder, shard).write_bytes(b"")
    for batches in (train(folder, batch=8), reader.eval_batches(folder, "train", global_batch_size=8, on_error="skip")):
        with pytest.raises(ImageShardsError, match=r"records drawn as substitutes for a corrupt one are corrupt too"):
            list(batches)


def test_the_error_of_a_skipped_record_is_not_kept() -> None:
    """Its traceback would keep a batch and its records in memory as long as the dataset."""
    skips, error = Skips(), CorruptRecordError("shard", 3, 100, "the CRC of the data is wrong")
    kept = weakref.ref(error)
    skips.add(3, error)
    del error
    assert (skips.count, kept()) == (1, None)
