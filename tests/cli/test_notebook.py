"""`run` in a real Jupyter kernel: the page's block, errors, the stop button, a kernel that goes away."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from tests import make
from tests.blocks import blocks


class Kernel:
    """A running kernel; a cell's outputs as text."""

    def __init__(self, folder: Path) -> None:
        notebook = nbformat.v4.new_notebook()
        self.client = NotebookClient(notebook, allow_errors=True, timeout=120, resources={"metadata": {"path": folder}})
        self._cells = notebook.cells

    def run(self, source: str) -> str:
        self._cells.append(nbformat.v4.new_code_cell(source))
        cell = self.client.execute_cell(self._cells[-1], len(self._cells) - 1)
        return "".join(map(_text, cell.outputs))


def _text(output: Any) -> str:
    if output.output_type == "error":
        return "\n".join(output.traceback) + "\n"
    return str(output.get("text") or output["data"]["text/plain"] + "\n")


@pytest.fixture
def kernel(photos: Path, tmp_path: Path) -> Iterator[Kernel]:
    (tmp_path / "photos").symlink_to(photos)
    kernel = Kernel(tmp_path)
    with kernel.client.setup_kernel():
        yield kernel


def jobs(folder: Path) -> list[psutil.Process]:
    """Processes of jobs that are running in a folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cwd"] == str(folder) and "run_here" in " ".join(process.info["cmdline"] or ())
    ]


def until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_page_s_block_runs_in_a_notebook_and_a_manifest_is_shown_in_one_line(
    kernel: Kernel, tmp_path: Path
) -> None:
    (block,) = (
        text
        for language, text in blocks(make.ROOT / "docs/howto/write.md")
        if language == "python" and "imageshards.write(" in text
    )
    assert kernel.run(block).splitlines() == [f"{tmp_path}/datasets/small/1.0.0 {{'train': 40}} {{}}"]
    shown = f"Manifest(url='{tmp_path}/datasets/small/1.0.0', outcome='published', records=40, rejects=0, classes=3)"
    assert kernel.run("manifest").splitlines() == [shown]
    assert (tmp_path / "datasets/small/1.0.0/manifest.json").exists()


@pytest.mark.soak
def test_an_error_is_the_same_as_elsewhere_and_a_plan_is_printed(kernel: Kernel, tmp_path: Path) -> None:
    call = "import imageshards; imageshards.write(imageshards.Config(input={!r}, output='out', name='x'{}))"
    said = kernel.run(call.format("nowhere", ""))
    line = re.sub(r"\x1b\[[\d;]*m", "", said).splitlines()[-1]
    assert line == f"UsageError: --input '{tmp_path}/nowhere': no such folder"
    assert kernel.run(call.format("photos", ", plan_only=True")).startswith("train: 40 images in 1 shard of about ")


@pytest.mark.parametrize("how", ["interrupted", pytest.param("killed", marks=pytest.mark.soak)])
def test_the_stop_button_is_one_line_and_no_job_outlives_its_kernel(kernel: Kernel, tmp_path: Path, how: str) -> None:
    folder = make.class_folders(tmp_path / "many", {"a": 12}, size=(1600, 1200))
    for number in range(300):  # more than are converted meanwhile
        (folder / f"a{number}").symlink_to(folder / "a")
    call = "import imageshards; imageshards.write(imageshards.Config(input='many', output='out', name='x'))"
    manager = kernel.client.km

    def stop() -> None:
        until(lambda: (tmp_path / "out").exists())
        if how == "killed":
            os.kill(manager.provisioner.pid, signal.SIGKILL)
        else:
            os.killpg(manager.provisioner.pgid, signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    if how == "killed":
        with pytest.raises(Exception, match="died"):
            kernel.run(call)
    else:
        assert kernel.run(call) == "KeyboardInterrupt: interrupted; the same call resumes\n"
    thread.join()
    try:
        until(lambda: not jobs(tmp_path), seconds=15)
    finally:
        for job in jobs(tmp_path):
            job.kill()
