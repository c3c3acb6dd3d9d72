"""Trains with kills, in this process and in others; compares what was read with the arithmetic of `reader.order`."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import reader
from beam_pipeline.schema.example import int64_feature
from reader import order
from tests.make import ROOT
from tests.reading.shards import make_dataset
from tests.soak import trainers
from tests.soak.trainers import RECORDS, Job, Rows

EPOCHS, KILLS = 3, 4
KERAS = ("keras tensorflow", "keras jax", "keras torch")
TRAINERS: dict[str, type[trainers.Trainer]] = {
    "numpy position": trainers.NumpyPosition,
    "numpy state": trainers.NumpyState,
    "numpy replicas": trainers.NumpyReplicas,
    "tensorflow": trainers.TfData,
    "tensorflow replicas": trainers.TfReplicas,
    "torch": trainers.Torch,
    "torch workers": trainers.TorchWorkers,
    "jax": trainers.Jax,
}
HOSTS = {"jax": [1, 2], **{name: [1] for name in KERAS}}
OWN_PROCESS = ("jax", *KERAS)
# How many pairs of trainings `make soak` has, one with the same hosts and one with others: 70 trainings.
PAIRS = {**dict.fromkeys(TRAINERS, 4), "numpy position": 3, "jax": 3, "torch": 3, **dict.fromkeys(KERAS, 2)}
Training = tuple[str, int, bool]  # adapter, seed, whether hosts and batches change
TRAININGS: list[Training] = [
    (name, seed, other) for name in PAIRS for seed in range(PAIRS[name]) for other in (False, True)
]


def skip_without(adapter: str) -> None:
    """Skip a test of an adapter whose frameworks aren't installed."""
    for name in {*adapter.split()} & {"tensorflow", "jax", "torch", "keras"}:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def dataset(folder: Path) -> str:
    """Uneven shards of 559 records with their numbers."""
    columns: Any = [("number", "int64", False, int64_feature, lambda number: (number,))]
    return make_dataset(folder / "1.0.0", {"train": [200, 67, 292]}, columns=columns)


def plan(
    adapter: str, url: str, folder: Path, seed: int, is_elastic: bool, kills: int = KILLS, sigkills: int = KILLS
) -> list[Job]:
    """A training of three epochs with so many kills, some of them of a real process; fixed by its arguments.

    Half of them begin at a position, and before each second checkpoint an evaluation has begun.
    """
    draw = random.Random(f"{adapter} {seed} {is_elastic}")
    counts = HOSTS.get(adapter, [1, 2, 3])
    sizes = (20, 31, 43) if adapter in KERAS else (4, 7, 20, 13)  # the last divides the records
    sizes = (4, 8, 20, 26) if "replicas" in adapter else sizes
    start = 0 if adapter in KERAS or draw.random() < 0.5 else draw.randrange(1, 40)
    hosts, host_batch = counts[-1] if adapter == "jax" else draw.choice(counts), sizes[-1]
    ends = [*sorted(draw.sample(range(1, EPOCHS * RECORDS), kills)), EPOCHS * RECORDS + 3]
    killed = draw.sample(range(kills), min(kills, sigkills))
    jobs: list[Job] = []
    read = 0
    for segment, end in enumerate(ends):
        if is_elastic and segment and (segment == 1 or draw.random() < 0.5):
            hosts = draw.choice([count for count in counts if count != hosts] or counts)
            host_batch = draw.choice([size for size in sizes if size != host_batch])
        batch, is_last = hosts * host_batch, segment == kills
        steps: int | None = max(0, end - read) // batch + is_last
        read += batch * (steps or 0)
        steps, lost = (None if is_last else steps, 0) if adapter in KERAS else (steps, draw.randrange(4))
        evaluated = draw.randrange(1, max(2, RECORDS // batch)) if segment % 2 == 0 and adapter not in KERAS else 0
        more = {"start": start, "evaluated": evaluated}
        jobs.append(Job(adapter, url, str(folder), segment, batch, hosts, steps, lost, segment in killed, **more))
    return jobs


def soak_plan(training: Training, url: str, folder: Path) -> list[Job]:
    """A training of `make soak`: it is killed once, and stopped more often where that costs no import."""
    kills = 2 if training[0] in OWN_PROCESS else KILLS
    return plan(training[0], url, folder, *training[1:], kills=kills, sigkills=1)


def train(jobs: Sequence[Job]) -> tuple[Rows, Any]:
    """What was trained on in the end, and the last state. Processes are killed after a job that says so."""
    rows: Rows = []
    state: Any = None
    together: list[Job] = []
    for job in jobs:
        together.append(job)
        if job.adapter in KERAS and not job.is_killed and job is not jobs[-1]:
            continue  # the next fit is in the same process
        is_here = not job.is_killed and job.adapter not in OWN_PROCESS
        rows, state = (run if is_here else _run_in_processes)(together, rows, state)
        together = []
    return rows, state


def run(jobs: Iterable[Job], rows: Rows, state: Any, tell: Callable[[Rows, Any], object] = lambda *_: None) -> Any:
    """Train in this process, each job with what the last one saved; `tell` is given what is saved."""
    for job in jobs:
        trainer = _trainer(job.adapter)(job, rows, state)
        trainer.read(job.steps)
        rows, state = json.loads(json.dumps([trainer.rows, trainer.save()]))
        tell(rows, state)
        trainer.read(job.lost)
        if job.is_killed:
            _meet(job)
            os.kill(os.getpid(), signal.SIGKILL)
    return rows, state


def _meet(job: Job) -> None:
    """Wait until all hosts are here: JAX ends those whose peer was killed, perhaps before they have saved."""
    if job.host is not None:
        here = [Path(job.folder, f"{job.segment}-{host}.here") for host in range(job.hosts)]
        here[job.host].touch()
        while not all(path.exists() for path in here):
            time.sleep(0.01)


def _trainer(adapter: str) -> Any:
    if adapter in TRAINERS:
        return TRAINERS[adapter]
    from tests.soak.keras_trainer import KerasFit  # imports the backend that the process was given

    return KerasFit


def _run_in_processes(jobs: Sequence[Job], rows: Rows, state: Any) -> tuple[Rows, Any]:
    """`run` in a new process, or in one for each of JAX's hosts."""
    first, last = jobs[0], jobs[-1]
    folder = Path(first.folder)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)}
    if first.adapter in KERAS:
        environment["KERAS_BACKEND"] = first.adapter.split()[1]
    hosts = range(first.hosts) if first.adapter == "jax" else [None]
    from tests import servers  # which the children need not wait for

    address = f"127.0.0.1:{servers.free_port()}"
    processes = []
    for host in hosts:
        path = folder / f"{first.segment}-{host}.json"
        path.write_text(json.dumps([[job._replace(host=host, address=address) for job in jobs], rows, state]))
        command = [sys.executable, "-W", "ignore", "-m", "tests.soak.harness", str(path)]
        options: Any = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append((path.with_suffix(".saved"), subprocess.Popen(command, text=True, **options)))
    outputs = [process.communicate(timeout=300)[0] for _, process in processes]
    for (_, process), output in zip(processes, outputs, strict=True):
        assert process.returncode == (-signal.SIGKILL if last.is_killed else 0), f"{last}\n{output[-4000:]}"
    saved = [json.loads(path.read_text()) for path, _ in processes if path.exists()]
    if len(saved) < 2:  # none after Keras' kill, which comes in the middle of `fit`: its checkpoint is in the folder
        return saved[0] if saved else (rows, state)
    parts = zip(*(rows_of_host[len(rows) :] for rows_of_host, _ in saved), strict=True)
    merged = [[step[0][0], *itertools.chain(*(part[1:] for part in step))] for step in parts]
    training = [one for _, (states, _) in saved for one in states]
    return rows + merged, [training, None]  # each host's evaluation is its own


def expected(url: str, jobs: Sequence[Job], segments: Iterable[int]) -> list[list[tuple[int, int]]]:
    """(epoch, record number) of all hosts in each step, by arithmetic alone; `segments`: in which job each step was.

    While hosts and batch stay the same this is one uninterrupted sequence: no position is made.
    """
    first = reader.load_info(url).run_table("train").first
    first_job = jobs[0]
    position, start = first_job._replace(start=0).batches((0, first_job.hosts)).start, first_job.start
    steps: list[list[tuple[int, int]]] = []
    for (batch, hosts), group in itertools.groupby((jobs[segment].batch, jobs[segment].hosts) for segment in segments):
        position = position.at(start + len(steps)).on(global_batch_size=batch, hosts=hosts)
        streams = [_records(order.train_windows(order.each_once(first), position, host)) for host in range(hosts)]
        steps += [[next(stream) for stream in streams for _ in range(batch // hosts)] for _ in group]
    return steps


def _records(windows: Iterator[order.Window]) -> Iterator[tuple[int, int]]:
    for window in windows:
        yield from ((window.epoch, int(number)) for number in window.numbers)


def check(rows: Rows, jobs: Sequence[Job]) -> None:
    """Fail the test in a line that says which records are missing, double or out of order."""
    wrong = fault(rows, jobs)
    if wrong:
        pytest.fail(wrong, pytrace=False)


def fault(rows: Rows, jobs: Sequence[Job]) -> str | None:
    """What is wrong with a training; None if it read what it should have."""
    steps = expected(jobs[0].url, jobs, [segment for segment, *_ in rows])
    read, wanted = [row[1:] for row in rows], [[number for _, number in step] for step in steps]
    for number, (ours, theirs) in enumerate(zip(read, wanted, strict=True)):
        if ours != theirs:
            missing, double = _count(wanted) - _count(read), _count(read) - _count(wanted)
            return (
                f"segment {rows[number][0]} of {jobs[rows[number][0]]}, step {number}: read {ours}, expected {theirs}; "
                f"in all {missing.total()} records missing {[*missing][:9]}, {double.total()} too often {[*double][:9]}"
            )
    # Hosts differ by a record at most, so these epochs have ended on all; that of a position may have begun before.
    ended = (jobs[0].start * jobs[0].batch + sum(map(len, read)) - jobs[-1].hosts + 1) // RECORDS
    epochs = Counter(itertools.chain.from_iterable(steps))
    for epoch in range(-(-jobs[0].start * jobs[0].batch // RECORDS), ended):
        often = {number: epochs[epoch, number] for number in range(RECORDS) if epochs[epoch, number] != 1}
        if often:
            some = dict(itertools.islice(often.items(), 9))
            return f"epoch {epoch} hasn't each record once: {some}, {len(often)} in all"
    # Keras counts iterations, which hold a little less than an epoch.
    least = EPOCHS - (jobs[0].adapter in KERAS)
    return None if ended >= least else f"only {ended} epochs were read, in {len(read)} steps"


def _count(steps: list[list[int]]) -> Counter[int]:
    return Counter(itertools.chain.from_iterable(steps))


def main(path: Path) -> None:
    """The process that is killed: jobs from a file; what is saved goes to one beside it."""
    jobs, rows, state = json.loads(path.read_text())
    saved = path.with_suffix(".saved")
    run([Job(*job) for job in jobs], rows, state, lambda *both: saved.write_text(json.dumps(both)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
