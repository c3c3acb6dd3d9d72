"""Imports TensorFlow without the five lines that its C++ side writes to stderr however its log level is set."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@contextmanager
def _stderr_closed() -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


with _stderr_closed():  # an exception is raised as ever: only what is printed meanwhile is lost
    import tensorflow

    tensorflow.config.list_physical_devices()
