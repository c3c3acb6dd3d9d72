"""Blocks of code of the documents, and running one: our command in this process, since Beam takes seconds to import."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import imageshards


def blocks(document: Path) -> list[tuple[str, str]]:
    """(language, text) of each block that is marked as bash or python."""
    return re.findall(r"^```(bash|python)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


def run(language: str, text: str, name: object, variables: dict[str, Any] | None = None) -> str:
    """What a block prints in the working directory; `name` is of its document, for tracebacks. It must succeed.

    `variables` are those of the Python blocks before it, for a block that goes on where they ended.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if language == "python":
            variables = {"__name__": "block"} if variables is None else variables
            exec(compile(text, str(name), "exec"), variables)
            return printed.getvalue()
        for is_ours, part in _commands(text):
            if is_ours:
                line, _, otherwise = part.partition(" || ")
                line, _, file = line.partition(" > ")
                with (
                    open(file, "w") if file else contextlib.nullcontext(printed) as out,
                    contextlib.redirect_stdout(out),
                ):
                    code = imageshards.main(shlex.split(line, comments=True)[1:])
                assert code == 0 or (otherwise, code) == ("true", 1), line
            else:
                command = ["bash", "-euo", "pipefail", "-c", part]
                done = subprocess.run(command, env=environment(), capture_output=True, text=True)
                assert (done.returncode, done.stderr) == (0, ""), part
                print(done.stdout)
    return printed.getvalue()


def environment(**variables: str) -> dict[str, str]:
    """Variables of a process that finds this Python's programs, as in an activated environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, **variables}


def _commands(text: str) -> list[tuple[bool, str]]:
    """The parts of a block: (whether it is a line of ours, its text)."""
    parts: list[tuple[bool, str]] = []
    for line in text.replace("\\\n", "").splitlines():
        is_ours = line.startswith("imageshards ")
        if parts and not is_ours and not parts[-1][0]:
            parts[-1] = (False, f"{parts[-1][1]}\n{line}")
        else:
            parts.append((is_ours, line))
    return parts
