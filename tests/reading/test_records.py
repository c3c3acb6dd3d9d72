"""Runs: any records of a table in one read each; corrupt bytes are named, and never raise anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reader
from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, StorageError
from beam_pipeline.storage import LocalStorage
from reader.records import RunReader, RunTable, frame_bounds, frame_fault
from tests.reading.shards import make_dataset


def make_files(folder: Path, counts: list[int], has_index: bool = False) -> tuple[RunTable, list[bytes]]:
    """Shards of small records, their table, and all records in order."""
    records, rows, files, indexes = [], [], [], []
    for shard, count in enumerate(counts):
        mine = [f"shard {shard} record {number}".encode() * (1 + number % 3) for number in range(count)]
        framed = [schema.frame(record) for record in mine]
        files.append(str(folder / f"shard-{shard}"))
        indexes.append(str(folder / f"index-{shard}") if has_index else "")
        Path(files[-1]).write_bytes(b"".join(framed))
        offsets = np.cumsum([0, *map(len, framed)])
        if has_index:
            Path(indexes[-1]).write_text(
                "".join(f"{offset} {len(one)}\n" for offset, one in zip(offsets, framed, strict=False))
            )
        rows += schema.run_rows(shard, map(len, framed))
        records += mine
    return RunTable.select(files, np.array(rows, schema.RUN_DTYPE), 0, len(records), indexes), records


def read(table: RunTable, numbers: Any, **more: Any) -> list[bytes | CorruptRecordError]:
    """Records by number, each from its run; an error for one that is corrupt."""
    reading = RunReader(table, **more)
    found: list[bytes | CorruptRecordError] = []
    for run, index in zip(*table.runs_of(np.asarray(numbers)), strict=True):
        buffer = bytearray(int(table.bytes[run]) + 7)
        try:
            found.append(reading.read(int(run), memoryview(buffer)).record(int(index)))
        except CorruptRecordError as error:
            found.append(error)
    return found


@given(st.data())
def test_any_records_in_any_order(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.sampled_from([0, 1, 63, 64, 65, 200]), min_size=1, max_size=4).filter(sum))
    table, records = make_files(tmp_path_factory.mktemp("runs"), counts)
    assert table.total == len(records)
    numbers = data.draw(st.lists(st.integers(0, len(records) - 1), min_size=1, max_size=50))
    assert read(table, numbers) == [records[number] for number in numbers]


def test_a_split_string_reads_its_own_records(tmp_path: Path) -> None:
    info = reader.load_info(make_dataset(tmp_path / "1.0.0", {"train": [70, 0, 30], "validation": [5]}, size=(4, 4)))
    found = read(info.run_table("validation+train[60:75]+train[90:]"), range(30))
    names = [record.split(b".jpg")[0][-6:] for record in found if isinstance(record, bytes)]
    assert [int(name) for name in names] == [*range(5), *range(60, 75), *range(90, 100)]


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("byte", [0, 7, 9, 14, -2])
@pytest.mark.parametrize("record", [0, 70, 127, 199])
def test_a_flipped_bit_costs_one_record_and_a_length_without_a_text_index_the_rest_of_its_run(
    tmp_path: Path, record: int, byte: int, has_index: bool
) -> None:
    table, records = make_files(tmp_path, [10, 200], has_index)
    path = tmp_path / "shard-1"
    offset = sum(map(len, map(schema.frame, records[10 : 10 + record])))
    change(path, offset + byte if byte >= 0 else offset + len(schema.frame(records[10 + record])) + byte)
    found = read(table, range(210))
    lost = [number - 10 for number, one in enumerate(found) if isinstance(one, CorruptRecordError)]
    rest_of_run = list(range(record, min((record // 64 + 1) * 64, 200)))
    assert lost == (rest_of_run if byte in (0, 7, 9) and not has_index else [record])
    assert [one for one in found if isinstance(one, bytes)] == [
        one for number, one in enumerate(records) if number - 10 not in lost
    ]
    error = found[10 + record]
    assert isinstance(error, CorruptRecordError)
    assert (error.file, error.record, error.offset) == (str(path), record, offset)
    assert error.reason == f"the CRC of the {'length' if byte in (0, 7, 9) else 'data'} is wrong"


def change(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_file_cut_inside_a_record_between_two_or_to_nothing_loses_what_is_gone(
    tmp_path: Path, has_index: bool
) -> None:
    table, records = make_files(tmp_path, [20], has_index)
    path = tmp_path / "shard-0"
    data = path.read_bytes()
    offset = len(data) - len(schema.frame(records[-1]))
    for end, reason in (
        (len(data) - 1, "the file ends inside this record"),
        (offset + 5, "the file ends inside this record"),
        (offset, "the file ends before this record"),
    ):
        path.write_bytes(data[:end])
        *found, error = read(table, range(20))
        assert found == records[:19]
        assert str(error) == f"{path}: record 19 at byte {offset}: {reason}"
    path.write_bytes(b"")
    assert str(read(table, [0])[0]) == f"{path}: record 0 at byte 0: the file ends before this record"
    path.unlink()
    assert str(read(table, [0])[0]) == f"{path}: record 0 at byte 0: the file is missing"


@pytest.mark.parametrize(("size", "has_index"), [(7, False), (30, False), (7, True), (300, True)])
def test_the_valid_records_of_another_file_are_none_of_ours(tmp_path: Path, size: int, has_index: bool) -> None:
    table, _ = make_files(tmp_path, [80], has_index)
    path = tmp_path / "shard-0"
    path.write_bytes(b"".join(schema.frame(bytes(size)) for _ in range(200)))
    found = read(table, range(80))
    assert all(isinstance(one, CorruptRecordError) and one.file == str(path) for one in found)


@given(st.binary(max_size=400), st.data())
def test_any_bytes_in_a_file_or_an_index_are_records_or_corrupt(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    table, records = make_files(folder, [70], has_index=True)
    offset = data.draw(st.sampled_from([0, 1, 100, 1500]))
    path = folder / data.draw(st.sampled_from(["shard-0", "index-0"]))
    content = path.read_bytes()
    path.write_bytes(content[:offset] + junk + content[offset + data.draw(st.sampled_from([0, len(junk)])) :])
    change(folder / "shard-0", 0)  # so that the index is read
    found = read(table, range(70))
    assert all(isinstance(one, CorruptRecordError) or one == records[number] for number, one in enumerate(found))
    assert isinstance(found[0], CorruptRecordError)


@pytest.mark.parametrize("text", ["0 1\n1 1\n2 1\n", "0\n-5\n", "0 1\n" * 70, "9" * 5000 + " 1\n", "\xff", "0 1\n\n"])
def test_a_text_index_of_nonsense_is_not_believed(tmp_path: Path, text: str) -> None:
    table, _ = make_files(tmp_path, [3], has_index=True)
    change(tmp_path / "shard-0", 0)
    (tmp_path / "index-0").write_bytes(text.encode("latin-1"))
    assert all(isinstance(one, CorruptRecordError) for one in read(table, range(3)))


@given(st.binary(max_size=200), st.integers(1, 70))
def test_any_bytes_have_frames_or_none(junk: bytes, count: int) -> None:
    bounds = frame_bounds(memoryview(junk), count)
    assert bounds[0] == 0 and bounds == sorted(set(bounds)) and len(bounds) <= count + 1 and bounds[-1] <= len(junk)
    assert "\n" not in frame_fault(junk)
    frames = b"".join(map(schema.frame, (b"", junk, b"x")))
    assert frame_bounds(memoryview(frames + junk), 3) == [0, 16, 32 + len(junk), 49 + len(junk)]


def test_a_cache_that_answers_nonsense_is_read_past_and_gets_only_valid_runs(tmp_path: Path) -> None:
    table, records = make_files(tmp_path, [70])
    change(tmp_path / "shard-0", -1)  # the second run
    kept: dict[int, bytes] = {0: b"nonsense"}

    class Cache:
        def get(self, path: str, start: int, stop: int) -> bytes | None:
            return kept.get(start)

        def put(self, path: str, start: int, data: bytes) -> None:
            kept[start] = data

    found = read(table, range(70), cache=Cache())
    assert found[:69] == records[:69]
    assert isinstance(found[69], CorruptRecordError)
    assert list(kept) == [0] and len(kept[0]) == table.bytes[0]


def test_a_storage_that_fails_raises_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bytes:
        raise StorageError("the bucket is on fire")

    table, _ = make_files(tmp_path, [3])
    monkeypatch.setattr(LocalStorage, "read_range", fail)
    with pytest.raises(StorageError, match=r"^the bucket is on fire$"):
        read(table, [0])
