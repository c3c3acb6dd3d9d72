"""Documents of a job: many threads may read them, the first time too."""

from __future__ import annotations

import subprocess
import sys

from tests.make import ROOT

READ = """
import sys, threading
sys.setswitchinterval(1e-6)
from beam_pipeline.schema.job import Counts, RejectLine, Sidecar, document_bytes, read_document
from beam_pipeline.schema.manifest import FileSums, Shard

shard = Shard("a", 3, 1, 2, 3, "0" * 32, "0" * 32, FileSums(1, 2, "0" * 64))
sidecar = Sidecar("0" * 64, shard, "", None, ((0, 0, 1, 1),), Counts(records=3), (RejectLine("a", "b", "c"),))
data, start, equal = document_bytes(sidecar), threading.Barrier(16), []

def read():
    start.wait()
    equal.append(read_document(data, Sidecar) == sidecar)

threads = [threading.Thread(target=read) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert equal == [True] * 16
"""


def test_threads_that_read_a_first_document_at_once_do_not_crash_the_process() -> None:
    # msgspec isn't safe there: without `build_types` one process in seven ended in a segmentation fault.
    command = [sys.executable, "-c", READ]
    processes = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(12)]
    assert [(process.communicate()[1], process.returncode) for process in processes] == [("", 0)] * 12
