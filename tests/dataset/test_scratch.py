"""What a killed process left on the machine's disk is deleted by the next job there, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from beam_pipeline.dataset import scratch
from tests import make

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc to know a dead process")

LEAVE = """
import os, sys
from beam_pipeline import scratch
open(scratch.new_path(), "w").write("half a shard")
os.mkdir(folder := scratch.new_path())
open(folder + "/1.json", "w").write("{}")
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's folder for temporary files, of this process and its children."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_only_what_the_dead_left_is_deleted(folder: Path) -> None:
    mine = Path(scratch.new_path())
    mine.write_text("of a process that lives")
    others = [folder / "imageshards-photos.txt", folder / mine.name.replace("imageshards-", "imageshards-f", 1)]
    for other in others:
        other.write_text("a user's; another machine's")
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVE], cwd=make.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    scratch.delete_abandoned()
    assert len(list(folder.iterdir())) == 5, "it may still be at work"
    process.kill()
    process.communicate()
    scratch.delete_abandoned()
    assert sorted(folder.iterdir()) == sorted([mine, *others])
