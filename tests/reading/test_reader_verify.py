"""`verify`: a fine dataset has no fault, and every kind of damage is found and placed."""

from __future__ import annotations

from pathlib import Path

import pytest

from beam_pipeline import schema
from reader import load_info
from reader.verify import Fault, verify
from tests.reading.shards import make_dataset, make_record

SHARD = "photos-train.tfrecord-00001-of-00002"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def offsets(folder: Path, shard: str = SHARD) -> list[int]:
    return [int(line.split()[0]) for line in (folder / "index" / f"{shard}.idx").read_text().splitlines()]


def faults_of(folder: Path) -> list[tuple[str, int | None, int | None, str]]:
    return [(Path(f.file).name, f.record, f.offset, f.what) for f in verify(load_info(str(folder)), threads=2)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(make_dataset(tmp_path / "1.0.0", {"train": [70, 80], "validation": [10, 0]}))


@pytest.mark.parametrize(
    "options", [{}, {"compression": "gzip"}, {"one_hot": True}, {"image_format": "png", "channels": 1}]
)
def test_a_published_dataset_has_no_fault(tmp_path: Path, options: dict[str, object]) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [70, 80], "validation": [10, 0]}, **options))  # type: ignore[arg-type]
    assert faults_of(folder) == []
    (folder / "report.html").write_text("not part of it")
    assert faults_of(folder) == []


@pytest.mark.parametrize("record", [0, 40, 79])
@pytest.mark.parametrize(
    ("byte", "what"), [(2, "the CRC of the length is wrong"), (50, "the CRC of the data is wrong")]
)
def test_a_flipped_bit_costs_one_record_and_is_placed(folder: Path, record: int, byte: int, what: str) -> None:
    offset = offsets(folder)[record]
    flip(folder / SHARD, offset + byte)
    found = faults_of(folder)
    assert found[0] == (SHARD, record, offset, what)
    assert [fault[3] for fault in found[1:3]] == [
        "79 records are found in it, the manifest has 80",
        "its CRC-32C isn't the one that was published",
    ]
    assert "train has" in found[3][3]
    assert len(found) == 4


def test_cut_missing_and_foreign_files(folder: Path) -> None:
    last = offsets(folder)[-1]
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:last])
    found = faults_of(folder)
    assert (SHARD, 79, last, "the file ends before this record") in found
    (folder / SHARD).unlink()
    (folder / "index" / f"{SHARD}.idx").unlink()
    (folder / "class.labels.txt").unlink()
    (folder / "photos-train.tfrecord-00000-of-00003").write_bytes(b"")
    found = faults_of(folder)
    assert [(name, what) for name, _, _, what in found if "record" not in what] == [
        ("class.labels.txt", "the file is missing"),
        (f"{SHARD}.idx", "the file is missing"),
        (SHARD, "the file is missing"),
        ("photos-train.tfrecord-00000-of-00003", "the file doesn't belong to the dataset"),
    ]


def test_changed_metadata_and_indexes(folder: Path) -> None:
    (folder / "class.labels.txt").write_text("cat\n")
    flip(folder / "index" / "train.runs.npy", -1)
    (folder / "index" / f"{SHARD}.idx").write_text("0 17\n")
    found = {(name, what) for name, _, _, what in faults_of(folder)}
    assert found == {
        ("class.labels.txt", "its SHA-256 isn't the one that was published"),
        ("train.runs.npy", "its SHA-256 isn't the one that was published"),
        (f"{SHARD}.idx", "its SHA-256 isn't the one that was published"),
        (f"{SHARD}.idx", "its records don't lie one behind the other over the whole shard"),
    } | {fault for fault in found if fault[1].startswith("its runs of shard")}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda record: b"\xff" + record[1:], "not a tf.train.Example"),
        (lambda record: record.replace(b"\x05image", b"\x05omage"), "it lacks image"),
        (lambda record: record.replace(b"\xff\xd8\xff", b"\xff\xd8\xfe"), "the image doesn't decode"),
        (lambda record: record.replace(b"bird", b"fish"), r"label \[b'fish'\] isn't the name of class 0, 'bird'"),
    ],
)
def test_a_record_with_right_crcs_and_wrong_content(tmp_path: Path, change: object, what: str) -> None:
    import re

    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [70, 80]}))
    shard = folder / "photos-train.tfrecord-00000-of-00002"
    data = shard.read_bytes()
    record = make_record(3, (16, 24))
    changed = change(record)  # type: ignore[operator]
    assert len(changed) == len(record) and changed != record
    offset = data.index(schema.frame(record))
    shard.write_bytes(data.replace(schema.frame(record), schema.frame(changed)))
    found = faults_of(folder)
    assert found[0][:3] == (shard.name, 3, offset)
    assert re.search(what, found[0][3])
    assert "0x" not in found[0][3]  # no memory address
    assert any("CRC-32C" in fault[3] for fault in found)


def test_a_damaged_gzip_shard(tmp_path: Path) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [70, 80]}, compression="gzip"))
    shard = folder / SHARD
    shard.write_bytes(shard.read_bytes()[:-20])
    found = faults_of(folder)
    assert any("gzip" in fault[3] for fault in found)
    assert any("bytes, the manifest" in fault[3] for fault in found)


def test_a_fault_reads_as_one_line() -> None:
    assert str(Fault("f", 3, 70, "wrong")) == "f: record 3 at byte 70: wrong"
    assert str(Fault("f", None, None, "missing")) == "f: missing"
