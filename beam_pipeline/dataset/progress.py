"""Counts of a local job's progress, from its worker processes to the launcher, which shows them (cli/progress.py).

Local runners show nothing while they work. The launcher names a UDP port of this machine in an environment variable
that worker processes inherit. Each process sends its own counts there now and then, and the launcher adds up the
latest. On a cluster nobody sets the variable.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress

VARIABLE = "IMAGESHARDS_PROGRESS"  # the port, the launcher's process, and an id of the job, since ports are reused
HOST = "127.0.0.1"
_SEND_EVERY_S = 0.25
_lock = threading.Lock()
_counts: dict[str, int] = {}  # of this process, for the job in _sender
_sender = ("", 0)
_sent = 0.0


def report(now: bool = False, **counts: int) -> None:
    """Add to this process's counts, if a launcher shows them; from any thread.

    Args:
        now: send them now; else at most every quarter of a second.
        counts: `images`, `shards` done; `images_planned`, `shards_planned`, `images_listed`, `images_to_sample`,
            `images_sampled`.
    """
    global _sender, _sent
    job = os.environ.get(VARIABLE)
    if not job:
        return
    with _lock:
        if _sender != (job, os.getpid()):  # another job, or a forked process
            _sender, _sent = (job, os.getpid()), 0.0
            _counts.clear()
            with suppress(ValueError):
                if (launcher := int(f"{job}-".split("-")[1])) != os.getpid():
                    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
        for name, number in counts.items():
            _counts[name] = _counts.get(name, 0) + number
        if now or time.monotonic() - _sent > _SEND_EVERY_S:
            _sent = time.monotonic()
            with suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.sendto(json.dumps([*_sender, _counts]).encode(), (HOST, int(job.partition("-")[0])))


def _end_with(launcher: int) -> None:
    """End this worker process soon after a launcher that was killed: Beam's would wait for it for two minutes."""
    with suppress(ProcessLookupError, PermissionError):
        while True:
            os.kill(launcher, 0)
            time.sleep(1)
    os._exit(1)
