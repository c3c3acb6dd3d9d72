"""`imageshards copy`: every file checked, resumed where it stopped, the manifest last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import imageshards
import reader
from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, UsageError
from imageshards import main
from reader.tools.copy import dataset_hash
from tests import make, servers
from tests.reading.shards import make_dataset

SHARD = "photos-train.tfrecord-00001-of-00002"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(make_dataset(tmp_path / "source", {"train": [70, 80], "validation": [10, 0]}))


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_copy_is_the_same_dataset_and_a_second_one_keeps_what_is_there(tmp_path: Path, compression: str) -> None:
    source = Path(make_dataset(tmp_path / "source", {"train": [70, 80]}, compression=compression))
    files = make.files(source)
    copied = reader.copy(source, tmp_path / "copy")
    assert make.files(tmp_path / "copy") == files
    assert dataset_hash(str(tmp_path / "copy")) == dataset_hash(str(source))
    assert (copied.files, copied.kept, copied.bytes) == (len(files), 0, sum(map(len, files.values())))
    shard = tmp_path / "copy" / SHARD
    written = shard.stat().st_mtime_ns
    make.flip_byte(tmp_path / "copy" / "photos-train.tfrecord-00000-of-00002")
    again = reader.copy(str(source), tmp_path / "copy")
    assert again.kept == again.files - 1
    assert shard.stat().st_mtime_ns == written
    assert make.files(tmp_path / "copy") == files


def test_a_damaged_source_gives_no_dataset(source: Path, tmp_path: Path) -> None:
    info = reader.load_info(str(source))
    make.flip_byte(source / SHARD)
    fix = "; run the job again with --repair"
    with pytest.raises(ImageShardsError, match=f"{SHARD} isn't the file that was published: its checksum is .*{fix}"):
        reader.copy(info, str(tmp_path / "copy"))
    assert not (tmp_path / "copy" / schema.MANIFEST_FILE).exists()
    assert not list((tmp_path / "copy").glob(f"{SHARD}*"))


def test_a_missing_file_of_the_source_names_the_fix(source: Path, tmp_path: Path) -> None:
    info = reader.load_info(str(source))
    for file in ("index/train.runs.npy", SHARD):
        (source / file).unlink()
        with pytest.raises(ImageShardsError, match=f"{file} is missing.*: run the job again with --repair"):
            reader.copy(info, str(tmp_path / "copy"))


def test_a_folder_that_holds_something_else_is_left_alone(source: Path, tmp_path: Path) -> None:
    info = reader.load_info(str(source))
    other = Path(make_dataset(tmp_path / "other", {"train": [3]}))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for folder, message in (
        (other, "it holds another dataset"),
        (tmp_path / "notes", r"'mine\.txt' isn't the dataset's; choose an empty folder"),
        (tmp_path / "file", "it is a file"),
        ("gs://bucket/copy", "a copy goes to a local folder"),
    ):
        with pytest.raises(UsageError, match=message):
            reader.copy(info, str(folder))


def test_a_link_in_the_folder_is_never_written_through(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim, outside, target = tmp_path / "victim", tmp_path / "outside", tmp_path / "copy"
    victim.write_text("mine")
    outside.mkdir()
    target.mkdir()
    (target / f"{SHARD}.copying").symlink_to(victim)
    (target / "class.labels.txt").symlink_to(victim)
    (target / "index").symlink_to(outside)
    assert imageshards.main(["copy", str(source), str(target)]) == 2
    assert capsys.readouterr().err == f"error: {target}/index: it is a link to another folder; delete it\n"
    assert not list(outside.iterdir())
    (target / "index").unlink()
    reader.copy(source, target)
    assert make.files(target) == make.files(source)
    assert victim.read_text() == "mine" and not [path for path in target.rglob("*") if path.is_symlink()]


def test_a_copy_of_an_index_brings_its_shards(tmp_path: Path) -> None:
    source = make_dataset(tmp_path / "source", {"train": [70, 80]})
    info = reader.index(f"{source}/photos-train*", str(tmp_path / "index")).info
    reader.copy(info, str(tmp_path / "copy"))
    reader.copy(info, str(tmp_path / "copy"))
    for path in Path(source).glob("photos*"):
        path.unlink()
    copied = reader.load_info(str(tmp_path / "copy"))
    assert [shard.file for shard in copied.splits["train"].shards] == [
        f"shards/0000{number}-photos-train.tfrecord-0000{number}-of-00002" for number in range(2)
    ]
    assert len(list(reader.train_dataset(copied, "train", global_batch_size=150))) == 1


def test_the_command_copies_from_a_bucket(
    source: Path, tmp_path: Path, gcs: servers.Gcs, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "photos/1.0.0", source)
    arguments = ["copy", f"gs://{bucket}/photos/1.0.0", str(tmp_path / "copy")]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(f"OK: {len(make.files(source))} files, 1")
    assert make.files(tmp_path / "copy") == make.files(source)
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == len(make.files(source))
    assert main(arguments) == 0
    assert ", all of them already there; all checksums match\n" in capsys.readouterr().out
    assert reader.verify(tmp_path / "copy")
