"""The command from end to end: exit codes with their one line, what a second run does, damage, repair, rejects."""

from __future__ import annotations

import contextlib
import dataclasses
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
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

import beam_pipeline
from beam_pipeline import schema
from beam_pipeline.cli import job
from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.storage import LocalStorage
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


def writable(photos: Path, folder: Path) -> Path:
    """A copy of the pictures with their times."""
    return Path(shutil.copytree(photos, folder))


# --- bad usage: exit 2, one line, nothing read and nothing written -----------------------------------------------

USAGE = [
    (("--input", "IN"), "--output is missing: give the root folder or URL of your datasets"),
    (("--input", "IN", "--output", "OUT"), "--name is missing: give the dataset a name such as photos"),
    (
        ("--output", "OUT", "--name", "x"),
        "--input is missing: give the folder or URL whose sub-folders are classes",
    ),
    (("GOOD", "--inp", "x"), "unknown flag '--inp': did you mean --input?"),
    (("GOOD", "--targt_shard_bytes=1MB"), "unknown flag '--targt_shard_bytes': did you mean --target_shard_bytes?"),
    (("GOOD", "--direct_num_worker", "2"), "unknown flag '--direct_num_worker': did you mean --direct_num_workers?"),
    (("GOOD", "--xyzzyplugh"), "unknown flag '--xyzzyplugh': see --help"),
    (("GOOD", "--name", "My-photos"), "--name 'My-photos': use a-z, 0-9 and _, a letter first (TFDS reads no other)"),
    (("GOOD", "--version", "1.0"), "--version '1.0': use N.N.N such as 1.0.0 (TFDS reads no other)"),
    (
        ("GOOD", "--splits", "train=0.9"),
        "--splits 'train=0.9': write train=0.9,validation=0.1 with shares that sum to 1, one of them may be 'rest'",
    ),
    (("GOOD", "--splits", "a=1"), "--splits 'a=1': one split must be named train"),
    (("GOOD", "--image_size", "0"), "--image_size '0': write 224, 224x320 (height x width) or none"),
    (("GOOD", "--jpeg_quality", "abc"), "--jpeg_quality 'abc': give a whole number from 1 to 100"),
    (("GOOD", "--one_hot=yes"), "--one_hot 'yes': leave it out, this flag has no value"),
    (("GOOD", "more"), "unexpected argument 'more': every value belongs to a flag; see --help"),
    (
        ("GOOD", "--runner", "Nope"),
        "--runner 'Nope': choose one of DataflowRunner, FlinkRunner, SparkRunner, PrismRunner, PortableRunner, "
        "or leave it out",
    ),
    (
        ("GOOD", "--runner", "Dataflow"),
        "--runner 'Dataflow': it needs --project, --region, --temp_location too; deploy/dataflow.sh helps",
    ),
    (
        ("GOOD", "--runner", "DataflowRunner", "--project=p", "--region=r"),
        "--runner 'DataflowRunner': it needs --temp_location too; deploy/dataflow.sh helps",
    ),
    (("GOOD", "--jpeg_quality", "0"), "--jpeg_quality '0': give a whole number from 1 to 100"),
    (
        ("GOOD", "--resize_mode", "zoom"),
        "--resize_mode 'zoom': choose one of stretch, crop, pad, shorter, longer",
    ),
    (("GOOD", "--num_shards", "0"), "--num_shards '0': write 8 or train=64,validation=4"),
    (
        ("GOOD", "--num_shards", "1", "--target_shard_bytes", "1MB"),
        "--num_shards '1': leave out --target_shard_bytes or this",
    ),
    (
        ("GOOD", "--target_shard_bytes", "1XB"),
        "--target_shard_bytes '1XB': write a size such as 128MiB, 200MB or 1000000",
    ),
    (("GOOD", "--layout", "flat"), "--layout 'flat': choose one of class_folders, split_class_folders, manifest"),
    (("GOOD", "--layout", "manifest"), "--manifest is missing: --layout manifest needs a CSV or JSONL file"),
    (("GOOD", "--repair", "--overwrite"), "--repair and --overwrite exclude each other: leave out one"),
    (("GOOD", "--repair", "--restart"), "--repair and --restart exclude each other: leave out one"),
    (("GOOD", "--split_by", "a"), "--split_by 'a': put the part that stays together in a group: '([^/]+)_\\d+'"),
    (("GOOD", "--input", "MISSING"), "--input 'MISSING': no such folder"),
    (
        ("GOOD", "--input", "EMPTY"),
        "--input 'EMPTY': no class folders, nothing in it; --layout class_folders wants DIR/CLASS/image.jpg",
    ),
    (
        ("GOOD", "--input", "FLAT"),
        "--input 'FLAT': 2 images directly in it; if 'FLAT' is a class, give --input 'ROOT', "
        "else sort them into DIR/CLASS/image.jpg",
    ),
    (
        ("GOOD", "--input", "NO_IMAGE"),
        "--input 'NO_IMAGE': no image in 1 class folder (1 file without an image suffix, 1 hidden); "
        "images end in avif, bmp, dib, gif, heic, heif, jfif, jpe, jpeg, jpg, png, tif, tiff, webp",
    ),
    (
        ("GOOD", "--labels_file", "LABELS"),
        "--labels_file 'LABELS': class folder 'b' is not in it; add a line for each or move the folder away",
    ),
    (("GOOD", "--output", "IN/out"), "--output 'IN/out': it lies inside --input 'IN'; choose another place"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the table of bad usages calls by one word."""
    root = tmp_path_factory.mktemp("places")
    make.class_folders(root / "IN", {"a": 1, "b": 1})
    for folder in ("EMPTY", "FLAT", "NO_IMAGE/a"):
        (root / folder).mkdir(parents=True)
    for file in ("FLAT/x.jpg", "FLAT/y.jpg", "NO_IMAGE/a/notes.txt", "NO_IMAGE/a/.hidden.jpg"):
        (root / file).write_bytes(b"")
    (root / "LABELS").write_text("a\n")
    return {name: str(root / name) for name in ("IN", "OUT", "EMPTY", "FLAT", "NO_IMAGE", "MISSING", "LABELS")}


def run_in(places: dict[str, str], arguments: tuple[str, ...]) -> make.Finished:
    """Run with the places' words replaced by paths, and the paths in the message by their words."""
    good = ("--input", "IN", "--output", "OUT", "--name", "photos")
    words = [part for argument in arguments for part in (good if argument == "GOOD" else (argument,))]
    paths = [
        str(Path(places[word.split("/")[0]], *word.split("/")[1:])) if word.split("/")[0] in places else word
        for word in words
    ]
    finished = make.run(*paths)
    root = str(Path(places["IN"]).parent)
    return finished._replace(err=finished.err.replace(f"{root}/", "").replace(root, "ROOT"))


@pytest.mark.parametrize(("arguments", "line"), USAGE, ids=[" ".join(arguments) for arguments, _ in USAGE])
def test_bad_usage_is_exit_2_with_one_line_and_writes_nothing(
    arguments: tuple[str, ...], line: str, places: dict[str, str]
) -> None:
    finished = run_in(places, arguments)
    assert (finished.code, finished.err, finished.out) == (2, f"error: {line}\n", "")
    assert not Path(places["OUT"]).exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("GOOD", "--direct_num_workers", "x"), ("--direct_num_workers", "'x'")),
        (("GOOD", "--labels_file", "MISSING"), ("--labels_file 'MISSING'",)),
        # An input or output that is a file, not a folder.
        (("GOOD", "--input", "LABELS"), ("--input 'LABELS'",)),
        (("GOOD", "--output", "LABELS"), ("--output 'LABELS'",)),
        (("GOOD", "--input", "nope://bucket/x"), ("--input", "nope://")),
        (("GOOD", "--output", "nope://bucket/x"), ("--output", "nope://")),
        # Without a bucket this would be a local folder named "gs:".
        (("GOOD", "--output", "gs://"), ("--output", "'gs://'")),
        (("GOOD", "--input", "gs://"), ("--input", "'gs://'")),
        # A split that there is not: the user's number of shards would be ignored.
        (("GOOD", "--num_shards", "tarin=3"), ("--num_shards 'tarin=3'",)),
    ],
    ids=lambda value: " ".join(value),
)
def test_other_bad_usage_is_exit_2_with_one_line_that_names_flag_and_value(
    arguments: tuple[str, ...], parts: tuple[str, ...], places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(places["IN"]).parent)
    here = Path(places["IN"]).parent
    finished = run_in(places, arguments)
    written = {path.name for path in here.iterdir()} - {"EMPTY", "FLAT", "IN", "LABELS", "NO_IMAGE"}
    for name in written:
        shutil.rmtree(here / name)
    assert finished.code == 2, finished
    assert finished.err.startswith("error: ") and finished.err.count("\n") == 1, finished.err
    assert all(part in finished.err for part in parts), finished.err
    assert not written


@pytest.mark.parametrize("flag", ["--input", "--output"])
def test_a_missing_bucket_is_exit_2_and_names_the_flag(gcs: Gcs, photos: Path, tmp_path: Path, flag: str) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "in", photos / "bee")
    given = {"--input": str(photos), "--output": str(tmp_path)} | {flag: "gs://no-such-bucket/x"}
    before = len(gcs.requests())
    finished = make.run("--name", "photos", *(part for pair in given.items() for part in pair))
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.count("\n") == 1
    assert f"{flag} 'gs://no-such-bucket/x': no such bucket" in finished.err
    assert not any(request.object_read == "in" for request in gcs.requests()[before:])


def test_help_is_exit_0_and_lists_every_flag_of_ours_in_its_group() -> None:
    finished = make.run("--help")
    assert finished.code == 0
    assert finished.out.startswith("usage: imageshards write --input DIR --output ROOT --name NAME [")
    groups = dict(re.findall(r"^([a-z ]+):\n((?:  .*\n)+)", finished.out, re.MULTILINE))
    for flag, group in {
        "--input DIR": "input and output", "--splits SHARES": "splits", "--resize_mode stretch|crop|": "images",
        "--seed N": "shards", "--io_deadline SECONDS": "job", "--repair ": "job",
    }.items():  # fmt: skip
        assert f"  {flag}" in groups[group]
    for field in dataclasses.fields(Config):
        assert ("help" in field.metadata) == (f"  --{field.name} " in finished.out.replace("\n", " ")), field.name


def test_help_says_each_default() -> None:
    text = " ".join(make.run("--help").out.split())
    for flag, default in {
        "--seed": "(0)",
        "--io_deadline": "(600)",
        "--jpeg_quality": "(90)",
    }.items():
        assert default in text.partition(f" {flag} ")[2].partition(" --")[0], flag


def test_the_command_prints_its_one_line_and_nothing_else(with_broken: Path, tmp_path: Path) -> None:
    # As a process: no log line, no warning, no traceback of a library around it.
    command = [
        sys.executable,
        "-m",
        "beam_pipeline",
        "--input",
        str(with_broken),
        "--output",
        str(tmp_path),
        "--name=x",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: 3 of 45 images rejected, --max_reject_fraction is 0.01: ")
    assert done.stderr.count("\n") == 1


def test_an_error_of_a_worker_is_the_same_line(with_broken: Path, tmp_path: Path) -> None:
    # This mode hands errors back as text, as Dataflow does; Beam's workers print their tracebacks before it.
    in_memory = make.job(with_broken, tmp_path)
    threads = make.job(with_broken, tmp_path, "--direct_running_mode=multi_threading", "--direct_num_workers=2")
    assert threads.code == in_memory.code == 1
    assert threads.err.splitlines()[-1] == in_memory.err.rstrip()


# --- published already -------------------------------------------------------------------------------------------


def test_a_published_version_says_its_counts_and_balance(photos: Path, tmp_path: Path) -> None:
    finished = make.job(photos, tmp_path, *TWO_SPLITS)
    assert finished.code == 0
    assert finished.err == FEW
    lines = finished.out.splitlines()
    assert lines[0] == f"published {tmp_path}/photos/1.0.0"
    data = make.manifest(tmp_path / "photos" / "1.0.0")
    for split in ("train", "validation"):
        (line,) = (line for line in lines if line.startswith(f"  {split}: "))
        assert f"{data['splits'][split]['records']} records in 2 shards" in line
        assert "%" in line
    assert "  40 images listed = 40 records + 0 rejects" in lines


def test_the_same_command_again_writes_nothing(photos: Path, copy: Path) -> None:
    before = make.traces(copy.parent.parent)
    finished = again(photos, copy)
    assert finished.code == 0
    assert finished.out.splitlines()[0] == f"already published {copy}, nothing written"
    assert make.traces(copy.parent.parent) == before


def test_repair_of_a_whole_version_writes_nothing(photos: Path, copy: Path) -> None:
    before = make.traces(copy.parent.parent)
    finished = again(photos, copy, "--repair")
    assert finished.code == 0
    assert finished.out.splitlines()[0] == f"already published {copy}, nothing written"
    assert make.traces(copy.parent.parent) == before


@pytest.mark.parametrize(
    ("flag", "value", "now", "then"),
    [
        ("--image_size", "32", "32", "24"),
        ("--seed", "1", "1", "0"),
        ("--jpeg_quality", "50", "50", "90"),
        ("--num_shards", "3", "3", "2"),
        ("--splits", "train=0.5,validation=0.5", "train=0.5,validation=0.5", "train=0.8,validation=0.2"),
        ("--image_size", "24x32", "24x32", "24"),
    ],
)
def test_another_configuration_of_a_published_version_is_exit_2_and_writes_nothing(
    photos: Path, copy: Path, flag: str, value: str, now: str, then: str
) -> None:
    before = make.traces(copy.parent.parent)
    finished = again(photos, copy, flag, value)
    assert finished.code == 2
    assert finished.err.count("\n") == 1
    # The flag and its value as the user wrote it, what is published, and the two ways out.
    assert flag in finished.err
    assert now in finished.err
    assert then in finished.err
    assert "--version or --overwrite" in finished.err
    assert make.traces(copy.parent.parent) == before


def test_the_line_for_another_configuration_is_exact(photos: Path, copy: Path) -> None:
    assert again(photos, copy, "--seed", "1").err == (
        f"error: --seed 1: {copy} is published with 0; choose another --version or --overwrite\n"
    )


def test_another_labels_file_names_that_flag(photos: Path, copy: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("cat\nbee\nant\n")
    finished = again(photos, copy, "--labels_file", labels)
    assert finished.code == 2
    assert "--labels_file" in finished.err


def test_flags_that_only_say_how_to_run_may_differ(photos: Path, copy: Path) -> None:
    finished = again(photos, copy, "--fetch_concurrency", "2", "--decode_threads", "1", "--max_reject_fraction", "0.5")
    assert finished.code == 0
    assert finished.out.startswith("already published")


def test_an_added_and_a_removed_image_are_exit_1_with_counts(photos: Path, copy: Path, tmp_path: Path) -> None:
    changed = writable(photos, tmp_path / "changed")
    before = make.traces(copy)
    (changed / "ant" / "new.jpg").write_bytes(make.encoded(make.picture(seed=1000)))
    (changed / "ant" / "newer.jpg").write_bytes(make.encoded(make.picture(seed=1001)))
    added = again(changed, copy)
    assert added.code == 1
    assert added.err.count("\n") == 1
    assert "40 images were listed then, 42 now" in added.err
    assert "of 4 shards differ" in added.err
    for name in ("new.jpg", "newer.jpg", "0000.jpg"):
        (changed / "ant" / name).unlink()
    assert again(changed, copy).err == (
        f"error: the input is not the one that {copy} was made from: 40 images were listed then, 39 now, "
        "1 of 4 shards differ; choose another --version or --overwrite\n"
    )
    assert make.traces(copy) == before


def test_a_renamed_image_is_found_though_the_count_is_the_same(photos: Path, copy: Path, tmp_path: Path) -> None:
    changed = writable(photos, tmp_path / "changed")
    (changed / "ant" / "0000.jpg").rename(changed / "ant" / "renamed.jpg")
    finished = again(changed, copy)
    assert finished.code == 1
    assert "40 images were listed then, 40 now" in finished.err


def edit_keeping_the_size(image: Path) -> None:
    """Another picture of the same number of bytes: a JPEG may end in anything."""
    size = image.stat().st_size
    for quality in range(94, 5, -3):
        data = make.encoded(make.picture(seed=999), quality=quality)
        if len(data) <= size:
            image.write_bytes(data.ljust(size, b"\0"))
            return
    raise AssertionError("no quality gives a file small enough")


def test_repair_finds_an_edited_image_of_the_same_size(photos: Path, copy: Path, tmp_path: Path) -> None:
    # Design §3: an edit that keeps the size is found where the listing gives an MD5, and by --repair.
    changed = writable(photos, tmp_path / "changed")
    edit_keeping_the_size(changed / "ant" / "0003.jpg")
    before = make.traces(copy)
    finished = again(changed, copy, "--repair")
    assert finished.code == 1, finished
    assert "40 images were listed then, 40 now" in finished.err
    assert make.traces(copy) == before


def test_an_edited_object_of_the_same_size_is_found_by_its_md5(gcs: Gcs, photos: Path, tmp_path: Path) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "in", photos)
    url = f"gs://{bucket}/in"
    make.published(url, tmp_path / "out", *TWO_SPLITS)
    edited = tmp_path / "edited.jpg"
    edited.write_bytes((photos / "ant" / "0003.jpg").read_bytes())
    edit_keeping_the_size(edited)
    gcs.put(bucket, "in/ant/0003.jpg", edited.read_bytes())
    finished = make.job(url, tmp_path / "out", *TWO_SPLITS)
    assert finished.code == 1
    assert "40 images were listed then, 40 now, 1 of 4 shards differ" in finished.err


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


def test_a_flipped_byte_is_not_seen_by_the_plain_command(photos: Path, copy: Path) -> None:
    # Local listings know sizes only; this is what --repair is for.
    make.flip_byte(make.shard_files(copy)[0])
    assert again(photos, copy).out.startswith("already published")


KINDS = [
    "photos-train.tfrecord-00000-of-00002",
    "photos-validation.tfrecord-00001-of-00002",
    "index/photos-train.tfrecord-00001-of-00002.idx",
    "index/train.runs.npy",
    "index/validation.runs.npy",
    schema.LABELS_FILE,
    schema.FEATURES_FILE,
    schema.DATASET_INFO_FILE,
    schema.REJECTS_FILE,
    schema.MANIFEST_FILE,
]


@pytest.mark.parametrize("name", KINDS)
def test_repair_finds_and_mends_a_flipped_byte(photos: Path, original: Path, copy: Path, name: str) -> None:
    if name == schema.REJECTS_FILE:
        (copy / name).write_bytes(b"x")  # it is empty: no byte to flip
    else:
        make.flip_byte(copy / name)
    finished = again(photos, copy, "--repair")
    assert finished.code == 0, finished.err
    assert make.same_each_time(copy) == make.same_each_time(original)
    assert not (copy.parent / "_state").exists()


def test_a_damaged_manifest_is_exit_1_and_names_repair(photos: Path, copy: Path) -> None:
    make.flip_byte(copy / schema.MANIFEST_FILE)
    before = make.traces(copy)
    finished = again(photos, copy)
    assert finished.code == 1
    assert finished.err.count("\n") == 1
    assert "manifest.json is damaged" in finished.err
    assert "--repair" in finished.err
    assert make.traces(copy) == before


def test_a_version_without_its_manifest_is_ours_and_repair_is_the_fix(photos: Path, original: Path, copy: Path) -> None:
    (copy / schema.MANIFEST_FILE).unlink()
    before = make.traces(copy)
    finished = again(photos, copy)
    assert finished.code == 2
    assert finished.err == (
        f"error: --output '{copy.parent.parent}': {copy} has shards but no manifest.json: --repair writes them anew in "
        "place, or choose another --version\n"
    )
    assert make.traces(copy) == before
    assert again(photos, copy, "--repair").code == 0
    assert make.same_each_time(copy) == make.same_each_time(original)


def test_repair_never_publishes_a_shard_with_other_bytes(photos: Path, copy: Path, tmp_path: Path) -> None:
    changed = writable(photos, tmp_path / "changed")
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


def test_a_repair_does_not_believe_the_leftover_of_an_interrupted_one(
    photos: Path, original: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in make.shard_files(copy):
        make.flip_byte(shard)
    publish = LocalStorage.publish
    mended: list[str] = []

    def fail_at_second(self: LocalStorage, file: Any, url: str, generation: str | None = None) -> bool:
        if mended:
            raise RuntimeError("the machine goes away here")
        mended.append(url)
        return publish(self, file, url)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "publish", fail_at_second)
        assert again(photos, copy, "--repair").code == 1
    make.flip_byte(Path(mended[0]))  # damaged once more, after the interrupted repair had mended it
    finished = again(photos, copy, "--repair")
    assert finished.code == 0, finished.err
    assert make.files(copy) == make.files(original)


def test_overwrite_writes_the_version_anew_with_another_configuration(photos: Path, original: Path, copy: Path) -> None:
    finished = again(photos, copy, "--overwrite", "--seed", "5", "--num_shards", "1")
    assert finished.code == 0
    assert finished.out.startswith(f"published {copy}")
    assert [path.name for path in make.shard_files(copy)] == [
        "photos-train.tfrecord-00000-of-00001",
        "photos-validation.tfrecord-00000-of-00001",
    ]
    assert make.manifest(copy)["configuration"]["seed"] == 5


def test_overwrite_with_the_same_command_gives_the_same_bytes(photos: Path, original: Path, copy: Path) -> None:
    make.flip_byte(make.shard_files(copy)[0])
    (copy / "stray.tfrecord").write_bytes(b"left by somebody")
    assert again(photos, copy, "--overwrite").code == 0
    assert make.same_each_time(copy) == make.same_each_time(original)


def test_overwrite_that_fails_before_it_writes_leaves_the_published_version(
    photos: Path, copy: Path, tmp_path: Path
) -> None:
    changed = writable(photos, tmp_path / "changed")
    for image in (changed / "bee").iterdir():
        image.write_bytes(b"no image")
    before = make.traces(copy)
    assert again(changed, copy, "--overwrite").code == 1
    assert make.traces(copy) == before


# --- a job that fails, and the same command after it -------------------------------------------------------------


def fail_at_one_shard(folder: Path, version: Path, monkeypatch: pytest.MonkeyPatch, *flags: object) -> make.Finished:
    """The command on a machine that goes away in the middle."""
    publish = LocalStorage.publish

    def fail_at_one(self: LocalStorage, file: Any, url: str, generation: str | None = None) -> bool:
        if "validation.tfrecord-00001" in url:
            raise RuntimeError("the machine goes away here")
        return publish(self, file, url)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "publish", fail_at_one)
        return again(folder, version, *flags)


def test_the_same_command_resumes_a_failed_job_and_keeps_its_finished_shards(
    photos: Path, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "photos" / "1.0.0"
    failed = fail_at_one_shard(photos, version, monkeypatch)
    assert failed.code == 1
    assert failed.err.count("\n") == 1
    assert "the same command resumes" in failed.err
    assert not (version / schema.MANIFEST_FILE).exists()
    assert not list(tmp_path.rglob("*.tmp"))
    finished_shards = {str(path): path.stat().st_mtime_ns for path in make.shard_files(version)}
    assert again(photos, version).code == 0
    kept = {name: os.stat(name).st_mtime_ns for name in finished_shards}
    assert len(kept) >= 1
    assert kept == finished_shards
    assert make.same_each_time(version) == make.same_each_time(original)
    assert not (tmp_path / "photos" / "_state").exists()


@pytest.mark.parametrize("change", ["of the seed", "of an image's time"])
def test_another_plan_voids_what_a_failed_job_left(
    photos: Path, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    folder, version = writable(photos, tmp_path / "in"), tmp_path / "out" / "photos" / "1.0.0"
    flags = ("--seed", "9") if change == "of the seed" else ()
    assert fail_at_one_shard(folder, version, monkeypatch, *flags).code == 1
    assert make.shard_files(version)
    if not flags:
        os.utime(folder / "ant" / "0000.jpg", ns=(1, 1))  # its bytes are the same, but a listing can't tell
    publish = LocalStorage.publish
    published: list[str] = []

    def note(self: LocalStorage, file: Any, url: str, generation: str | None = None) -> bool:
        published.append(Path(url).name)
        return publish(self, file, url)

    monkeypatch.setattr(LocalStorage, "publish", note)
    assert again(folder, version).code == 0
    shards = [path.name for path in make.shard_files(version)]
    assert len(shards) == 4
    assert set(shards) <= set(published), "none is kept"
    assert make.same_each_time(version) == make.same_each_time(original)


# --- rejects -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_broken(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`photos` and three broken images in a class of two good ones."""
    folder = writable(photos, tmp_path_factory.mktemp("broken") / "in")
    make.class_folders(folder, {"dog": 2})
    good = make.encoded(make.picture(120, 90, seed=77))
    (folder / "dog" / "cut.jpg").write_bytes(good[: len(good) // 2])
    (folder / "dog" / "text.jpg").write_bytes(b"hello, this is no image")
    (folder / "dog" / "empty.jpg").write_bytes(b"")
    return folder


def test_broken_images_are_listed_with_path_reason_and_detail(with_broken: Path, tmp_path: Path) -> None:
    version = make.published(with_broken, tmp_path, "--max_reject_fraction", "0.1", "--num_shards", "3")
    rejects = {line["path"]: line for line in map(json.loads, (version / "rejects.jsonl").read_text().splitlines())}
    cut_bytes = (with_broken / "dog" / "cut.jpg").stat().st_size
    assert rejects == {
        "dog/cut.jpg": {
            "path": "dog/cut.jpg",
            "reason": "truncated",
            "detail": f"JPEG of 120x90 pixels, {cut_bytes} bytes",
        },
        "dog/text.jpg": {
            "path": "dog/text.jpg",
            "reason": "not_an_image",
            "detail": "23 bytes, beginning 68656c6c6f2c2074",
        },
        "dog/empty.jpg": {"path": "dog/empty.jpg", "reason": "not_an_image", "detail": "0 bytes, beginning nowhere"},
    }
    data = make.manifest(version)
    assert (data["images"], data["records"]) == (45, 42)
    assert data["rejects"] == {"by_reason": {"not_an_image": 2, "truncated": 1}, "environment": 0}
    assert data["splits"]["train"]["class_counts"] == [14, 13, 13, 2]


def test_the_summary_counts_rejects_by_reason(with_broken: Path, tmp_path: Path) -> None:
    finished = make.job(with_broken, tmp_path, "--max_reject_fraction", "0.1")
    assert "  45 images listed = 42 records + 3 rejects (not_an_image 2, truncated 1; see rejects.jsonl)" in (
        finished.out.splitlines()
    )


def test_rejects_are_in_the_order_of_the_records(with_broken: Path, tmp_path: Path) -> None:
    from beam_pipeline.inputs.references import order_key

    version = make.published(with_broken, tmp_path, "--max_reject_fraction", "0.1", "--num_shards", "2")
    paths = [json.loads(line)["path"] for line in (version / "rejects.jsonl").read_text().splitlines()]
    assert paths == sorted(paths, key=lambda path: order_key(path, 0))


def test_too_many_rejects_are_exit_1_and_publish_nothing(with_broken: Path, tmp_path: Path) -> None:
    finished = make.job(with_broken, tmp_path, "--max_reject_fraction", "0.05")
    assert (finished.code, finished.out) == (1, "")
    assert finished.err == (
        "error: 3 of 45 images rejected, --max_reject_fraction is 0.05: the first is 'dog/cut.jpg' "
        f"(truncated: JPEG of 120x90 pixels, {(with_broken / 'dog' / 'cut.jpg').stat().st_size} bytes); "
        "remove them or raise --max_reject_fraction\n"
    )
    assert make.files(tmp_path) == {}


def test_as_many_rejects_as_the_limit_are_published(with_broken: Path, tmp_path: Path) -> None:
    assert make.job(with_broken, tmp_path, "--max_reject_fraction", repr(3 / 45)).code == 0


def test_a_rejected_image_with_a_line_break_in_its_name_is_one_whole_line(tmp_path: Path) -> None:
    folder = make.class_folders(tmp_path / "in", {"a": 2})
    (folder / "a" / "new\nline.jpg").write_bytes(b"")
    finished = make.job(folder, tmp_path / "out")
    assert finished.code == 1
    assert finished.err == (
        "error: 1 of 3 images rejected, --max_reject_fraction is 0.01: the first is 'a/new\\nline.jpg' "
        "(not_an_image: 0 bytes, beginning nowhere); remove them or raise --max_reject_fraction\n"
    )


def test_damaged_rejects_of_a_version_that_has_some_are_mended(with_broken: Path, tmp_path: Path) -> None:
    flags = ("--max_reject_fraction", "0.1", "--num_shards", "3")
    version = make.published(with_broken, tmp_path, *flags)
    whole = make.files(version)
    make.flip_byte(version / "rejects.jsonl")
    assert make.job(with_broken, tmp_path, *flags, "--repair").code == 0
    assert make.files(version) == whole


def test_a_shard_of_rejects_only_stays_with_no_record(tmp_path: Path, gcs: Gcs) -> None:
    folder = make.class_folders(tmp_path / "in", {"a": 5})
    (folder / "a" / "bad.jpg").write_bytes(b"bad")
    flags = ("--num_shards", "6", "--max_reject_fraction", "0.5")
    version = make.published(folder, tmp_path / "out", *flags)
    shards = make.manifest(version)["splits"]["train"]["shards"]
    assert sorted(shard["records"] for shard in shards) == [0, 1, 1, 1, 1, 1]
    assert sorted(path.stat().st_size for path in make.shard_files(version))[0] == 0
    # An empty object can't be read in ranges: the remote store answers 416.
    bucket = gcs.new_bucket()
    url = f"gs://{bucket}/out"
    assert make.job(folder, url, *flags).code == 0
    finished = make.job(folder, url, *flags, "--repair")
    assert finished.code == 0, finished.err
    assert finished.out.startswith("already published")


# --- other outcomes ----------------------------------------------------------------------------------------------


def test_plan_only_prints_the_plan_and_leaves_nothing(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for output in ("new", "mine"):
        finished = make.job(photos, tmp_path / output, *TWO_SPLITS, "--plan_only")
        assert finished.code == 0
        assert "train: " in finished.out
        assert "in 2 shards" in finished.out
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_plan_only_leaves_a_published_version_alone(photos: Path, copy: Path) -> None:
    before = make.traces(copy)
    assert again(photos, copy, "--plan_only", "--seed", "3").code == 0
    assert make.traces(copy) == before


def test_a_split_without_images_is_left_out_with_a_warning(tmp_path: Path) -> None:
    folder = make.class_folders(tmp_path / "in", {"a": 2})
    finished = make.job(folder, tmp_path / "out", "--splits", "train=rest,validation=0.000001")
    assert finished.code == 0
    assert finished.err == "warning: split 'validation' got no image and is left out\n"
    info = json.loads((tmp_path / "out/photos/1.0.0/dataset_info.json").read_text())
    assert [split["name"] for split in info["splits"]] == ["train"]


def test_no_train_image_is_an_error(tmp_path: Path) -> None:
    folder = make.class_folders(tmp_path / "in", {"a": 2})
    finished = make.job(folder, tmp_path / "out", "--splits", "validation=rest,train=0.000001")
    assert finished.code == 1
    assert finished.err.count("\n") == 1
    assert "no image is in split 'train' (found validation)" in finished.err
    assert make.files(tmp_path / "out") == {}


def test_classes_without_images_are_warned_about(tmp_path: Path) -> None:
    folder = make.class_folders(tmp_path / "in", {"a": 2})
    (folder / "b").mkdir()
    finished = make.job(folder, tmp_path / "out")
    assert finished.code == 0
    assert finished.err == "warning: 1 class has no record: 'b'\n"
    assert make.manifest(tmp_path / "out/photos/1.0.0")["classes"] == ["a", "b"]


def test_more_shards_than_images_are_lowered_with_a_line(tmp_path: Path) -> None:
    folder = make.class_folders(tmp_path / "in", {"a": 3})
    finished = make.job(folder, tmp_path / "out", "--num_shards", "10")
    assert finished.code == 0
    assert finished.err == "warning: --num_shards 10: split 'train' is written in 3 shards, it has no more images\n"
    assert len(make.shard_files(tmp_path / "out/photos/1.0.0")) == 3


def test_gzip_shards_say_what_is_missing(photos: Path, tmp_path: Path) -> None:
    finished = make.job(photos, tmp_path, "--compression", "gzip")
    assert finished.code == 0
    assert "gzip shards have no index and no TFDS metadata" in finished.err
    names = set(make.files(tmp_path / "photos/1.0.0"))
    assert not {schema.FEATURES_FILE, schema.DATASET_INFO_FILE} & names
    assert not any(name.startswith("index/") for name in names)


def test_gzip_gives_the_same_bytes_whenever_it_runs(photos: Path, tmp_path: Path) -> None:
    versions = [make.published(photos, tmp_path / name, "--compression", "gzip") for name in ("a", "b")]
    assert make.same_each_time(versions[0]) == make.same_each_time(versions[1])
    (shard,) = make.shard_files(versions[0])
    header = shard.read_bytes()[:10]
    assert header[:2] == b"\x1f\x8b"
    assert header[4:8] == b"\0\0\0\0", "the time of writing"


def test_files_that_are_skipped_are_told_and_change_no_byte_of_the_dataset(
    photos: Path, original: Path, tmp_path: Path
) -> None:
    folder = writable(photos, tmp_path / "in")
    for name in ("ant/notes.txt", "bee/x.JPX", "y.JPX", "ant/.DS_Store", "loose.jpg", "bee/.z.jpg", ".cat/1.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"no image")
    finished = make.job(folder, tmp_path / "out", *TWO_SPLITS)
    line = "  3 files skipped: not an image suffix (.JPX 2, .txt 1), see --extensions"
    assert line in finished.out.splitlines()
    assert "  1 image skipped: not inside a class folder" in finished.out.splitlines()
    for what in ("image", "folder"):
        assert f"  1 {what} skipped: hidden, the name begins with a dot" in finished.out.splitlines()
    version = tmp_path / "out/photos/1.0.0"
    assert json.loads((version / schema.RUN_FILE).read_bytes())["skipped"] == {
        "hidden": 1,
        "hidden_images": 1,
        "hidden_folders": 1,
        "outside_classes": 1,
        "suffixes": {".JPX": 2, ".txt": 1},
    }
    assert make.same_each_time(version) == make.same_each_time(original)
    assert line in make.job(folder, tmp_path / "out", *TWO_SPLITS).out.splitlines(), "published already"
    (version / schema.RUN_FILE).unlink()
    assert make.job(folder, tmp_path / "out", *TWO_SPLITS).code == 0


def test_run_json_says_how_it_went(original: Path) -> None:
    facts = json.loads((original / schema.RUN_FILE).read_bytes())
    assert facts["runner"] == "FnApiRunner"
    assert facts["command"][:3] == ["python", "-m", "beam_pipeline"]
    assert facts["images"] == 40
    assert facts["versions"]["imageshards"] == beam_pipeline.__version__


# --- from Python -------------------------------------------------------------------------------------------------


def test_run_returns_the_manifest(photos: Path, original: Path, tmp_path: Path) -> None:
    config = beam_pipeline.Config(
        input=str(photos),
        output=str(tmp_path),
        name="photos",
        image_size=24,
        splits="train=0.8,validation=0.2",
        num_shards=2,
    )
    manifest = beam_pipeline.run(config)
    assert isinstance(manifest, beam_pipeline.Manifest)
    version = tmp_path / "photos" / "1.0.0"
    assert manifest.url == str(version)
    assert manifest.outcome == "published"
    assert manifest.data == make.manifest(version)
    assert (manifest.images, manifest.records, manifest.rejects) == (40, 40, {})
    assert manifest.classes == ["ant", "bee", "cat"]
    assert sum(manifest.splits.values()) == 40
    assert make.same_each_time(version) == make.same_each_time(original), "the command line writes the same"
    second = beam_pipeline.run(config)
    assert second is not None
    assert second.outcome == "already published"
    assert second.data == manifest.data


def test_run_raises_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        beam_pipeline.run(beam_pipeline.Config(input=str(tmp_path / "no"), output=str(tmp_path / "out"), name="x"))


def test_run_raises_the_workers_error(with_broken: Path, tmp_path: Path) -> None:
    config = beam_pipeline.Config(input=str(with_broken), output=str(tmp_path), name="x", image_size=24)
    with pytest.raises(ImageShardsError, match="3 of 45 images rejected") as caught:
        beam_pipeline.run(config)
    assert not isinstance(caught.value, UsageError)


@pytest.mark.parametrize(
    ("runner", "local"),
    [(None, True), ("direct", True), ("DirectRunner", True), ("FnApiRunner", True), ("prismrunner", True),
     ("Dataflow", False), ("FlinkRunner", False)],
)  # fmt: skip
def test_a_runner_is_local_however_its_name_is_written(runner: str | None, local: bool) -> None:
    assert job.is_local(PipelineOptions([f"--runner={runner}"] if runner else [])) is local


@pytest.mark.parametrize("mode", ["in_memory", "multi_threading"])
def test_ctrl_c_is_a_callers_own_and_one_line_of_the_command(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    # In the middle of a step, where Beam makes an error of its own of it.
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("beam_pipeline.dataset.writer.ShardWriter.write", interrupt)
    options = PipelineOptions([f"--direct_running_mode={mode}"])
    config = Config(input=str(photos), output=str(tmp_path / "out"), name="photos", image_size=24)
    if mode == "in_memory":
        with pytest.raises(KeyboardInterrupt):
            beam_pipeline.run(config, options)
        finished = make.job(photos, tmp_path / "out")
        assert (finished.code, finished.err) == (1, "error: interrupted; the same command resumes\n")
    monkeypatch.undo()
    assert make.job(photos, tmp_path / "out").code == 0, "nothing is locked"


def test_ctrl_c_while_a_job_runs_in_this_process(photos: Path, tmp_path: Path) -> None:
    for seconds in (0.05, 0.3):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                beam_pipeline.run(Config(input=str(photos), output=str(tmp_path), name="photos", overwrite=True))


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
    assert told.splitlines() == [
        f"published {tmp_path}/x/1.0.0",
        told.splitlines()[1],
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
    assert finished.err.endswith("; check the URL and the network; nothing was begun\n")
    assert "resumes" not in finished.err
