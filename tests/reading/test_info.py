"""What a dataset says about itself, what is said if there is none, and what builders ask of it."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, NotPublishedError
from beam_pipeline.schema.manifest import seal_manifest
from beam_pipeline.storage.local import LocalStorage
from imageshards import main
from reader.info import MAX_WINDOW_BYTES, DatasetInfo, load_info
from tests import make
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
    for split, batch, steps in (("train", 64, 3), ("train", 201, 1), ("validation", 64, 1)):
        assert info.steps_per_epoch(split, batch) == steps
    assert load_info(f"file://{dataset}/") == load_info(Path(dataset)) == info == pickle.loads(pickle.dumps(info))


def test_its_repr_is_one_short_line(dataset: str, tmp_path: Path) -> None:
    counts = "train 200, validation 9 records; 3 classes; jpeg 16x24"
    assert repr(load_info(dataset)) == f"DatasetInfo(photos 1.0.0 at {dataset}: {counts})"
    grey = make_dataset(tmp_path / "1.0.0", {"train": [2]}, size_of=lambda number: (8 + number, 8), channels=1)
    counts = "train 2 records; 3 classes; jpeg grey 8x8 to 9x8"
    assert repr(load_info(grey)) == f"DatasetInfo(photos 1.0.0 at {grey}: {counts})"


def npy(rows: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, rows)
    return out.getvalue()


def rows(*some: tuple[int, int, int, int]) -> bytes:
    return npy(np.array(list(some), schema.RUN_DTYPE))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\x02\x00{}",
        npy(np.zeros(2)),
        npy(np.array([{}], object)),
        rows(),
        rows((0, 0, 100, 64)),
        rows((0, 0, 100, 64), (0, 100, 100, 7)),
        rows((0, 0, 100, 64), (1, 100, 100, 6)),
        rows((0, 0, 100, 64), ((1 << 32) - 1, 100, 100, 6)),
        rows((0, 0, 100, 64), (0, (1 << 64) - 1, 100, 6)),
        rows((0, 0, (1 << 32) - 1, 64), (0, 100, 100, 6)),
        npy(np.zeros((1, 2), schema.RUN_DTYPE)),
    ],
    ids=lambda data: hashlib.sha256(data).hexdigest()[:6],
)
def test_an_index_that_contradicts_the_manifest_is_refused(tmp_path: Path, data: bytes) -> None:
    """Its hash may be correct: whoever makes a manifest makes that too."""
    dataset = Path(make_dataset(tmp_path / "1.0.0", {"train": [70]}))
    file = schema.runs_file("train")
    (dataset / file).write_bytes(data)
    said = r"train\.runs\.npy isn't the published run index of the manifest's shards; run the job"
    with pytest.raises(ImageShardsError, match=said):
        load_info(dataset).run_table("train")
    manifest = json.loads((dataset / schema.MANIFEST_FILE).read_bytes())
    manifest["files"][file] = schema.sha256(data)
    (dataset / schema.MANIFEST_FILE).write_bytes(seal_manifest(manifest))
    with pytest.raises(ImageShardsError, match=said):
        load_info(dataset).run_table("train")


# --- no dataset


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "holds no manifest.json, so no dataset is published there: there is no such folder, or it is empty"),
        (
            ["1.0.0/photos-train.tfrecord-00000-of-00001", "10.0.0/a"],
            "no version is published there: 10.0.0, 1.0.0 without a manifest.json; run the same imageshards write",
        ),
        (["1.0.0/manifest.json", "1.1.0/manifest.json"], "1.1.0/manifest.json is corrupt"),
        (
            ["photos-train.tfrecord-00000-of-00001"],
            "only an unfinished job's files: .*run the same imageshards write command again",
        ),
        (["c/a.txt", "d/a", "e", "f"], "found c/, d/, e and 1 more$"),
        (["cat/a.JPG", "dog/a.txt", "e"], r"holds images, not a dataset: write one first: imageshards write --input /"),
        (["a.png"], r"holds images, not a dataset: write one first: imageshards write --input /.* --output DIR"),
        (["train/cat/a.webp"], "holds images, not a dataset"),
        (
            ["run.json", "metrics.jsonl", "model.keras", "curves.png"],
            "holds a run of imageshards train, not a dataset: .* RUN first",
        ),
    ],
)
def test_a_folder_without_a_manifest_says_what_is_there(tmp_path: Path, files: list[str], message: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(NotPublishedError, match=message) as error:
        load_info(str(tmp_path) if files else str(tmp_path / "none"))
    assert "\n" not in str(error.value)


def test_a_url_that_names_no_folder_names_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    meant = "did you mean gs://bucket/photos/1.0.0"
    for url, message in (
        (tmp_path / "file", f"file is a file: name the folder {tmp_path}$"),
        ("gs//bucket/photos/1.0.0", f"no folder gs//bucket/photos/1.0.0: {meant}"),
        ("gs:/bucket/photos/1.0.0", f"no folder gs:/bucket/photos/1.0.0: {meant}"),
    ):
        with pytest.raises(NotPublishedError, match=message):
            load_info(url)


# --- which version


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of published versions, of unpublished ones, and of what is no version."""
    folder = tmp_path_factory.mktemp("versions") / "photos"
    for version in ("1.9.0", "1.10.0", "1.10.2", "2.0.0"):
        make_dataset(folder / version, {"train": [3]})
    for other in ("_state/1.10.3", "10.0.0", "1.11.0", "2.0", "latest", "01.99.0"):
        (folder / other).mkdir(parents=True)
        (folder / other / "a").write_bytes(b"")
    (folder / "99.0.0").write_bytes(b"a file")
    return folder


MATCHES = [
    ("", "2.0.0"), ("/", "2.0.0"), (":*.*.*", "2.0.0"), (":1.*.*", "1.10.2"), (":1.9.*", "1.9.0"), (":1.*.0", "1.10.0"),
    (":1.10.0", "1.10.0"), ("/1.9.0", "1.9.0"),
]  # fmt: skip


@pytest.mark.parametrize("place", ["local", "gs", "s3"])
def test_the_newest_published_version_that_matches_is_opened(
    versions: Path, place: str, request: pytest.FixtureRequest
) -> None:
    url = str(versions)
    if place != "local":
        server = request.getfixturevalue({"gs": "gcs", "s3": "s3"}[place])
        bucket = server.new_bucket()
        for name, data in make.files(versions).items():
            server.put(bucket, f"photos/{name}", data)
        url = f"{place}://{bucket}/photos"
    for suffix, version in MATCHES:
        assert load_info(f"{url}{suffix}").url == f"{url}/{version}", suffix


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        (":3.*.*", r"no published version matches 3\.\*\.\*: there are 2.0.0, 1.10.2, 1.10.0, 1.9.0$"),
        (":1.11.*", r"no published version matches 1\.11\.\*: there are 2.0.0"),
        (":10.0.0", r"no published version matches 10\.0\.0: there are 2.0.0"),
        (":1.*", "no folder|there is no such folder"),
        ("/3.0.0", r"/3.0.0 holds no manifest.json, .*: there are 2.0.0, 1.10.2, 1.10.0, 1.9.0$"),
    ],
)
def test_a_version_that_is_not_there_is_told_with_those_that_are(versions: Path, suffix: str, message: str) -> None:
    with pytest.raises(NotPublishedError, match=message) as error:
        load_info(f"{versions}{suffix}")
    assert "\n" not in str(error.value)


def test_the_url_of_a_version_is_opened_by_one_request(versions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []
    for method in ("names", "files", "stat", "read_range"):
        make.before(monkeypatch, LocalStorage, method, lambda _, url, *more: requests.append(url))
    load_info(versions / "1.9.0")
    file = str(versions / "1.9.0" / schema.MANIFEST_FILE)
    assert set(requests) == {file}, "the folder is never listed"


def test_every_verb_takes_a_folder_of_versions(
    versions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_newest = []
    for url in (f"{versions}:2.*.*", f"{versions}/2.0.0"):
        for arguments in (["info"], ["info", "--hash"], ["verify"], ["show", "--out", f"{tmp_path}/a.png"]):
            assert main([arguments[0], url, *arguments[1:]]) == 0
            of_newest.append(capsys.readouterr().out)
    assert of_newest[:4] == of_newest[4:]
    assert reader.verify(versions)
    assert len(list(reader.train_batches(versions, "train", global_batch_size=1))) == 3


# --- positions


def test_a_position_names_the_records_and_their_order(tmp_path: Path) -> None:
    """The same images in another order, or cut into other shards, have the same content fingerprint."""

    def source(name: str, shards: list[int], first: int = 0, split: str = "train") -> str:
        def size(number: int) -> tuple[int, int]:
            return 16, 24 + (number + first) % 2

        info = load_info(make_dataset(tmp_path / name / "1.0.0", {"train": shards}, size_of=size))
        return info.source(split)

    assert source("a", [70, 130]) == source("copy", [70, 130])
    others = [source("b", [100, 100]), source("c", [70, 130], first=1), source("d", [70, 130], split="train[:50%]")]
    assert len({source("e", [70, 130]), *others}) == 4


def large(info: DatasetInfo, record_bytes: list[tuple[int, int]]) -> DatasetInfo:
    """The same dataset with shards of (records, bytes a record), by its manifest; no such files are there."""
    manifest = json.loads(json.dumps(info.manifest))
    shard = manifest["splits"]["train"]["shards"][0]
    shards = [
        {**shard, "file": f"{number}", "records": records, "bytes": records * size, "images": records}
        for number, (records, size) in enumerate(record_bytes)
    ]
    totals = {key: sum(shard[key] for shard in shards) for key in ("records", "bytes")}
    manifest["splits"] = {"train": {**totals, "class_counts": [0, 0, 0], "shards": shards}}
    path = Path(info.url, schema.MANIFEST_FILE)
    path.write_bytes(seal_manifest({**manifest, "records": totals["records"]}))
    return load_info(info.url)


def test_windows_of_large_records_are_cut_to_256_mb_by_the_manifest_alone(tmp_path: Path) -> None:
    info = load_info(make_dataset(tmp_path / "1.0.0", {"train": [3]}))

    def window(record_bytes: list[tuple[int, int]], window_runs: int = 16) -> int:
        return large(info, record_bytes).capped_window_runs("train", window_runs)

    assert window([(10_000, MAX_WINDOW_BYTES // 1024)]) == 16
    assert window([(10_000, MAX_WINDOW_BYTES // 1024 + 1)]) == 15
    assert window([(10_000, 16_000), (10_000, 500_000), (0, 0)]) == 8
    assert window([(10_000, 1 << 30)]) == 1
    assert window([(100_000, 16_000)], 10_000) == 262
    assert window([(10_000, 16_000)], 10_000) == 10_000  # its 157 runs are 161 MB
    assert window([(64 * 16, 500_000)], 8) == 8
    assert window([(64 * 3, 500_000)]) == 16  # 3 runs are 96 MB, whatever the window
    assert large(info, [(640, 16_000), (64_000, 500_000)]).capped_window_runs("train[:10]", 16) == 8
