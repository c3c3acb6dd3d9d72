"""`imageshards bench`: every row is really measured, and every request to storage waits and is counted."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import reader
from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.schema.example import image_example
from imageshards import main
from reader import commands
from reader.preprocess import image_files
from reader.tools.requests import Request, SlowStorage
from tests import make, servers
from tests.images.kinds import every_kind
from tests.reading.shards import make_dataset

FEW: dict[str, Any] = {"images": 128, "batch_size": 16, "image_size": 32, "repeats": 1}
FLAGS = [word for name, value in FEW.items() for word in (f"--{name}", str(value))]
FILES = ["files, one at a time", "files, 32 at a time"]
OURS = ["train_batches (NumPy)", "as_tf (TensorFlow)", "as_torch (PyTorch)", "as_jax (JAX)"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("bench") / "1.0.0", {"train": [100, 60]}, size=(32, 32))


@pytest.fixture
def originals(tmp_path: Path) -> Path:
    return make.class_folders(tmp_path / "originals", {"ant": 7, "bee": 9})


def test_the_table(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", folder, *FLAGS, "--images", "200"]) == 0
    out, err = capsys.readouterr()
    title, head, *lines = out.splitlines()
    assert title.startswith("photos 1.0.0, 32 px, ") and title.endswith(
        " 0 ms a request, 200 images a run (train has 160, read again and again), 1 run in turns"
    )
    assert "CPU s/1,000  requests/1,000  kB/image  % of decode-only (time / CPU)" in head
    assert [line.split("  ")[0] for line in lines] == [*OURS, "decoding alone"]
    assert err.startswith("about 1 s: ") and err.count("\n") == 1, "a line a minute"


def test_every_request_waits_and_every_row_counts_its_own(
    folder: str, originals: Path, gcs: servers.Gcs, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "photos/1.0.0", Path(folder))
    more = ["--against", str(originals), "--latency_ms", "5", "--json"]
    assert main(["bench", f"gs://{bucket}/photos/1.0.0", *FLAGS, *more]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["rows"]}
    assert (document["latency_ms"], document["images"], document["against"]) == (5, 128, str(originals))
    assert list(rows) == [*FILES, *OURS, "decoding alone"]
    assert 0 < rows[FILES[0]]["images_per_s"] <= 200  # 5 ms each
    for name, row in rows.items():
        if "missing" not in row:
            # Ours: runs of 64 records in a shard of 100 and one of 60, and no more than 128 records.
            requests = 128 if name in FILES else 3 if name in OURS else 0
            assert row["requests_per_1000"] == pytest.approx(1000 * requests / 128, abs=0.01), name
            assert (row["bytes_per_image"] > 500) == (requests > 0)
            assert (row["of_decoding_alone"] or {}).keys() == ({"wall", "cpu"} if name in OURS else set()), name


def test_requests_elsewhere_are_not_delayed_and_a_bucket_s_are_recorded_once(folder: str, gcs: servers.Gcs) -> None:
    bucket, seen = gcs.new_bucket(), list[Request]()
    gcs.put(bucket, "one", b"123")
    with storage.wrapped(lambda store: SlowStorage(store, 0.01, seen.append)):
        for url, name in ((f"gs://{bucket}", "one"), (folder, "manifest.json")):
            slow = storage.open_storage(url)
            assert slow.read(f"{url}/{name}") and slow.names(url) and [*slow.files(url)] and slow.stat(f"{url}/{name}")
    assert [one.name for one in seen] == ["read_range", "names", "files", "stat"] * 2
    assert sum(one.bytes_read for one in seen) == 3 + Path(folder, "manifest.json").stat().st_size
    assert all(one.end - one.begin >= 0.01 for one in seen)
    assert not isinstance(storage.open_storage(folder), SlowStorage)


def test_a_run_reads_the_first_records_that_are_asked_for(folder: str) -> None:
    found = reader.bench(folder, "train[:40]", classes=["cat"], **FEW | {"images": 8, "batch_size": 4})
    assert found.conditions["split_images"] == found.rows[0].passes[0].images == 8


def test_originals_are_those_that_the_writer_takes_and_one_that_does_not_decode_is_one_line(
    folder: str, originals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {f"{kind}.{kind.split('_')[0]}": data for kind, data in every_kind().items()}
    (originals / "cat").mkdir()
    for name, data in {**kinds, f"{'x' * 251}.jpg": kinds["jpeg.jpeg"]}.items():
        (originals / "cat" / name).write_bytes(data)
    taken = {path.name for path in originals.glob("*/*")}
    (originals / "cat" / ".hidden").mkdir()
    for name in ("cat/.hidden/a.jpg", "cat/notes.txt", "outside.jpg"):
        (originals / name).write_bytes(b"no image")
    assert {os.path.basename(path) for path in image_files(str(originals)) if "/" in path} == taken
    found = reader.bench(folder, against=originals, **FEW)
    assert found.rows[0].passes[0].images == 128 and not found.conditions["left_out"]

    (originals / "cat" / "broken.jpg").write_bytes(b"hello")
    command = ["bench", folder, *FLAGS, "--against", str(originals)]
    assert main(command) == 0
    left_out = f"1 file left out, such as {originals}/cat/broken.jpg: "
    assert [line[: len(left_out)] for line in capsys.readouterr().out.splitlines()].count(left_out) == 1
    assert main(["bench", folder, "--against", str(originals / "cat")]) == 2
    assert capsys.readouterr().err == f"error: '{originals}/cat': no image in class folders there\n"
    for path in originals.glob("*/[!.]*"):
        path.write_bytes(b"hello")
    assert main(command) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {originals}/") and error.endswith("; none of the first images decodes")


def test_a_record_that_does_not_decode_is_one_line(tmp_path: Path) -> None:
    record = image_example(image=b"hello", size=(32, 32), class_id=0, label="bird", path="bird/0.jpg")
    url = make_dataset(tmp_path / "1.0.0", {"train": [4]}, record=lambda _, number: (0, record))
    with pytest.raises(ImageShardsError, match=r"1\.0\.0: .*; imageshards verify finds the record$"):
        reader.bench(url, **FEW)


def test_a_terminal_gets_a_line_for_each_run_and_a_pipe_one_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_terminal, shown in ((True, ["a", "b", "c"]), (False, ["a", "c"])):
        progress, clock = commands._Progress(), iter([0.0, 30.0, 60.0])
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
        monkeypatch.setattr(time, "monotonic", lambda clock=clock: next(clock))
        for line in "abc":
            progress(line)
        monkeypatch.undo()
        assert capsys.readouterr().err.splitlines() == shown
