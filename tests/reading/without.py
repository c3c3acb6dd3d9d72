"""Programs in other processes: several at one time, or as if some packages weren't installed.

python tests/reading/without.py tensorflow,jax PROGRAM …
"""

from __future__ import annotations

import importlib.machinery
import itertools
import os
import runpy
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Without:
    """Finds modules on `sys.path`, but for those of some packages."""

    def __init__(self, packages: list[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module's spec, or None."""
        if name.partition(".")[0] in self._packages:
            return None
        return importlib.machinery.PathFinder.find_spec(name, path, target)


def run_without(
    packages: str, program: str, folder: Path, *arguments: object, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A program that has run well, written to a folder, in a Python without these packages."""
    path = folder / "program.py"
    path.write_text(program)
    command = [sys.executable, "-W", "ignore", __file__, packages, str(path), *map(str, arguments)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr[-3000:]
    return done


def run_together(
    commands: Iterable[Sequence[object]], each: Iterable[Mapping[str, str]] = itertools.repeat({}), **common: str
) -> list[tuple[str, str]]:
    """What Python processes that run at one time say and complain of; each must end well.

    Args:
        commands: after `python`.
        each: variables of each process.
        common: variables of all.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = []
    for command, own in zip(commands, each, strict=False):
        arguments = [sys.executable, "-W", "ignore", *map(str, command)]
        processes.append(subprocess.Popen(arguments, cwd=ROOT, env={**os.environ, **common, **own}, **pipes))
    done = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, done, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return done


if __name__ == "__main__":
    packages = sys.argv[1].split(",")
    finder: Any = Without(packages)
    # In its place: behind it may stand what finds another checkout, which is installed.
    sys.meta_path[:] = [finder if one is importlib.machinery.PathFinder else one for one in sys.meta_path]
    sys.argv[:] = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert not set(packages) & set(sys.modules)
