"""One job of the matrix: run from its start to its end, or killed in the middle and run again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from beam_pipeline import schema, storage
from tools.engines import processes

TRAIN_SHARDS, VALIDATION_SHARDS = 9, 3
SHARDS = TRAIN_SHARDS + VALIDATION_SHARDS
_JOB = (
    "--name=sample",
    "--splits=train=0.8,validation=0.2",
    "--image_size=96",
    f"--num_shards=train={TRAIN_SHARDS},validation={VALIDATION_SHARDS}",
)
_DATASET = "sample/1.0.0"
_STATE = f"sample/{schema.STATE_FOLDER}/1.0.0"
_KILL_AFTER_SHARDS = 2
_POLL_S = 0.005
_JOB_DEADLINE_S = 300.0

Flags = AbstractContextManager[Sequence[str]]


class Engine(NamedTuple):
    """One way to run the job.

    Attributes:
        name: as the table shows it.
        start: given a folder for logs, starts what the engine needs; yields the flags of a job, ends all of it.
    """

    name: str
    start: Callable[[Path], Flags]


class Outcome(NamedTuple):
    """How a job ended.

    Attributes:
        seconds: of the whole command; of both, where it was killed.
        records: of the dataset.
        hash: of the dataset.
        killed_after: shards that were finished when it was killed; 0 where it wasn't.
        failure: why there is no dataset; empty where there is one.
    """

    seconds: float = 0.0
    records: int = 0
    hash: str = ""
    killed_after: int = 0
    failure: str = ""


class Failed(Exception):
    """A job didn't end as it should; one line."""


def run_job(engine: Engine, images: str, output: str, logs: Path, killed: bool = False) -> Outcome:
    """Write the dataset anew with one engine and hash it.

    Args:
        engine: runs it.
        images: folder or URL of class folders.
        output: `--output`; what a run before left there goes first.
        logs: folder for everything that is said.
        killed: kill every process of the job and of its engine when some shards are finished, and run it again.

    Raises:
        Missing: the engine isn't here.
    """
    store = storage.open_storage(output)
    store.delete_tree(output)
    started = time.monotonic()
    try:
        killed_after = _kill_in_the_middle(engine, images, output, logs) if killed else 0
        with engine.start(logs) as flags:
            _finish(_start(images, output, flags, logs / "job.log"), logs / "job.log")
        seconds = time.monotonic() - started
        records = json.loads(store.read(storage.join(output, f"{_DATASET}/{schema.MANIFEST_FILE}")))["records"]
        return Outcome(seconds, records, dataset_hash(storage.join(output, _DATASET)), killed_after)
    except (Failed, RuntimeError) as error:
        return Outcome(time.monotonic() - started, failure=str(error))


def dataset_hash(url: str) -> str:
    """What `python -m reader info URL --hash` says.

    Raises:
        Failed: it says no.
    """
    done = subprocess.run(
        [sys.executable, "-m", "reader", "info", url, "--hash"], cwd=processes.ROOT, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise Failed(done.stderr.strip())
    return done.stdout.split()[-1]


def _start(images: str, output: str, flags: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "beam_pipeline", f"--input={images}", f"--output={output}", *_JOB, *flags]
    return processes.start(command, log)


def _finish(job: subprocess.Popen[bytes], log: Path) -> None:
    try:
        code = job.wait(_JOB_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"no end after {_JOB_DEADLINE_S:.0f} s (what it said: {log})") from None
    finally:
        processes.kill(job)  # also what it left running
    if code != 0:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise Failed(f"exit {code}: {last} (all of it: {log})")


def _kill_in_the_middle(engine: Engine, images: str, output: str, logs: Path) -> int:
    """Run the job until some of its shards are finished and kill all of it; returns how many were.

    Raises:
        Failed: it ended before.
    """
    store, log = storage.open_storage(output), logs / "killed.log"
    sidecars = storage.join(output, f"{_STATE}/shards")
    manifest = storage.join(output, f"{_DATASET}/{schema.MANIFEST_FILE}")
    with engine.start(logs) as flags:
        job = _start(images, output, flags, log)
        try:
            while _count(store, sidecars) < _KILL_AFTER_SHARDS:
                if job.poll() is not None:
                    raise Failed(f"ended with {job.returncode} before it could be killed (what it said: {log})")
                time.sleep(_POLL_S)
        finally:
            processes.kill(job)
    finished = _count(store, sidecars)
    if store.stat(manifest) is not None or not 0 < finished <= SHARDS:
        raise Failed(f"published before it could be killed (what it said: {log})")
    return finished


def _count(store: storage.Storage, sidecars: str) -> int:
    try:
        return sum(1 for file in store.files(sidecars) if file.path.endswith(".json"))
    except FileNotFoundError:
        return 0
