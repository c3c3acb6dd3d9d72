"""Every message of messages.txt is printed, to the letter, with its exit code."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

import pytest
from PIL import Image

from beam_pipeline import Config
from beam_pipeline.cli.main import main as write_command
from beam_pipeline.dataset.claim import open_claim
from tests import make

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
    "labels.txt": "cat\n",
    "rat_first.txt": "rat\ncat\ndog\n",
    "rat_last.txt": "cat\ndog\nrat\n",
    "no_label.csv": "path,class\ncat/0.jpg,cat\n",
    "reserved.csv": "path,label,image:bytes\ncat/0.jpg,cat,x\n",
    "number.csv": "path,label,age:int64\ncat/0.jpg,cat,3\ncat/1.jpg,cat,old\n",
    "twice.csv": "path,label\ncat/1.jpg,cat\ncat//1.jpg,dog\n",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that messages.txt describes."""
    data = tmp_path_factory.mktemp("data")
    for label in ("cat", "dog"):
        for number in range(3):
            path = data / "photos" / label / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), (80 * number, 10, 200)).save(path)
    copies = {"other": "photos", "inserted": "photos", "appended": "photos", "broken": "photos", "flat": "photos/cat"}
    for copy, of in (copies | {f"dealt/{split}/cat": "photos/cat" for split in ("train", "test")}).items():
        shutil.copytree(data / of, data / copy)
    shutil.copy(data / "photos/cat/0.jpg", data / "other/cat/3.jpg")
    for input, label in (("inserted", "bat"), ("appended", "rat")):
        shutil.copytree(data / "photos/cat", data / input / label, ignore=shutil.ignore_patterns("[12].jpg"))
    for label in ("cat", "dog"):
        (data / "broken" / label / "0.jpg").write_text("not an im")
    (data / "flat/2.jpg").unlink()
    (data / "empty").mkdir()
    for name, text in TEXTS.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(text)
    assert write_command(["--input", f"{data}/photos", "--output", f"{data}/done", "--name", "photos"]) == 0
    shutil.copytree(data / "done/photos", data / "moved/pics")
    shutil.copytree(data / "done", data / "lost")
    (data / "lost/photos/1.0.0/manifest.json").unlink()
    open_claim(Config(output=f"{data}/busy", input=f"{data}/photos", name="photos")).acquire()
    return data


@pytest.mark.parametrize(("arguments", "code", "line"), messages())
def test_each_mistake_is_told_in_one_line_with_its_exit_code(
    arguments: str, code: int, line: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)
    before = make.files(data)
    finished = make.run(*arguments.split())
    assert (finished.code, finished.out) == (code, "")
    assert code == 1 or make.files(data) == before, "bad usage writes nothing"
    printed = [text for text in finished.err.splitlines() if not text.startswith("warning:")]
    here = rf"process {os.getpid()} on {re.escape(socket.gethostname())}, since .*? UTC"
    told = [re.sub(here, "process 4711 on laptop, since 2026-07-01 12:00:00 UTC", text) for text in printed]
    assert [text.replace(str(data), "/data") for text in told] == [line]
