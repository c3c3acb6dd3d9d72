"""Record tables: a column is one range of the file, NumPy alone reads them, and nothing else passes for one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from beam_pipeline import schema
from beam_pipeline.images import formats
from beam_pipeline.schema import example, table
from tests import make

ROWS = {"path": "ü.png", "label": "a", "age:int64": "-7", "score:float32": "0.1", "tags:int64[]": "1;2", "note": "x"}


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images and a reject, with columns of every kind."""
    folder = tmp_path_factory.mktemp("table")
    (folder / "in").mkdir()
    Image.new("RGB", (30, 20)).save(
        folder / "in" / "ü.png", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"
    )
    (folder / "in" / "b.jpg").write_bytes(make.encoded(make.picture(48, 36)))
    (folder / "in" / "no.jpg").write_text("text")
    lines = [",".join(ROWS), ",".join(ROWS.values()), "b.jpg,b,9007199254740993,nan,,", "no.jpg,b,1,1,,"]
    (folder / "rows.csv").write_text("\n".join(lines))
    flags = ("--layout", "manifest", "--manifest", folder / "rows.csv", "--max_reject_fraction", 0.5)
    return make.published(folder / "in", folder / "out", *flags)


def test_a_row_says_what_is_known_of_a_record(version: Path) -> None:
    file = version / "index" / "photos-train.tfrecord-00000-of-00001.records.npy"
    columns = np.load(file, mmap_mode="r")
    (shard,) = make.shard_files(version)
    records = [example.features_of(record) for record in schema.unframe(shard.read_bytes())]
    paths = [example.bytes_of(record["filename"]).decode() for record in records]
    assert sorted(paths) == ["b.jpg", "ü.png"]
    sources = [(version.parents[2] / "in" / path).read_bytes() for path in paths]
    upright = {"ü.png": (30, 20), "b.jpg": (36, 48)}
    expected = {
        "bytes": np.diff([0, *np.cumsum([int(line.split()[1]) for line in index_lines(version)])]).tolist(),
        "class": [int(example.numbers_of(record["class"])[0]) for record in records],
        "source_bytes": list(map(len, sources)),
        "source_height": [upright[path][0] for path in paths],
        "source_width": [upright[path][1] for path in paths],
        "source_format": [table.SOURCE_FORMATS.index("PNG" if path == "ü.png" else "JPEG") for path in paths],
        "passthrough": [0, 0],
        "name": [table.name_hash(path) for path in paths],
        "column:age": [-7 if path == "ü.png" else 9007199254740993 for path in paths],
    }
    assert {name: columns[name].tolist() for name in expected} == expected
    assert columns.dtype.names == (*table.COLUMNS, "column:age", "column:score")
    assert [bytes(md5) for md5 in columns["source_md5"]] == [hashlib.md5(data).digest() for data in sources]
    assert (np.diff(columns["order_key"].astype(object)) > 0).all()
    score = columns["column:score"]
    assert score.dtype == np.float32 and sorted(map(str, score.tolist())) == [str(float(np.float32(0.1))), "nan"]


def index_lines(version: Path) -> list[str]:
    return next((version / "index").glob("*.idx")).read_text().splitlines()


@pytest.mark.parametrize("records", [0, 1, 1000])
def test_a_column_is_one_range_of_the_file(records: int) -> None:
    odd = dict.fromkeys(("column:x', (7", 'column:", (7', "column:\\', (7", "column:'\"', (7\n"), "<i8")
    types = {"bytes": "<u4", "source_md5": "(16,)u1", "column:größe" + "x" * 20_000: "<f4"} | odd
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 255, (records, *np.dtype(kind).shape)).ravel() for name, kind in types.items()}
    data = table.table_bytes(types, columns)
    read = table.read_table(data)
    for name, kind in types.items():
        values = columns[name].astype(np.dtype(kind).base)
        assert read[name].ravel().tolist() == values.tolist() and values.tobytes() in data
        assert read[name].shape == (records, *np.dtype(kind).shape)
        fields, size = table.table_fields(lambda stop: data[:stop], 64)
        field = fields[name]
        assert (size, field.shape) == (len(data), (records, *np.dtype(kind).shape))
        assert data[field.offset : field.offset + field.bytes] == values.tobytes()
    assert len(data) < 100_000 + 56 * records


def test_the_codes_are_those_of_what_is_read() -> None:
    assert set(table.SOURCE_FORMATS) == set(formats._READERS)


@pytest.mark.parametrize(
    "array", [np.zeros(3), np.zeros((), [("a", "u4")]), np.zeros((), [("a", "u4", 2), ("b", "u4", 3)])]
)
def test_another_array_is_no_table(array: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ValueError, match="it isn't a record table"):
        table.read_table((tmp_path / "x.npy").read_bytes())


def test_features_come_back_as_they_were_written() -> None:
    features = {
        "image": example.bytes_feature(b"\0" * 300),
        "class": example.int64_feature(-(1 << 63)),
        "size": example.int64_feature(1, (1 << 63) - 1, 300),
        "half": example.float_feature(0.5, -1.5),
        "none": example.bytes_feature(),
    }
    record = example.example(features)
    assert example.features_of(record) == features
    assert example.bytes_of(features["image"]) == b"\0" * 300
    assert [example.numbers_of(features[key]) for key in ("class", "size", "half")] == [
        (-(1 << 63),),
        (1, (1 << 63) - 1, 300),
        (0.5, -1.5),
    ]
    for data in (record[:-1], b"\x08\x01", b"", record + b"\x0a"):
        with pytest.raises(ValueError):
            example.features_of(data)
