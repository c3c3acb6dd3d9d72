"""The command from end to end: exit codes with their one line, what a second run does, damage, repair, rejects."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

import beam_pipeline
from beam_pipeline import schema
from beam_pipeline.cli import job
from beam_pipeline.config import FLAGS, Config
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.inputs.references import order_key
from beam_pipeline.storage.local import LocalStorage
from tests import make
from tests.conftest import forget_clients
from tests.servers import Gcs

TWO_SPLITS = ("--splits", "train=0.8,validation=0.2", "--num_shards", "2")
FEW = "warning: 3 classes have fewer than 5 records in split 'validation': 'ant' 3, 'bee' 4, 'cat' 4\n"


@pytest.fixture(scope="module")
def original(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published version of `photos`; tests work on copies."""
    return make.published(photos, tmp_path_factory.mktemp("original"), *TWO_SPLITS)


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    """A published version to damage: `tmp_path`/photos/1.0.0."""
    return Path(shutil.copytree(original, tmp_path / "photos" / "1.0.0"))


def again(photos: Path, version: Path, *more: object) -> make.Finished:
    """The command that made `version`, once more."""
    return make.job(photos, version.parent.parent, *TWO_SPLITS, *more)


@pytest.fixture
def changed(photos: Path, tmp_path: Path) -> Path:
    """A copy of the pictures with their times, to be changed."""
    return Path(shutil.copytree(photos, tmp_path / "changed"))


def refused(finished: make.Finished, code: int, line: str) -> None:
    assert (finished.code, finished.err) == (code, f"error: {line}\n")


def failed(finished: make.Finished, *parts: str) -> None:
    """Exit 1 and one line that holds these parts."""
    assert (finished.code, finished.err.count("\n")) == (1, 1), finished
    assert [part for part in parts if part not in finished.err] == [], finished.err


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = make.traces(folder)
    yield
    assert make.traces(folder) == before


@contextlib.contextmanager
def publishing(fails: Callable[[str, list[str]], bool] = lambda url, before: False) -> Iterator[list[str]]:
    """What is written, by URL; on a machine that goes away where `fails` says so of the next URL and those before."""
    publish = LocalStorage.publish
    urls: list[str] = []

    def note(self: LocalStorage, file: Any, url: str, generation: str | None = None) -> bool:
        if fails(url, urls):
            raise RuntimeError("the machine goes away here")
        urls.append(url)
        return publish(self, file, url)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "publish", note)
        yield urls


# --- bad usage: exit 2, one line, nothing read and nothing written (most lines: tests/cli/messages.txt) ----


@pytest.mark.parametrize("flag", ["--input", "--output"])
@pytest.mark.parametrize("value", ["a-file", "nope://bucket/x", "gs://", "gs:/bucket/x", "gs://no-such-bucket/x"])
def test_a_place_that_is_none_is_exit_2_with_one_line_that_names_it(
    flag: str, value: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gcs: Gcs
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    given = {"--input": str(photos), "--output": "out"} | {flag: value}
    finished = make.run("--name", "photos", *(part for pair in given.items() for part in pair))
    assert (finished.code, finished.out, finished.err.count("\n")) == (2, "", 1)
    assert finished.err.startswith(f"error: {flag} '") and f"{value}': " in finished.err
    assert ("no such bucket" in finished.err) is ("no-such" in value)
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_help_is_exit_0_and_lists_every_flag_in_its_group_with_its_default() -> None:
    finished = make.run("--help")
    assert finished.code == 0
    assert finished.out.startswith("usage: imageshards write --input DIR --output ROOT --name NAME [")
    groups = dict(re.findall(r"^([a-z ]+):\n((?:  .*\n)+)", finished.out, re.MULTILINE))
    for name, flag in FLAGS.items():
        _, _, told = groups[flag.group].partition(f"  --{name}")
        text = " ".join(told.partition("\n  --")[0].split())
        assert " ".join(flag.help.split()) in text
        assert text.endswith(")") or flag.default in (None, "", False), name
    assert "  --seed N " in groups["shards"] and "  --resize_mode stretch|crop|pad" in groups["images"]
    assert "(0)" in groups["shards"] and "(600)" in groups["job"] and "(90)" in groups["images"]


def test_the_command_prints_its_one_line_and_nothing_else(with_broken: Path, tmp_path: Path) -> None:
    # As a process: no log line, no warning, no traceback of a library around it.
    command = [sys.executable, "-m", "beam_pipeline", f"--input={with_broken}", f"--output={tmp_path}", "--name=x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        "error: 3 of 45 images rejected, --max_reject_fraction is 0.01: the first is 'dog/cut.jpg' "
        f"(truncated: JPEG of 120x90 pixels, {(with_broken / 'dog' / 'cut.jpg').stat().st_size} bytes); "
        "remove them or raise --max_reject_fraction\n",
    )
    assert make.files(tmp_path) == {}


def test_an_error_of_a_worker_is_the_same_line(with_broken: Path, tmp_path: Path) -> None:
    # This mode hands errors back as text, as Dataflow does; Beam's workers print their tracebacks before it.
    in_memory = make.job(with_broken, tmp_path)
    threads = make.job(with_broken, tmp_path, "--direct_running_mode=multi_threading", "--direct_num_workers=2")
    assert threads.code == in_memory.code == 1
    assert threads.err.splitlines()[-1] == in_memory.err.rstrip()


# --- published already -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [(), ("--repair",), ("--fetch_concurrency", "2", "--decode_threads", "1", "--max_reject_fraction", "0.5")],
    ids=" ".join,
)
def test_the_same_command_again_writes_nothing(photos: Path, copy: Path, flags: tuple[str, ...]) -> None:
    with unchanged(copy.parent.parent):
        finished = again(photos, copy, *flags)
    assert finished.code == 0
    assert finished.out.splitlines()[0] == f"already published {copy}, nothing written"


@pytest.mark.parametrize(
    ("flag", "value", "now", "then"),
    [
        ("--image_size", "24x32", "24x32", "24"),
        ("--num_shards", "3", "3", "2"),
        ("--splits", "train=0.5,validation=0.5", "'train=0.5,validation=0.5'", "'train=0.8,validation=0.2'"),
        ("--labels_file", "labels.txt", "of cat, bee, ant", "None"),
    ],
)
def test_another_configuration_of_a_published_version_is_exit_2_and_writes_nothing(
    photos: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, flag: str, value: str, now: str, then: str
) -> None:
    monkeypatch.chdir(copy.parent.parent.parent)
    Path("labels.txt").write_text("cat\nbee\nant\n")
    with unchanged(copy.parent):
        finished = again(photos, copy, flag, value)
    line = f"{flag} {now}: {copy} is published with {then}; choose another --version or --overwrite"
    refused(finished, 2, line)


def test_added_and_removed_images_are_exit_1_with_counts(changed: Path, copy: Path) -> None:
    with unchanged(copy):
        for number in range(2):
            (changed / "ant" / f"new{number}.jpg").write_bytes(make.encoded(make.picture(seed=1000 + number)))
        failed(again(changed, copy), "40 images were listed then, 42 now", "of 4 shards differ")
        for name in ("new0.jpg", "new1.jpg", "0000.jpg"):
            (changed / "ant" / name).unlink()
        line = f"the input has changed since {copy} was published: 40 images were listed then, 39 now, "
        refused(again(changed, copy), 1, f"{line}1 of 4 shards differ; choose another --version or --overwrite")


def edit_keeping_the_size(image: Path) -> None:
    """Another picture of the same number of bytes: a JPEG may end in anything."""
    size = image.stat().st_size
    for quality in range(94, 5, -3):
        data = make.encoded(make.picture(seed=999), quality=quality)
        if len(data) <= size:
            image.write_bytes(data.ljust(size, b"\0"))
            return
    raise AssertionError("no quality gives a file small enough")


def rename(image: Path) -> None:
    image.rename(image.with_name("renamed.jpg"))


@pytest.mark.parametrize(("change", "flags"), [(rename, ()), (edit_keeping_the_size, ("--repair",))])
def test_an_input_of_as_many_other_images_is_found(
    changed: Path, copy: Path, change: Callable[[Path], None], flags: tuple[str, ...]
) -> None:
    change(changed / "ant" / "0003.jpg")
    with unchanged(copy):
        failed(again(changed, copy, *flags), "40 images were listed then, 40 now")


def test_an_edited_object_of_the_same_size_is_found_by_its_md5(gcs: Gcs, changed: Path, tmp_path: Path) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "in", changed)
    command = (f"gs://{bucket}/in", tmp_path / "out", *TWO_SPLITS)
    make.published(*command)
    edit_keeping_the_size(changed / "ant" / "0003.jpg")
    gcs.put(bucket, "in/ant/0003.jpg", (changed / "ant" / "0003.jpg").read_bytes())
    failed(make.job(*command), "40 images were listed then, 40 now, 1 of 4 shards differ")


# --- damage and repair -------------------------------------------------------------------------------------------


def test_a_truncated_shard_is_written_again_with_the_same_bytes(photos: Path, original: Path, copy: Path) -> None:
    shard = make.shard_files(copy)[1]
    shard.write_bytes(shard.read_bytes()[:-7])
    others = {name: trace for name, trace in make.traces(copy).items() if Path(name).suffix == ".json"}
    finished = again(photos, copy)
    assert finished.code == 0, finished.err
    assert make.files(copy) == make.files(original)
    assert {name: make.traces(copy)[name] for name in others} == others
    assert not (copy.parent / "_state").exists()
    assert finished.out.startswith(f"repaired {copy}\n")
    assert finished.err == f"repairing 1 corrupt shard\n{FEW}"


def test_missing_files_of_every_kind_are_written_again(photos: Path, original: Path, copy: Path) -> None:
    for name in make.manifest(copy)["files"]:
        (copy / name).unlink()
    make.shard_files(copy)[0].unlink()
    assert again(photos, copy).code == 0
    assert make.files(copy) == make.files(original)


def test_a_corrupt_manifest_is_exit_1_and_names_repair(photos: Path, copy: Path) -> None:
    make.flip_byte(copy / schema.MANIFEST_FILE)
    with unchanged(copy):
        failed(again(photos, copy), "manifest.json is corrupt", "--repair")


def test_repair_never_publishes_a_shard_with_other_bytes(changed: Path, copy: Path) -> None:
    for image in sorted((changed / "ant").iterdir()):
        edit_keeping_the_size(image)
    for shard in make.shard_files(copy):
        shard.unlink()
    finished = again(changed, copy)
    assert finished.code == 1
    line = finished.err.splitlines()[-1]
    assert line.startswith("error: shard photos-")
    assert line.endswith("comes out with other bytes than were published: an image of it has changed; use --overwrite")
    splits = make.manifest(copy)["splits"].values()
    crcs = {shard["file"]: shard["crc32c"] for content in splits for shard in content["shards"]}
    wrong = [file.name for file in make.shard_files(copy) if google_crc32c.value(file.read_bytes()) != crcs[file.name]]
    assert not wrong, "published under names whose bytes the manifest promises"


def test_a_repair_does_not_believe_the_leftover_of_an_interrupted_one(photos: Path, original: Path, copy: Path) -> None:
    for shard in make.shard_files(copy):
        make.flip_byte(shard)
    with publishing(fails=lambda url, before: len(before) == 1) as repaired:
        assert again(photos, copy, "--repair").code == 1
    make.flip_byte(Path(repaired[0]))  # damaged once more, after the interrupted repair had repaired it
    finished = again(photos, copy, "--repair")
    assert finished.code == 0, finished.err
    assert make.files(copy) == make.files(original)


def test_overwrite_writes_the_version_anew_with_another_configuration(photos: Path, copy: Path) -> None:
    finished = again(photos, copy, "--overwrite", "--seed", "5", "--num_shards", "1")
    assert finished.code == 0
    assert finished.out.startswith(f"published {copy}")
    assert [path.suffix for path in make.shard_files(copy)] == [".tfrecord-00000-of-00001"] * 2
    assert make.manifest(copy)["configuration"]["seed"] == 5


def test_overwrite_that_fails_before_it_writes_leaves_the_published_version(changed: Path, copy: Path) -> None:
    for image in (changed / "bee").iterdir():
        image.write_bytes(b"no image")
    with unchanged(copy):
        assert again(changed, copy, "--overwrite").code == 1


# --- a job that fails, and the same command after it -------------------------------------------------------------


def fail_at_one_shard(folder: Path, version: Path) -> None:
    with publishing(fails=lambda url, before: "validation.tfrecord-00001" in url):
        failed(again(folder, version), "the same command resumes")


def test_the_same_command_resumes_a_failed_job_and_keeps_its_finished_shards(
    photos: Path, original: Path, tmp_path: Path
) -> None:
    version = tmp_path / "photos" / "1.0.0"
    fail_at_one_shard(photos, version)
    assert not (version / schema.MANIFEST_FILE).exists()
    assert not list(tmp_path.rglob("*.tmp"))
    finished_shards = {path: path.stat().st_mtime_ns for path in make.shard_files(version)}
    assert finished_shards
    assert again(photos, version).code == 0
    assert {path: path.stat().st_mtime_ns for path in finished_shards} == finished_shards
    assert make.same_each_time(version) == make.same_each_time(original)
    assert not (tmp_path / "photos" / "_state").exists()


def test_an_image_with_another_time_voids_what_a_failed_job_left(changed: Path, original: Path, tmp_path: Path) -> None:
    version = tmp_path / "out" / "photos" / "1.0.0"
    fail_at_one_shard(changed, version)
    assert make.shard_files(version)
    os.utime(changed / "ant" / "0000.jpg", ns=(1, 1))  # its bytes are the same, but a listing can't tell
    with publishing() as published:
        assert again(changed, version).code == 0
    shards = [str(path) for path in make.shard_files(version)]
    assert len(shards) == 4
    assert set(shards) <= set(published), "none is kept"
    assert make.same_each_time(version) == make.same_each_time(original)


# --- rejects -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_broken(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`photos` and three broken images in a class of two good ones."""
    folder = Path(shutil.copytree(photos, tmp_path_factory.mktemp("broken") / "in"))
    make.class_folders(folder, {"dog": 2})
    good = make.encoded(make.picture(120, 90, seed=77))
    (folder / "dog" / "cut.jpg").write_bytes(good[: len(good) // 2])
    (folder / "dog" / "text.jpg").write_bytes(b"hello, this is no image")
    (folder / "dog" / "empty.jpg").write_bytes(b"")
    return folder


def test_as_many_rejects_as_the_limit_are_listed_in_the_order_of_the_records_and_counted(
    with_broken: Path, tmp_path: Path
) -> None:
    finished = make.job(with_broken, tmp_path, "--max_reject_fraction", repr(3 / 45), "--num_shards", "3")
    assert finished.code == 0, finished.err
    told = "  45 images listed = 42 records + 3 rejects (not_an_image 2, truncated 1; see rejects.jsonl)"
    assert told in finished.out.splitlines()
    version = tmp_path / "photos/1.0.0"
    cut_bytes = (with_broken / "dog" / "cut.jpg").stat().st_size
    expected = [
        ("dog/cut.jpg", "truncated", f"JPEG of 120x90 pixels, {cut_bytes} bytes"),
        ("dog/empty.jpg", "not_an_image", "0 bytes, beginning nowhere"),
        ("dog/text.jpg", "not_an_image", "23 bytes, beginning 68656c6c6f2c2074"),
    ]
    rejects = [json.loads(line) for line in (version / "rejects.jsonl").read_text().splitlines()]
    assert rejects == [
        dict(zip(("path", "reason", "detail"), one, strict=True))
        for one in sorted(expected, key=lambda one: order_key(one[0], 0))
    ]
    data = make.manifest(version)
    assert (data["images"], data["records"]) == (45, 42)
    assert data["rejects"] == {"by_reason": {"not_an_image": 2, "truncated": 1}, "environment": 0}
    assert data["splits"]["train"]["class_counts"] == [14, 13, 13, 2]


def test_a_rejected_image_with_a_line_break_in_its_name_is_one_whole_line(tmp_path: Path) -> None:
    folder = make.class_folders(tmp_path / "in", {"a": 2})
    (folder / "a" / "new\nline.jpg").write_bytes(b"")
    line = (
        "1 of 3 images rejected, --max_reject_fraction is 0.01: the first is 'a/new\\nline.jpg' "
        "(not_an_image: 0 bytes, beginning nowhere); remove them or raise --max_reject_fraction"
    )
    refused(make.job(folder, tmp_path / "out"), 1, line)


def test_a_shard_of_rejects_only_stays_with_no_record(tmp_path: Path, gcs: Gcs) -> None:
    # An empty object can't be read in ranges: the remote store answers 416.
    folder = make.class_folders(tmp_path / "in", {"a": 5})
    (folder / "a" / "bad.jpg").write_bytes(b"bad")
    bucket = gcs.new_bucket()
    command = (folder, f"gs://{bucket}/out", "--num_shards", "6", "--max_reject_fraction", "0.5")
    assert make.job(*command).code == 0
    version = gcs.download(bucket, "out/photos/1.0.0", tmp_path / "out")
    shards = make.manifest(version)["splits"]["train"]["shards"]
    assert sorted(shard["records"] for shard in shards) == [0, 1, 1, 1, 1, 1]
    assert sorted(path.stat().st_size for path in make.shard_files(version))[0] == 0
    finished = make.job(*command, "--repair")
    assert finished.code == 0, finished.err
    assert finished.out.startswith("already published")


# --- other outcomes ----------------------------------------------------------------------------------------------


def test_plan_only_prints_the_plan_and_writes_nothing(photos: Path, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with unchanged(copy):
        for output, seed in ((tmp_path / "new", 0), (tmp_path / "mine", 0), (tmp_path, 3)):  # the last is published
            finished = make.job(photos, output, *TWO_SPLITS, "--plan_only", "--seed", seed)
            assert (finished.code, "train: " in finished.out, "in 2 shards" in finished.out) == (0, True, True)
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "photos"}
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize(
    ("images", "flags", "line"),
    [
        ({"a": 2}, ("--splits", "train=rest,validation=0.000001"), "split 'validation' got no images and was left out"),
        ({"a": 2, "b": 0}, (), "1 class has no records: 'b'"),
        ({"a": 3}, ("--num_shards", "10"),
         "--num_shards 10: split 'train' has only 3 images: wrote 3 shards"),
        ({"a": 2}, ("--compression", "gzip"),
         "gzip shards have no index and no TFDS metadata: read them with reader.record_dataset"),
    ],
    ids=["split", "class", "shards", "gzip"],
)  # fmt: skip
def test_what_a_user_should_look_at_is_a_warning(
    tmp_path: Path, images: dict[str, int], flags: tuple[str, ...], line: str
) -> None:
    folder = make.class_folders(tmp_path / "in", images)
    finished = make.job(folder, tmp_path / "out", *flags)
    assert (finished.code, finished.err) == (0, f"warning: {line}\n")
    version = tmp_path / "out/photos/1.0.0"
    assert make.manifest(version)["classes"] == list(images)
    assert len(make.shard_files(version)) == (3 if "10" in flags else 1)


def test_no_train_image_is_an_error(tmp_path: Path) -> None:
    folder = make.class_folders(tmp_path / "in", {"a": 2})
    finished = make.job(folder, tmp_path / "out", "--splits", "validation=rest,train=0.000001")
    failed(finished, "no image is in split 'train' (found validation)")
    assert make.files(tmp_path / "out") == {}


def test_gzip_shards_are_the_same_whenever_they_are_written_and_have_no_index(photos: Path, tmp_path: Path) -> None:
    versions = [make.published(photos, tmp_path / name, "--compression", "gzip") for name in ("a", "b")]
    assert make.same_each_time(versions[0]) == make.same_each_time(versions[1])
    (shard,) = make.shard_files(versions[0])
    header = shard.read_bytes()[:10]
    assert header[:2] == b"\x1f\x8b"
    assert header[4:8] == b"\0\0\0\0", "the time of writing"
    names = set(make.files(versions[0]))
    assert not {schema.FEATURES_FILE, schema.DATASET_INFO_FILE} & names
    assert not any(name.startswith("index/") for name in names)


def test_files_that_are_skipped_are_told_and_change_no_byte_of_the_dataset(
    changed: Path, original: Path, tmp_path: Path
) -> None:
    folder = changed
    for name in ("ant/notes.txt", "bee/x.JPX", "y.JPX", "ant/.DS_Store", "loose.jpg", "bee/.z.jpg", ".cat/1.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"no image")
    line = "  3 files skipped: not an image suffix (.JPX 2, .txt 1), see --extensions"
    hidden = (f"  1 {what} skipped: hidden, its name begins with a dot" for what in ("image", "folder"))
    told = make.job(folder, tmp_path / "out", *TWO_SPLITS).out.splitlines()
    assert {line, "  1 image skipped: not inside a class folder", *hidden} <= set(told)
    version = tmp_path / "out/photos/1.0.0"
    kinds = dict.fromkeys(("hidden", "hidden_images", "hidden_folders", "outside_classes"), 1)
    skipped = json.loads((version / schema.RUN_FILE).read_bytes())["skipped"]
    assert skipped == {**kinds, "suffixes": {".JPX": 2, ".txt": 1}}
    assert make.same_each_time(version) == make.same_each_time(original)
    assert line in make.job(folder, tmp_path / "out", *TWO_SPLITS).out.splitlines(), "published already"
    (version / schema.RUN_FILE).unlink()
    assert make.job(folder, tmp_path / "out", *TWO_SPLITS).code == 0


def test_run_json_says_how_it_went(original: Path) -> None:
    facts = json.loads((original / schema.RUN_FILE).read_bytes())
    assert (facts["runner"], facts["images"]) == ("FnApiRunner", 40)
    assert facts["command"][:3] == ["python", "-m", "beam_pipeline"]
    assert facts["versions"]["imageshards"] == beam_pipeline.__version__


# --- from Python -------------------------------------------------------------------------------------------------


def test_run_returns_the_manifest(photos: Path, original: Path, tmp_path: Path) -> None:
    places = {"input": str(photos), "output": str(tmp_path), "name": "photos"}
    config = Config(**places, image_size=24, splits="train=0.8,validation=0.2", num_shards=2)
    manifest = beam_pipeline.run(config)
    assert isinstance(manifest, beam_pipeline.Manifest)
    version = tmp_path / "photos" / "1.0.0"
    assert (manifest.url, manifest.outcome, manifest.data) == (str(version), "published", make.manifest(version))
    assert (manifest.images, manifest.records, manifest.rejects) == (40, 40, {})
    assert (manifest.classes, sum(manifest.splits.values())) == (["ant", "bee", "cat"], 40)
    assert make.same_each_time(version) == make.same_each_time(original), "the command line writes the same"
    second = beam_pipeline.run(config)
    assert second is not None
    assert (second.outcome, second.data) == ("already published", manifest.data)


def test_run_raises_what_the_command_prints(with_broken: Path, tmp_path: Path) -> None:
    for place, kind, line in (
        (tmp_path / "no", UsageError, "no such folder"),
        (with_broken, ImageShardsError, "3 of 45 images rejected"),
    ):
        config = beam_pipeline.Config(input=place, output=tmp_path / "out", name="x", image_size=24)
        with pytest.raises(ImageShardsError, match=line) as caught:
            beam_pipeline.run(config)
        assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("runner", "local"),
    [(None, True), ("direct", True), ("DirectRunner", True), ("FnApiRunner", True), ("prismrunner", True),
     ("Dataflow", False), ("FlinkRunner", False)],
)  # fmt: skip
def test_a_runner_is_local_however_its_name_is_written(runner: str | None, local: bool) -> None:
    assert job.is_local(PipelineOptions([f"--runner={runner}"] if runner else [])) is local


def test_ctrl_c_is_a_callers_own_and_one_line_of_the_command(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the middle of a step, where Beam makes an error of its own of it.
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("beam_pipeline.dataset.writer.ShardWriter.write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            beam_pipeline.run(Config(input=str(photos), output=str(tmp_path / "out"), name="photos", image_size=24))
        refused(make.job(photos, tmp_path / "out"), 1, "interrupted; the same command resumes")
    assert make.job(photos, tmp_path / "out").code == 0, "nothing is locked"


def test_ctrl_c_while_a_job_runs_in_this_process(photos: Path, tmp_path: Path) -> None:
    for seconds in (0.05, 0.3):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            for _ in range(100):
                beam_pipeline.run(Config(input=str(photos), output=str(tmp_path), name="photos", overwrite=True))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More pictures than a machine converts before it is interrupted."""
    folder = make.class_folders(tmp_path_factory.mktemp("many"), {"a": 12}, size=(1600, 1200))
    for number in range(150):
        shutil.copytree(folder / "a", folder / f"a{number}", copy_function=os.link)
    return folder


@pytest.mark.parametrize("mode", ["in_memory", "multi_threading", "multi_processing"])
def test_ctrl_c_ends_the_command_soon_with_one_line(many: Path, tmp_path: Path, mode: str) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "beam_pipeline", f"--input={many}", f"--output={out}", "--name=x"]
    command += [f"--direct_running_mode={mode}", "--direct_num_workers=2", "--num_shards=4"]
    with subprocess.Popen(command, cwd=make.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not out.exists():
            time.sleep(0.1)
        time.sleep(1)
        for _ in range(2):  # a second one changes nothing
            process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        _, said = process.communicate(timeout=60)  # until its workers have ended, too
        assert time.monotonic() - begun < 15, "four seconds, on a machine that does nothing else"
    assert process.returncode == 1
    line = "error: interrupted; the same command resumes"
    assert said == f"{line}\n" if mode == "in_memory" else line in said.splitlines()  # Beam's workers print, too


def test_an_unforeseen_error_is_one_line_that_names_its_traceback(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(job.beam.Pipeline, "run", fail)
    finished = make.job(photos, tmp_path)
    assert finished.code == 1
    said, _, path = finished.err.rstrip().partition("; its traceback is in ")
    assert said == "error: the job failed: unforeseen; the same command resumes"
    kept = Path(path)
    assert "in fail\n" in kept.read_text() and "RuntimeError: unforeseen\n" in kept.read_text()
    kept.unlink()


@pytest.mark.parametrize("mode", ["in_memory", "multi_processing"])
def test_a_terminal_sees_the_progress_line_and_what_is_published(photos: Path, tmp_path: Path, mode: str) -> None:
    # A real terminal, with a clock of half a second for the line; nothing of Beam's.
    command = [sys.executable, "-m", "beam_pipeline", "--input", str(photos), "--output", str(tmp_path), "--name=x"]
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [*command, f"--direct_running_mode={mode}", "--direct_num_workers=2"],
        stdin=end, stdout=end, stderr=end, cwd=make.ROOT,
    ) as process:  # fmt: skip
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # Linux' end of a terminal
            while data := os.read(terminal, 65_536):
                shown += data
    os.close(terminal)
    assert process.returncode == 0
    *drawn, told = shown.decode().split("\r\033[K")
    assert all(line.startswith(("listing: ", "shards ")) for line in drawn if line), shown
    first, _, *rest = told.splitlines()
    assert [first, *rest] == [
        f"published {tmp_path}/x/1.0.0",
        "  40 images listed = 40 records + 0 rejects",
        "  3 classes",
    ]


def test_a_job_changes_no_logging_and_leaves_no_temporary_folder(
    photos: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = (logging.root.level, logging.root.manager.disable)
    assert make.job(photos, tmp_path / "new", "--runner=FnApiRunner").code == 0
    assert again(photos, copy, "--runner=FnApiRunner").out.startswith("already published")
    assert again(photos, copy, "--runner=FnApiRunner", "--seed=1").code == 2
    assert (logging.root.level, logging.root.manager.disable) == before
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_store_that_does_not_answer_is_told_before_anything_is_begun(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://localhost:1")
    forget_clients()
    try:
        finished = make.job("gs://bucket/photos", tmp_path, "--io_deadline", "0")
    finally:
        forget_clients()
    assert finished.code == 1
    assert finished.err.startswith("error: gs://bucket/photos: no success for 0 s: ")
    assert finished.err.endswith("; check the URL and the network; nothing was started\n")
    assert "resumes" not in finished.err
