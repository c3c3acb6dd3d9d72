"""Reading runs and whole files: what comes out, and what damage is called."""

from __future__ import annotations

import gzip
import itertools
import queue
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError
from reader import load_info, runs
from reader.position import Phase, Position
from reader.run_table import RunTable
from reader.runs import RunReader
from reader.scanning import scan_file
from reader.storage import LocalStorage
from reader.stream import RecordStream, Source
from tests.reading.shards import make_dataset

STORAGE = LocalStorage()


def make_files(folder: Path, counts: list[int]) -> tuple[RunTable, list[bytes]]:
    """Shards of small records, their table, and all records in order."""
    records, rows, files = [], [], []
    for shard, count in enumerate(counts):
        mine = [f"shard {shard} record {number}".encode() * (1 + number % 3) for number in range(count)]
        framed = [schema.frame(record) for record in mine]
        files.append(str(folder / f"shard-{shard}"))
        Path(files[-1]).write_bytes(b"".join(framed))
        rows += schema.run_rows(shard, map(len, framed))
        records += mine
    return RunTable.select(files, np.array(rows, schema.RUN_DTYPE), 0, len(records)), records


def read_file(storage: LocalStorage, path: str) -> Iterator[list[bytes]]:
    """A whole file's records, one by one, until one is wrong."""
    for frame in scan_file(storage, path):
        if isinstance(frame.record, CorruptRecordError):
            raise frame.record
        yield [frame.record]


@given(st.data())
def test_any_records_in_any_order(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.sampled_from([0, 1, 63, 64, 65, 200]), min_size=1, max_size=4).filter(sum))
    table, records = make_files(tmp_path_factory.mktemp("runs"), counts)
    numbers = data.draw(st.lists(st.integers(0, len(records) - 1), min_size=1, max_size=50))
    assert RunReader(STORAGE, table).read(np.array(numbers)) == [records[number] for number in numbers]


def test_neighbouring_runs_are_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, records = make_files(tmp_path, [200, 100])
    requests = []

    class Counting(LocalStorage):
        is_remote = True

        def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
            requests.append((path[-7:], start))
            return super().read(path, start, stop)

    assert RunReader(Counting(), table).read(np.arange(300)) == records
    assert requests == [("shard-0", 0), ("shard-1", 0)]
    requests.clear()
    monkeypatch.setattr(runs, "JOIN_BYTES", 4000)
    assert RunReader(Counting(), table).read(np.arange(300)) == records
    assert len(requests) > 2
    requests.clear()
    assert RunReader(Counting(), table).read(np.array([0, 130])) == [records[0], records[130]]
    assert len(requests) == 2  # the run between them isn't read


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> RunTable:
    """20,480 records in 4 uneven shards."""
    return make_files(tmp_path_factory.mktemp("uneven"), [9000, 123, 6357, 5000])[0]


@pytest.mark.parametrize("hosts", [1, 2, 3, 7, 16])
def test_a_host_fetches_its_share_of_an_epoch_and_little_more(uneven: RunTable, hosts: int) -> None:
    fetched = []

    class Counting(LocalStorage):
        is_remote = True

        def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
            data = super().read(path, start, stop)
            fetched.append(len(data))
            return data

    dataset = int(uneven.bytes.sum())
    source = Source(Counting(), uneven, None, None)
    beginning = Position("", uneven.total, 0, hosts, 0, (Phase(hosts, 16),))
    read: Counter[tuple[int, int]] = Counter()
    for host in range(hosts):
        stream = RecordStream.train(source, beginning, host)
        fetched.clear()
        for epoch in range(2):
            block = stream.take(share_of(uneven.total, hosts, host, epoch))
            assert set(block.epochs.tolist()) == {epoch}
            read.update(zip(block.epochs.tolist(), block.numbers.tolist(), strict=True))
            # A window of the next epoch may be under way, once twenty were asked for.
            assert sum(fetched) <= 1.1 * (epoch + 1) * dataset / hosts
    assert read == Counter({(epoch, number): 1 for epoch in range(2) for number in range(uneven.total)})


def test_remote_windows_are_read_ahead_over_an_epochs_end_once_many_were_read(tmp_path: Path) -> None:
    table, _ = make_files(tmp_path, [256])
    fetched: queue.Queue[int] = queue.Queue()

    class Remote(LocalStorage):
        is_remote = True

        def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
            fetched.put(start)
            return super().read(path, start, stop)

    stream = RecordStream.train(Source(Remote(), table, None, None), Position("", 256, 0, 1, 0, (Phase(1, 1),)), 0)
    for epoch in range(4):  # of 4 windows each
        stream.take(256)
        assert fetched.qsize() == 4 * (epoch + 1), "who stops here has fetched nothing else"
    stream.take(256)
    for _ in range(21):
        fetched.get(timeout=30)  # one more than was asked for


def share_of(records: int, hosts: int, host: int, epoch: int) -> int:
    """Records of one host in an epoch: dealt one by one in turn, on and on."""
    return sum((epoch * records + record) % hosts == host for record in range(records))


@pytest.mark.parametrize("record", [0, 100, 199])
@pytest.mark.parametrize("byte", [0, 9, 14, -2])
def test_a_flipped_bit_names_file_record_and_offset(tmp_path: Path, record: int, byte: int) -> None:
    table, records = make_files(tmp_path, [10, 200])
    path = tmp_path / "shard-1"
    offset = sum(len(other) + schema.FRAME_BYTES for other in records[10 : 10 + record])
    end = offset + len(records[10 + record]) + schema.FRAME_BYTES
    data = bytearray(path.read_bytes())
    data[offset + byte if byte >= 0 else end + byte] ^= 4
    path.write_bytes(data)
    for read in (lambda: RunReader(STORAGE, table).read(np.arange(210)), lambda: list(read_file(STORAGE, str(path)))):
        with pytest.raises(CorruptRecordError, match="CRC") as error:
            read()
        assert (error.value.file, error.value.record, error.value.offset) == (str(path), record, offset)
    # Other runs can still be read.
    other = 10 if record > 64 else 10 + 150
    assert RunReader(STORAGE, table).read(np.array([other])) == [records[other]]


def test_a_wrong_crc_costs_a_scan_one_record_and_a_wrong_length_the_rest(tmp_path: Path) -> None:
    _, records = make_files(tmp_path, [20])
    path = tmp_path / "shard-0"
    good = path.read_bytes()
    offset = sum(len(record) + schema.FRAME_BYTES for record in records[:5])
    for byte, found in ((offset + 13, 19), (offset + 1, 5)):
        data = bytearray(good)
        data[byte] ^= 1
        path.write_bytes(data)
        frames = list(scan_file(STORAGE, str(path)))
        (fault,) = [frame.record for frame in frames if isinstance(frame.record, CorruptRecordError)]
        assert (fault.record, fault.offset) == (5, offset)
        assert [frame.record for frame in frames if isinstance(frame.record, bytes)] == (
            records[:5] + records[6:] if found == 19 else records[:5]
        )


def test_a_file_cut_inside_a_record_and_between_two(tmp_path: Path) -> None:
    table, records = make_files(tmp_path, [20])
    path = tmp_path / "shard-0"
    data = path.read_bytes()
    offset = len(data) - len(records[-1]) - schema.FRAME_BYTES
    for end, reason in ((len(data) - 1, "the file ends inside"), (offset, "the file ends before this record")):
        path.write_bytes(data[:end])
        assert RunReader(STORAGE, table).read(np.arange(19)) == records[:19]
        with pytest.raises(CorruptRecordError, match=reason) as error:
            RunReader(STORAGE, table).read(np.array([3, 19]))
        assert (error.value.record, error.value.offset) == (19, offset)
    path.write_bytes(b"")
    with pytest.raises(CorruptRecordError, match="record 0 at byte 0: the file ends before"):
        RunReader(STORAGE, table).read(np.arange(4))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    table, _ = make_files(tmp_path, [20])
    (tmp_path / "shard-0").unlink()
    with pytest.raises(CorruptRecordError, match=r"shard-0: record 3 at byte 0: the file is missing$"):
        RunReader(STORAGE, table).read(np.array([3]))


@pytest.mark.parametrize("with_index", [True, False])
def test_a_wrong_length_costs_one_record_with_a_text_index_and_the_rest_of_the_run_without(
    tmp_path: Path, with_index: bool
) -> None:
    info = load_info(make_dataset(tmp_path / "1.0.0", {"train": [140]}))
    table = info.run_table("train")
    records = RunReader(STORAGE, table).read(np.arange(140))
    path = Path(table.files[0])
    offset = sum(len(record) + schema.FRAME_BYTES for record in records[:70])
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    if not with_index:
        Path(table.indexes[0]).unlink()
    found = RunReader(STORAGE, table).find(np.arange(140))
    lost = [place for place, record in enumerate(found) if isinstance(record, CorruptRecordError)]
    assert lost == ([70] if with_index else list(range(70, 128)))
    assert all(record == records[place] for place, record in enumerate(found) if place not in lost)
    assert (found[70].record, found[70].offset) == (70, offset)
    assert table.locate(70) == (str(path), 70)


@pytest.mark.parametrize("members", [1, 3])
def test_gzip_files_of_one_or_more_members(tmp_path: Path, members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, records = make_files(tmp_path, [300])
    plain = (tmp_path / "shard-0").read_bytes()
    cuts = np.linspace(0, len(plain), members + 1).astype(int)
    packed = b"".join(gzip.compress(plain[a:b]) for a, b in itertools.pairwise(cuts))
    path = tmp_path / "packed.gz"
    path.write_bytes(packed)
    for chunk_bytes in (8 << 20, 100):
        monkeypatch.setattr("reader.storage.CHUNK_BYTES", chunk_bytes)
        monkeypatch.setattr("reader.scanning.CHUNK_BYTES", chunk_bytes)
        assert [record for block in read_file(STORAGE, str(path)) for record in block] == records
    for damaged, reason in ((packed[:-9], "ends too early"), (packed[:40] + b"xxxx" + packed[44:], "damaged|CRC")):
        path.write_bytes(damaged)
        with pytest.raises(CorruptRecordError, match=reason):
            list(read_file(STORAGE, str(path)))


def test_plain_files_are_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, records = make_files(tmp_path, [300])
    monkeypatch.setattr("reader.storage.CHUNK_BYTES", 77)
    assert [record for block in read_file(STORAGE, str(tmp_path / "shard-0")) for record in block] == records
    (tmp_path / "empty").write_bytes(b"")
    assert list(read_file(STORAGE, str(tmp_path / "empty"))) == []


def test_a_dataset_is_read_through_its_table(tmp_path: Path) -> None:
    info = load_info(make_dataset(tmp_path / "1.0.0", {"train": [70, 30], "validation": [5]}))
    table = info.run_table("validation+train[60:75]")
    found = RunReader(info.storage, table).read(np.arange(20))
    names = [record.split(b".jpg")[0][-6:] for record in found]
    assert [int(name) for name in names] == [*range(5), *range(60, 75)]
