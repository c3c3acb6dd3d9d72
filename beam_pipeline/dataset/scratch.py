"""Names of files on a machine's disk that last no longer than their process: what a killed one left is found by them.

A killed job whose output is remote leaves half a shard for each of its writers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import uuid

from beam_pipeline.storage.identity import Process

_PREFIX = "imageshards-"
_NAME = re.compile(rf"{_PREFIX}([0-9a-f]{{16}})-(\d+)-(\d+)-[0-9a-f]{{32}}")


def new_path() -> str:
    """A path in the machine's folder for temporary files where nothing is; its name says which process made it."""
    here = Process.here()
    whose = f"{_place(here)}-{here.pid}-{here.started}-" if here is not None else ""
    return os.path.join(tempfile.gettempdir(), f"{_PREFIX}{whose}{uuid.uuid4().hex}")


def delete_abandoned() -> None:
    """Delete what processes left that ran here and are gone. Never raises."""
    here = Process.here()
    if here is None:
        return
    place = _place(here)
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            name = _NAME.fullmatch(entry.name)
            if name is None or name[1] != place:
                continue
            if here._replace(pid=int(name[2]), started=int(name[3])).is_dead():
                with contextlib.suppress(OSError):  # another user's, or another job has just deleted it
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


def _place(process: Process) -> str:
    """Where its number means this process: the machine since its start, and the container."""
    place = f"{process.boot}\0{process.namespace}"
    return hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
