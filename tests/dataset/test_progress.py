"""The progress line: processes send their counts, the launcher adds them up, nothing is left behind."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import time

import pytest

from beam_pipeline.cli import progress
from beam_pipeline.cli.progress import ProgressLine, StatusLine
from beam_pipeline.dataset.progress import report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


@pytest.mark.parametrize("variable", ["", "no port", "1-of a launcher that is gone"])
def test_without_a_launcher_that_listens_a_report_does_nothing(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("IMAGESHARDS_PROGRESS", variable)
    report(now=True, images=1)


def test_counts_of_several_processes_are_added_up_and_each_job_begins_at_0() -> None:
    code = "from beam_pipeline.dataset.progress import report; report(now=True, images=5, shards=1)"
    for _ in range(2):
        with ProgressLine() as line:
            assert line._text(line._sum()) == ""
            report(now=True, images_listed=1234)
            assert line._text(line._sum()) == "listing: 1,234 images", "before there is a plan"
            report(now=True, images_to_sample=64)
            report(now=True, images_sampled=9)
            assert line._text(line._sum()) == "sampling: 9/64 images", "it decodes, which may take a while"
            report(now=True, images_sampled=55)
            assert line._text(line._sum()) == "planning: 1,234 images"
            report(now=True, images=3, images_planned=40, shards_planned=4)
            report(now=True, images=4, shards=1)
            subprocess.run([sys.executable, "-c", code], check=True)
            assert line._text(line._sum()) == "shards 2/4 · images 12/40"


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
    line = ProgressLine()
    counts = {"images_planned": 1000, "shards_planned": 4, "images": 200, "shards": 1}
    line._text(counts)  # resumed: 200 were done already
    clock[0] = 110.0
    assert line._text(counts | {"images": done}) == f"shards 1/4 · images {min(done, 1000):,}/1,000{text}"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_one_line_that_is_wiped_and_a_log_whole_lines_now_and_then(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(progress, "_REDRAW_EVERY_S", 0.01)
    monkeypatch.setattr(progress, "LOG_LINE_EVERY_S", 0.02)
    stream, before = stderr(monkeypatch, Terminal() if is_terminal else io.StringIO()), dict(os.environ)
    with pytest.raises(ValueError, match="x"), ProgressLine():
        assert dict(os.environ) != before
        report(now=True, images=1, images_planned=2, shards_planned=1)
        wait_for("images 1/2" if is_terminal else "\n", stream)
        raise ValueError("x")
    assert dict(os.environ) == before
    text = stream.getvalue()
    assert ("\n" in text, "\r" in text) == (not is_terminal, is_terminal)
    assert text.endswith("\r\033[K") if is_terminal else text.startswith("shards 0/1 · images 1/2\n")


def test_a_line_is_no_wider_than_the_terminal_as_what_wraps_can_t_be_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = stderr(monkeypatch, Terminal())
    monkeypatch.setenv("COLUMNS", "12")
    StatusLine().show("shards 2/4 · images 12/40")
    assert terminal.getvalue() == "\r\033[Kshards 2/4 "


def test_a_reader_of_stderr_who_has_gone_does_not_fail_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr(monkeypatch, Terminal()).close()
    line = StatusLine(log_every_s=0)
    line.show("images 12/40")
    line.print_above("running")
    line.wipe()


def test_what_others_send_is_ignored() -> None:
    with ProgressLine() as line, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        job = os.environ["IMAGESHARDS_PROGRESS"]
        here = ("127.0.0.1", int(job.partition("-")[0]))
        datagrams = ["", "{", "[" * 4000, "[]", '["another job", 1, {"images": 9}]', "\0" * 9000]
        for datagram in [*datagrams, f'["{job}", [], {{}}]', f'["{job}", 1, 2]', f'["{job}", 1, {{"images": "x"}}]']:
            other.sendto(datagram.encode(), here)
        report(now=True, images=3)
        assert line._sum() == {"images": 3}


def test_without_a_port_there_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HOST", "192.0.2.1")  # of documentation: no machine has it
    terminal, before = stderr(monkeypatch, Terminal()), dict(os.environ)
    with ProgressLine():
        assert dict(os.environ) == before
        report(now=True, images=1)
    assert terminal.getvalue() == ""
