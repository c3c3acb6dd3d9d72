"""What runners and their workers print stays out of stderr, and is kept where nobody knows what went wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from beam_pipeline import running
from beam_pipeline.quiet import runner_log
from tests import make

PRINTS = "import os, sys; os.write(2, b'child\\n'); print('child too', file=sys.stderr)"


def test_stderr_of_this_process_and_its_children_goes_to_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    with runner_log(quiet=True) as log:
        subprocess.run([sys.executable, "-c", PRINTS], check=True)
        print("runner", file=sys.stderr)
        os.write(2, b"a library\n")
        print("progress", file=log.stderr)
        path = log.save()
    print("afterwards", file=sys.stderr)
    os.write(2, b"by number\n")
    assert path is not None
    kept = Path(path).read_text()
    os.unlink(path)
    assert {"child", "child too", "runner", "a library"} <= set(kept.splitlines())
    assert set(capfd.readouterr().err.splitlines()) == {"progress", "afterwards", "by number"}


SAYS = "import sys; from beam_pipeline.quiet import say; say('größe'); say('\\udcff', sys.stderr)"


@pytest.mark.parametrize(
    ("redirection", "output"),
    [("2>/dev/null", "größe\n"), ("| true", ""), (">/dev/full", "\\udcff\n"), (">&- 2>&-", "")],
)
def test_what_cannot_be_printed_fails_nothing(redirection: str, output: str) -> None:
    command = f'"{sys.executable}" -c "{SAYS}" {redirection}'
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=make.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0
    assert done.stdout.decode() in (output, "\\udcff\n" + output)


def test_who_reads_no_unicode_is_told_nevertheless() -> None:
    command = [sys.executable, "-c", SAYS]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=make.ROOT, env=environment, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"gr\\xf6\\xdfe\n", b"\\udcff\n")


def test_an_empty_log_is_not_kept() -> None:
    with runner_log(quiet=True) as log:
        assert log.save() is None


def test_a_caller_from_python_keeps_its_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with runner_log(quiet=False) as log:
        print("runner", file=sys.stderr)
        assert log.save() is None
    assert capfd.readouterr().err == "runner\n"


def test_an_error_of_a_worker_process_is_one_line(tmp_path: Path) -> None:
    # Beam's worker processes print a traceback for each attempt, their runner another.
    make.class_folders(tmp_path / "in", {"a": 3})
    (tmp_path / "in/a/broken.jpg").write_bytes(b"not an image")
    command = [
        sys.executable,
        "-m",
        "beam_pipeline",
        "--input",
        str(tmp_path / "in"),
        "--output",
        str(tmp_path / "out"),
    ]
    command += ["--name=x", "--direct_running_mode=multi_processing", "--direct_num_workers=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=make.ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("listing: ")]  # each 15 s
    assert [line[:62] for line in lines] == ["error: 1 of 4 images rejected, --max_reject_fraction is 0.01: "]


def test_an_error_that_nobody_foresaw_names_the_log(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        print("a clue", file=sys.stderr)
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(running.beam.Pipeline, "run", fail)
    finished = make.job(photos, tmp_path)
    assert finished.code == 1
    start, _, rest = finished.err.partition("; what the runner said is in ")
    path, _, end = rest.partition(";")
    assert (start, end) == ("error: the job failed: unforeseen", " the same command resumes\n")
    assert Path(path).read_text() == "a clue\n"
    os.unlink(path)
