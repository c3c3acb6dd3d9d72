"""Selecting records by class and by column: what is read, through every door, and what is refused."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.schema.example import int64_feature
from beam_pipeline.storage.local import LocalStorage
from imageshards import main
from reader.position import Position
from reader.runs import RunTable, SelectedTable
from reader.select import select
from tests import servers
from tests.reading import shards

SHARDS = {"train": [200, 65, 0, 130], "validation": [50]}
PETS = {"cat": "pet", "dog": "pet"}
COLUMNS = [("width", "int64", False, int64_feature, lambda number: [number % 7])]


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    folder = tmp_path_factory.mktemp("select") / "1.0.0"
    return reader.load_info(shards.make_dataset(folder, SHARDS, columns=COLUMNS))


def train(info: Any, **options: Any) -> Any:
    return reader.train_batches(
        info, options.pop("split", "train"), **{"global_batch_size": 8, "features": ["filename"], **options}
    )


def evaluated(info: Any, split: str, **options: Any) -> list[tuple[int, int]]:
    """(number, label) of each record that evaluation reads."""
    batches = reader.eval_batches(info, split, global_batch_size=16, features=["filename"], **options)
    return [(int(one["filename"][-10:-4]), one["class"]) for one in shards.each_record(batches)]


def odd(columns: Any) -> Any:
    return columns["column:width"] % 2 == 1


@pytest.mark.parametrize(
    ("split", "options", "classes", "wanted"),
    [
        ("train", {"classes": ["dog", "cat"]}, ("cat", "dog"), lambda n: n % 3 - 1),
        ("train", {"classes": PETS}, ("pet",), lambda n: min(n % 3, 1) - 1),
        (
            "train[:50%]",
            {"classes": {"bird": "z", "cat": "a"}},
            ("a", "z"),
            lambda n: (1, 0, -1)[n % 3] if n < 198 else -1,
        ),
        ("train", {"where": odd}, shards.CLASSES, lambda n: n % 3 if n % 7 % 2 else -1),
        (
            "train[100:-60]",
            {"where": odd, "classes": ["bird"]},
            ("bird",),
            lambda n: 0 if 100 <= n < 335 and n % 7 % 2 and not n % 3 else -1,
        ),
    ],
)
def test_exactly_the_selected_records_are_read_with_the_new_class_ids(
    info: reader.DatasetInfo,
    split: str,
    options: dict[str, Any],
    classes: tuple[str, ...],
    wanted: Callable[[int], int],
) -> None:
    every = [(number, wanted(number)) for number in range(395) if wanted(number) >= 0]
    assert evaluated(info, split, **options) == every
    batches = train(info, split=split, **options)
    assert batches.classes == classes and batches.start.records == len(every)
    epoch = [
        (int(name[-10:-4]), int(label))
        for inputs, labels in itertools.islice(train(info, split=split, global_batch_size=1, **options), len(every))
        for name, label in zip(inputs["filename"], labels, strict=True)
    ]
    assert sorted(epoch) == every != epoch


def test_all_classes_by_their_own_names_are_no_selection(info: reader.DatasetInfo) -> None:
    assert select(info, "train", classes=list(info.classes)) is None
    assert train(info, classes=list(info.classes)).start == train(info).start
    renamed = select(info, "train", classes={"bird": "z", "cat": "b", "dog": "a"})
    assert renamed is not None and renamed.size == 395 and [renamed.label(old) for old in range(3)] == [2, 1, 0]


def doubled(column: Any) -> Any:
    own = column.astype(float)
    own *= 2
    return own


TEXTS: dict[str, Any] = {
    "differs": lambda columns: columns["class"] != "cat",
    "is": lambda columns: columns["class"] == "cat",
    "in a larger condition": lambda columns: (columns["column:width"] > 3) & (columns["class"] != "cat"),
    "one a record": lambda columns: columns["class"] != np.array(["cat"] * len(columns["class"])),
    "objects": lambda columns: columns["class"] != np.array(["cat"] * len(columns["class"]), object),
    "bytes": lambda columns: columns["class"] != b"cat",
    "another column": lambda columns: columns["column:width"] != "3",
    "none of several": lambda columns: ~np.isin(columns["class"], ["cat", "dog"]),
    "none of one": lambda columns: ~np.isin(columns["class"], "cat"),
    "none of a set": lambda columns: np.isin(columns["class"], np.array(["cat"]), invert=True),
}


@pytest.mark.parametrize("where", TEXTS.values(), ids=TEXTS)
def test_a_number_compared_with_a_text_is_an_error_where_numpy_selects_every_record(
    info: reader.DatasetInfo, where: Any
) -> None:
    with pytest.raises(
        UsageError, match=r"^where compares a column with .*: a column holds numbers, of classes the ids"
    ):
        select(info, "train", where=where)


@pytest.mark.parametrize(
    "where",
    [
        lambda columns: columns["class"] != 1,
        lambda columns: doubled(columns["class"]) != 2,
        lambda columns: (np.argsort(columns["class"], kind="stable") >= 0) & (columns["class"] != 1),
        lambda columns: columns["class"] != np.quantile([0, 1, 2], 0.5, method="nearest"),
        lambda columns: (
            (columns["class"] >= np.quantile(columns["class"], 0, method="lower")) & (columns["class"] != 1)
        ),
        lambda columns: np.array(["bird", "cat", "dog"])[columns["class"]] != "cat",
        lambda columns: columns["class"].astype(str) != "1",
        lambda columns: ~np.isin(columns["class"], [1]),
        lambda columns: np.abs(columns["class"].astype(int) - 1) > 0,
        lambda columns: np.logical_and(
            columns["class"] != 1, columns["bytes"] > 0, out=np.ones(columns["class"].shape, bool)
        ),
    ],
    ids=range(10),
)
def test_numbers_are_computed_with_as_arrays(info: reader.DatasetInfo, where: Any) -> None:
    wanted = select(info, "train", classes=["bird", "dog"])
    found = select(info, "train", where=where)
    assert wanted is not None and found is not None and found.numbers().tolist() == wanted.numbers().tolist()


def test_one_hot_labels_have_the_selected_classes(info: reader.DatasetInfo) -> None:
    batches = train(info, classes={"bird": "b", "dog": "a"}, labels="one_hot")
    assert batches.one_hot_classes == 2
    for inputs, labels in batches:
        is_dog = [b"dog" in bytes(name) for name in inputs["filename"]]
        assert labels.tolist() == [[1, 0] if one else [0, 1] for one in is_dog]


def test_only_the_columns_that_are_asked_for_are_read(
    info: reader.DatasetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[tuple[str, int, int]] = []
    kept = LocalStorage.read_range

    def read_range(self: Any, url: str, start: int, stop: int | None, out: Any = None) -> Any:
        data = kept(self, url, start, stop, out)
        if url.endswith(".records.npy"):
            ranges.append((url, start, len(data)))
        return data

    monkeypatch.setattr(LocalStorage, "read_range", read_range)
    called = []
    select(info, "train", where=lambda columns: called.append(1) or columns["column:width"] > 2)
    assert len(called) == 3  # once a shard that has records
    assert [size for _, start, size in ranges if start] == [8 * 200, 8 * 65, 8 * 130]
    ranges.clear()
    train(info, classes=["cat"])
    assert sum(size for _, start, size in ranges if start) == 2 * 4 * 395  # class, then bytes


@pytest.mark.parametrize(
    ("size", "wanted", "local", "remote"),
    [
        (40_000, [3, 120], [(3, 4), (120, 121)], [(3, 4), (120, 121)]),
        (40_000, range(0, 128, 4), [(at, at + 1) for at in range(0, 128, 4)], [(0, 61), (64, 125)]),
        (40_000, [5, 6, 8, 40], [(5, 9), (40, 41)], [(5, 9), (40, 41)]),
        (40_000, [120, 3, 3], [(3, 4), (120, 121)], [(3, 4), (120, 121)]),
        (300_000, [0, 3, 4, 9], [(0, 1), (3, 5), (9, 10)], [(0, 5), (9, 10)]),
    ],
)
def test_sparse_records_are_read_one_by_one_and_dense_ones_at_once(
    size: int, wanted: Any, local: Any, remote: Any
) -> None:
    index = (np.arange(128) % 64).astype(np.uint16)
    rows = np.array([(0, 0, 64 * size, 64), (0, 64 * size, 64 * size, 64)], schema.RUN_DTYPE)
    known = {"start": index.astype(np.uint32) * size, "size": np.full(128, size, np.uint32), "label": index}
    table = SelectedTable.of(
        RunTable.select(["shard"], rows, 0, 128), np.arange(2), np.array([64, 64]), index=index, **known
    )
    for is_remote, ranges in ((False, local), (True, remote)):
        pieces, of, at = table.pieces_of(np.array(wanted), is_remote=is_remote)
        assert [(piece.start, piece.stop, piece.records) for piece in pieces] == [
            (first * size, last * size, last - first) for first, last in ranges
        ]
        assert [pieces[one].record + index for one, index in zip(of, at.tolist(), strict=True)] == list(wanted)
    kept, *_ = table.pieces_of(np.array([3]), is_kept=True)
    assert [(piece.record, piece.records) for piece in kept] == [(0, 64)]


# --- resume, processes, hosts


def test_another_selection_is_refused_on_resume_in_one_line(info: reader.DatasetInfo) -> None:
    position = train(info, classes=["cat", "dog"]).position_at(3)
    saved = Position.from_json(position.to_json())
    assert train(info, classes=["dog", "cat"], position=saved).start == position
    for other in ({"classes": ["cat"]}, {"classes": {"cat": "x", "dog": "y"}}, {}, {"where": odd}):
        with pytest.raises(
            ValueError, match=r"^the position was made with another selection \(classes, where\): '.*'$"
        ):
            train(info, position=saved, **other)
    position = train(info, balance="classes").position_at(3)
    with pytest.raises(ValueError, match=r"^the position was made with another balance: '.*'$"):
        train(info, position=position, balance={"cat": 1, "dog": 2, "bird": 1})
    with pytest.raises(ValueError, match=r"^the position was made with another number of records: 395, here it is 99$"):
        train(info, position=position, balance="classes", epoch_records=99)


def test_the_function_is_not_pickled_only_its_mask(info: reader.DatasetInfo) -> None:
    batches = train(info, where=lambda columns: columns["column:width"] == 3, classes=["cat", "dog"], balance="classes")
    copy = pickle.loads(pickle.dumps(batches))
    assert copy.start == batches.start and copy.classes == batches.classes
    for (one, labels), (other, others) in zip(batches, copy, strict=True):
        assert (one["image"] == other["image"]).all() and (labels == others).all()


def test_a_corrupt_record_is_substituted_by_a_selected_one(tmp_path: Path) -> None:
    url, _ = shards.flipped(tmp_path / "1.0.0", [100], 4)  # a cat
    batches = train(url, classes=["cat"], on_error="skip")
    for _ in range(2):
        for inputs, labels in batches:
            assert (labels == 0).all() and all(b"cat" in bytes(name) for name in inputs["filename"])
    assert batches.skipped == 1


def test_caches_serve_selected_records(info: reader.DatasetInfo, tmp_path: Path) -> None:
    for cache in ("memory", tmp_path / "cache"):
        batches = train(info, classes=["cat"], cache=cache, balance="classes")
        for _ in range(2):
            for inputs, _ in batches:
                assert all(b"cat" in bytes(name) for name in inputs["filename"])


def test_tables_and_records_are_read_from_a_bucket(info: reader.DatasetInfo, gcs: servers.Gcs) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "photos/1.0.0", Path(info.url))
    there = reader.load_info(f"gs://{bucket}/photos/1.0.0")
    options: dict[str, Any] = {"where": odd, "classes": ["bird", "cat"]}
    assert evaluated(there, "train", **options) == evaluated(info, "train", **options)


# --- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": ["dgo"]}, "there is no class 'dgo': did you mean 'dog'?"),
        ({"classes": ["c"]}, "there is no class 'c': did you mean 'cat'?"),
        ({"classes": ["yak"]}, "there is no class 'yak': there are bird, cat, dog"),
        ({"classes": "dog"}, "classes must be a list of class names, or a dict of names → new names, got 'dog'"),
        ({"classes": {"dog": 3}}, "classes: a dict is of old name → new name, and the new name is a text, got 3"),
        ({"where": lambda columns: columns["width"] > 2}, "there is no column 'width': did you mean 'column:width'?"),
        (
            {"where": lambda columns: columns["bytes"]},
            "where returned uint32 [200]: it has to return bool [200], a value a record",
        ),
        ({"where": lambda columns: 1 / 0}, "<lambda> failed: ZeroDivisionError: division by zero"),
        ({"where": "dog"}, "where must be a function of the record table's columns, got 'dog'"),
        ({"balance": {"dog": 1}}, "balance has no weight for bird, cat: give one, or leave them out with classes"),
        ({"balance": {"dgo": 1}}, "balance: there is no class 'dgo': did you mean 'dog'?"),
        ({"balance": {"dog": 0, "cat": 1, "bird": 1}}, "balance: the weight of 'dog' must be above 0, got 0"),
        ({"balance": "all"}, "balance must be 'classes' or a dict of class → weight, got 'all'"),
        ({"epoch_records": 5}, "epoch_records goes with balance: without it an epoch is every record once"),
    ],
)
def test_mistakes_are_one_line_with_the_fix(info: reader.DatasetInfo, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        train(info, **options)
    assert str(error.value) == message


def test_a_class_without_records_is_a_class_and_alone_an_error(tmp_path: Path) -> None:
    names = (*shards.CLASSES, "yak")
    url = shards.make_dataset(tmp_path / "1.0.0", {"train": [3, 30]}, classes=names, record=_three)
    assert train(url, classes=["dog", "yak"]).classes == ("dog", "yak")
    with pytest.raises(UsageError, match=r"^none of the 33 records of split 'train' is selected by classes=\['yak'\]$"):
        train(url, classes=["yak"])
    assert {label for _, labels in train(url, classes=["dog", "yak"], balance="classes") for label in labels} == {0}
    with pytest.raises(UsageError, match=r"^balance has a weight for yak, of which there is no record: leave it out "):
        train(url, classes=["dog", "yak"], balance={"dog": 1, "yak": 1})


def _three(split: str, number: int) -> tuple[int, bytes]:
    return number % 3, shards.make_record(number, (16, 24))


def test_gzip_and_a_table_that_is_missing_or_of_other_records_are_refused(
    tmp_path: Path, info: reader.DatasetInfo
) -> None:
    url = shards.make_dataset(tmp_path / "gzip" / "1.0.0", SHARDS, compression="gzip")
    with pytest.raises(ImageShardsError, match=r"is compressed with gzip, so .*: write it with --compression none$"):
        train(url, classes=["dog"])
    url = shards.make_dataset(tmp_path / "other" / "1.0.0", SHARDS, columns=COLUMNS)
    first, second, *_ = sorted(Path(url, schema.INDEX_FOLDER).glob("*-train*.records.npy"))
    first.write_bytes(second.read_bytes())
    with pytest.raises(
        ImageShardsError, match=rf"^{first} isn't the record table of this shard; run the job with --rep"
    ):
        train(url, classes=["dog"])
    first.write_bytes(b"\x93NUMPY\x03\x00junk")
    with pytest.raises(ImageShardsError, match=r"isn't the record table of this shard"):
        train(url, classes=["dog"])
    first.unlink()
    with pytest.raises(ImageShardsError, match=rf"^{first} is missing$"):
        train(url, classes=["dog"])


# --- the commands


def test_show_takes_classes(info: reader.DatasetInfo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "a.png")
    assert main(["show", info.url, "--classes", "cat=pet,dog=pet", "--count", "30", "--json", "--out", out]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert {one["label"] for one in records} == {"pet"} and all(one["record"] % 3 for one in records)
    assert main(["show", info.url, "--classes", "cta"]) == 2
    assert capsys.readouterr().err == "error: there is no class 'cta': did you mean 'cat'?\n"
