"""The progress line: counts of this process from any thread, each job's own; finished shards of worker processes."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from beam_pipeline.cli import job, progress
from beam_pipeline.cli.progress import ProgressLine, ProgressText, StatusLine
from beam_pipeline.config import Config
from beam_pipeline.dataset.progress import report
from beam_pipeline.pipeline import shards
from tests import make


def stderr(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> io.StringIO:
    """This stream in place of stderr; called by the test itself, since pytest replaces stderr after fixtures."""
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def wait_for(text: str, stream: io.StringIO) -> None:
    for _ in range(1000):
        if text in stream.getvalue():
            return
        time.sleep(0.01)
    raise AssertionError(f"{text!r} never came: {stream.getvalue()!r}")


def report_images(number: int) -> None:
    for _ in range(number):
        report(images=1)


def test_counts_of_all_threads_are_added_up_and_each_job_begins_at_0(tmp_path: Path) -> None:
    config = Config(input="in", output=str(tmp_path), name="x")
    for _ in range(2):
        line, text = job.Job(None, config)._progress(config), ProgressText()
        assert text(line._count()) == ""
        report(images_listed=1234)
        assert text(line._count()) == "listing: 1,234 images", "before there is a plan"
        report(images_to_sample=64)
        report(images_sampled=9)
        assert text(line._count()) == "sampling: 9/64 images", "it decodes, which may take a while"
        report(images_sampled=55)
        assert text(line._count()) == "planning: 1,234 images"
        report(images=3, images_planned=40_000, shards_planned=4)
        threads = [threading.Thread(target=report_images, args=(5000,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        report(shards=1)
        assert line._count()["images"] == 20_003
        assert text(line._count()).startswith("shards 1/4 · images 20,003/40,000")


def test_finished_shards_of_worker_processes_are_counted_in_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = make.class_folders(tmp_path / "in", {"ant": 20})
    config = Config(input=str(images), output=str(tmp_path / "out"), name="x", num_shards=4)
    found: list[Counter[str]] = []
    make.before(monkeypatch, shards, "publish", lambda *_: found.append(job._finished_shards(config)))
    assert job._finished_shards(config) == Counter(), "before there is a plan"
    job.Job(None, config).write(config)
    assert found == [{"shards": 4, "shards_planned": 4}]
    assert ProgressText()(found[0]) == "shards 4/4"
    stream = stderr(monkeypatch, make.Terminal())
    monkeypatch.setattr(job, "_LOCAL_EVERY_S", 0.01)
    for flag in ("--direct_running_mode=multi_processing", "--runner=PortableRunner"):
        line = job.Job(PipelineOptions([flag]), config)._progress(config, StatusLine())
        assert line._count() == Counter()
        stream.truncate(0)
        with line:
            wait_for("running: listing images, planning shards", stream)


def test_the_last_counts_stay_when_a_published_job_s_state_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, counts = stderr(monkeypatch, make.Terminal()), [Counter[str]()]
    with ProgressLine(lambda: counts[-1], 0.01, "running"):
        wait_for("running", stream)
        counts.append(Counter(shards=1, shards_planned=2))
        wait_for("shards 1/2", stream)
        counts.append(Counter())
        stream.truncate(0)
        wait_for("shards 1/2", stream)
    assert "running" not in stream.getvalue()


@pytest.mark.parametrize(
    ("done", "text"),
    [
        (400, " · 20 images/s · 30 s left"),
        (210, " · 1 images/s · 13 min 10 s left"),
        (209, ""),  # too few to tell
        (1003, " · 80 images/s · 0 s left"),  # some are counted twice
    ],
)
def test_rate_and_time_left_are_of_what_was_seen_done(monkeypatch: pytest.MonkeyPatch, done: int, text: str) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    line = ProgressText()
    counts = {"images_planned": 1000, "shards_planned": 4, "images": 200, "shards": 1}
    line(counts)  # resumed: 200 were done already
    clock[0] = 110.0
    assert line(counts | {"images": done}) == f"shards 1/4 · images {min(done, 1000):,}/1,000{text}"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_one_line_that_is_wiped_and_a_log_whole_lines_now_and_then(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(progress, "LOG_LINE_EVERY_S", 0.02)
    stream = stderr(monkeypatch, make.Terminal() if is_terminal else io.StringIO())
    counts = [Counter(images=7, images_planned=9, shards_planned=3)]  # at first maybe of another plan
    with pytest.raises(ValueError, match="x"), ProgressLine(lambda: counts[-1], 0.01):
        time.sleep(0.1)
        assert stream.getvalue() == ""
        counts.append(Counter(images=1, images_planned=2, shards_planned=1))
        wait_for("images 1/2" if is_terminal else "\n", stream)
        raise ValueError("x")
    text = stream.getvalue()
    assert ("\n" in text, "\r" in text) == (not is_terminal, is_terminal)
    assert text.endswith("\r\033[K") if is_terminal else text.startswith("shards 0/1 · images 1/2\n")


def test_a_line_is_no_wider_than_the_terminal_as_what_wraps_can_t_be_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = stderr(monkeypatch, make.Terminal())
    monkeypatch.setenv("COLUMNS", "12")
    StatusLine().show("shards 2/4 · images 12/40")
    assert terminal.getvalue() == "\r\033[Kshards 2/4 "


def test_a_reader_of_stderr_who_has_gone_does_not_fail_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr(monkeypatch, make.Terminal()).close()
    line = StatusLine(log_every_s=0)
    line.show("images 12/40")
    line.print_above("running")
    line.wipe()
