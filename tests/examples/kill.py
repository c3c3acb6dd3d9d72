"""Runs a script, and kills its process when it prints a text: python tests/examples/kill.py TEXT SCRIPT ARGUMENT …"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any


def main(text: str, script: str) -> None:
    write: Any = sys.stdout.write

    def write_or_kill(line: str) -> int:
        if text in line:
            os.kill(os.getpid(), signal.SIGKILL)
        return int(write(line))

    vars(sys.stdout)["write"] = write_or_kill
    sys.argv = sys.argv[2:]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
