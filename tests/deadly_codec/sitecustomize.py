"""First on the path of a job under test: its decoder really crashes or hangs on files that hold one of these comments.

Python imports this at its start, in the launcher, in workers and in the subprocesses that decode.
"""

from __future__ import annotations

import os
import time
from typing import Any

from PIL import Image, ImageFile

from beam_pipeline.decoding import watchdog

watchdog.LEAST_S, watchdog.SECONDS_A_PIXEL = 2.0, 0.0  # a hang is one after 2 s

_load = ImageFile.ImageFile.load


def _deadly_load(image: ImageFile.ImageFile) -> Any:
    data = image.fp.getvalue() if hasattr(image.fp, "getvalue") else b""
    if b"DEADLY: crash" in data:
        os.abort()
    if b"DEADLY: killed" in data:
        os.kill(os.getpid(), 9)
    if b"DEADLY: spin" in data:
        while True:
            pass
    if b"DEADLY: sleep" in data:
        time.sleep(3600)
    return _load(image)


_save = Image.Image.save


def _deadly_save(image: Image.Image, *arguments: Any, **options: Any) -> Any:
    if image.getpixel((0, 0)) == (1, 2, 3):
        raise TypeError("no image's fault")
    return _save(image, *arguments, **options)


Image.Image.save = _deadly_save  # type: ignore[method-assign]
ImageFile.ImageFile.load = _deadly_load  # type: ignore[method-assign]
