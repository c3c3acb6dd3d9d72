"""`verify`: a published dataset has no fault, and every kind of damage is found, with its file, record and offset."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from beam_pipeline import schema
from beam_pipeline.errors import UsageError
from beam_pipeline.schema.manifest import seal_manifest
from imageshards import main
from reader import verify
from reader.tools.verify import Fault
from tests import make
from tests.reading.shards import make_dataset, make_record, offsets

FIRST, SHARD = (f"photos-train.tfrecord-0000{number}-of-00002" for number in range(2))


def faults_of(folder: Path) -> list[tuple[str, int | None, int | None, str]]:
    return [(Path(f.file).name, f.record, f.offset, f.what) for f in verify(folder).faults]


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
    ("byte", "what"), [(2, "length is wrong, so the rest of the file is lost"), (50, "data is wrong")]
)
def test_a_flipped_bit_costs_one_record_and_is_placed(folder: Path, record: int, byte: int, what: str) -> None:
    offset = offsets(folder, SHARD)[record]
    make.flip_byte(folder / SHARD, offset + byte)
    assert faults_of(folder) == [(SHARD, record, offset, f"the CRC of the {what}")]  # and nothing it causes


def test_cut_missing_and_foreign_files(folder: Path) -> None:
    starts, data = offsets(folder, SHARD), (folder / SHARD).read_bytes()
    inside = (20, starts[20], "the file ends inside this record")
    for end, expected in ((starts[79], []), (starts[20] + 5, [inside])):
        (folder / SHARD).write_bytes(data[:end])
        size = (None, None, f"it has {end:,} bytes, the manifest says {len(data):,}")
        assert [fault[1:] for fault in faults_of(folder)] == [size, *expected]
    (folder / SHARD).unlink()
    (folder / "index" / f"{SHARD}.idx").unlink()
    (folder / "class.labels.txt").unlink()
    foreign = "photos-train.tfrecord-00000-of-00003"
    (folder / foreign).write_bytes(b"")
    assert [(name, what) for name, _, _, what in faults_of(folder) if "record" not in what] == [
        ("class.labels.txt", "the file is missing"),
        (f"{SHARD}.idx", "the file is missing"),
        (SHARD, "the file is missing"),
        (foreign, "the file doesn't belong to the dataset; move it away if --repair leaves it"),
    ]


def test_changed_metadata_and_indexes(folder: Path) -> None:
    (folder / "class.labels.txt").write_text("cat\n")
    make.flip_byte(folder / "index" / "train.runs.npy", -1)
    (folder / "index" / f"{SHARD}.idx").write_text("0 17\n")
    found = {(name, what) for name, _, _, what in faults_of(folder)}
    wrong = "its SHA-256 isn't the one that was published"
    assert found == {("class.labels.txt", wrong), ("train.runs.npy", wrong), (f"{SHARD}.idx", wrong)}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda data: data[:-24] + bytes([data[-24] ^ 1]) + data[-23:],  # the length of the run before the last
            "its runs of shard 1 aren't those of the shard",
        ),
        (lambda data: b"no array", "it isn't a run index of the manifest's shards"),
    ],
)
def test_an_index_that_was_published_wrong(folder: Path, change: Callable[[bytes], bytes], what: str) -> None:
    file = "index/train.runs.npy"
    reseal(folder, lambda manifest: None, {file: change((folder / file).read_bytes())})
    (fault,) = faults_of(folder)
    assert fault[:3] == (Path(file).name, None, None) and fault[3].startswith(what)


def replace_record(folder: Path, number: int, old: bytes, new: bytes) -> None:
    """Write another record of the same length, with valid CRCs."""
    shard = folder / (FIRST if number < 70 else SHARD)
    record, data = make_record(number, (16, 24)), shard.read_bytes()
    changed = record.replace(old, new)
    assert len(changed) == len(record) and changed != record
    shard.write_bytes(data.replace(schema.frame(record), schema.frame(changed)))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (b"\x0a", b"\xff", "not a tf.train.Example"),
        (b"\x05image", b"\x05omage", "it lacks image"),
        (b"\xff\xd8\xff", b"\xff\xd8\xfe", "the image doesn't decode"),
        (b"bird", b"fish", r"label \[b'fish'\] isn't the name of class 0, 'bird'"),
    ],
)
def test_a_record_with_valid_crcs_and_wrong_content(folder: Path, old: bytes, new: bytes, what: str) -> None:
    replace_record(folder, 3, old, new)
    found = faults_of(folder)
    assert found[0][:3] == (FIRST, 3, offsets(folder, FIRST)[3])
    assert re.search(what, found[0][3]) and "0x" not in found[0][3]  # no memory address
    assert any("CRC-32C" in fault[3] for fault in found)


def test_a_damaged_gzip_shard(tmp_path: Path) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [70, 80]}, compression="gzip"))
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-20])
    found = " ".join(fault[3] for fault in faults_of(folder))
    assert "the GZIP stream is corrupt" in found and "bytes, the manifest says" in found


def reseal(folder: Path, change: Callable[[dict[str, Any]], None], files: dict[str, bytes] | None = None) -> None:
    """Change the manifest (and other files), as somebody would who knows how it is sealed."""
    manifest = json.loads((folder / schema.MANIFEST_FILE).read_bytes())
    for file, data in (files or {}).items():
        (folder / file).write_bytes(data)
        manifest["files"][file] = schema.sha256(data)
    change(manifest)
    (folder / schema.MANIFEST_FILE).write_bytes(seal_manifest(manifest))


def test_sums_of_the_manifest_that_do_not_add_up(folder: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["images"] += 1
        manifest["splits"]["train"]["class_counts"] = [49, 51, 49]

    reseal(folder, change)
    assert [fault[3] for fault in faults_of(folder)] == [
        "records + rejects isn't the number of images listed",
        "train has 50 records of class 0 'bird', the manifest says 49; and 2 more classes differ",
    ]


def test_only_a_decoder_finds_an_image_that_was_written_broken(folder: Path) -> None:
    number, shard = 64, folder / FIRST
    replace_record(folder, number, b"\xff\xd8\xff", b"\xff\xd8\xfe")

    def change(manifest: dict[str, Any]) -> None:
        manifest["splits"]["train"]["shards"][0]["crc32c"] = google_crc32c.value(shard.read_bytes())

    reseal(folder, change)
    for decode, expected in (("all", [number]), ("sample", [number]), ("none", [])):  # 64: the first of its run
        report = verify(folder, decode=decode)
        assert [fault.record for fault in report.faults] == expected
        assert bool(report) == report.ok == (not expected)
    with pytest.raises(UsageError, match="--decode 'most': choose one of all, sample, none"):
        verify(folder, decode="most")


def test_every_record_wrong_is_told_for_the_first_hundred(tmp_path: Path) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [150]}))
    shard = folder / "photos-train.tfrecord-00000-of-00001"
    for offset in offsets(folder, shard.name):
        make.flip_byte(shard, offset + 50)
    found = faults_of(folder)
    assert [record for _, record, _, _ in found[:100]] == list(range(100))
    assert found[100][3] == "50 more faults of this shard are left out"


def test_the_command_tells_programs_and_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out == "OK: 160 records in 4 shards, all images decode\n"
    assert main(["verify", str(folder), "--json", "--decode", "none"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"dataset": str(folder), "records": 160, "decode": "none", "faults": []}
    offset = offsets(folder, SHARD)[2]
    make.flip_byte(folder / SHARD, offset + 50)
    assert main(["verify", str(folder), "--json"]) == 1
    fault = json.loads(capsys.readouterr().out)["faults"][0]
    what = "the CRC of the data is wrong"
    assert fault == {"file": str(folder / SHARD), "record": 2, "offset": offset, "what": what}
    assert main(["verify", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder / SHARD}: record 2 at byte {offset}: {what}"
    assert lines[-1] == f"1 fault in {folder}; run the job again with --repair"
    make.flip_byte(folder / "manifest.json", 9)
    assert main(["verify", str(folder), "--json"]) == 1
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert fault["file"] == f"{folder}/manifest.json"
    assert "is corrupt" in fault["what"]
    assert main(["verify", str(folder), "--decode", "most"]) == 2
    error = capsys.readouterr().err
    assert error == "error: --decode 'most': choose one of all, sample, none\n"


def test_an_index_of_other_files_is_repaired_by_another_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(make_dataset(tmp_path / "source", {"train": [30]}))
    assert main(["index", f"{source}/photos-*", "--out", str(tmp_path / "index")]) == 0
    make.flip_byte(source / "photos-train.tfrecord-00000-of-00001", 50)
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "index")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"1 fault in {tmp_path / 'index'}; make it again with imageshards index"
    )


def test_a_fault_reads_as_one_line() -> None:
    assert str(Fault("f", 3, 70, "wrong")) == "f: record 3 at byte 70: wrong"
    assert str(Fault("f", None, None, "missing")) == "f: missing"
