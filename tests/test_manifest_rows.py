"""`--layout manifest`: CSV and JSONL rows, feature columns, byte ranges that can be read on their own."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_pipeline import examples, manifest_rows
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.manifest_rows import Column, RowReader, columns, read_header
from tests import make
from tests.servers import Gcs


def reader(path: Path) -> RowReader:
    return RowReader(str(path), read_header(str(path), 1), 1, str(path.parent))


def rows(path: Path) -> list[manifest_rows.Row]:
    some = reader(path)
    return [row for start, end in some.ranges() for row in some.rows(start, end)]


def written(tmp_path: Path, text: str | bytes, name: str = "m.csv") -> Path:
    path = tmp_path / "tables" / name  # beside the output: the manifest's folder is the input unless another is given
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# --- headers


def test_columns_are_features_in_order_of_their_names() -> None:
    header = ("path", "zeta", "label", "age:int64", "box:float32[]", "split", "tags[]", "md5", "bytes", "b:bytes")
    assert columns(header) == (
        Column("age", "int64", False),
        Column("b", "bytes", False),
        Column("box", "float32", True),
        Column("tags", "bytes", True),
        Column("zeta", "bytes", False),
    )


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ("path", "no column 'label' among 'path'; add it"),
        ("label,x", "no column 'path' among 'label', 'x'; add it"),
        ("path,label,image", "column 'image' has a reserved name: rename it"),
        ("path,label,class:int64", "column 'class:int64' has a reserved name: rename it"),
        ("path,label,one_hot_class", "column 'one_hot_class' has a reserved name: rename it"),
        ("path,label,filename", "column 'filename' has a reserved name: rename it"),
        ("path,label,size:int64[]", "column 'size:int64[]' has a reserved name: rename it"),
        ("path,label,split:int64", "column 'split:int64' has a reserved name: rename it"),
        ("path,label,:int64", "column ':int64' has a reserved name: rename it"),
        ("path,label,", "column '' has a reserved name: rename it"),
        ("path,label,a,a", "column 'a' is repeated: keep one"),
        ("path,label,a,a:int64", "column 'a' is repeated: keep one"),
        ("path,label,path", "column 'path' is repeated: keep one"),
        ("path,label,a:int32", "column 'a:int32' has no type int64, float32 or bytes: declare one"),
    ],
)
def test_headers_that_cannot_be_used_are_exit_2(tmp_path: Path, header: str, what: str) -> None:
    path = written(tmp_path, f"{header}\n")
    finished = make.run("--layout", "manifest", "--manifest", path, "--output", tmp_path / "out", "--name", "x")
    assert (finished.code, finished.err) == (2, f"error: --manifest '{path}': {what}\n")


@pytest.mark.parametrize(
    ("name", "data"),
    [("m.csv", b""), ("m.jsonl", b""), ("m.jsonl", b"path,label\n"), ("m.jsonl", b"[1]\n"), ("m.csv", b"\xff\xfe\n")],
)
def test_files_without_a_header_are_exit_2(tmp_path: Path, name: str, data: bytes) -> None:
    path = written(tmp_path, data, name)
    finished = make.run("--layout", "manifest", "--manifest", path, "--output", tmp_path / "out", "--name", "x")
    assert finished.code == 2
    assert finished.err.startswith(f"error: --manifest '{path}': ")
    assert finished.err.count("\n") == 1


def test_a_header_without_rows_is_exit_2(tmp_path: Path) -> None:
    path = written(tmp_path, "path,label\n")
    finished = make.run("--layout", "manifest", "--manifest", path, "--output", tmp_path / "out", "--name", "x")
    assert (finished.code, finished.err) == (
        2,
        f"error: --manifest '{path}': it has a header but no row; add a row for each image\n",
    )


def test_a_missing_manifest_is_exit_2(tmp_path: Path, gcs: Gcs) -> None:
    for url in (tmp_path / "no.csv", f"gs://{gcs.new_bucket()}/no.csv", "gs://no-such-bucket/no.jsonl"):
        finished = make.run("--layout", "manifest", "--manifest", url, "--output", tmp_path / "out", "--name", "x")
        assert finished.code == 2, finished.err
        assert finished.err.startswith(f"error: --manifest '{url}': ")


# --- rows


def test_csv_rows(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "\ufeffpath,label,bytes,md5,age:int64,box:float32[],tags[],note\r\n"
        'a/1.jpg,cat,10,ABCDEF,7,"0.5;1.5",x;y z,"quoted, with\nline break"\r\n'
        "\r\n"
        "./a/2.jpg,dog,,,,,,\r\n",
    )
    first, second = rows(path)
    assert first[:5] == ("a/1.jpg", "cat", None, 10, "abcdef")
    assert first.features == (
        examples.int64_feature(7),
        examples.float_feature(0.5, 1.5),
        examples.bytes_feature(b"quoted, with\nline break"),
        examples.bytes_feature(b"x", b"y z"),
    )
    assert second[:5] == ("a/2.jpg", "dog", None, None, None)
    assert second.features == (
        examples.int64_feature(0),
        examples.float_feature(),
        examples.bytes_feature(b""),
        examples.bytes_feature(),
    )


def test_jsonl_rows_are_the_same(tmp_path: Path) -> None:
    table = [
        {
            "path": "a/1.jpg",
            "label": "cat",
            "split": "train",
            "bytes": 10,
            "age:int64": -7,
            "box:float32[]": [0.5, 1.5],
        },
        {"path": "a/2.jpg", "label": 3, "split": "test", "age:int64": None, "box:float32[]": []},
    ]
    table[0]["tags[]"] = ["é", "y z"]
    path = written(tmp_path, "\n\n".join(json.dumps(row) for row in table), "m.jsonl")
    first, second = rows(path)
    assert first[:5] == ("a/1.jpg", "cat", "train", 10, None)
    assert first.features == (
        examples.int64_feature(-7),
        examples.float_feature(0.5, 1.5),
        examples.bytes_feature("é".encode(), b"y z"),
    )
    assert second[:3] == ("a/2.jpg", "3", "test")
    assert second.features == (examples.int64_feature(0), examples.float_feature(), examples.bytes_feature())


@pytest.mark.parametrize(
    ("header", "row", "what"),
    [
        ("path,label", ",cat", "row 2: its path is empty"),
        ("path,label", "a.jpg,", "row 2: label '' is empty or has white space around it or a line break"),
        ("path,label", "a.jpg, cat", "row 2: label ' cat' is empty or has white space around it or a line break"),
        ("path,label,split", "a.jpg,cat,Train", "row 2: split 'Train' is not a-z, 0-9 and _, a letter first"),
        ("path,label,bytes", "a.jpg,cat,many", "row 2: bytes 'many' is no whole number"),
        ("path,label,bytes", "a.jpg,cat,-5", "row 2: bytes '-5' is no whole number"),
        ("path,label,n:int64", "a.jpg,cat,1.5", "row 2: column 'n' holds '1.5', no int64"),
        ("path,label,n:int64", f"a.jpg,cat,{1 << 63}", f"row 2: column 'n' holds '{1 << 63}', no int64"),
        ("path,label,x:float32", "a.jpg,cat,1e39", "row 2: column 'x' holds '1e39', no float32"),
        ("path,label,x:float32[]", "a.jpg,cat,1;b", "row 2: column 'x' holds '1;b', no float32[]"),
        ("path,label", "a.jpg", "row 2: 1 cells, the header has 2"),
        ("path,label", "a.jpg,cat,dog", "row 2: 3 cells, the header has 2"),
    ],
)
def test_rows_that_cannot_be_read_are_named(tmp_path: Path, header: str, row: str, what: str) -> None:
    path = written(tmp_path, f"{header}\n{row}\n")
    with pytest.raises(ImageShardsError) as caught:
        rows(path)
    assert str(caught.value) == f"--manifest '{path}': {what}"


@pytest.mark.parametrize(
    ("path", "write"),
    [
        ("cat//1.jpg", "'cat/1.jpg'"),
        ("cat/./1.jpg", "'cat/1.jpg'"),
        ("cat/../cat/1.jpg", "'cat/1.jpg'"),
        (".//cat/1.jpg", "'cat/1.jpg'"),
        ("././cat/1.jpg", "'cat/1.jpg'"),
        ("cat/1.jpg/", "'cat/1.jpg'"),
        ("/in//cat/1.jpg", "'/in/cat/1.jpg'"),
        ("//in/cat/1.jpg", "'/in/cat/1.jpg'"),
        ("../tables/cat/1.jpg", "'cat/1.jpg'"),
        ("../elsewhere//1.jpg", "'../elsewhere/1.jpg'"),
    ],
)
def test_a_local_path_has_one_spelling(tmp_path: Path, path: str, write: str) -> None:
    table = written(tmp_path, f"path,label\n{path},cat\n")
    with pytest.raises(ImageShardsError) as caught:
        rows(table)
    assert str(caught.value) == (
        f"--manifest '{table}': row 2: path {path!r} holds '//', '.' or '..', which give one image several names: "
        f"write {write}"
    )


def test_a_path_may_lead_out_of_the_input(tmp_path: Path) -> None:
    assert [row.path for row in rows(written(tmp_path, "path,label\n../images/1.jpg,cat\n"))] == ["../images/1.jpg"]


def test_a_remote_path_may_hold_anything(tmp_path: Path) -> None:
    table = written(tmp_path, "path,label\na//b/../1.jpg,cat\ngs://b/in//1.jpg,cat\n")
    remote = RowReader(str(table), read_header(str(table), 1), 1, "gs://bucket/in")
    found = [row.path for start, end in remote.ranges() for row in remote.rows(start, end)]
    assert found == ["a//b/../1.jpg", "gs://b/in//1.jpg"]


def test_a_file_url_is_a_local_path(photos: Path, tmp_path: Path) -> None:
    table = [{"path": name, "label": "x"} for name in sorted(make.files(photos))]
    table.append({"path": f"file://{photos}/{table[0]['path']}", "label": "x"})
    path = jsonl(tmp_path / "m.jsonl", table)
    finished = make.job(photos, tmp_path / "out", "--layout", "manifest", "--manifest", path)
    assert finished.code == 1
    assert "is given twice" in finished.err


@pytest.mark.parametrize("path", ["a\0.jpg", "a\ud800.jpg"])
def test_a_path_that_no_file_can_have_names_its_row(tmp_path: Path, path: str) -> None:
    table = written(tmp_path, json.dumps({"path": path, "label": "cat"}), "m.jsonl")
    with pytest.raises(ImageShardsError) as caught:
        rows(table)
    assert str(caught.value) == f"--manifest '{table}': line at byte 0: no file can have the path {path!r}"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("m.csv", b'path,label\na.jpg,"cat\n'),  # a quote that never ends
        ("m.csv", b"path,label\na.jpg,c\xe9t\n"),  # no UTF-8
        ("m.jsonl", b'{"path":"a","label":"b"}\n{"path"\n'),
        ("m.jsonl", b'{"path":"a","label":"b"}\n[1]\n'),
        ("m.jsonl", b'{"path":"a","label":"b"}\n"text"\n'),
        ("m.jsonl", b'{"path":"a","label":"b"}\n{"path":"a","label":"b","new":1}\n'),
        ("m.jsonl", b'{"path":"a","label":"b"}\n{"path":"a","label":"\xe9"}\n'),
    ],
)
def test_a_broken_manifest_is_one_line_that_names_it(tmp_path: Path, name: str, data: bytes) -> None:
    path = written(tmp_path, data, name)
    finished = make.run("--layout", "manifest", "--manifest", path, "--output", tmp_path / "out", "--name", "x")
    assert finished.code in (1, 2), finished
    assert not (tmp_path / "out").exists() or make.files(tmp_path / "out") == {}
    assert finished.err.startswith(f"error: --manifest '{path}': "), finished.err
    assert finished.err.count("\n") == 1


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_jsonl_cut_at_any_byte_gives_every_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, end: str
) -> None:
    monkeypatch.setattr(manifest_rows, "_PIECE_BYTES", piece)
    table = [json.dumps({"path": f"{number}é", "label": "a"}, ensure_ascii=False) for number in range(4)]
    path = written(tmp_path, "\n".join(table) + end, "m.jsonl")
    some, size = reader(path), path.stat().st_size
    for cut in range(size + 1):
        found = [row.path for bounds in ((0, cut), (cut, size)) for row in some.rows(*bounds)]
        assert found == ["0é", "1é", "2é", "3é"], cut


@settings(max_examples=30)
@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=30), min_size=1, max_size=12),
    st.lists(st.integers(0, 600), max_size=5),
    st.integers(1, 200),
)
def test_jsonl_in_any_ranges_gives_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, notes: list[str], cuts: list[int], piece: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "m.jsonl"
    table = [
        json.dumps({"path": str(number), "label": "a", "note": note}, ensure_ascii=False)
        for number, note in enumerate(notes)
    ]
    path.write_bytes("\n".join(table).encode())
    size = path.stat().st_size
    bounds = sorted({0, size, *(min(cut, size) for cut in cuts)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_rows, "_PIECE_BYTES", piece)
        some = reader(path)
        found = [row.path for start, end in itertools.pairwise(bounds) for row in some.rows(start, end)]
    assert found == [str(number) for number in range(len(notes))]


def test_a_large_jsonl_is_cut_and_a_csv_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_rows, "_RANGE_BYTES", 100)
    text = "\n".join(json.dumps({"path": str(number), "label": "a"}) for number in range(20))
    assert len(reader(written(tmp_path, text, "m.jsonl")).ranges()) == -(-len(text) // 100)
    assert len(reader(written(tmp_path, "path,label\n" + "x,y\n" * 100)).ranges()) == 1


# --- a job


def table_of(photos: Path, absolute: bool = False) -> list[dict]:
    table = []
    for number, name in enumerate(sorted(make.files(photos))):
        split = "train" if number % 4 else "validation"
        where = f"{photos}/{name}" if absolute else name
        table.append(
            {
                "path": where,
                "label": name.split("/")[0],
                "split": split,
                "number:int64": number,
                "tags[]": ["a"] * (number % 3),
            }
        )
    return table


def jsonl(path: Path, table: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in table))
    return path


def test_a_manifest_job_writes_its_features(photos: Path, tmp_path: Path) -> None:
    import tensorflow as tf

    table = table_of(photos)
    path = jsonl(tmp_path / "m.jsonl", table)
    version = make.published(photos, tmp_path / "out", "--layout", "manifest", "--manifest", path)
    manifest = make.manifest(version)
    assert manifest["features"] == [
        {"name": "number", "dtype": "int64", "list": False},
        {"name": "tags", "dtype": "bytes", "list": True},
    ]
    expected = {row["path"]: (row["split"], row["number:int64"], len(row["tags[]"])) for row in table}
    found = {}
    for shard in make.shard_files(version):
        for record in tf.data.TFRecordDataset([str(shard)]).as_numpy_iterator():
            feature = tf.train.Example.FromString(record).features.feature
            found[feature["filename"].bytes_list.value[0].decode()] = (
                shard.name.split("-")[1].split(".")[0],
                feature["number"].int64_list.value[0],
                len(feature["tags"].bytes_list.value),
            )
    assert found == expected
    import tensorflow_datasets as tfds

    features = tfds.builder_from_directory(str(version)).info.features
    assert features["number"].np_dtype == "int64"
    assert next(iter(tfds.load("photos:1.0.0", data_dir=str(tmp_path / "out"), split="train")))["tags"].shape.rank == 1


def test_csv_jsonl_absolute_and_relative_paths_give_the_same_manifest(photos: Path, tmp_path: Path) -> None:
    table = [{key: row[key] for key in ("path", "label", "split")} for row in table_of(photos)]
    absolute = [{**row, "path": f"{photos}/{row['path']}"} for row in table]
    csv_file = tmp_path / "m.csv"
    csv_file.write_text(
        "split,path,label\n" + "".join(f"{row['split']},{row['path']},{row['label']}\n" for row in table)
    )
    manifests = {
        (
            make.published(photos, tmp_path / str(number), "--layout", "manifest", "--manifest", path) / "manifest.json"
        ).read_bytes()
        for number, path in enumerate(
            [csv_file, jsonl(tmp_path / "a.jsonl", table[::-1]), jsonl(tmp_path / "b.jsonl", absolute)]
        )
    }
    assert len(manifests) == 1


def test_remote_sizes_come_from_listings_never_from_a_request_a_row(gcs: Gcs, photos: Path, tmp_path: Path) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "in", photos)
    url = f"gs://{bucket}/in"
    table = [{key: row[key] for key in ("path", "label")} for row in table_of(photos)]
    remote = f"gs://{bucket}/m.jsonl"
    gcs.put(bucket, "m.jsonl", jsonl(tmp_path / "m.jsonl", table).read_bytes())
    before = len(gcs.requests())
    version = make.published(url, tmp_path / "out", "--layout", "manifest", "--manifest", remote)
    since = gcs.requests()[before:]
    assert make.manifest(version)["records"] == 40
    reads = [request.object_read for request in since if request.object_read and request.object_read.startswith("in/")]
    assert sorted(reads) == sorted(f"in/{row['path']}" for row in table for _ in range(2)), "sampled and written"
    lists = [request.listed_prefix for request in since if (request.listed_prefix or "").startswith("in/")]
    assert sorted(lists) == ["in/ant/", "in/bee/", "in/cat/"]


def test_a_row_without_a_file_is_a_reject(photos: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(photos, tmp_path / "in")
    os.mkfifo(folder / "ant" / "pipe.jpg")
    lost = ["ant/no.jpg", "ant/pipe.jpg", "ant", "ant/0001.jpg/x.jpg"]
    more = {"label": "ant", "split": "train", "number:int64": 1, "tags[]": []}
    path = jsonl(tmp_path / "m.jsonl", [*table_of(folder), *({"path": name, **more} for name in lost)])
    flags = ("--layout", "manifest", "--manifest", path, "--max_reject_fraction", "0.2")
    version = make.published(folder, tmp_path / "out", *flags)
    assert make.manifest(version)["rejects"] == {"by_reason": {"vanished": 4}, "environment": 4}
    rejects = [json.loads(line) for line in (version / "rejects.jsonl").read_text().splitlines()]
    assert sorted(reject["path"] for reject in rejects) == sorted(lost)


def test_a_row_whose_md5_or_size_is_wrong_is_a_reject(photos: Path, tmp_path: Path) -> None:
    import hashlib

    table = []
    for number, (name, data) in enumerate(sorted(make.files(photos).items())):
        md5 = hashlib.md5(data if number else b"other").hexdigest().upper()
        table.append({"path": name, "label": "x", "md5": md5, "bytes": len(data) + (number == 1)})
    path = jsonl(tmp_path / "m.jsonl", table)
    version = make.published(
        photos, tmp_path / "out", "--layout", "manifest", "--manifest", path, "--max_reject_fraction", "0.1"
    )
    assert make.manifest(version)["rejects"]["by_reason"] == {"changed": 2}


@pytest.mark.parametrize("splits", [("train", "train"), ("train", "validation")])
def test_a_path_given_twice_is_an_error_that_names_both(photos: Path, tmp_path: Path, splits: tuple[str, str]) -> None:
    # Also in two splits: the same picture in train and validation would go unseen.
    table = [{"path": name, "label": "x", "split": "train"} for name in sorted(make.files(photos))]
    table[0]["split"] = splits[0]
    table.append({"path": table[0]["path"], "label": "y", "split": splits[1]})
    path = jsonl(tmp_path / "m.jsonl", table)
    finished = make.job(photos, tmp_path / "out", "--layout", "manifest", "--manifest", path)
    assert finished.code == 1, finished
    assert finished.err.count("\n") == 1
    assert repr(table[0]["path"]) in finished.err
    assert not list((tmp_path / "out").rglob("manifest.json"))


@pytest.mark.parametrize("more", [{"bytes": 5}, {"md5": "0" * 32}, {"n:int64": 3}, {}], ids=lambda more: "".join(more))
def test_a_path_given_twice_with_more_in_one_row_is_the_same_error(photos: Path, tmp_path: Path, more: dict) -> None:
    names = sorted(make.files(photos))
    table = [{"path": name, "label": "x", **dict.fromkeys(more)} for name in names]
    table.append({"path": names[0], "label": "x", **more})
    path = jsonl(tmp_path / "m.jsonl", table)
    finished = make.job(photos, tmp_path / "out", "--layout", "manifest", "--manifest", path)
    assert finished.code == 1
    assert (
        finished.err
        == f"error: input {names[0]!r} is given twice, with label 'x' and with label 'x': keep one of the two\n"
    )


def test_a_manifest_job_again_writes_nothing_and_sees_a_changed_feature(photos: Path, tmp_path: Path) -> None:
    table = table_of(photos)
    path = jsonl(tmp_path / "m.jsonl", table)
    flags = ("--layout", "manifest", "--manifest", path)
    version = make.published(photos, tmp_path / "out", *flags)
    before = make.traces(version.parent)
    assert make.job(photos, tmp_path / "out", *flags).out.startswith("already published")
    table[3]["number:int64"] = 999
    jsonl(path, table)
    finished = make.job(photos, tmp_path / "out", *flags)
    assert finished.code == 1
    assert "40 images were listed then, 40 now, 1 of 2 shards differ" in finished.err
    assert make.traces(version.parent) == before


def test_splits_and_a_split_column_exclude_each_other(photos: Path, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "m.jsonl", table_of(photos))
    finished = make.job(photos, tmp_path / "out", "--layout", "manifest", "--manifest", path, "--splits", "train=1")
    assert (finished.code, finished.err) == (
        2,
        "error: --splits 'train=1': leave it out, the manifest has a column 'split'\n",
    )


def test_a_label_that_is_not_in_the_labels_file_is_one_line(photos: Path, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "m.jsonl", table_of(photos))
    (tmp_path / "labels.txt").write_text("ant\nbee\n")
    finished = make.job(
        photos, tmp_path / "out", "--layout", "manifest", "--manifest", path, "--labels_file", tmp_path / "labels.txt"
    )
    assert finished.code in (1, 2)
    assert finished.err == "error: class 'cat' is not in the labels file: add a line for it\n"
