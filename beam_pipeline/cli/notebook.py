"""Runs the job in a new process if IPython is active.

Beam looks for an interactive shell whenever a transform is applied, and then imports its notebook support with pandas,
which isn't installed. No option turns that off. `multiprocessing` isn't used: it would import the caller's `__main__`.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError

_CODE = "from beam_pipeline.cli.command import run_here; run_here()"
_INTERRUPTED = "interrupted; the same call resumes"


class InterruptedCell(KeyboardInterrupt):
    """Ctrl-C, or the stop button: one line in a notebook."""

    def _render_traceback_(self) -> list[str]:
        """https://ipython.readthedocs.io/en/stable/config/integrating.html#custom-exception-tracebacks."""
        return [f"KeyboardInterrupt: {self}"]


def is_active() -> bool:
    """Whether this process is a notebook's, or an interactive IPython."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def run_elsewhere(config: Config, options: Any, command: Sequence[str]) -> Any:
    """`cli.run.run` in a new process, whose output is printed here.

    Raises:
        InterruptedCell: the process has ended; the text says so if a job on Dataflow runs on.
        ImageShardsError: as `run`, or the process ended without an answer.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    is_interrupted = False
    with tempfile.TemporaryFile() as answer:
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, str(answer.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[answer.fileno()],
            start_new_session=True,  # a notebook's stop button interrupts a group of processes
        )
        with process:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(pickle.dumps((config, options, command)))
                process.stdin.flush()
                for line in io.TextIOWrapper(process.stdout, "utf-8", "replace"):
                    print(line, end="", flush=True)
            except KeyboardInterrupt:
                is_interrupted = True
                process.send_signal(signal.SIGINT)
        answer.seek(0)
        data = answer.read()
    result = pickle.loads(data) if data else None  # noqa: S301 - from our own process
    if is_interrupted:
        raise InterruptedCell(str(result) if isinstance(result, KeyboardInterrupt) else _INTERRUPTED)
    if not data:
        raise ImageShardsError(f"the job's process ended with exit code {process.returncode}; the same call resumes")
    if isinstance(result, BaseException):
        raise result
    return result
