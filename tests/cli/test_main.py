"""Arguments: nothing is guessed, nothing is dropped, and each mistake has its line of messages.txt, to the letter."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from beam_pipeline.cli.main import _SURELY_OURS, beams_parser
from beam_pipeline.config import FLAGS, Config
from beam_pipeline.dataset.claim import VersionLock
from beam_pipeline.schema.manifest import seal_manifest
from tests import make
from tests.servers import Gcs

MESSAGES = Path(__file__).with_name("messages.txt").read_text()


def messages() -> list[tuple[str, int, str]]:
    """(arguments, exit code, line) of each paragraph."""
    found = re.findall(r"^(.+)\n(\d) (error: .+)$", MESSAGES, re.MULTILINE)
    assert len(found) == MESSAGES.count("error: ")
    return [(arguments, int(code), line) for arguments, code, line in found]


TEXTS = {
    "texts/a/1.txt": "1",
    "texts/a/2.txt": "2",
    "photos.tar": "an archive is known by its name",
    "packed/cat.tar": "1",
    "packed/dog.tar": "2",
    "packed_twice/train/cat.tar": "1",
    "rows/1.parquet": "1",
    "taken/photos/1.0.0/notes.txt": "mine",
    "of_tfds/photos/1.0.0/photos-train.tfrecord-00000-of-00001": "as TFDS writes it: ours have more files",
    "of_pics/photos/1.0.0/index/pics-train.tfrecord-00000-of-00001.idx": "a dataset of another name",
    "no_shard/photos/1.0.0/rejects.jsonl": "of no shard",
    "labels.txt": "cat\n",
    "no_labels.txt": "\n \n",
    "same_labels.txt": "cat\ndog\ncat\n",
    "latin_labels.txt": "größe\n",
    "rat_first.txt": "rat\ncat\ndog\n",
    "rat_last.txt": "cat\ndog\nrat\n",
    "no_label.csv": "path,class\ncat/0.jpg,cat\n",
    "cat_dog.csv": "path,label\ncat/0.jpg,cat\ndog/0.jpg,dog\n",
    "reserved.csv": "path,label,image:bytes\ncat/0.jpg,cat,x\n",
    "number.csv": "path,label,age:int64\ncat/0.jpg,cat,3\ncat/1.jpg,cat,old\n",
    "twice.csv": "path,label\ncat/1.jpg,cat\ncat//1.jpg,dog\n",
    "undecided.jsonl": "".join(f'{{"path":"cat/{n}.jpg","group":"{n}"}}\n' for n in "0123456789"),
    "no_path.jsonl": '\n{"path":"cat/0.jpg"}\n{"image":"cat/1.jpg"}\n',
    "no_choice.jsonl": '{"path":"cat/0.jpg","group":"a","keep":"yes"}\n',
    "misspelled.jsonl": '{"path":"cat/0.jpg","distance":0}\n{"path":"cat/1.jpg","Keep":true}\n',
    "no_file.jsonl": '{"path":""}\n',
    "no_lines.txt": "cat/0.jpg\0cat/1.jpg\0",
    "lines.txt": '{"path":"cat/0.jpg"}\n',
    "gone.txt": "cat/0.jpg\n",
    "done/photos/_state/2.0.0/gone.txt": "cat/0.jpg\n",
    "done/photos/_state/2.0.0/rows.csv": "path,label\ncat/0.jpg,cat\n",
    "all.txt": "".join(f"{label}/{number}.jpg\n" for label in ("cat", "dog") for number in range(3)),
    "password.csv": "path,label\nftp://me:secret@host/a.jpg,cat\n",
    "hidden/.cat/1.jpg": "no class folder",
    "capital/Train/cat/1.jpg": "no split",
}


@pytest.fixture(scope="module")
def data(gcs: Gcs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that messages.txt describes."""
    data = tmp_path_factory.mktemp("data")
    for label in ("cat", "dog"):
        for number in range(3):
            path = data / "photos" / label / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), (80 * number, 10, 200)).save(path)
    copies = dict.fromkeys(("other", "inserted", "appended", "broken", "removed", "renamed", "dangling"), "photos")
    copies["flat"] = "photos/cat"
    for copy, of in (copies | {f"dealt/{split}/cat": "photos/cat" for split in ("train", "test")}).items():
        shutil.copytree(data / of, data / copy)
    shutil.copy(data / "photos/cat/0.jpg", data / "other/cat/3.jpg")
    for input, label in (("inserted", "bat"), ("appended", "rat")):
        shutil.copytree(data / "photos/cat", data / input / label, ignore=shutil.ignore_patterns("[12].jpg"))
    for label in ("cat", "dog"):
        (data / "broken" / label / "0.jpg").write_text("not an im")
    (data / "flat/2.jpg").unlink()
    (data / "removed/cat/2.jpg").unlink()
    (data / "renamed/cat/2.jpg").rename(data / "renamed/cat/3.jpg")
    (data / "dangling/cat/gone.jpg").symlink_to("nowhere")
    (data / "link").symlink_to("photos")
    (data / "empty").mkdir()
    for name, text in TEXTS.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        data.joinpath(name).write_text(text, encoding="latin-1")
    assert make.run("--input", f"{data}/photos", "--output", f"{data}/done", "--name", "photos").code == 0
    shutil.copytree(data / "done/photos", data / "moved/pics")
    shutil.copytree(data / "done/photos/1.0.0", data / "moved/photos/2.0.0")
    for copy in ("lost", "corrupt", "cut", "newer", "folder", "file", "rewritten", "ninth"):
        shutil.copytree(data / "done", data / copy)
    (data / "lost/photos/1.0.0/manifest.json").unlink()
    make.flip_byte(data / "corrupt/photos/1.0.0/manifest.json")
    (data / "cut/photos/1.0.0/manifest.json").write_text('{"format_version": 2, "name": "pho')
    (data / "ninth/photos/1.9.0").mkdir()
    shutil.copytree(data / "photos", data / "done/photos/1.0.0-source")
    newer = data / "newer/photos/1.0.0/manifest.json"
    newer.write_bytes(seal_manifest({**json.loads(newer.read_text()), "format_version": 2}))
    for name, moved in (("folder", "photos-train.tfrecord-00000-of-00001"), ("file", "index")):
        (place := data / name / "photos/1.0.0" / moved).rename(data / name / "moved")
        (place / "mine").mkdir(parents=True) if name == "folder" else place.write_text("mine")
    configs = [Config(output=f"{data}/{name}", input=f"{data}/photos", name="photos") for name in ("busy", "rewritten")]
    for lock in (locks := [VersionLock(config) for config in configs]):
        lock.acquire()
    gcs.put(others := gcs.new_bucket("bucket-of-others"), "out/photos/1.0.0/notes.txt", b"keep")
    yield data
    assert gcs.names(others) == ["out/photos/1.0.0/notes.txt"]
    for lock in locks:
        lock.release()


@pytest.mark.parametrize(("arguments", "code", "line"), messages())
def test_each_mistake_is_told_in_one_line_with_its_exit_code(
    arguments: str, code: int, line: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)
    before = make.files(data), make.traces(data / "done/photos/1.0.0")
    finished = make.run(*arguments.split())
    assert (finished.code, finished.out) == (code, "")
    left = [*make.files(data / "new")] if (data / "new").exists() else None
    shutil.rmtree(data / "new", ignore_errors=True)
    assert left == (["out/photos/_state/1.0.0/rejects.jsonl"] if "imageshards rejects" in line else None)
    assert (make.files(data), make.traces(data / "done/photos/1.0.0")) == before
    printed = [text for text in finished.err.splitlines() if not text.startswith("warning:")]
    here = rf"process {os.getpid()} on {re.escape(socket.gethostname())}, since .*? UTC"
    told = [re.sub(here, "process 4711 on laptop, since 2026-07-01 12:00:00 UTC", text) for text in printed]
    assert [text.replace(str(data), "/data") for text in told] == [line]


# --- what is read


GOOD = ["--input", "/in", "--output", "/out", "--name", "photos"]


def test_every_flag_is_read_as_python_would_give_it() -> None:
    special = {
        "input": "/a", "output": "/b", "name": "n", "version": "2.0.0", "layout": "class_folders", "splits": "train=1",
        "split_by": "name", "image_size": "64", "resize_mode": "crop", "resample": "box", "image_format": "png",
        "jpeg_subsampling": "4:4:4", "max_image_bytes": "5MB", "num_shards": "3", "compression": "gzip",
        "labels_file": "/l", "background": "red", "channels": "1", "extensions": "png",
        "base": "1.0.0", "seed": "-5",
    }  # fmt: skip
    arguments: list[str] = []
    expected: dict[str, object] = {}
    for name in FLAGS.keys() - {
        "manifest",
        "split_folders",
        "target_shard_bytes",
        "overwrite",
        "restart",
    }:  # which exclude others
        switch = FLAGS[name].default is False
        expected[name] = True if switch else special.get(name, "1")
        arguments += [f"--{name}"] if switch else [f"--{name}", str(expected[name])]
    config, rest = make.parsed(arguments)
    assert rest == []
    assert config == Config(**expected)


def test_beam_options_are_passed_on_and_defaults_are_the_config_s() -> None:
    beam = ["--runner=DataflowRunner", "--project", "p", "--temp_location=gs://t", "--experiments=a", "--experiments=b"]
    config, rest = make.parsed([*beam[:2], *GOOD, *beam[2:], "--streaming"])
    assert make.parsed(GOOD) == (config, []) == (Config(input="/in", output="/out", name="photos"), [])
    assert sorted(rest) == sorted([*beam, "--streaming"])


def test_dashes_in_a_flag_are_underscores() -> None:
    config, beams = make.parsed(
        [*GOOD, "--image-size", "64", "--split-by=(a-b)", "--one-hot", "--temp-location=gs://a-b"]
    )
    assert (config.image_size, config.split_by, config.one_hot) == ((64, 64), re.compile("(a-b)"), True)
    assert beams == ["--temp_location=gs://a-b"]


def test_no_flag_of_beams_is_as_like_ours_as_a_slip_is() -> None:
    # So a slip is told at once, without the seconds that Beam's import takes.
    ours = [f"--{name}" for name in FLAGS]
    beams = beams_parser()[1]
    assert {"--runner", "--experiments", "--experiment", "--no_use_public_ips"} <= set(beams)
    assert not [flag for flag in beams if difflib.get_close_matches(flag, ours, cutoff=_SURELY_OURS)]
