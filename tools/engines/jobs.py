"""One job of the matrix: run from its start to its end, or with a fault in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

from beam_pipeline import schema, storage
from tools.engines import processes

SHARDS = 12
# Faults: what is done to a job when a quarter of its shards is finished.
KILLED = "killed"  # all processes of it and of its engine; then the same command
ONE_KILLED = "one killed"  # a part of its engine, which recovers by itself
CANCELLED = "cancelled"  # by its engine; then the same command
_JOB = ("--name=sample", "--splits=train=0.8,validation=0.2", "--image_size=96")
_DATASET = "sample/1.0.0"
_STATE = f"sample/{schema.STATE_FOLDER}"
_POLL_S = 0.005
_JOB_DEADLINE_S = 300.0


class Running(NamedTuple):
    """An engine that is up.

    Attributes:
        flags: of a job on it.
        faults: fault → what brings it about.
    """

    flags: Sequence[str]
    faults: Mapping[str, Callable[[], None]] = {}


class Engine(NamedTuple):
    """One way to run the job.

    Attributes:
        name: as the table shows it.
        start: given a folder for logs, starts what the engine needs, and ends all of it.
    """

    name: str
    start: Callable[[Path], AbstractContextManager[Running]]


class Outcome(NamedTuple):
    """How a job ended.

    Attributes:
        seconds: of the whole command; of both, if it was run again.
        records: of the dataset.
        hash: of the dataset.
        kept: shards that were finished after the fault and not written again; 0 without a fault.
        failure: why there is no dataset; empty if there is one.
    """

    seconds: float = 0.0
    records: int = 0
    hash: str = ""
    kept: int = 0
    failure: str = ""


class Failed(Exception):
    """A job didn't end as it should; one line."""


def run_job(engine: Engine, images: str, output: str, logs: Path, fault: str = "", shards: int = SHARDS) -> Outcome:
    """Write the dataset from nothing with one engine and hash it.

    Args:
        engine: runs it.
        images: folder or URL of class folders.
        output: `--output`; what an earlier run left there is deleted first.
        logs: folder for all output.
        fault: `KILLED`, or one of the engine's; none by default.
        shards: of both splits.

    Raises:
        Missing: the engine isn't here.
    """
    store = storage.open_storage(output)
    with suppress(FileNotFoundError):
        for file in list(store.files(output)):
            store.delete(storage.join(output, file.path))
    validation = shards // 4
    command = [sys.executable, "-m", "beam_pipeline", f"--input={images}", f"--output={output}", *_JOB]
    command += [f"--num_shards=train={shards - validation},validation={validation}"]
    started = time.monotonic()
    try:
        kept = _run(engine, command, output, logs, fault, max(2, shards // 4))
        seconds = time.monotonic() - started
        if left := _files(f"{output}/{_STATE}"):
            raise Failed(f"{next(iter(left))} and {len(left) - 1} more are left in {_STATE}")
        written = _files(f"{output}/{_DATASET}")
        if again := [path for path in kept if written.get(path) != kept[path]]:
            raise Failed(f"{again[0]} and {len(again) - 1} more were finished and are written again")
        records = json.loads(store.read(storage.join(output, f"{_DATASET}/{schema.MANIFEST_FILE}")))["records"]
        return Outcome(seconds, records, dataset_hash(storage.join(output, _DATASET)), len(kept))
    except (Failed, RuntimeError) as error:
        return Outcome(time.monotonic() - started, failure=str(error))


def _run(
    engine: Engine, command: Sequence[str], output: str, logs: Path, fault: str, shards_before: int
) -> dict[str, str]:
    """Run the job to its end, with a fault after so many shards; returns what was finished after the fault."""
    log, faulty_log = logs / "job.log", logs / "fault.log"
    finished: dict[str, str] = {}
    if fault == KILLED:
        with engine.start(logs) as running:
            processes.kill(_start_to_the_middle([*command, *running.flags], output, faulty_log, shards_before))
        finished = _finished(output, faulty_log)
    with engine.start(logs) as running:
        full = [*command, *running.flags]
        if fault == CANCELLED:
            job = _start_to_the_middle(full, output, faulty_log, shards_before)
            running.faults[fault]()
            _finish(job, 1, faulty_log)
            finished = _finished(output, faulty_log)
        if fault == ONE_KILLED:
            job = _start_to_the_middle(full, output, log, shards_before)
            running.faults[fault]()
            finished = _finished(output, log)
        else:
            job = processes.start(full, log)
        _finish(job, 0, log)
    return finished


def dataset_hash(url: str) -> str:
    """What `imageshards info URL --hash` prints.

    Raises:
        Failed: the dataset can't be read.
    """
    done = subprocess.run(
        [sys.executable, "-m", "reader", "info", url, "--hash"], cwd=processes.ROOT, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise Failed(done.stderr.strip())
    return done.stdout.split()[-1]


def _finish(job: subprocess.Popen[bytes], expected: int, log: Path) -> None:
    try:
        code = job.wait(_JOB_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"no end after {_JOB_DEADLINE_S:.0f} s (log: {log})") from None
    finally:
        processes.kill(job)  # also what it left running
    if code != expected:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise Failed(f"exit {code}: {last} (log: {log})")


def _start_to_the_middle(command: Sequence[str], output: str, log: Path, shards: int) -> subprocess.Popen[bytes]:
    """Start a job and wait until so many of its shards are finished."""
    job = processes.start(command, log)
    while len(_sidecars(output)) < shards:
        if job.poll() is not None:
            processes.kill(job)
            raise Failed(f"ended with {job.returncode} before its fault (log: {log})")
        time.sleep(_POLL_S)
    return job


def _finished(output: str, log: Path) -> dict[str, str]:
    """The files of finished shards, each with what tells it from another version of it."""
    sidecars = [f"sample-{name.replace('-', '.tfrecord-')}-of-" for name in _sidecars(output)]
    files = _files(f"{output}/{_DATASET}")
    found = {path: files[path] for path in files if path.startswith(tuple(sidecars))}
    if not found or schema.MANIFEST_FILE in files:
        raise Failed(f"published before its fault (log: {log})")
    return found


def _sidecars(output: str) -> list[str]:
    """Names such as train-00003."""
    names = (Path(path) for path in _files(f"{output}/{_STATE}/1.0.0/shards"))
    return [name.stem for name in names if name.suffix == ".json"]


def _files(url: str) -> dict[str, str]:
    with suppress(FileNotFoundError):
        return {file.path: f"{file.etag} {file.generation}" for file in storage.open_storage(url).files(url)}
    return {}
