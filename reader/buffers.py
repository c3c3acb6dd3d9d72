"""Memory that is reused: batches and runs are large, and fresh pages cost as much CPU as reading them."""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from beam_pipeline.machine import cpu_count

# TensorFlow uses memory without a copy if it is aligned to this; NumPy's own large arrays aren't.
_ALIGNMENT = 64
# Free batches that are kept: as many as the engine has in flight at 64 records a batch, and two that the trainer held.
_KEPT_BATCHES = 4
_KEPT_BATCHES_A_CORE = 0.25
_KEPT_RUN_BYTES = 96 << 20
SMALLEST_BUFFER = 128 << 10  # fewer bytes are read into memory of their own, which malloc has at hand
_RUN_STEP = 256 << 10  # runs of a dataset differ by a few percent: rounded up, they fit each other's memory


class BufferPool:
    """Gives out memory for batches and runs, and takes it back. Thread-safe without a lock, so a fork is harmless."""

    def __init__(self) -> None:
        self._batches: deque[npt.NDArray[np.uint8]] = deque(
            maxlen=_KEPT_BATCHES + int(_KEPT_BATCHES_A_CORE * cpu_count())
        )
        self._runs: deque[memoryview] = deque()

    def array(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """An aligned, uninitialized uint8 array; its memory comes back when it and all views of it are dropped."""
        size = math.prod(shape)
        base = _pop(self._batches)
        if base is None or len(base) != size + _ALIGNMENT:
            base = np.empty(size + _ALIGNMENT, np.uint8)
        offset = -base.ctypes.data % _ALIGNMENT
        # Over a memoryview: NumPy makes views of a view refer to the base, which would outlive the array in the middle.
        array = np.frombuffer(memoryview(base)[offset : offset + size], np.uint8)
        weakref.finalize(array, self._batches.append, base).atexit = False
        return array.reshape(shape)

    def run_buffer(self, size: int) -> memoryview:
        """Memory of at least `size` bytes, until `take_back`."""
        buffer: memoryview | None = _pop(self._runs)
        if buffer is None or len(buffer) < size:
            buffer = np.empty(-(-size // _RUN_STEP) * _RUN_STEP, np.uint8).data
        return buffer

    def take_back(self, buffers: list[memoryview]) -> None:
        """Reuse run buffers that nothing refers to any more."""
        kept = sum(map(len, self._runs))
        for buffer in buffers:
            kept += len(buffer)
            if kept <= _KEPT_RUN_BYTES:
                self._runs.append(buffer)


def _pop(free: deque[Any]) -> Any:
    try:
        return free.pop()
    except IndexError:
        return None
