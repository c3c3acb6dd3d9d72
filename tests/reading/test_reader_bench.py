"""`python -m reader bench`: every row is really measured, and the advice follows from what is."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import tensorflow as tf
from PIL import Image

import reader
from reader.bench.breakdown import AUGMENT, DECODE, HAND_OVER, Part, advise
from reader.bench.latency import delayed
from reader.bench.measure import Rate, Runnable, measure, ratio
from reader.commands import main
from reader.storage import open_storage
from tests import make
from tests.reading.shards import make_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("bench") / "1.0.0", {"train": [100, 60]}, size=(32, 32))


FEW = ["--images", "128", "--batch_size", "16", "--image_size", "32", "--repeats", "2"]
OURS = [
    "train_dataset",
    "train_dataset, flip_crop",
    "train_dataset, random_resized_crop",
    "train_dataset, image_size=None",
]
INDIVIDUAL = ["individual files", "individual files, cached in memory", "individual files, cached on disk"]
TUTORIAL = ["GZIP shards, the tutorial's way", "plain shards, the tutorial's way"]


def test_the_table_the_chart_and_a_trace(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart, trace = tmp_path / "bench.png", tmp_path / "trace"
    assert main(["bench", folder, *FEW, "--images", "200", "--chart", str(chart), "--profile", str(trace)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("photos 1.0.0, 32 px, ")
    assert " 160 images a run (200 asked, train has 160), median of 2 runs in turns\n" in out
    assert "\nCPU s/1,000: CPU seconds of the whole process for 1,000 images; of its ceiling: " in out
    names = [line.split("  ")[0] for line in out.splitlines()]
    assert [name for name in names if name in [*INDIVIDUAL, *TUTORIAL, *OURS]] == [*INDIVIDUAL, *TUTORIAL, *OURS]
    assert "what would help most: these runs are too short to judge" in out
    with Image.open(chart) as drawn:
        assert drawn.width == 1200
    assert list(trace.rglob("*.xplane.pb"))


def test_json_with_other_originals_and_slow_storage(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    originals = make.class_folders(tmp_path / "originals", {"ant": 70, "bee": 74})
    few = ["--images", "64", *FEW[2:], "--chart", str(tmp_path / "c.png"), "--json"]
    assert main(["bench", folder, *few, "--against", str(originals), "--storage_latency_ms", "20"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == [*INDIVIDUAL, *TUTORIAL, *OURS]
    assert rows["individual files"]["images"] == 64
    assert rows["individual files"]["images_per_s"] < 64 / 0.020  # each batch of 16 waits 20 ms
    for name in TUTORIAL:
        assert rows[name]["images_per_s"] < 64 / 0.040  # a shard's size, then its bytes
    assert rows["train_dataset"]["of_ceiling"]["images_per_s"] > 0
    assert document["storage_latency_ms"] == 20 and document["advice"]["factor"] >= 1


def test_wrong_values_are_told(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--images", "0"], "--images '0': give a whole number from 1"),
        (["--split", "test"], "there is no split 'test'"),
    ):
        assert main(["bench", folder, *FEW, *arguments]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    chart = str(tmp_path / "file" / "c.png")
    assert main(["bench", folder, *FEW, "--chart", chart]) == 2
    assert f"--chart {chart!r}: " in capsys.readouterr().err


def test_a_shard_that_is_missing_is_named_with_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [10]}))
    (shard,) = folder.glob("photos-*")
    shard.unlink()
    assert main(["bench", str(folder), "--chart", str(tmp_path / "c.png")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {shard} is missing") and error.endswith(": run the job again with --repair\n")


def test_slow_storage_sleeps_for_each_request(folder: str) -> None:
    url = delayed(folder, 0.05)
    storage = open_storage(url)
    start = time.perf_counter()
    data = storage.read(f"{url}/manifest.json", 10, 20)
    assert time.perf_counter() - start >= 0.05
    assert data == (Path(folder) / "manifest.json").read_bytes()[10:20]
    assert storage.files(url) == open_storage(folder).files(folder)
    assert reader.load_info(url).records("train") == 160


def test_rates_count_what_was_read() -> None:
    def slow(value: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(lambda x: (time.sleep(0.02), x)[1], [value], tf.int64)

    quick = tf.data.Dataset.range(64).batch(8)
    rates = measure({"quick": Runnable(quick, 8), "slow": Runnable(quick.map(slow), 8)}, 32, 3, lambda line: None)
    assert rates["slow"].images == 32 and len(rates["slow"].wall_s) == 3
    assert rates["slow"].images_per_s < 8 / 0.02
    assert ratio(rates["slow"], rates["quick"])[0] < 0.5


def test_the_advice_is_what_gains_most(folder: str) -> None:
    info = reader.load_info(folder)

    def parts(decode: float, augment: float, hand_over: float) -> list[Part]:
        return [Part(DECODE, decode), Part(AUGMENT, augment), Part(HAND_OVER, hand_over)]

    fast, idle = Rate(1000, (1.0,) * 3, (1.0,) * 3), Rate(1000, (5.0,) * 3, (1.0,) * 3)
    assert "more CPU cores" in advise(parts(0.9, 0.05, 0.05), fast, fast, info, 32).text
    assert "on_device" in advise(parts(0.6, 0.35, 0.05), fast, fast, info, 32).text
    assert "larger batches" in advise(parts(0.6, 0.05, 0.35), fast, fast, info, 32).text
    assert "more CPU cores" in advise(parts(0.9, 0.05, 0.05), idle, fast, info, 32).text  # no storage to blame
    for short in (Rate(999, (5.0,) * 3, (1.0,) * 3), Rate(1000, (5.0,) * 2, (1.0,) * 2)):
        assert "too short to judge" in advise(parts(0.6, 0.35, 0.05), short, fast, info, 32).text
    storage = advise(parts(0.9, 0.05, 0.05), idle, fast, reader.load_info(delayed(folder, 0)), 32)
    assert "wait 80% of the time for storage" in storage.text and storage.factor == pytest.approx(5)
    assert "--image_size 8" in advise(parts(0.9, 0.05, 0.05), fast, fast, info, 8).text
