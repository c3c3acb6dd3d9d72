"""`--layout manifest`: CSV and JSONL rows, feature columns, what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import unicodedata
from pathlib import Path

import pytest

from beam_pipeline.config import Config
from beam_pipeline.errors import UsageError
from beam_pipeline.inputs.manifest_rows import box_notice, read_header, row_refs
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.schema import example
from tests import make
from tests.conftest import reached
from tests.servers import Answer, Gcs, telling

MD5 = "0123456789abcdef" * 2
NO_LABEL = "write a name in UTF-8 without line breaks or white space around it"
AS_MANY = "write as many, and quotes around a cell with a comma"
NO_OBJECT = 'not a JSON object: write {"path": …, "label": …} in one line, or call a CSV file .csv'
NO_FILE = "correct it, or remove the row"
NO_UTF8 = "not UTF-8: save the file as UTF-8"
KEEP_ONE = (
    "keep one of the two; several boxes are one row, with lists such as 0.1;0.5 in columns such as xmin:float32[]"
)


def rows(path: Path, images: object = None) -> list[ImageRef]:
    places = {"input": str(images or path.parent), "output": "/out", "manifest": str(path)}
    header = read_header(str(path), 1)
    return list(row_refs(Config(name="x", layout="manifest", header=header, **places)))


def written(tmp_path: Path, text: str | bytes, name: str = "m.csv") -> Path:
    path = tmp_path / "tables" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def jsonl(path: Path, table: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in table))
    return path


def job(photos: object, tmp_path: Path, table: list[dict], *flags: object) -> make.Finished:
    """A job over the rows of a table, into `tmp_path`/out."""
    path = jsonl(tmp_path / "m.jsonl", table)
    return make.job(photos, tmp_path / "out", "--layout", "manifest", "--manifest", path, *flags)


def refused_job(photos: Path, tmp_path: Path, table: list[dict], line: str, *flags: object) -> None:
    """The table ends a job with exit 2 and one line; nothing is written."""
    finished = job(photos, tmp_path, table, *flags)
    assert (finished.code, finished.err) == (2, f"error: {line}\n".replace("FILE", f"--manifest '{tmp_path}/m.jsonl'"))
    assert make.files(tmp_path / "out") == {}


# --- headers


RESERVED = "has a reserved name: rename it"
NAMELESS = "has no name: give it one, or leave it out (pandas: index=False)"
TWICE = "is repeated: keep one"
CLASSLESS = "add it: every row needs a class, the same one if there are none"
EMPTY = "it is empty; give a CSV or JSONL file with rows"


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("m.csv", "label,x\n", "no column 'path' among 'label', 'x'; add it"),
        *(
            ("m.csv", f"x,{name},label\n", f"no column 'path' among 'x', {name!r}, 'label'; rename {name!r} to path")
            for name in ("filename", "image", "file", "img_path", "Image_ID", "url")
        ),
        *(
            ("m.csv", f"path,{name}\n", f"no column 'label' among 'path', {name!r}; rename {name!r} to label")
            for name in ("class", "category", "target", " label", "Label")
        ),
        ("m.csv", "path,age:int64\n", f"no column 'label' among 'path', 'age:int64'; {CLASSLESS}"),
        *(
            ("m.csv", f"path,label,{column}\n", f"column '{column}' {RESERVED}")
            for column in ("image", "class:int64", "size:int64[]", "split:int64")
        ),
        ("m.csv", "path,label,:int64\n", f"column ':int64' {NAMELESS}"),
        ("m.csv", ",path,label\n", f"column '' {NAMELESS}"),
        *(
            (
                "m.csv",
                f"path{sep}label\n",
                f"no column 'path' among {f'path{sep}label'!r}; separate columns by commas, not by {sep!r}",
            )
            for sep in ";\t|"
        ),
        ("m.csv", "path,label,a,a:int64\n", f"column 'a' {TWICE}"),
        ("m.csv", "path,label,path\n", f"column 'path' {TWICE}"),
        ("m.csv", "path,label,a:int32\n", "column 'a:int32' has no type int64, float32 or bytes: declare one"),
        ("m.csv", "", EMPTY),
        ("m.jsonl", "\n\r\n", EMPTY),
        ("m.jsonl", "path,label\n", f"line 1: {NO_OBJECT}"),
        ("m.jsonl", '{"path":"a","label":"b","\\ud800":1}', "column '\\ud800' has a name that isn't UTF-8: rename it"),
        ("m.csv", b"\xff\xfe\n", f"line 1: {NO_UTF8}"),
        ("m.csv", 'path,"label\n', "line 1: can't be read, unexpected end of data: correct it"),
        ("m.csv", "path,label\n", "it has a header but no row; add a row for each image"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_files_whose_header_cannot_be_used_or_without_rows_are_exit_2(
    tmp_path: Path, name: str, data: str | bytes, what: str
) -> None:
    path = written(tmp_path, data, name)
    finished = make.run("--layout", "manifest", "--manifest", path, "--output", tmp_path / "out", "--name", "x")
    assert (finished.code, finished.err) == (2, f"error: --manifest '{path}': {what}\n")


# --- rows


def test_csv_rows(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "\ufeffpath,label,bytes,md5,age:int64,box:float32[],tags[],note\r\n"
        f'a/1.jpg,cat,10,{MD5.upper()},7,"0.5;1.5",x;y z,"quoted, with\nline break"\r\n'
        "\r\n"
        "./a/2.jpg,dog,,,0,,,\r\n",
    )
    first, second = rows(path)
    assert first[:5] == ("a/1.jpg", 10, bytes.fromhex(MD5), "cat", "train")
    texts = (example.bytes_feature(b"quoted, with\nline break"), example.bytes_feature(b"x", b"y z"))
    assert first.features == (example.int64_feature(7), example.float_feature(0.5, 1.5), *texts)
    assert second[:5] == ("a/2.jpg", 0, "", "dog", "train"), "there is no such file"
    nothing = (example.bytes_feature(b""), example.bytes_feature())
    assert second.features == (example.int64_feature(0), example.float_feature(), *nothing)


def test_jsonl_rows_are_the_same(tmp_path: Path) -> None:
    table = [
        {"path": "a/1.jpg", "label": "cat", "split": "train", "bytes": 10, "age:int64": -7, "box:float32[]": [0.5, 1],
         "tags[]": ["é", "y z"]},
        {"path": "a/2.jpg", "label": 3, "split": "test", "age:int64": 0, "box:float32[]": []},
    ]  # fmt: skip
    first, second = rows(written(tmp_path, "\n\n".join(json.dumps(row) for row in table), "m.jsonl"))
    assert first[:5] == ("a/1.jpg", 10, "", "cat", "train")
    tags = example.bytes_feature("é".encode(), b"y z")
    assert first.features == (example.int64_feature(-7), example.float_feature(0.5, 1), tags)
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
    first, second = rows(written(tmp_path, end.join(table)))
    assert (first.path, first.features) == ("1.jpg", (example.bytes_feature(f"two{end}lines".encode()),))
    assert second.path == "2.jpg"
    objects = ['{"path": "1.jpg", "label": "cat"}', "", '{"path": "2.jpg", "label": "dog"}']
    assert [row.path for row in rows(written(tmp_path, end.join(objects), "m.jsonl"))] == ["1.jpg", "2.jpg"]


def refused(path: Path) -> str:
    """What is wrong with the row in line 2."""
    with pytest.raises(UsageError) as caught:
        rows(path)
    return str(caught.value).removeprefix(f"--manifest '{path}': line 2: ")


@pytest.mark.parametrize(
    ("column", "kind", "cells"),
    [
        ("split", "split (a-z, 0-9 and _, a letter first)", ["Train", "", "../up"]),
        ("bytes", "size in bytes", ["many", "-5", "9" * 19]),
        ("md5", "MD5 of 32 hexadecimal digits", ["zz", "١" * 32]),
        ("n:int64", "int64", ["1.5", str(1 << 63), "", " ", "nan"]),
        ("n:int64[]", "int64[]", ["1;;3", ";1", "1;;", "1; ;3", ";"]),
        ("x:float32", "float32", ["1e39", "0x10", "1_000"]),
        ("x:float32[]", "float32[]", ["1;b"]),
    ],
)
def test_cells_that_cannot_be_read_are_named(tmp_path: Path, column: str, kind: str, cells: list[str]) -> None:
    for cell in cells:
        what = f"column '{column.partition(':')[0]}' holds '{cell}', no {kind}: correct it"
        assert refused(written(tmp_path, f"path,label,{column}\na.jpg,cat,{cell}\n")) == what
        line = json.dumps({"path": "a.jpg", "label": "cat", column: cell})
        assert refused(written(tmp_path, f"\n{line}\n", "m.jsonl")) == what


FIRST = {
    "csv": "path,label",
    "jsonl": '{"path":"x","label":"b","n:float32":1,"t":"","bytes":1,"md5":"","y:int64":1,"z:int64[]":[]}',
}
NO_CLASS = (
    "is a missing value, or several classes: correct it, put several in a column such as tags[], or list that class in "
    "--labels_file"
)
NO_SIZE = "needs its size, which http:// and https:// don't list: give it in a column bytes"


@pytest.mark.parametrize(
    ("form", "row", "what"),
    [
        ("csv", ",cat", f"no file can have the path '': {NO_FILE}"),
        ("csv", "a.jpg,", f"label '': {NO_LABEL}"),
        ("csv", "a.jpg, cat", f"label ' cat': {NO_LABEL}"),
        ("csv", "a.jpg", f"1 cell, the header has 2: {AS_MANY}"),
        ("csv", "a.jpg,cat,dog", f"3 cells, the header has 2: {AS_MANY}"),
        ("csv", 'a.jpg,"cat\n\n', "can't be read, unexpected end of data: correct it"),
        ("jsonl", "{}", f"no file can have the path '': {NO_FILE}"),
        ("jsonl", '{"path":["a"],"label":"b"}', f"no file can have the path ['a']: {NO_FILE}"),
        ("jsonl", '{"path":"a\\u0000.jpg","label":"cat"}', f"no file can have the path 'a\\x00.jpg': {NO_FILE}"),
        ("jsonl", '{"path":"a\\ud800","label":"b"}', f"no file can have the path 'a\\ud800': {NO_FILE}"),
        *(("csv", f"a.jpg,{nan}", f"label {nan!r} {NO_CLASS}") for nan in ("nan", "NaN", "-nan", "<NA>")),
        *(("csv", f"a.jpg,{two}", f"label {two!r} {NO_CLASS}") for two in ("cat;dog", "Mass|Nodule", "cat;")),
        *(("csv", f"{url},cat", f"{url} {NO_SIZE}") for url in ("http://x.test/1.jpg", "https://x.test/1.jpg")),
        ("jsonl", '{"path":"a.jpg"}', f"label None: {NO_LABEL}"),
        ("jsonl", '{"path":"a.jpg","label":NaN}', f"label nan: {NO_LABEL}"),
        ("jsonl", '{"path":"a.jpg","label":null}', f"label None: {NO_LABEL}"),
        ("jsonl", '{"path":"a.jpg","label":"b","y:int64":null}', "column 'y' holds None, no int64: correct it"),
        ("jsonl", '{"path":"a.jpg","label":"b"}', "column 'y' holds None, no int64: correct it"),
        (
            "jsonl",
            '{"path":"a.jpg","label":"b","y:int64":2,"z:int64[]":[1,null]}',
            "column 'z' holds [1, None], no int64[]: correct it",
        ),
        ("jsonl", '{"path":"a.jpg","label":["cat"]}', f"label ['cat']: {NO_LABEL}"),
        ("jsonl", '{"path":"a","path":"b","label":"b"}', "column 'path' is repeated: keep one"),
        ("jsonl", '{"path":"a","label":"b","new":1}', "column 'new' is not in the first row: name every column there"),
        ("jsonl", '{"path":"a","label":"b","t":"\\ud800"}', "column 't' holds '\\ud800', no bytes: correct it"),
        ("jsonl", '{"path":"a","label":"b","bytes":-1}', "column 'bytes' holds -1, no size in bytes: correct it"),
        ("jsonl", '{"path":"a","label":"b","n:float32":1e400}', "column 'n' holds inf, no float32: correct it"),
        *(("jsonl", row, NO_OBJECT) for row in ('{"path"', '"text"', '{"path":' + "1" * 5000, "[" * 100_000)),
        ("jsonl", '{"path":"a","label":"b","t":' + "[" * 100_000 + "]" * 100_000 + "}", NO_OBJECT),
    ],
    ids=lambda value: value[:40],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, form: str, row: str, what: str) -> None:
    assert refused(written(tmp_path, f"{FIRST[form]}\n{row}\n", f"m.{form}")) == what


@pytest.mark.parametrize("cell", ["", " ", None, "nan"])
def test_an_empty_float_is_nan_and_empty_text_stays_empty(tmp_path: Path, cell: str | None) -> None:
    nan = float("nan")
    expected = (example.float_feature(1, nan, 3), example.bytes_feature(b""), example.float_feature(nan))
    tables = {
        "m.jsonl": [{"path": "a", "label": "b", "l:float32[]": [1, cell, 3], "t": "", "w:float32": cell}],
        "n.jsonl": [{"path": "a", "label": "b", "l:float32[]": [1, cell, 3], "t": None, "w:float32": cell}],
    }
    for name, table in tables.items():
        (ref,) = rows(written(tmp_path, "".join(map(json.dumps, table)), name))
        assert ref.features == expected
    if cell is not None:
        (ref,) = rows(written(tmp_path, f"path,label,l:float32[],t,w:float32\na,b,1;{cell};3,,{cell}\n"))
        assert ref.features == expected


def test_a_labels_file_may_list_odd_classes_and_gives_the_form_of_their_letters(tmp_path: Path) -> None:
    nfc, nfd = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    path = written(tmp_path, f"path,label\na,nan\nb,cat;dog\nc,{nfd}\nd,{nfc}\n")
    places = {"input": str(tmp_path), "output": "/out", "manifest": str(path), "labels": ("nan", "cat;dog", nfc)}
    found = [ref.label for ref in row_refs(Config(name="x", layout="manifest", header=("path", "label"), **places))]
    assert found == ["nan", "cat;dog", nfc, nfc]


def test_one_class_in_two_unicode_forms_ends_a_job_with_exit_2(photos: Path, tmp_path: Path) -> None:
    forms = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    table = [{"path": name, "label": forms[number % 2]} for number, name in enumerate(sorted(make.files(photos)))]
    what = "classes 'cafe\\u0301' and 'caf\\xe9' are one name in two Unicode forms: rename one, or merge the two"
    refused_job(photos, tmp_path, table, what)


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "path,label\na.jpg,größe\n".encode("latin-1"))
    assert refused(path) == NO_UTF8


@pytest.mark.parametrize(
    ("place", "given", "kept"),
    [
        (None, "cat//1.jpg", "cat/1.jpg"),
        (None, "cat/../cat/1.jpg", "cat/1.jpg"),
        (None, "././cat/1.jpg/", "cat/1.jpg"),
        (None, "../tables/cat/1.jpg", "cat/1.jpg"),
        (None, "../elsewhere//1.jpg", "../elsewhere/1.jpg"),
        ("/in", "file:///in/1.jpg", "1.jpg"),
        ("/in", "//in/cat/./1.jpg", "cat/1.jpg"),
        ("gs://bucket/in", "a//b/../1.jpg", "a//b/../1.jpg"),
        ("gs://bucket/in", "gs://b/in//1.jpg", "gs://b/in//1.jpg"),
    ],
)
def test_a_local_path_has_one_spelling_and_a_remote_one_stays(
    tmp_path: Path, place: str | None, given: str, kept: str
) -> None:
    assert [row.path for row in rows(written(tmp_path, f"path,label\n{given},cat\n"), place)] == [kept]


# --- a job


def table_of(photos: Path) -> list[dict]:
    return [
        {"path": name, "label": name.split("/")[0], "split": "train" if number % 4 else "validation",
         "number:int64": number, "tags[]": ["a"] * (number % 3)}
        for number, name in enumerate(sorted(make.files(photos)))
    ]  # fmt: skip


def test_a_manifest_job_writes_its_features(photos: Path, tmp_path: Path) -> None:
    import tensorflow_datasets as tfds

    table, version = table_of(photos), tmp_path / "out/photos/1.0.0"
    assert job(photos, tmp_path, table).code == 0
    assert make.manifest(version)["features"] == [
        {"name": "number", "dtype": "int64", "list": False},
        {"name": "tags", "dtype": "bytes", "list": True},
    ]
    assert tfds.builder_from_directory(str(version)).info.features["number"].np_dtype == "int64"
    found = {
        row["filename"].decode(): (split, row["number"], list(row["tags"]))
        for split in ("train", "validation")
        for row in tfds.as_numpy(tfds.load("photos:1.0.0", data_dir=str(tmp_path / "out"), split=split))
    }
    assert found == {row["path"]: (row["split"], row["number:int64"], [b"a"] * len(row["tags[]"])) for row in table}


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


def test_rows_with_sizes_need_no_listing_of_a_bucket_that_refuses_it(
    tmp_path: Path,
) -> None:
    table = [{"path": f"{folder}/{number}.jpg", "label": "x", "bytes": 5} for folder in "ab" for number in range(9)]
    refuses = telling(Answer(403, words="may not list"))
    with refuses as server, reached({"STORAGE_EMULATOR_HOST": server.url}):
        refs = rows(jsonl(tmp_path / "m.jsonl", table), "gs://bucket/in")
    assert {ref.source_bytes for ref in refs} == {5}
    assert len(server.requests) <= 1, "which would show archives"


def test_rows_without_a_file_and_with_another_md5_or_size_are_rejects(photos: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(photos, tmp_path / "in")
    os.mkfifo(folder / "ant" / "pipe.jpg")
    reasons = dict.fromkeys(["ant/no.jpg", "ant/pipe.jpg", "ant", "ant/0001.jpg/x.jpg"], "vanished")
    table = [{"path": name, "label": "x", "md5": "", "bytes": None} for name in reasons]
    for number, (name, data) in enumerate(sorted(make.files(photos).items())):
        md5 = hashlib.md5(data if number else b"other").hexdigest().upper()
        table.append({"path": name, "label": "x", "md5": md5, "bytes": len(data) + (number == 1)})
    reasons |= dict.fromkeys(sorted(make.files(photos))[:2], "changed")
    version = tmp_path / "out/photos/1.0.0"
    assert job(folder, tmp_path, table, "--max_reject_fraction", "0.2").code == 0
    assert make.manifest(version)["rejects"] == {"by_reason": {"vanished": 4, "changed": 2}, "environment": 6}
    assert {reject["path"]: reject["reason"] for reject in make.rejects(version)} == reasons


def test_a_path_given_twice_is_an_error_that_names_both(photos: Path, tmp_path: Path) -> None:
    names = sorted(make.files(photos))
    for split, told in ({}, ""), ({"split": "train"}, " in train"):
        table = [{"path": name, "label": "x", **split} for name in names]
        both = [*table, {**table[0], "path": f"file://{photos}/{names[0]}", "label": "y"}]
        what = f"FILE: path {names[0]!r} is given twice, with label 'x'{told} and with label 'y'{told}: {KEEP_ONE}"
        refused_job(photos, tmp_path, both, what)


BOXES = ("box", "BBox", "boxes:bytes", "object/bbox/xmin", "bounding_box", "y_max", "xywh")


@pytest.mark.parametrize(
    ("column", "cells", "is_box"),
    [
        *((name, "x", True) for name in BOXES),
        *((name, "x", False) for name in ("mailbox", "boxer", "inbox", "toolboxes", "max", "oxymax")),
        ("where:float32[]", "1;2;3;4", True),
        ("where:float32[]", "", False),
        ("where:float32[]", "1;2;3", False),
        ("where", "1;2;3;4", False),
    ],
)
def test_columns_that_look_like_boxes_are_a_warning(tmp_path: Path, column: str, cells: str, is_box: bool) -> None:
    table = f"path,label,age:int64,{column}\na.jpg,cat,3,{cells}\nb.jpg,cat,3,{cells}\n"
    url = str(written(tmp_path, table))
    header = read_header(url, 1)
    notice = box_notice(Config(layout="manifest", manifest=url, output="/nowhere", name="x", header=header))
    assert (notice or "").startswith(f"{column.partition(':')[0]!r} looks like a box and") is is_box


def test_the_warning_of_boxes_comes_before_the_job(photos: Path, tmp_path: Path) -> None:
    table = [{"path": name, "label": "x", "place:float32[]": [0, 0, 1, 1], "box": ""} for name in make.files(photos)]
    assert job(photos, tmp_path, table).err == (
        "warning: 'box', 'place' look like boxes and won't be moved with the pixels: boxes in pixels, of upright "
        "images, need --image_size none, boxes as fractions also fit --resize_mode stretch, shorter and longer\n"
    )
