"""A missing extra is one line that says what to install, from the command line and from Python."""

from __future__ import annotations

import subprocess
import sys

import pytest

import beam_pipeline
from beam_pipeline.errors import UsageError
from tests.make import ROOT

NAMES = {"apache_beam": "Apache Beam", "PIL": "Pillow"}


@pytest.mark.parametrize("module", NAMES)
def test_the_command_without_it_is_exit_2_with_one_line(module: str) -> None:
    without = (
        f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_module('beam_pipeline', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", without], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {NAMES[module]} is not installed: pip install '.[pipeline]'\n"


@pytest.mark.parametrize("module", NAMES)
@pytest.mark.parametrize("name", ["run", "Config"])
def test_python_without_it_raises_a_usage_error(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"^{NAMES[module]} is not installed: pip install '\.\[pipeline\]'$"):
        getattr(beam_pipeline, name)
