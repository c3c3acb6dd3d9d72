"""`imageshards bench`: every row is really measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from imageshards import main
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
