"""`benchmarks/resume.py`, its short form: streams resumed in new processes, on as many hosts and on others."""

from __future__ import annotations

import runpy

import pytest

from tests.make import ROOT


def test_resumes_in_new_processes_are_exact(capfd: pytest.CaptureFixture[str]) -> None:
    resume = runpy.run_path(str(ROOT / "benchmarks" / "resume.py"))
    assert resume["main"](["--resumes", "2", "--records", "160", "--hosts", "1,2"]) == 0
    assert capfd.readouterr().out.count("right") == 2
