"""Remote storage beside the rest of a process: forks, exits, Ctrl-C, threads."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from beam_pipeline.storage import open_storage
from tests.servers import SILENCE, Answer, Gcs, telling


def in_a_process(code: str, server: str) -> str:
    """What a fresh Python prints that runs `code`, with gs:// leading to `server`; the silent one waits a minute."""
    environment = {**os.environ, "STORAGE_EMULATOR_HOST": server}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


FORK = """
import os, signal
from beam_pipeline import storage
def read():
    try:
        print(storage.open_storage("gs://b").read("gs://{bucket}/x").decode(), flush=True)
    except Exception as error:
        print(error, flush=True)
def forked():
    if (child := os.fork()) == 0:
        signal.alarm(20)
        read()
        print(storage.open_storage("gs://b").names("gs://{bucket}"), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("is_used_before", [False, True])
def test_a_child_forked_before_remote_use_reads_and_one_after_is_told_at_once_and_still_lists(
    gcs: Gcs, is_used_before: bool
) -> None:
    bucket = gcs.new_bucket()
    gcs.put(bucket, "x", b"content")
    work = "read()\nforked()" if is_used_before else "storage.open_storage('gs://b')\nforked()\nread()"
    lines = in_a_process(FORK.replace("{bucket}", bucket) + work, gcs.url).splitlines()
    if not is_used_before:
        assert lines == ["content", "['x']", "content"]
    else:
        first, told, listed = lines
        assert (first, listed) == ("content", "['x']")
        assert told.startswith(f"gs://{bucket}/x: this process was forked from one that had used remote storage")
        assert 'multiprocessing_context="forkserver"' in told


HANGING = """
import os, signal, threading, time
from beam_pipeline import storage
signal.signal(signal.SIGINT, signal.default_int_handler)
def ask():
    storage.open_storage("gs://b").{ask}
for _ in range(8):
    threading.Thread(target=ask, daemon=True).start()
time.sleep(0.5)
if {interrupted}:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        ask()
    except KeyboardInterrupt:
        pass
print("goes on")
"""


@pytest.mark.parametrize("interrupted", [False, True], ids=["exit", "Ctrl-C"])
@pytest.mark.parametrize("ask", ['read_range("gs://b/x", 0, 9)', 'read("gs://b/a//b")', 'names("gs://b")'])
def test_a_silent_server_keeps_nobody(ask: str, interrupted: bool) -> None:
    code = HANGING.replace("{ask}", ask).replace("{interrupted}", str(interrupted))
    with telling(Answer(SILENCE)) as server:
        assert in_a_process(code, server.url) == "goes on\n"


def test_many_threads_share_a_storage(gcs: Gcs) -> None:
    bucket = gcs.new_bucket()
    store = open_storage("gs://")

    def one(number: int) -> bool:
        url, data = f"gs://{bucket}/odd//{number}", os.urandom(50_000)
        store.write(url, data)
        assert store.stat(url) is not None
        return store.read(url) == data == bytes(store.read_range(url, 0, 100_000))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(64)))
    assert sum(1 for _ in store.files(f"gs://{bucket}/odd")) == 64
