"""First on the path of a job under test: its decoder really crashes or hangs on files that hold one of these comments.

Python imports this at its start, in the launcher, in workers and in the child processes that decode.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import time
from typing import Any

from PIL import ImageFile

from beam_pipeline.conversion import decoder

decoder.MIN_S, decoder.SECONDS_PER_PIXEL = 2.0, 0.0  # a hang is one after 2 s

_load = ImageFile.ImageFile.load


def answer(data: bytes) -> None:
    """What a decoder that was taken over might send from a child process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) > 2 and "socket" in os.readlink(f"/proc/self/fd/{name}"):
                os.write(int(name), data)


def _deadly_load(image: ImageFile.ImageFile) -> Any:
    data = image.fp.getvalue() if hasattr(image.fp, "getvalue") else b""
    if b"DEADLY: crash" in data:
        os.abort()
    if b"DEADLY: segfault" in data:
        ctypes.string_at(0)
    if b"DEADLY: exit" in data:
        os._exit(3)
    if b"DEADLY: nonsense" in data:
        answer(bytes(100))
        os._exit(0)
    if b"DEADLY: half an answer" in data:
        answer(bytes(3))
        os._exit(0)
    if b"DEADLY: says " in data:
        said = image.info["comment"].partition(b"says ")[2]
        answer(struct.pack("!i", len(said)) + said + struct.pack("!i", 0))
        time.sleep(3600)
    if b"DEADLY: out of step" in data:
        answer(bytes(3))
        raise OSError  # which is answered as well
    if b"DEADLY: killed" in data:
        os.kill(os.getpid(), 9)
    if b"DEADLY: sleep with the interpreter" in data:
        ctypes.PyDLL(None).sleep(3600)
    if b"DEADLY: sleep" in data:
        time.sleep(3600)
    return _load(image)


ImageFile.ImageFile.load = _deadly_load  # type: ignore[method-assign]
