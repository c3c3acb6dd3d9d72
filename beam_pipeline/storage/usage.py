"""What a process has used: CPU time, requests of object stores, bytes read and written.

Whoever finishes a piece of work takes what was used since the last one did, whichever threads used it: added up over
all pieces and processes it is what the job used, without attempts that failed and workers that decoded a sample only.
"""

from __future__ import annotations

import os
import threading
import time

from beam_pipeline.schema.job import Usage

_lock = threading.Lock()


_used, _process, _cpu_s = Usage(), os.getpid(), 0.0


def count(lists_and_writes: int = 0, reads: int = 0, bytes_read: int = 0, bytes_written: int = 0) -> None:
    """Add to what this process has used; from any thread."""
    with _lock:
        _used.lists_and_writes += lists_and_writes
        _used.reads += reads
        _used.bytes_read += bytes_read
        _used.bytes_written += bytes_written


def take() -> Usage:
    """What this process has used since the last call, the first time since it began; from any thread."""
    global _used, _process, _cpu_s
    with _lock:
        if _process != os.getpid():  # a forked one counts from zero
            _used, _process, _cpu_s = Usage(), os.getpid(), 0.0
        taken, _used = _used, Usage()
        now = time.process_time()
        taken.cpu_s, _cpu_s = now - _cpu_s, now
        return taken
