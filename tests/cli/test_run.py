"""The command from end to end: exit codes with their one line, rejects, warnings, from Python, Ctrl-C, progress."""

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
import time
from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

import beam_pipeline
from beam_pipeline.cli import job
from beam_pipeline.config import FLAGS, Config
from beam_pipeline.errors import UsageError
from beam_pipeline.text import size_text
from tests import make
from tests.conftest import forget_clients


def program(mode: str, photos: Path, output: Path, *more: str) -> list[str]:
    """The command, for a process of its own."""
    command = [sys.executable, "-m", "beam_pipeline", f"--input={photos}", f"--output={output}", "--name=x", *more]
    return [*command, f"--direct_running_mode={mode}", "--direct_num_workers=2"]


def test_help_is_exit_0_and_lists_every_flag_in_its_group_with_its_default() -> None:
    finished = make.run("--help")
    assert finished.code == 0
    assert finished.out.startswith("usage: imageshards write --input DIR --output ROOT --name NAME [")
    assert finished.out.count("\n  --") == len(FLAGS), "each once"
    groups = dict(re.findall(r"^(?:more: )?([a-z ]+):\n((?:  .*\n)+)", finished.out, re.MULTILINE))
    first = groups["the flags that matter most"]
    assert re.findall(r"^  --(\w+)", first, re.MULTILINE)[:3] == ["input", "output", "name"]
    for name, flag in FLAGS.items():
        _, _, told = (first if f"  --{name} " in first else groups[flag.group]).partition(f"  --{name}")
        text = " ".join(told.partition("\n  --")[0].split())
        assert " ".join(flag.help.split()) in text
        assert text.endswith(")") or flag.default in (None, "", False), name
    assert "  --seed N " in groups["shards"] and "  --resize_mode stretch|crop|pad" in first
    assert "(default: 0)" in groups["shards"] and "(default: 600)" in groups["job"]


@pytest.mark.parametrize(
    "mode",
    ["in_memory", *(pytest.param(mode, marks=pytest.mark.soak) for mode in ("multi_threading", "multi_processing"))],
)
def test_the_command_prints_its_one_line_and_nothing_else(with_broken: Path, tmp_path: Path, mode: str) -> None:
    # No log line, warning or traceback of a library or of Beam's workers; their error holds what text formats unescape.
    table = tmp_path / "twice.csv"
    table.write_text("path,label\na\\new.jpg,x\na\\new.jpg,y\n")
    if mode == "in_memory":
        flags, code = [], 1
        line = (
            "3 of 45 images rejected, --max_reject_fraction is 0.01: the first is 'dog/cut.jpg' "
            f"(truncated: JPEG of 120x90 pixels, {(with_broken / 'dog/cut.jpg').stat().st_size} bytes); "
            f"see imageshards rejects {tmp_path}/x/1.0.0, remove them or raise --max_reject_fraction"
        )
        left = ["x/_state/1.0.0/rejects.jsonl"]
    else:
        flags, code, left = ["--layout=manifest", f"--manifest={table}"], 2, []
        what = "path 'a\\\\new.jpg' is given twice, with label 'x' and with label 'y'"
        boxes = "several boxes are one row, with lists such as 0.1;0.5 in columns such as xmin:float32[]"
        line = f"--manifest '{table}': {what}: keep one of the two; {boxes}"
    done = subprocess.run(program(mode, with_broken, tmp_path, *flags), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"error: {line}\n")
    assert [*make.files(tmp_path)] == ["twice.csv", *left]


# --- rejects


@pytest.fixture(scope="module")
def with_broken(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`photos` and three broken images in a class of two good ones."""
    folder = Path(shutil.copytree(photos, tmp_path_factory.mktemp("broken") / "in"))
    make.class_folders(folder, {"dog": 2})
    good = make.encoded(make.picture(120, 90, seed=77))
    for name, data in (("cut", good[: len(good) // 2]), ("text", b"hello, this is no image"), ("empty", b"")):
        (folder / "dog" / f"{name}.jpg").write_bytes(data)
    return folder


# --- other outcomes


def test_a_plan_knows_what_the_job_will_read_and_both_tell_their_cpu_time(photos: Path, tmp_path: Path) -> None:
    plan = make.job(photos, tmp_path, *make.TWO_SPLITS, "--plan_only")
    assert (plan.code, "train: " in plan.out, "in 2 shards" in plan.out) == (0, True, True)
    assert not list(tmp_path.iterdir())
    start = time.process_time()
    finished = make.job(photos, tmp_path, *make.TWO_SPLITS, "--s3_secret_access_key", "canary-8f14")
    cpu_s, run = time.process_time() - start, json.loads((tmp_path / "photos/1.0.0/run.json").read_text())
    source, shards = size_text(run["source_bytes"]), len(make.shard_files(tmp_path / "photos/1.0.0"))
    assert run["source_bytes"] == sum(path.stat().st_size for path in photos.rglob("*.jpg"))
    assert f"  reads 40 files ({source}), writes {shards} shards (" in plan.out
    assert re.search(r"\n  [\d.]+ CPU-seconds to convert 40 images: \d+ s on \d+ cores? if none is idle\n", plan.out)
    assert 0 < run["cpu_s"] < cpu_s
    assert (run["runner"], run["images"]) == ("FnApiRunner", 40)
    assert run["versions"]["imageshards"] == beam_pipeline.__version__
    assert [*run["command"][:3], run["command"][-1]] == ["imageshards", "write", "--input", "***"]
    wrote = size_text(run["shard_bytes"])
    assert finished.out.endswith(f"\n  {run['cpu_s']:.1f} CPU-seconds to convert; read {source}, wrote {wrote}\n")
    before = make.traces(tmp_path / "photos/1.0.0")
    assert make.job(photos, tmp_path, *make.TWO_SPLITS, "--plan_only", "--seed", 3).code == 0
    assert make.traces(tmp_path / "photos/1.0.0") == before


# --- from Python


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
    assert second is not None and (second.outcome, second.data) == ("already published", manifest.data)


@pytest.mark.parametrize("options", [["--direct_num_workers=2"], ("--runner=x",), "--runner=x", {"runner": "x"}, 7])
def test_options_that_are_not_beams_are_one_line(options: object, photos: Path, tmp_path: Path) -> None:
    config = Config(input=str(photos), output=str(tmp_path / "out"), name="x")
    with pytest.raises(UsageError, match=rf"^beam_options is a {type(options).__name__}: give PipelineOptions\(\["):
        beam_pipeline.run(config, options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag", ["--output", "--labels_file"])
def test_a_relative_path_in_a_working_folder_that_is_gone_is_one_line(flag: str, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    values = {"--input": str(photos), "--output": str(tmp_path / "out"), "--name": "x", flag: "relative"}
    flags = " ".join(word for pair in values.items() for word in pair)
    shell = f"cd {tmp_path}/gone && rmdir ../gone && {sys.executable} -m beam_pipeline {flags}"
    done = subprocess.run(
        shell, shell=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": make.ROOT}
    )
    line = f"error: {flag} 'relative': the working folder is gone: give a full path, or cd to another folder\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_names_are_not_read_in_another_encoding_than_utf_8(photos: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    environment |= {"PYTHONPATH": str(make.ROOT), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "beam_pipeline", f"--input={photos}", f"--output={tmp_path}/out", "--name=x"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    line = f"error: --input '{photos}': file names are read as ascii here; set PYTHONUTF8=1\n"
    assert (done.returncode, done.stderr) == (2, line)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("runner", "local"),
    [(None, True), ("direct", True), ("DirectRunner", True), ("FnApiRunner", True), ("prismrunner", True),
     ("Dataflow", False), ("FlinkRunner", False)],
)  # fmt: skip
def test_a_runner_is_local_however_its_name_is_written(runner: str | None, local: bool) -> None:
    assert job.runs_locally(PipelineOptions([f"--runner={runner}"] if runner else [])) is local


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
        finished = make.job(photos, tmp_path / "out")
    assert (finished.code, finished.err) == (1, "error: interrupted; the same command resumes\n")
    assert make.job(photos, tmp_path / "out").code == 0, "nothing is locked"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More pictures than a machine converts before it is interrupted."""
    folder = make.class_folders(tmp_path_factory.mktemp("many"), {"a": 12}, size=(1600, 1200))
    for number in range(150):
        shutil.copytree(folder / "a", folder / f"a{number}", copy_function=os.link)
    return folder


@pytest.mark.parametrize(
    "mode",
    [*(pytest.param(mode, marks=pytest.mark.soak) for mode in ("in_memory", "multi_threading")), "multi_processing"],
)
def test_ctrl_c_ends_the_command_soon_with_one_line(many: Path, tmp_path: Path, mode: str) -> None:
    out = tmp_path / "out"
    command = program(mode, many, out, "--num_shards=4")
    with subprocess.Popen(command, cwd=make.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not out.exists():
            time.sleep(0.1)
        time.sleep(1)
        for _ in range(2):  # a second one changes nothing
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)  # until its workers have ended, too
    assert process.returncode == 1
    assert said == "error: interrupted; the same command resumes\n"


# A process that gets Ctrl-C as it begins to import a module.
_INTERRUPTED_BY_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == os.environ["AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize(
    ("start", "module"),
    [
        *(
            pytest.param(["-m", "beam_pipeline"], module, marks=pytest.mark.soak)
            for module in ("beam_pipeline.cli.main", "PIL.Image")
        ),
        (["-m", "beam_pipeline"], "apache_beam"),
        ([str(make.ROOT / "imageshards" / "__main__.py"), "write"], "beam_pipeline.cli.main"),
    ],
    ids=str,
)
def test_ctrl_c_while_the_command_is_being_imported_is_the_same_line(
    start: list[str], module: str, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_INTERRUPTED_BY_IMPORT)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{make.ROOT}", "AT": module}
    command = [sys.executable, *start, "--input", str(photos), "--output", str(tmp_path / "out"), "--name=x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: interrupted; the same command resumes\n")


@pytest.mark.parametrize("wait_s", [pytest.param(0.0, marks=pytest.mark.soak), 1.0])
def test_a_launcher_that_is_terminated_leaves_no_worker(photos: Path, tmp_path: Path, wait_s: float) -> None:
    command = program("multi_processing", photos, tmp_path)
    with subprocess.Popen(command, cwd=make.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        tasks = Path(f"/proc/{process.pid}/task")
        while process.poll() is None and not any(file.read_text() for file in tasks.glob("*/children")):
            time.sleep(0.01)
        time.sleep(wait_s)
        process.terminate()
        said, _ = process.communicate(timeout=20)  # its workers hold stdout: it ends with the last of them
    assert process.returncode == -signal.SIGTERM
    assert b"error: interrupted; the same command resumes\n" in said


def test_only_our_lines_are_shown_and_the_others_go_into_the_log_of_an_unforeseen_error() -> None:
    code = """
import logging, os, sys
from beam_pipeline.cli.quiet import only_our_lines
from beam_pipeline.errors import UnforeseenError
from beam_pipeline.text import print_line
try:
    with only_our_lines():
        print("of a thread", file=sys.stderr)
        os.system("echo of a process >&2")
        logging.error("of a logger")
        print_line("ours", sys.stderr)
        raise UnforeseenError("x")
except UnforeseenError as error:
    print(error.__notes__)
print("later", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout) == ("ours\nlater\n", "['of a thread\\nof a process\\n']\n")


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


@pytest.mark.parametrize("mode", ["in_memory", pytest.param("multi_processing", marks=pytest.mark.soak)])
def test_a_terminal_sees_the_progress_line_and_what_is_published(photos: Path, tmp_path: Path, mode: str) -> None:
    # A real terminal, with a clock of half a second for the line; nothing of Beam's.
    terminal, end = pty.openpty()
    streams = {"stdin": end, "stdout": end, "stderr": end}
    with subprocess.Popen(program(mode, photos, tmp_path), cwd=make.ROOT, **streams) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # Linux' end of a terminal
            while data := os.read(terminal, 65_536):
                shown += data
    os.close(terminal)
    assert process.returncode == 0
    *drawn, told = shown.decode().split("\r\033[K")
    assert all(
        line.startswith(("running: ", "listing: ", "sampling: ", "planning: ", "shards ")) for line in drawn if line
    ), shown
    first, _, *rest, used = told.splitlines()
    assert " CPU-seconds to convert; read " in used
    assert [first, *rest] == [
        f"published {tmp_path}/x/1.0.0",
        "  40 images listed = 40 records + 0 rejects",
        "  3 classes",
        f"  look at it: imageshards report {tmp_path}/x/1.0.0",
    ]


def test_a_job_changes_no_logging_and_leaves_no_temporary_folder(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = (logging.root.level, logging.root.manager.disable)
    assert make.job(photos, tmp_path / "new", "--runner=FnApiRunner").code == 0
    assert make.job(photos, tmp_path / "new", "--runner=FnApiRunner", "--seed=1").code == 2
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


@pytest.mark.parametrize("endpoint", ["localhost:1", "no-such-host.invalid:8099", "localhost:99999"])
def test_a_job_server_that_does_not_answer_is_told_at_once(endpoint: str, photos: Path, tmp_path: Path) -> None:
    finished = make.job(photos, tmp_path, "--runner=PortableRunner", f"--job_endpoint={endpoint}")
    assert (finished.code, finished.err.count("\n")) == (2, 1), finished
    assert finished.err.startswith(f"error: --job_endpoint '{endpoint}': no job server answers there (")
    assert finished.err.endswith("); start one, or correct HOST:PORT\n")
    assert list(tmp_path.iterdir()) == []
