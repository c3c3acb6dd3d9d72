"""`imageshards bench`: every row is really measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from beam_pipeline import storage
from imageshards import main
from reader.tools.requests import Requests, SlowStorage
from tests import make, servers
from tests.reading.shards import make_dataset
from tests.reading.without import run_without


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("bench") / "1.0.0", {"train": [100, 60]}, size=(32, 32))


FEW = ["--images", "200", "--batch_size", "16", "--image_size", "32", "--repeats", "2"]
CACHED = ["individual files, cached in memory", "individual files, cached on disk"]
TUTORIAL = ["GZIP shards, the tutorial's way", "plain shards, the tutorial's way"]
DOORS = ["train_dataset (TensorFlow)", "torch.loader (PyTorch)"]
OURS = [
    f"{name}{work}"
    for work in ("", ", flip_crop", ", random_resized_crop")
    for name in ("train_batches", "decoding alone")
]


def test_the_table_and_the_chart(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "new" / "bench.png"
    assert main(["bench", folder, *FEW, "--cached", "--chart", str(chart)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("photos 1.0.0, 32 px, ")
    assert " 200 images a run (train has 160, read again and again), median of 2 runs in turns\n" in out
    assert "% of decode-only speed (time / CPU)\n" in out
    names = [line.split("  ")[0] for line in out.splitlines()]
    expected = ["individual files", *CACHED, *TUTORIAL, *DOORS, *OURS]
    assert [name for name in names if name in expected] == expected
    with Image.open(chart) as drawn:
        assert drawn.width == 1200


def test_json_of_a_bucket_and_other_originals(
    folder: str, tmp_path: Path, gcs: servers.Gcs, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "photos/1.0.0", Path(folder))
    originals = make.class_folders(tmp_path / "originals", {"ant": 7, "bee": 9})
    more = ["--chart", str(tmp_path / "c.png"), "--json", "--against", str(originals)]
    assert main(["bench", f"gs://{bucket}/photos/1.0.0", *FEW, *more]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == ["individual files", *TUTORIAL, *DOORS, *OURS]
    present = [row for row in rows.values() if "missing" not in row]
    assert len(present) >= len(rows) - 1  # PyTorch may not be installed
    assert all(200 <= row["images"] < 200 + 128 and row["images_per_s"] > 0 for row in present)
    assert rows["individual files"]["of_decoding_alone"] is None  # other images
    assert rows["train_batches"]["of_decoding_alone"].keys() == {"clock", "cpu"}
    assert (document["split_images"], document["against"]) == (160, str(originals))


def test_wrong_values_are_told(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    chart = str(tmp_path / "file" / "c.png")
    for arguments, message in (
        (["--images", "0"], "images must be at least 1, got 0"),
        (["--repeats", "none"], "--repeats: invalid int value: 'none'"),
        (["--split", "test"], "there is no split 'test'"),
        (["--chart", chart], f"--chart {chart!r}: "),
    ):
        assert main(["bench", folder, "--chart", str(tmp_path / "c.png"), *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_latency_is_waited_for_by_every_request_and_every_row_counts_its_requests(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    originals = make.class_folders(tmp_path / "originals", {"ant": 7, "bee": 9})
    (originals / "ant" / "0000.jpg").write_bytes(b"no picture")  # is left out
    trace = tmp_path / "new" / "trace.png"
    few = ["--images", "128", "--batch_size", "16", "--image_size", "32", "--repeats", "1"]
    more = ["--against", str(originals), "--latency_ms", "5", "--trace", str(trace), "--json"]
    assert main(["bench", folder, *few, *more]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["rows"]}
    assert (document["latency_ms"], document["images"], document["epoch_images"]) == (5, 128, 160)
    assert not [name for name, row in rows.items() if "missing" in row]
    one, *_, ours = rows.values()
    assert 0 < one["images_per_s"] <= 200  # 5 ms each
    for name, row in rows.items():
        is_file = name.startswith("files") and "second" not in name
        requests = 1000 if is_file else 0 if "second" in name else None
        assert requests is None or row["requests_per_1000"] == pytest.approx(requests, rel=0.02), name
    assert rows["imageshards, train_batches"] is ours
    assert ours["requests_per_1000"] == pytest.approx(
        1000 * 3 / 128, 1e-3
    )  # of 64 records each, in a shard of 100 and one of 60
    assert ours["epoch_dollars"] == pytest.approx(0.0004 * 3 / 128 * 160 / 1000, abs=1e-6)
    assert rows["plain shards, interleave"]["requests_per_1000"] == pytest.approx(1000 * 8 / 128)
    first, last = document["traces"]
    assert len(first["lanes"]["reads"]) == len(first["lanes"]["decodes"]) == 1
    assert last["images"] == 160 and last["lanes"]["waits"]
    with Image.open(trace) as drawn:
        assert drawn.width > 900


def test_the_experiment_s_table_needs_no_tensorflow(folder: str, tmp_path: Path) -> None:
    originals = make.class_folders(tmp_path / "originals", {"ant": 7})
    program = f"""
import reader
result = reader.bench({folder!r}, against={str(originals)!r}, latency_ms=1, images=16, image_size=32, repeats=1)
print(result)
"""
    lines = run_without("tensorflow", program, tmp_path).stdout.splitlines()
    assert len([line for line in lines if line.endswith("pip install '.[tensorflow]'")]) == 11
    assert lines[-1].startswith("imageshards, train_batches ") and "is not installed" not in lines[-1]


def test_requests_outside_the_experiment_are_not_delayed(folder: str) -> None:
    requests = Requests()
    with storage.wrapped(lambda store: SlowStorage(store, 0, requests)):
        inside = storage.open_storage(folder)
        assert inside.read(f"{folder}/manifest.json") and inside.names(folder)
        assert len([*inside.files(folder)]) > 2 and inside.stat(f"{folder}/manifest.json")
    assert (requests.count.lists, requests.count.reads) == (2, 2)
    assert requests.count.bytes == Path(folder, "manifest.json").stat().st_size
    assert not isinstance(storage.open_storage(folder), SlowStorage)


def test_wrong_values_of_the_experiment_are_told(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        (["--latency_ms", "50"], "latency_ms needs against: the class folders of the original images"),
        (["--latency_ms", "-1", "--against", folder], "latency_ms must be from 0 to 10,000, got -1"),
        (["--latency_ms", "nan", "--against", folder], "latency_ms must be from 0 to 10,000, got nan"),
        (["--latency_ms", "5", "--against", f"{tmp_path}/none"], f"{tmp_path}/none: no such folder"),
        (["--latency_ms", "5", "--against", f"{tmp_path}/empty"], f"{tmp_path}/empty: no images in class folders"),
        (["--trace", "t.png"], "--trace needs --latency_ms"),
    ):
        assert main(["bench", folder, "--chart", str(tmp_path / "c.png"), *arguments]) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")
