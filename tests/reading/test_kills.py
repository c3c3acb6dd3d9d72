"""Trainings that are killed: each life is a process that reads, saves, reads on and ends by SIGKILL.

The hosts of a life read in turn in its process; half of the trainings change hosts and batch size from life to life.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import reader
from tests.make import ROOT
from tests.reading.shards import make_dataset
from tests.reading.test_resume import ADAPTERS, NUMBER, RECORDS, evals, seen, share, train

pytestmark = pytest.mark.soak
LIVES, PASSES = 4, 4
SEEDS = 1  # with 5: 70 trainings, 280 kills in six minutes
# Some begin at a position, and between lives an evaluation is stopped too.
TRAININGS = [
    (adapter, seed, other) for adapter in (*ADAPTERS, "tensorflow") for seed in range(SEEDS) for other in (0, 1)
]


class Life(NamedTuple):
    """A process of a training: it makes so many steps, saves, and makes some more that are lost."""

    adapter: str
    url: str
    folder: str
    hosts: int
    batch: int
    start: int  # step of the position that the training begins at
    steps: int
    lost: int
    evaluated: int  # steps of an evaluation that are made before the save; 0 for none


def lives(adapter: str, seed: int, is_other: int, url: str, folder: Path) -> Iterator[Life]:
    """The last one ends with the last record of a pass."""
    draw, read = random.Random(f"{adapter} {seed} {is_other}"), 0
    most = 1 if adapter == "jax" else 3
    hosts, batch = draw.randint(1, most), 12
    start = 0 if is_other else draw.choice((0, 7, 30))
    for number in range(LIVES):
        if is_other and number:
            hosts, batch = draw.randint(1, most), draw.choice((12, 24))
        steps, is_last = draw.randrange(1, 16), number == LIVES - 1
        if is_last and is_other:
            hosts, batch = 1, 1 if adapter != "replicas" else 2
            steps = (PASSES * RECORDS - read) // batch
        read += steps * batch
        yield Life(adapter, url, str(folder), hosts, batch, start, steps, draw.randrange(4), draw.choice((0, 3)))


def live(life: Life) -> None:
    """What a training script does, as the docs write it."""
    file = Path(life.folder, "saved.json")
    saved = json.loads(file.read_text()) if file.exists() else {"rows": [], "training": None, "evaluation": None}
    info, rows, replicas = reader.load_info(life.url), saved["rows"], 2 if life.adapter == "replicas" else 1
    options = {"global_batch_size": life.batch, "seed": 7, "window_runs": 3}

    def training(host: int) -> tuple[Iterator[Any], Callable[[int], Any]]:
        batches = train(info, host=share(life.adapter, host, life.hosts), **options)
        if life.start and not saved["training"]:
            batches = batches.at(batches.position_at(life.start))
        if life.adapter == "tensorflow":  # whose loops are full, from any position
            batches = batches.at(reader.Position.from_json(saved["training"] or batches.start.to_json()), rest=False)
            return iter(reader.as_tf(batches).repeat()), lambda step: batches.position_at(step).to_json()
        loops = ADAPTERS[life.adapter](batches, saved["training"])
        step_state = getattr(getattr(loops, "dataset", None), "state_dict", None)
        return itertools.chain.from_iterable(itertools.repeat(loops)), step_state or (
            lambda step: batches.state_at(step).to_dict()
        )

    opened = [training(host) for host in range(life.hosts)]

    def step() -> list[list[int]]:
        return [seen(next(stream) for _ in range(replicas)) for stream, _ in opened]

    rows += [step() for _ in range(life.steps)]
    states = [state(life.start + len(rows)) for _, state in opened]
    assert all(one == states[0] for one in states)
    evaluation = evaluate(info, life, saved["evaluation"]) if life.adapter != "tensorflow" else None
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"rows": rows, "training": states[0], "evaluation": evaluation}))
    new.replace(file)
    for _ in range(life.lost):
        step()
    os.kill(os.getpid(), signal.SIGKILL)


def evaluate(info: Any, life: Life, saved: Any) -> Any:
    """Finish a saved evaluation, on the same hosts; begin another one."""

    def part(host: int) -> Any:
        return evals(info, host=share(life.adapter, host, life.hosts), global_batch_size=life.batch)

    if saved and saved["on"] == [life.hosts, life.batch]:
        for host, (state, before) in enumerate(zip(saved["states"], saved["read"], strict=True)):
            everything = seen(part(host))
            assert seen(ADAPTERS[life.adapter](part(host), state)) == everything[len(before) :]
            assert before == everything[: len(before)] != []
    if not life.evaluated:
        return None
    replicas = 2 if life.adapter == "replicas" else 1
    parts = [part(host) for host in range(life.hosts)]
    read = [seen(itertools.islice(one, life.evaluated * replicas)) for one in parts]
    states = [one.state_at(life.evaluated).to_dict() for one in parts]
    return {"on": [life.hosts, life.batch], "states": states, "read": read}


@pytest.mark.parametrize(("adapter", "seed", "is_other"), TRAININGS)
def test_a_training_that_is_killed_again_and_again_reads_what_an_uninterrupted_one_does(
    tmp_path: Path, adapter: str, seed: int, is_other: int
) -> None:
    framework = "torch" if "worker" in adapter else adapter
    if framework in ("torch", "jax", "tensorflow") and not find_spec(framework):
        pytest.skip(f"{framework} is not installed: pip install 'imageshards[{framework}]'")
    url = make_dataset(tmp_path / "1.0.0", {"train": [130, 3, 100, 68]}, columns=NUMBER)
    plan = list(lives(adapter, seed, is_other, url, tmp_path))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)}
    for life in plan:
        command = [sys.executable, "-W", "ignore", "-m", "tests.reading.test_kills", json.dumps(life)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, f"{life}\n{done.stderr[-4000:]}"
    rows = json.loads((tmp_path / "saved.json").read_text())["rows"]
    hosts, batch, start = plan[0].hosts, plan[0].batch, plan[0].start
    if is_other:
        counts = Counter(number for step in rows for part in step for number in part)
        assert counts == dict.fromkeys(range(RECORDS), PASSES)
        return
    info = reader.load_info(url)
    for host in range(hosts):
        stream = train(info, host=(host, hosts), global_batch_size=batch, seed=7, window_runs=3).repeat()
        uninterrupted = itertools.islice(stream, start, start + len(rows))
        assert [step[host] for step in rows] == [seen([one]) for one in uninterrupted]


if __name__ == "__main__":
    live(Life(*json.loads(sys.argv[1])))
