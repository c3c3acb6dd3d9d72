"""Runs: any records of a table in one read each; corrupt bytes are named, and never raise anything else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError
from reader.cache import DiskCache, MemoryCache
from reader.runs import RunCache, RunReader, RunTable, frame_bounds, frame_fault
from tests import make


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


def read(table: RunTable, numbers: Any) -> list[bytes | CorruptRecordError]:
    """Records by number, each from its run; an error for one that is corrupt."""
    reading = RunReader(table)
    found: list[bytes | CorruptRecordError] = []
    pieces, *of = reading.pieces_of(np.asarray(numbers))
    for number, index in zip(*of, strict=True):
        buffer = bytearray(pieces[number].stop - pieces[number].start + 7)
        try:
            found.append(reading.read(pieces[number], memoryview(buffer)).record(int(index)))
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


@pytest.mark.parametrize("kind", ["no cache", "memory", "folder"])
def test_the_crc_of_each_record_is_computed_once_a_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of runs that come from a cache, or that are put there."""
    table, records = make_files(tmp_path, [70])
    caches: dict[str, RunCache] = {"memory": MemoryCache(), "folder": DiskCache(tmp_path, {table.files[0]: "kept"})}
    reading, computed, crc = RunReader(table, caches.get(kind)), Counter[bytes](), schema.masked_crc32c
    monkeypatch.setattr(schema, "masked_crc32c", lambda data: (computed.update([data]), crc(data))[1])
    for _ in range(3):  # the first fills the cache
        computed.clear()
        runs = [reading.read(piece) for piece in reading.pieces_of(np.arange(70))[0]]
        assert [
            run.record(index) for run, count in zip(runs, (64, 6), strict=True) for index in range(count)
        ] == records
        assert {computed[record] for record in records} == {1}


@pytest.mark.parametrize(("size", "has_index"), [(7, False), (30, False), (7, True), (300, True)])
def test_the_valid_records_of_another_file_are_none_of_ours(tmp_path: Path, size: int, has_index: bool) -> None:
    table, _ = make_files(tmp_path, [80], has_index)
    path = tmp_path / "shard-0"
    path.write_bytes(b"".join(schema.frame(bytes(size)) for _ in range(200)))
    found = read(table, range(80))
    assert all(isinstance(one, CorruptRecordError) and one.file == str(path) for one in found)


nonsense = st.sampled_from([b"0 1\n1 1\n2 1\n", b"0\n-5\n", b"0 1\n" * 70, b"9" * 5000 + b" 1\n", b"\xff", b"0 1\n\n"])


@given(st.binary(max_size=400) | nonsense, st.data())
def test_any_bytes_in_a_file_or_an_index_are_records_or_corrupt(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    table, records = make_files(folder, [70], has_index=True)
    offset = data.draw(st.sampled_from([0, 1, 100, 1500]))
    path = folder / data.draw(st.sampled_from(["shard-0", "index-0"]))
    content = path.read_bytes()
    path.write_bytes(content[:offset] + junk + content[offset + data.draw(st.sampled_from([0, len(junk)])) :])
    make.flip_byte(folder / "shard-0", 0)  # so that the index is read
    found = read(table, range(70))
    # Junk as long as a record moves valid ones to where others were.
    assert all(isinstance(one, CorruptRecordError) or one in records for one in found)
    assert isinstance(found[0], CorruptRecordError)


@given(st.binary(max_size=200), st.integers(1, 70))
def test_any_bytes_have_frames_or_none(junk: bytes, count: int) -> None:
    bounds = frame_bounds(memoryview(junk), count)
    assert bounds[0] == 0 and bounds == sorted(set(bounds)) and len(bounds) <= count + 1 and bounds[-1] <= len(junk)
    assert "\n" not in frame_fault(junk)
    frames = b"".join(map(schema.frame, (b"", junk, b"x")))
    assert frame_bounds(memoryview(frames + junk), 3) == [0, 16, 32 + len(junk), 49 + len(junk)]
