"""`--layout manifest`: CSV and JSONL rows, feature columns, what is refused."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import pytest

from beam_pipeline.config import Config
from beam_pipeline.errors import UsageError
from beam_pipeline.inputs.manifest_rows import read_header, row_refs
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.schema import example
from beam_pipeline.schema.example import Column, columns
from tests import make
from tests.servers import Gcs

MD5 = "0123456789abcdef" * 2
NO_LABEL = "is no name of a class: write UTF-8 text without white space around it or line breaks"
NO_SPLIT = "is not a-z, 0-9 and _, a letter first: rename it"
NO_SIZE = "is no whole number: write the size, or nothing"
NO_MD5 = "is not 32 hexadecimal digits: write the image's MD5, or nothing"
AS_MANY = "write as many, and quotes around a cell with a comma"
NO_OBJECT = 'no JSON object: write {"path": …, "label": …} in one line, or call a CSV file .csv'
ONE = "write one, or nothing"
NO_FILE = "correct it, or take the row out"
DEEP = "[" * 100_000


def rows(path: Path, images: object = None) -> list[ImageRef]:
    places = {"input": str(images or path.parent), "output": "/out", "manifest": str(path)}
    header = read_header(str(path), 1)
    return list(row_refs(Config(name="x", layout="manifest", header=header, **places)))


def written(tmp_path: Path, text: str | bytes, name: str = "m.csv") -> Path:
    path = tmp_path / "tables" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused_file(path: object, tmp_path: Path) -> str:
    """What is wrong with a manifest, by a command that exits with 2."""
    finished = make.run("--layout", "manifest", "--manifest", path, "--output", tmp_path / "out", "--name", "x")
    start = f"error: --manifest '{path}': "
    assert (finished.code, finished.err.count("\n")) == (2, 1), finished
    assert finished.err.startswith(start), finished.err
    return finished.err.removeprefix(start).removesuffix("\n")


def jsonl(path: Path, table: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in table))
    return path


def job(photos: object, tmp_path: Path, table: list[dict], *flags: object) -> make.Finished:
    """A job over the rows of a table, into `tmp_path`/out."""
    path = jsonl(tmp_path / "m.jsonl", table)
    return make.job(photos, tmp_path / "out", "--layout", "manifest", "--manifest", path, *flags)


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
    assert refused_file(written(tmp_path, f"{header}\n"), tmp_path) == what


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        *(
            (name, data, "it is empty; give a CSV or JSONL file with rows")
            for name in ("m.csv", "m.jsonl")
            for data in (b"", b"\n\r\n")
        ),
        ("m.jsonl", b"path,label\n", f"row 1: {NO_OBJECT}"),
        ("m.jsonl", b"[1]\n", f"row 1: {NO_OBJECT}"),
        ("m.jsonl", DEEP.encode(), f"row 1: {NO_OBJECT}"),
        ("m.jsonl", b'{"path":"a","label":"b","\\ud800":1}', "column '\\ud800' has a name that isn't UTF-8: rename it"),
        ("m.csv", b"\xff\xfe\n", "row 1: not UTF-8: save the file as UTF-8"),
        ("m.csv", b'path,"label\n', "row 1: no CSV, unexpected end of data: correct it"),
        ("m.csv", b"path,label\n", "it has a header but no row; add a row for each image"),
    ],
)
def test_files_without_a_header_or_rows_are_exit_2(tmp_path: Path, name: str, data: bytes, what: str) -> None:
    assert refused_file(written(tmp_path, data, name), tmp_path) == what


def test_a_missing_manifest_is_exit_2(tmp_path: Path, gcs: Gcs) -> None:
    for url in (tmp_path / "no.csv", f"gs://{gcs.new_bucket()}/no.csv", "gs://no-such-bucket/no.jsonl"):
        assert refused_file(url, tmp_path)


# --- rows


def test_csv_rows(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "\ufeffpath,label,bytes,md5,age:int64,box:float32[],tags[],note\r\n"
        f'a/1.jpg,cat,10,{MD5.upper()},7,"0.5;1.5",x;y z,"quoted, with\nline break"\r\n'
        "\r\n"
        "./a/2.jpg,dog,,,,,,\r\n",
    )
    first, second = rows(path)
    assert first[:5] == ("a/1.jpg", 10, f"md5:{MD5}", "cat", "train")
    assert first.features == (
        example.int64_feature(7),
        example.float_feature(0.5, 1.5),
        example.bytes_feature(b"quoted, with\nline break"),
        example.bytes_feature(b"x", b"y z"),
    )
    assert second[:5] == ("a/2.jpg", 0, "", "dog", "train"), "there is no such file"
    assert second.features == (
        example.int64_feature(0),
        example.float_feature(),
        example.bytes_feature(b""),
        example.bytes_feature(),
    )


def test_jsonl_rows_are_the_same(tmp_path: Path) -> None:
    table = [
        {"path": "a/1.jpg", "label": "cat", "split": "train", "bytes": 10, "age:int64": -7, "box:float32[]": [0.5, 1]},
        {"path": "a/2.jpg", "label": 3, "split": "test", "age:int64": None, "box:float32[]": []},
    ]
    table[0]["tags[]"] = ["é", "y z"]
    first, second = rows(written(tmp_path, "\n\n".join(json.dumps(row) for row in table), "m.jsonl"))
    assert first[:5] == ("a/1.jpg", 10, "", "cat", "train")
    assert first.features == (
        example.int64_feature(-7),
        example.float_feature(0.5, 1),
        example.bytes_feature("é".encode(), b"y z"),
    )
    assert (second.label, second.split) == ("3", "test")
    assert second.features == (example.int64_feature(0), example.float_feature(), example.bytes_feature())


def test_list_cells_are_json_or_separated(tmp_path: Path) -> None:
    cells = ["[1, 2]", "1;2", "1|2", "1 2", "1,2"]
    table = "".join(f'{number},cat,"{cell}"\n' for number, cell in enumerate(cells))
    found = {ref.features for ref in rows(written(tmp_path, f"path,label,box:int64[]\n{table}"))}
    assert found == {(example.int64_feature(1, 2),)}


def test_a_local_image_has_its_size_and_mtime_if_the_row_does_not_say(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"12345")
    (ref,) = rows(written(tmp_path, "path,label\n1.jpg,cat\n"), tmp_path)
    assert (ref.source_bytes, ref.etag) == (5, f"mtime_ns:{(tmp_path / '1.jpg').stat().st_mtime_ns}")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_in_any_of_three_ways(tmp_path: Path, end: str) -> None:
    table = ["path,label,note", '1.jpg,cat,"two', 'lines"', "", "2.jpg,dog,"]
    objects = [json.dumps({"path": path, "label": label}) for path, label in (("1.jpg", "cat"), ("2.jpg", "dog"))]
    for name, lines in (("m.csv", table), ("m.jsonl", ["", *objects])):
        found = rows(written(tmp_path, end.join(lines), name))
        assert [(row.path, row.label) for row in found] == [("1.jpg", "cat"), ("2.jpg", "dog")]
        if name == "m.csv":
            assert found[0].features == (example.bytes_feature(f"two{end}lines".encode()),)


def test_a_long_cell_is_read_and_the_limit_of_the_process_stays(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (row,) = rows(written(tmp_path, f"path,label,note\n1.jpg,cat,{'x' * 200_000}\n"))
    assert len(row.features[0]) > 200_000
    assert csv.field_size_limit() == before


def refused(path: Path) -> str:
    """What is wrong with the second row, which exits with 2."""
    with pytest.raises(UsageError) as caught:
        rows(path)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    start = f"--manifest '{path}': row 2: "
    assert str(caught.value).startswith(start), caught.value
    return str(caught.value).removeprefix(start)


@pytest.mark.parametrize(
    ("column", "cell", "what"),
    [
        ("split", "Train", f"split 'Train' {NO_SPLIT}"),
        *(("bytes", cell, f"bytes '{cell}' {NO_SIZE}") for cell in ("many", "-5", "1_000", "١٢", "9" * 19, "1e3")),
        ("md5", "zz", f"md5 'zz' {NO_MD5}"),
        ("md5", "١" * 32, f"md5 '{'١' * 32}' {NO_MD5}"),
        *(
            ("n:int64", cell, f"column 'n' holds '{cell}', no int64: {ONE}")
            for cell in ("1.5", "1_000", "١٢", str(1 << 63))
        ),
        *(
            ("x:float32", cell, f"column 'x' holds '{cell}', no float32: {ONE}")
            for cell in ("1e39", "1e400", "1_0.5", "١", "inf", "0x10")
        ),
        ("x:float32[]", "1;b", f"column 'x' holds '1;b', no float32[]: {ONE}"),
        ("x:int64[]", DEEP, f"column 'x' holds '{'[' * 99}…, no int64[]: {ONE}"),
    ],
)
def test_cells_that_cannot_be_read_are_named(tmp_path: Path, column: str, cell: str, what: str) -> None:
    assert refused(written(tmp_path, f"path,label,{column}\na.jpg,cat,{cell}\n")) == what
    line = json.dumps({"path": "a.jpg", "label": "cat", column: cell})
    assert refused(written(tmp_path, f"\n{line}\n", "m.jsonl")) == what


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (b",cat", "its path is empty: write it, or take the row out"),
        (b"a.jpg,", f"label '' {NO_LABEL}"),
        (b"a.jpg, cat", f"label ' cat' {NO_LABEL}"),
        (b"a.jpg", f"1 cell, the header has 2: {AS_MANY}"),
        (b"a.jpg,cat,dog", f"3 cells, the header has 2: {AS_MANY}"),
        (b"a.jpg,c\xe9t", "not UTF-8: save the file as UTF-8"),
        (b'a.jpg,"cat', "no CSV, unexpected end of data: correct it"),
    ],
)
def test_csv_rows_that_cannot_be_read_are_named(tmp_path: Path, row: bytes, what: str) -> None:
    assert refused(written(tmp_path, b"path,label\n" + row + b"\n")) == what


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (b"{}", "its path is empty: write it, or take the row out"),
        (b'{"path":["a.jpg"],"label":"cat"}', "path ['a.jpg'] is no text: write one path"),
        (
            b'{"path":"a\\u0000.jpg","label":"cat"}',
            f"no file can have the path 'a\\x00.jpg': {NO_FILE}",
        ),
        (b'{"path":"a\\ud800","label":"cat"}', f"no file can have the path 'a\\ud800': {NO_FILE}"),
        (b'{"path":"a.jpg"}', f"label None {NO_LABEL}"),
        (b'{"path":"a.jpg","label":["cat"]}', f"label ['cat'] {NO_LABEL}"),
        (b'{"path":"a.jpg","label":"\\ud800"}', f"label '\\ud800' {NO_LABEL}"),
        (
            b'{"path":"a.jpg","label":"cat","x:float32":1e400}',
            "column 'x' holds inf, no float32: write one, or nothing",
        ),
        (
            b'{"path":"a.jpg","label":"cat","n":"\\ud800"}',
            "column 'n' holds '\\ud800', no bytes: write one, or nothing",
        ),
        (b'{"path":"a.jpg","label":"cat","md5":7}', f"md5 '7' {NO_MD5}"),
        (b'{"path":"a.jpg","label":"cat","bytes":[7]}', f"bytes [7] {NO_SIZE}"),
        (b'{"path":"a","label":"b","new":1}', "column 'new' is not in the first row: name every column there"),
        (b'{"path":"a","label":"\xe9"}', "not UTF-8: save the file as UTF-8"),
        *(
            (row, NO_OBJECT)
            for row in (DEEP.encode(), b'{"path"', b"[1]", b'"text"', b"path,label", b'{"path":' + b"1" * 5000)
        ),
    ],
)
def test_jsonl_rows_that_cannot_be_read_are_named(tmp_path: Path, row: bytes, what: str) -> None:
    first = b'{"path":"1.jpg","label":"cat","x:float32":1,"n":"","md5":"","bytes":1}\n'
    assert refused(written(tmp_path, first + row + b"\n", "m.jsonl")) == what


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
    assert refused(written(tmp_path, f"path,label\n{path},cat\n")) == (
        f"path {path!r} holds '//', '.' or '..', which give one image several names: write {write}"
    )


def test_a_path_may_lead_out_of_the_input(tmp_path: Path) -> None:
    assert [row.path for row in rows(written(tmp_path, "path,label\n../images/1.jpg,cat\n"))] == ["../images/1.jpg"]


def test_a_remote_path_may_hold_anything(tmp_path: Path) -> None:
    table = written(tmp_path, "path,label\na//b/../1.jpg,cat\ngs://b/in//1.jpg,cat\n")
    assert [row.path for row in rows(table, "gs://bucket/in")] == ["a//b/../1.jpg", "gs://b/in//1.jpg"]


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    (ref,) = rows(written(tmp_path, f"path,label\nfile://{tmp_path}/in/1.jpg,cat\n"), tmp_path / "in")
    assert ref.path == "1.jpg"


def test_a_bad_row_of_a_job_is_one_line_and_exit_2_and_writes_nothing(photos: Path, tmp_path: Path) -> None:
    table = [{"path": name, "label": "x", "n:int64": 1} for name in sorted(make.files(photos))]
    table[-1]["n:int64"] = "1_000"
    finished = job(photos, tmp_path, table)
    what = f"row {len(table)}: column 'n' holds '1_000', no int64: write one, or nothing"
    assert (finished.code, finished.err) == (2, f"error: --manifest '{tmp_path}/m.jsonl': {what}\n")
    assert make.files(tmp_path / "out") == {}


# --- a job


def table_of(photos: Path) -> list[dict]:
    return [
        {
            "path": name,
            "label": name.split("/")[0],
            "split": "train" if number % 4 else "validation",
            "number:int64": number,
            "tags[]": ["a"] * (number % 3),
        }
        for number, name in enumerate(sorted(make.files(photos)))
    ]


def test_a_manifest_job_writes_its_features(photos: Path, tmp_path: Path) -> None:
    import tensorflow as tf

    table, version = table_of(photos), tmp_path / "out/photos/1.0.0"
    assert job(photos, tmp_path, table).code == 0
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
    table = [*table_of(folder), *({"path": name, **more} for name in lost)]
    version = tmp_path / "out/photos/1.0.0"
    assert job(folder, tmp_path, table, "--max_reject_fraction", "0.2").code == 0
    assert make.manifest(version)["rejects"] == {"by_reason": {"vanished": 4}, "environment": 4}
    rejects = [json.loads(line) for line in (version / "rejects.jsonl").read_text().splitlines()]
    assert sorted(reject["path"] for reject in rejects) == sorted(lost)


def test_a_row_whose_md5_or_size_is_wrong_is_a_reject(photos: Path, tmp_path: Path) -> None:
    import hashlib

    table = []
    for number, (name, data) in enumerate(sorted(make.files(photos).items())):
        md5 = hashlib.md5(data if number else b"other").hexdigest().upper()
        table.append({"path": name, "label": "x", "md5": md5, "bytes": len(data) + (number == 1)})
    assert job(photos, tmp_path, table, "--max_reject_fraction", "0.1").code == 0
    version = tmp_path / "out/photos/1.0.0"
    assert make.manifest(version)["rejects"]["by_reason"] == {"changed": 2}


def test_a_path_given_twice_in_two_splits_is_an_error_that_names_both(photos: Path, tmp_path: Path) -> None:
    table = [{"path": name, "label": "x", "split": "train"} for name in sorted(make.files(photos))]
    table.append({"path": table[0]["path"], "label": "y", "split": "validation"})
    finished = job(photos, tmp_path, table)
    rows = "with label 'x' in train and with label 'y' in validation: keep one of the two"
    what = f"path {table[0]['path']!r} is given twice, {rows}"
    assert (finished.code, finished.err) == (2, f"error: --manifest '{tmp_path}/m.jsonl': {what}\n")
    assert not list((tmp_path / "out").rglob("manifest.json"))


@pytest.mark.parametrize("more", [{"bytes": 5}, {"md5": "0" * 32}, {"n:int64": 3}, {}], ids=lambda more: "".join(more))
def test_a_path_given_twice_with_more_in_one_row_is_the_same_error(photos: Path, tmp_path: Path, more: dict) -> None:
    names = sorted(make.files(photos))
    table = [{"path": name, "label": "x", **dict.fromkeys(more)} for name in names]
    finished = job(photos, tmp_path, [*table, {"path": f"file://{photos}/{names[0]}", "label": "x", **more}])
    what = f"path {names[0]!r} is given twice, with label 'x' and with label 'x': keep one of the two"
    assert (finished.code, finished.err) == (2, f"error: --manifest '{tmp_path}/m.jsonl': {what}\n")


def test_a_manifest_job_again_writes_nothing_and_sees_a_changed_feature(photos: Path, tmp_path: Path) -> None:
    table = table_of(photos)
    assert job(photos, tmp_path, table).code == 0
    before = make.traces(tmp_path / "out")
    assert job(photos, tmp_path, table).out.startswith("already published")
    table[3]["number:int64"] = 999
    finished = job(photos, tmp_path, table)
    assert finished.code == 1
    assert "40 images were listed then, 40 now, 1 of 2 shards differ" in finished.err
    assert make.traces(tmp_path / "out") == before


def test_splits_and_a_split_column_exclude_each_other(photos: Path, tmp_path: Path) -> None:
    finished = job(photos, tmp_path, table_of(photos), "--splits", "train=1")
    what = "--splits 'train=1': leave it out, the manifest has a column 'split'"
    assert (finished.code, finished.err) == (2, f"error: {what}\n")


def test_a_label_that_is_not_in_the_labels_file_is_one_line(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("ant\nbee\n")
    finished = job(photos, tmp_path, table_of(photos), "--labels_file", tmp_path / "labels.txt")
    what = f"--labels_file '{tmp_path}/labels.txt': class 'cat' is not in it: add a line for it"
    assert (finished.code, finished.err) == (2, f"error: {what}\n")
