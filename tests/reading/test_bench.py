"""`imageshards bench`: every row is really measured."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from PIL import Image

from beam_pipeline import storage
from imageshards import main
from reader.tools import bench
from reader.tools.requests import Request, SlowStorage
from reader.tools.trace import Trace, Tracer, draw
from tests import make, servers
from tests.reading.shards import make_dataset
from tests.reading.without import run_without


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("bench") / "1.0.0", {"train": [100, 60]}, size=(32, 32))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("bench") / "1.0.0", {"train": [40, 24]}, size=(32, 32))


FEW = ["--images", "80", "--batch_size", "16", "--image_size", "32", "--repeats", "2"]
CACHED = ["individual files, cached in memory", "individual files, cached on disk"]
TUTORIAL = ["GZIP shards, the tutorial's way", "plain shards, the tutorial's way"]
DOORS = ["train_dataset (TensorFlow)", "as_torch (PyTorch)"]
OURS = [
    f"{name}{work}"
    for work in ("", ", flip_crop", ", random_resized_crop")
    for name in ("train_batches", "decoding alone")
]


def test_the_table_and_the_chart(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "new" / "bench.png"
    assert main(["bench", small, *FEW, "--cached", "--chart", str(chart)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("photos 1.0.0, 32 px, ")
    assert " 80 images a run (train has 64, read again and again), median of 2 runs in turns\n" in out
    assert "% of decode-only speed (time / CPU)\n" in out
    names = [line.split("  ")[0] for line in out.splitlines()]
    expected = ["individual files", *CACHED, *TUTORIAL, *DOORS, *OURS]
    assert [name for name in names if name in expected] == expected
    with Image.open(chart) as drawn:
        assert drawn.width == 1200


def test_json_of_a_bucket_and_other_originals(
    small: str, tmp_path: Path, gcs: servers.Gcs, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "photos/1.0.0", Path(small))
    originals = make.class_folders(tmp_path / "originals", {"ant": 7, "bee": 9})
    more = ["--chart", str(tmp_path / "c.png"), "--json", "--against", str(originals)]
    assert main(["bench", f"gs://{bucket}/photos/1.0.0", *FEW, *more]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == ["individual files", *TUTORIAL, *DOORS, *OURS]
    present = [row for row in rows.values() if "missing" not in row]
    assert len(present) >= len(rows) - 1  # PyTorch may not be installed
    assert all(80 <= row["images"] < 80 + 128 and row["images_per_s"] > 0 for row in present)
    assert rows["individual files"]["of_decoding_alone"] is None  # other images
    assert rows["train_batches"]["of_decoding_alone"].keys() == {"clock", "cpu"}
    assert (document["split_images"], document["against"]) == (64, str(originals))


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
    assert (document["latency_ms"], document["images"]) == (5, 128)
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
    assert rows["plain shards, interleave"]["requests_per_1000"] == pytest.approx(1000 * 8 / 128)
    first, last = document["traces"]
    assert len(first["lanes"]["reads"]) == len(first["lanes"]["decodes"]) == 1
    assert last["images"] == 160 and last["lanes"]["waits"] and 0 < last["seconds"] <= 1
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
    assert len([line for line in lines if line.endswith("pip install 'imageshards[tensorflow]'")]) == 11
    assert lines[-1].startswith("imageshards, train_batches ") and "is not installed" not in lines[-1]


def test_requests_outside_the_experiment_are_not_delayed(folder: str) -> None:
    seen: list[Request] = []
    with storage.wrapped(lambda store: SlowStorage(store, 0, seen.append)):
        inside = storage.open_storage(folder)
        assert inside.read(f"{folder}/manifest.json") and inside.names(folder)
        assert len([*inside.files(folder)]) > 2 and inside.stat(f"{folder}/manifest.json")
    assert [one.name for one in seen] == ["read_range", "names", "files", "stat"]
    assert sum(one.bytes_read for one in seen) == Path(folder, "manifest.json").stat().st_size
    assert not isinstance(storage.open_storage(folder), SlowStorage)


def test_a_bucket_s_requests_wait_and_are_recorded_once(gcs: servers.Gcs) -> None:
    bucket, seen = gcs.new_bucket(), list[Request]()
    gcs.put(bucket, "one", b"123")
    with storage.wrapped(lambda store: SlowStorage(store, 0.01, seen.append)):
        slow = storage.open_storage(f"gs://{bucket}")
        assert slow.read(f"gs://{bucket}/one") == b"123" and slow.names(f"gs://{bucket}") == ["one"]
    assert [(one.name, one.bytes_read) for one in seen] == [("read_range", 3), ("names", 0)]
    assert all(one.end - one.begin >= 0.01 for one in seen)


def test_our_row_reads_as_many_images_as_the_experiment_says(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    originals = make.class_folders(tmp_path / "originals", {"ant": 7})
    few = ["--batch_size", "4", "--image_size", "32", "--repeats", "1", "--against", str(originals)]
    command = ["bench", folder, *few, "--latency_ms", "0", "--json", "--images", "16"]
    for given, read in (("train[:40]", "train[:16]"), ("train[50:60]+train[2:]", "train[50:60]+train[2:8]")):
        assert main([*command, "--split", given]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["images"], document["split"], document["rows"][-1]["images"]) == (16, read, 16)


def test_original_files_may_have_names_as_long_as_names_can_be(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    originals = make.class_folders(tmp_path / "originals", {"ant": 3})
    long = originals / "ant" / ("x" * 251 + ".jpg")
    (originals / "ant" / "0000.jpg").rename(long)
    few = ["--images", "4", "--batch_size", "4", "--image_size", "32", "--repeats", "1", "--against", str(originals)]
    assert main(["bench", folder, *few, "--latency_ms", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 4


def test_an_original_that_does_not_decode_is_one_line(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorflow")
    originals = make.class_folders(tmp_path / "originals", {"ant": 3})
    (originals / "ant" / "0001.jpg").write_bytes(b"hello")
    few = ["--images", "4", "--batch_size", "4", "--image_size", "32", "--repeats", "1", "--against", str(originals)]
    assert main(["bench", folder, *few, "--chart", str(tmp_path / "x.png")]) == 1
    text = f"error: {originals}/ant/0001.jpg: the image doesn't decode"
    progress, error = capsys.readouterr().err.splitlines()
    assert progress == "warm-up: individual files" and error.startswith(text)


@contextmanager
def no_file_over(size: int) -> Iterator[None]:
    """Writing more fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("is_original", [True, False])
def test_temporary_files_that_cannot_be_written_are_one_line(
    is_original: bool, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    originals = make.class_folders(tmp_path / "originals", {"ant": 1})
    if is_original:
        Image.effect_noise((500, 500), 99).save(originals / "ant" / "0000.jpg", quality=95)
    few = ["--images", "1", "--image_size", "32", "--repeats", "1", "--against", str(originals), "--latency_ms", "0"]
    with no_file_over(100_000 if is_original else 100):
        code = main(["bench", folder, *few])
    err = capsys.readouterr().err
    assert code == 1 and err.count("error: ") == 1
    assert err.endswith(
        "a temporary file can't be written (File too large); free space there, or set TMPDIR to another folder\n"
    )


@pytest.mark.parametrize("mine", [None, b"my own"])
def test_a_bench_that_fails_or_is_interrupted_leaves_no_empty_picture(
    mine: bytes | None, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "c.png"
    if mine:
        picture.write_bytes(mine)

    def left() -> bytes | None:
        return picture.read_bytes() if picture.exists() else None

    assert main(["bench", folder, "--split", "none", "--chart", str(picture)]) == 2 and left() == mine

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", interrupt)
    assert main(["bench", folder, *FEW, "--chart", str(picture)]) == 1 and left() == mine


def test_it_tells_each_run_in_a_pipe_and_removes_its_temporary_files_when_it_is_ended(
    folder: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "imageshards", "bench", folder, "--image_size", "32", "--repeats", "99"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=make.ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]
        assert lines[0] == "warm-up: individual files\n" and [*tmp_path.glob("imageshards-*")]
        for _ in range(3):  # Python drops an interrupt that comes within a destructor; a user sends another one
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
                break
        assert process.stderr.read().endswith("error: interrupted\n")
    assert process.returncode == 1
    assert not {path.name for path in tmp_path.iterdir()} - {"__pycache__"}, "which is TensorFlow's"


def test_a_trace_s_title_says_when_the_pass_ended() -> None:
    tracer, begin = Tracer(), time.perf_counter()
    trace = tracer.record("short", (count for count in (2, 2)), 2, 0.01)
    assert 0.02 <= trace.seconds <= time.perf_counter() - begin
    assert trace.as_json()["seconds"] == round(trace.seconds, 4)
    (axes,) = draw([trace._replace(seconds=0.0312)]).axes
    assert axes.get_title(loc="left") == "short: 0 images in 0.031 s"
    (axes,) = draw([Trace("long", {}, 1234)]).axes  # as those recorded before there was an end
    assert axes.get_title(loc="left") == "long: 1,234 images in 1 s"


def test_wrong_values_of_the_experiment_are_told(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    originals = str(make.class_folders(tmp_path / "originals", {"ant": 1}))
    for arguments, message in (
        (["--latency_ms", "50"], "latency_ms needs against: the class folders of the original images"),
        (["--latency_ms", "-1", "--against", folder], "latency_ms must be from 0 to 10,000, got -1"),
        (["--latency_ms", "nan", "--against", folder], "latency_ms must be from 0 to 10,000, got nan"),
        (["--latency_ms", "5", "--against", f"{tmp_path}/none"], f"{tmp_path}/none: no such folder"),
        (["--latency_ms", "5", "--against", f"{tmp_path}/empty"], f"{tmp_path}/empty: no image in class folders"),
        (
            ["--latency_ms", "5", "--against", folder, "--chart", "c.png"],
            "--chart doesn't go with --latency_ms: --trace",
        ),
        (
            ["--latency_ms", "5", "--against", originals, "--cached"],
            "cached doesn't go with latency_ms, whose rows have",
        ),
        (["--trace", "t.png"], "--trace needs --latency_ms"),
    ):
        assert main(["bench", folder, *arguments]) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")
