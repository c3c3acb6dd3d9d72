"""`python -m reader bench`: every row is really measured, and the advice follows from what is."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

import reader
from reader.commands import main
from reader.tools.bench import Row, Run, advise, measure
from tests import make, servers
from tests.reading.shards import make_dataset


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
    assert "what would help most: these runs are too short to judge" in out
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
        (["--images", "0"], "--images '0': give a whole number from 1"),
        (["--split", "test"], "there is no split 'test'"),
        (["--chart", chart], f"--chart {chart!r}: "),
    ):
        assert main(["bench", folder, "--chart", str(tmp_path / "c.png"), *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_shard_that_is_missing_is_named_with_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [10]}))
    (shard,) = folder.glob("photos-*")
    shard.unlink()
    assert main(["bench", str(folder), "--chart", str(tmp_path / "c.png")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {shard} is missing") and "run the job again with --repair" in error


def test_rates_count_what_was_read_and_a_missing_package_is_said() -> None:
    def batches(pause_s: float) -> Iterator[int]:
        for _ in itertools.count():
            time.sleep(pause_s)
            yield 8

    def missing() -> Iterator[int]:
        raise ModuleNotFoundError(name="torch")
        yield 0

    quick, absent = Row("quick", lambda: batches(0)), Row("absent", missing)
    slow = Row("slow", lambda: batches(0.02), quick)
    measure([slow, quick, absent], 32, 3, lambda line: None)
    assert [run.images for run in slow.runs] == [32] * 3
    assert absent.missing == "PyTorch is not installed: in the clone of imageshards, pip install '.[torch]'"
    assert slow.images_per_s < 8 / 0.02
    assert slow.of_alone is not None and slow.of_alone[0] < 0.5


def test_the_advice_is_what_gains_most(folder: str, gcs: servers.Gcs) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "photos/1.0.0", Path(folder))
    local, remote = reader.load_info(folder), reader.load_info(f"gs://{bucket}/photos/1.0.0")

    def row(name: str, wall_s: float, cpu_s: float, images: int = 1000) -> Row:
        alone = Row("decoding alone", lambda: iter(()), runs=[Run(1000, 1, 1)] * 3)
        return Row(name, lambda: iter(()), alone, runs=[Run(images, wall_s, cpu_s)] * 3)

    def advice(info: reader.DatasetInfo, size: int, ours: Row, augmented_s: float = 1.0) -> str:
        return advise([ours, row("train_batches, flip_crop", 1, augmented_s)], info, size)

    fast, idle = row("train_batches", 1, 1), row("train_batches", 5, 1)
    assert "more CPU cores" in advice(local, 32, fast)
    assert "augment on the device" in advice(local, 32, fast, augmented_s=1.5)
    assert "--image_size 8" in advice(local, 8, fast)
    assert "wait 80% of the time for storage" in advice(remote, 32, idle)
    assert "larger batches" in advice(local, 32, row("train_batches", 2, 2), augmented_s=2)
    assert "more CPU cores" in advice(local, 32, idle)  # no storage to blame
    assert "too short to judge" in advice(local, 32, row("train_batches", 1, 1, images=999))
