"""What a dataset says about itself, and what is said where there is none."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, NotPublishedError, UsageError
from reader import load_info
from tests.reading.shards import CLASSES, make_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(
        tmp_path_factory.mktemp("info") / "photos" / "1.0.0", {"train": [70, 130, 0], "validation": [9]}
    )


def test_it_holds_what_the_manifest_says(dataset: str) -> None:
    info = load_info(dataset)
    assert (info.name, info.version, info.classes, info.num_classes) == ("photos", "1.0.0", CLASSES, 3)
    assert [shard.records for shard in info.splits["train"].shards] == [70, 130, 0]
    assert info.splits["train"].class_counts == (67, 67, 66)
    assert info.image.min_size == info.image.max_size == (16, 24)
    assert info.image.mean == (0.5, 0.5, 0.5)
    assert info.records("train[:10%]+validation") == 29
    assert info.manifest["images"] == 209
    assert load_info(f"file://{dataset}/") == load_info(Path(dataset)) == info == pickle.loads(pickle.dumps(info))


@pytest.mark.parametrize(("split", "batch", "steps"), [("train", 64, 3), ("train", 201, 1), ("validation", 64, 1)])
def test_steps_per_epoch(dataset: str, split: str, batch: int, steps: int) -> None:
    assert load_info(dataset).steps_per_epoch(split, batch) == steps


def test_the_run_table_follows_split_strings(dataset: str) -> None:
    table = load_info(dataset).run_table("train[60:80]+validation")
    assert table.total == 29
    assert table.records.tolist() == [64, 6, 64, 9]  # runs on disk
    assert table.skip.tolist() == [60, 0, 0, 0]
    assert table.first.tolist() == [0, 4, 10, 20, 29]
    assert table.file_record.tolist() == [0, 64, 0, 0]
    assert [table.files[file].rpartition("/")[2] for file in table.file] == [
        "photos-train.tfrecord-00000-of-00003",
        "photos-train.tfrecord-00000-of-00003",
        "photos-train.tfrecord-00001-of-00003",
        "photos-validation.tfrecord-00000-of-00001",
    ]


def test_an_index_of_another_dataset_is_refused(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "1.0.0", {"train": [70]})
    np.save(Path(dataset, schema.runs_file("train")), np.zeros(2, schema.RUN_DTYPE))
    with pytest.raises(ImageShardsError, match=r"train\.runs\.npy isn't the file that was published"):
        load_info(dataset).run_table("train")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "holds no manifest.json, so no dataset is published there: there is no such folder, or it is empty"),
        (["1.0.0/manifest.json", "1.1.0/manifest.json"], "name a version: .*/1.0.0, .*/1.1.0$"),
        (
            ["photos-train.tfrecord-00000-of-00001"],
            "only an unfinished job's files: .*run the same beam_pipeline command",
        ),
        (["cat/a.jpg", "dog/a.jpg", "e", "f"], "found cat/, dog/, e and 1 more$"),
    ],
)
def test_a_folder_without_a_manifest_says_what_is_there(tmp_path: Path, files: list[str], message: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(NotPublishedError, match=message) as error:
        load_info(str(tmp_path) if files else str(tmp_path / "none"))
    assert "\n" not in str(error.value)


def test_a_file_in_place_of_the_folder_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotPublishedError, match=f"file is a file: name the folder {tmp_path}$"):
        load_info(str(tmp_path / "file"))


@pytest.mark.parametrize("typed", ["gs//bucket/photos/1.0.0", "gs:/bucket/photos/1.0.0"])
def test_a_mistyped_url_names_the_right_one(typed: str) -> None:
    with pytest.raises(NotPublishedError, match=f"no folder {typed}: did you mean gs://bucket/photos/1.0.0"):
        load_info(typed)


def test_a_position_names_the_records_and_their_order(tmp_path: Path) -> None:
    """The same images in another order, or cut into other shards, have the same content fingerprint."""

    def source(name: str, shards: list[int], first: int = 0, split: str = "train") -> str:
        def size(number: int) -> tuple[int, int]:
            return 16, 24 + (number + first) % 2

        info = load_info(make_dataset(tmp_path / name / "1.0.0", {"train": shards}, size_of=size))
        return info.position(split, global_batch_size=1).source

    assert source("a", [70, 130]) == source("copy", [70, 130])
    others = [source("b", [100, 100]), source("c", [70, 130], first=1), source("d", [70, 130], split="train[:50%]")]
    assert len({source("e", [70, 130]), *others}) == 4


def test_a_position_takes_numbers_of_any_kind(dataset: str) -> None:
    info = load_info(dataset)
    numbers = {"global_batch_size": 4, "hosts": 2, "seed": 3, "window_runs": 8}
    arrays = {name: np.int64(number) for name, number in numbers.items()}
    assert info.position("train", **arrays).to_json() == info.position("train", **numbers).to_json()
    for wrong in ({"seed": None}, {"global_batch_size": 2.5}, {"window_runs": 1.5}):
        with pytest.raises(UsageError, match="a whole number"):
            info.position("train", **{**numbers, **wrong})


@pytest.mark.parametrize("window_runs", [0, -1])
def test_a_window_holds_at_least_one_run(dataset: str, window_runs: int) -> None:
    with pytest.raises(UsageError, match=f"window_runs={window_runs}: at least 1"):
        load_info(dataset).position("train", global_batch_size=1, window_runs=window_runs)


def test_an_edited_manifest_is_not_believed(tmp_path: Path) -> None:
    path = Path(make_dataset(tmp_path / "1.0.0", {"train": [3]}), schema.MANIFEST_FILE)
    manifest = json.loads(path.read_bytes())
    path.write_bytes(schema.canonical_json({**manifest, "records": 4}))
    with pytest.raises(NotPublishedError, match="self_sha256 doesn't match"):
        load_info(str(tmp_path / "1.0.0"))
    path.write_bytes(schema.seal_manifest({**manifest, "splits": {"train": {}}}))
    with pytest.raises(NotPublishedError, match=r"lacks or misstates 'shards'"):
        load_info(str(tmp_path / "1.0.0"))


def test_an_unknown_split_names_the_others(dataset: str) -> None:
    with pytest.raises(UsageError, match=r"no split 'test': there are train \(200 records\), validation \(9 records\)"):
        load_info(dataset).steps_per_epoch("test", 1)
