"""`imageshards duplicates`: planted groups across splits and labels, and the list of what to leave out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import imageshards
import reader
from beam_pipeline import schema, storage
from beam_pipeline.errors import CorruptRecordError, ImageShardsError
from beam_pipeline.schema.example import image_example
from reader.tables import locate
from reader.tools import duplicates, read
from reader.tools.requests import Request, SlowStorage
from tests import make
from tests.reading import shards
from tests.servers import Gcs

# Split → path → number of the picture.
PLANTED = {
    "train": {
        "ant/1": 1,
        "ant/again": 1,
        "ant/zz": 1,
        "bee/2": 2,
        "ant/4": 4,
        "bee/four": 4,
        "cat/5": 5,
        "cat/6": 6,
        "cat/6\udcff": 6,
    },
    "validation": {"bee/copy": 2, "bee/b": 2, "cat/3": 3},
    "test": {"cat/a": 3, "ant/five": 5},
}
BY_FOLDER = ("--layout", "split_class_folders", "--num_shards", "train=2,validation=1,test=1")
FOUND = [
    {"test/cat/a.jpg": "test", "validation/cat/3.jpg": "validation"},
    {"train/bee/2.jpg": "train", "validation/bee/b.jpg": "validation", "validation/bee/copy.jpg": "validation"},
    {"train/ant/4.jpg": "train", "train/bee/four.jpg": "train"},
    {"train/ant/1.jpg": "train", "train/ant/again.jpg": "train", "train/ant/zz.jpg": "train"},
    {"train/cat/6.jpg": "train", "train/cat/6\udcff.jpg": "train"},
    {"test/ant/five.jpg": "test", "train/cat/5.jpg": "train"},
]
"""What `duplicates.jsonl` of `--duplicates report` had of `PLANTED` when the job still looked for them, but for the
copies of broken files: they have no record."""


def planted(folder: Path) -> Path:
    """Class folders with groups of equal files within and across splits and labels, and equal files without records."""
    for split, files in enumerate(PLANTED.values()):
        root = folder / list(PLANTED)[split]
        others = {f"{label}/{split}{number}": 100 + 10 * split + number for number, label in enumerate(LABELS * 2)}
        for name, number in {**files, **others}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / f"{name}.jpg").write_bytes(make.encoded(make.picture(seed=number)))
        for label in LABELS[:2]:
            (root / label / f"empty{split}.jpg").write_bytes(b"")
            (root / label / f"broken{split}.jpg").write_bytes(b"no image")
    return folder


LABELS = ("ant", "bee", "cat")


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version of the planted images; not to be changed."""
    folder = tmp_path_factory.mktemp("planted")
    return make.published(planted(folder / "in"), folder / "out", *BY_FOLDER, "--max_reject_fraction", "0.9")


def listed(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def label_of(path: str) -> str:
    return path.split("/")[-2]


def test_it_finds_what_the_job_found(version: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, expected = tmp_path / "new" / "list.jsonl", FOUND
    assert imageshards.main(["duplicates", str(version), "--out", str(out), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    lines = listed(out)
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(line["group"], []).append(line["path"])
    assert list(groups.values()) == [list(group) for group in expected]  # in order of MD5, and of path
    assert list(groups) == sorted(groups)
    assert found == {
        "dataset": str(version),
        "compared": "source",
        "records": make.manifest(version)["records"],
        "groups": 6,
        "images": 14,
        "across_labels": 2,
        "across_splits": 3,
        "candidates": 0,
        "first": found["first"],
    }
    assert {one["group"]: sorted(one["paths"]) for one in found["first"]} == groups
    for group in expected:
        of_group = [line for line in lines if line["path"] in group]
        if len({label_of(path) for path in group}) > 1:
            assert not any("keep" in line for line in of_group)
            continue
        (kept,) = (line["path"] for line in of_group if line["keep"])
        outside = [path for path in group if group[path] != "train"]
        assert kept == (outside or list(group))[0]
    assert reader.duplicates(version).first == reader.duplicates(version, tmp_path / "again.jsonl").first
    assert (tmp_path / "again.jsonl").read_bytes() == out.read_bytes()
    assert {path.name for path in tmp_path.rglob("*")} == {"new", "list.jsonl", "again.jsonl"}


def test_the_list_and_the_text_say_why(version: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "list.jsonl"
    assert imageshards.main(["duplicates", str(version), "--out", str(out)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "6 groups with the same bytes, 14 of 32 images: 2 across labels (contradictions), 3 across splits (leaks)",
        "  train/ant/4.jpg, train/bee/four.jpg across labels ant, bee",
        "  test/ant/five.jpg, train/cat/5.jpg across labels ant, cat and splits test, train",
        "  test/cat/a.jpg, validation/cat/3.jpg across splits test, validation",
        "  train/bee/2.jpg, validation/bee/b.jpg, validation/bee/copy.jpg across splits train, validation",
        "  train/ant/1.jpg, train/ant/again.jpg, train/ant/zz.jpg",
        "  train/cat/6.jpg, train/cat/6\\udcff.jpg",
        f"all of them: {out}",
    ]
    assert {line["path"]: line["reason"] for line in listed(out)} == {
        "test/cat/a.jpg": "same bytes as validation/cat/3.jpg of split validation",
        "validation/cat/3.jpg": "same bytes as test/cat/a.jpg of split test",
        "train/bee/2.jpg": "same bytes as validation/bee/b.jpg of split validation",
        "validation/bee/b.jpg": "same bytes as train/bee/2.jpg of split train",
        "validation/bee/copy.jpg": "same bytes as validation/bee/b.jpg",
        "train/ant/4.jpg": "same bytes as train/bee/four.jpg, whose label is bee",
        "train/bee/four.jpg": "same bytes as train/ant/4.jpg, whose label is ant",
        "train/ant/1.jpg": "same bytes as train/ant/again.jpg",
        "train/ant/again.jpg": "same bytes as train/ant/1.jpg",
        "train/ant/zz.jpg": "same bytes as train/ant/1.jpg",
        "train/cat/6.jpg": "same bytes as train/cat/6\udcff.jpg",
        "train/cat/6\udcff.jpg": "same bytes as train/cat/6.jpg",
        "test/ant/five.jpg": "same bytes as train/cat/5.jpg, whose label is cat",
        "train/cat/5.jpg": "same bytes as test/ant/five.jpg, whose label is ant",
    }


def test_on_gs_it_reads_each_table_once_and_the_records_that_it_names(version: Path, gcs: Gcs, tmp_path: Path) -> None:
    local = tmp_path / "list.jsonl"
    gcs.put_folder(bucket := gcs.new_bucket(), "photos/1.0.0", version)
    before = len(gcs.requests())
    found = reader.duplicates(f"gs://{bucket}/photos/1.0.0", f"gs://{bucket}/list.jsonl")
    reads = [request.object_read or "" for request in gcs.requests()[before:]]
    assert found.first == reader.duplicates(version, local).first
    assert gcs.get(bucket, "list.jsonl") == local.read_bytes()
    assert sum(schema.ShardName.parse(name.rpartition("/")[2]) is not None for name in reads) == 4  # a run per shard


def test_an_index_is_compared_by_its_stored_images(
    version: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = reader.index(str(version / "*.tfrecord-*"), tmp_path / "index").info
    assert imageshards.main(["duplicates", index.url]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("6 groups with the same stored bytes, 14 of 32 images: 2 across labels")
    paths = {"test[4:5]": "test/cat/a.jpg", "validation[3:4]": "validation/cat/3.jpg"}
    assert f"  {', '.join(paths)} across splits test, validation" in said
    for name, path in paths.items():
        (record,) = reader.records(version, name)
        assert record["filename"] == path


def test_without_any_the_exit_code_is_0_and_the_list_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = make.published(make.class_folders(tmp_path / "in", {"ant": 3}), tmp_path / "out")
    (tmp_path / "list.part").write_text("mine")
    assert imageshards.main(["duplicates", str(version), "--out", str(tmp_path / "list")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", "list", "list.part"}
    assert (tmp_path / "list.part").read_text() == "mine"
    assert capsys.readouterr().out == "no two of 3 images have the same bytes\n"
    assert (tmp_path / "list").read_bytes() == b""


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("", "it is a folder"),
        ("file/list", "File exists; name a file that can be written"),
        ("s4://x/y", "no such storage; use a local path, gs://, s3:// or az://"),
        ("http://x/y", "http:// can't be written to"),
    ],
)
def test_a_list_that_cannot_be_written_is_refused_before_anything_is_read(
    out: str, message: str, version: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = Path(shutil.copytree(version, tmp_path / "1.0.0"))
    for table in version.rglob("*.records.npy"):
        table.unlink()
    (tmp_path / "file").touch()
    given = out if "://" in out else str(tmp_path / out)
    assert imageshards.main(["duplicates", str(version), "--out", given]) == 2
    assert capsys.readouterr().err.startswith(f"error: --out {given!r}: {message}")


def test_a_corrupt_path_is_one_line_and_leaves_no_list(
    version: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = Path(shutil.copytree(version, tmp_path / "1.0.0"))
    shard = next(version.glob("photos-test.*"))
    make.flip_byte(shard, shard.read_bytes().index(b"test/ant/five.jpg") + 11)
    assert imageshards.main(["duplicates", str(version), "--out", str(tmp_path / "list")]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: {shard}: record ") and said.err.count("\n") == 1
    assert said.err.endswith(f"imageshards verify {version} finds every fault\n")
    assert not list(tmp_path.glob("list*"))


# --- the paths in records


@pytest.fixture
def of_test(version: Path, tmp_path: Path) -> tuple[Path, Path, np.ndarray[Any, Any]]:
    """A copy of a version, its shard of the split test, and some of its records."""
    version = Path(shutil.copytree(version, tmp_path / "1.0.0"))
    return version, next(version.glob("photos-test.*")), np.array([0, 1, 4, 5])


@pytest.mark.parametrize("head", [1, 40, 80, 200, 1 << 20])
def test_paths_are_those_of_the_records_however_much_of_each_is_read(
    head: int, of_test: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, _, numbers = of_test
    expected = [one["filename"].encode() for one in reader.records(version, "test")[numbers]]
    monkeypatch.setattr(read, "_HEAD_BYTES", head)
    assert read.read_paths(reader.load_info(version), ["test"], numbers) == expected


def test_no_flipped_byte_gives_another_path(of_test: Any) -> None:
    version, shard, numbers = of_test
    info = reader.load_info(version)
    expected, failed = read.read_paths(info, ["test"], numbers), 0
    for at in range(200):  # the first record begins with class and path
        make.flip_byte(shard, at)
        try:
            assert read.read_paths(info, ["test"], numbers) == expected
        except CorruptRecordError as error:
            assert (error.file, error.record, error.offset) == (str(shard), 0, 0)
            failed += 1
        make.flip_byte(shard, at)
    assert failed > len("test/cat/a.jpg")


def test_a_missing_shard_and_a_table_of_other_paths_are_named(of_test: Any) -> None:
    version, shard, numbers = of_test
    info = reader.load_info(version)
    table, name = version / schema.table_file(shard.name), info.load_table(info.splits["test"].shards[0])["name"]
    table.write_bytes(table.read_bytes().replace(name.tobytes(), np.roll(name, 1).tobytes()))
    with pytest.raises(ImageShardsError, match=rf"^{shard}: its record table isn't of these records; run the job with"):
        read.read_paths(info, ["test"], numbers)
    shard.unlink()
    with pytest.raises(CorruptRecordError, match=rf"^{shard}: record 0 at byte 0: the file is missing$"):
        read.read_paths(info, ["test"], numbers)


@pytest.mark.parametrize(
    ("numbers", "requests", "complete"),  # in each request the last record is read to the end of its head
    [
        ([3], 1, 0),
        ([0, 30, 60], 3, 0),
        ([3, 4, 5], 1, 2),
        (range(64), 1, 63),
        (range(0, 64, 2), 1, 62),
        ([3, 60, 70, 127, 130], 5, 0),
    ],
)
def test_of_records_far_from_others_only_the_beginning_is_read(
    numbers: Any, requests: int, complete: int, tmp_path: Path
) -> None:
    def record(_: str, number: int) -> tuple[int, bytes]:
        path = f"cat/{number:03}.jpg"
        return 1, image_example(image=bytes(50_000), size=(16, 24), class_id=1, label="cat", path=path)

    info = reader.load_info(shards.make_dataset(tmp_path / "1.0.0", {"train": [192]}, record=record))
    table = locate(info, info.run_table("train"), np.array(numbers))
    seen: list[Request] = []
    with storage.wrapped(lambda store: SlowStorage(store, 1e-6, seen.append)):
        assert list(read.names_in_heads(table)) == [f"cat/{number:03}.jpg".encode() for number in numbers]
    assert len(seen) == requests
    assert sum(request.bytes_read for request in seen) == complete * int(table.size[0]) + requests * 4096


def test_of_compressed_shards_none_can_be_named(tmp_path: Path) -> None:
    images = make.class_folders(tmp_path / "in", {"ant": 3})
    assert not reader.duplicates(make.published(images, tmp_path / "out", "--compression", "gzip"))
    shutil.copy(images / "ant/0000.jpg", images / "ant/copy.jpg")
    version = make.published(images, tmp_path / "more", "--compression", "gzip")
    with pytest.raises(ImageShardsError, match="is compressed with gzip, so no record can be found by its offset"):
        reader.duplicates(version)


numbers = st.integers(0, 3)


@given(st.lists(st.tuples(numbers, numbers)))
def test_equal_rows_are_those_whose_numbers_are_both_equal(pairs: list[tuple[int, int]]) -> None:
    high, low = np.array(pairs, np.uint64).reshape(-1, 2).T
    rows, first = duplicates.equal_rows(high, low)
    expected = [[row for row, other in enumerate(pairs) if other == pair] for pair in sorted(set(pairs))]
    assert [part.tolist() for part in np.split(rows, first[1:-1]) if len(part)] == [
        group for group in expected if len(group) > 1
    ]
