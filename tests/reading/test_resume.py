"""Training that is stopped and goes on, in new processes and on other hosts: every record once an epoch."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline.errors import UsageError
from tests.make import ROOT
from tests.reading.shards import make_dataset

RECORDS, HOST_BATCH = 160, 4
HOSTS = (1, 2, 3, 7, 16)
Read = list[tuple[str, str]]  # (file name, hash of its pixels) in order


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    """Four uneven shards."""
    folder = tmp_path_factory.mktemp("resume") / "1.0.0"
    return reader.load_info(make_dataset(folder, {"train": [70, 3, 66, 21], "validation": [9]}))


def read(url: str, hosts: int, steps: int, position: str | None = None) -> list[Read]:
    """What each host trains on in so many steps, from the beginning or from a saved position."""
    seen = []
    for host in range(hosts):
        batches = reader.train_batches(
            url,
            "train",
            global_batch_size=HOST_BATCH * hosts,
            host=(host, hosts),
            image_size=(12, 16),
            augment=reader.augment.random_resized_crop(then=reader.augment.flip_crop),
            features=["filename"],
            **{"seed": 3} if position is None else {"position": reader.Position.from_json(position)},
        )
        seen.append(
            [
                (name.decode(), hashlib.sha256(image.tobytes()).hexdigest())
                for inputs, _ in itertools.islice(batches.repeat(), steps)
                for name, image in zip(inputs["filename"], inputs["image"], strict=True)
            ]
        )
    return seen


def in_order(seen: list[Read]) -> Read:
    """What hosts read, step by step: each host's batch of a step after the other."""
    steps = [[host[at : at + HOST_BATCH] for host in seen] for at in range(0, len(seen[0]), HOST_BATCH)]
    return [one for step in steps for batch in step for one in batch]


def read_in_new_process(plan: list[dict[str, Any]]) -> list[list[Read]]:
    """`read` of several arguments in a Python of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.reading.test_resume", json.dumps(plan)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [[[(name, pixels) for name, pixels in host] for host in seen] for seen in json.loads(done.stdout)]


@pytest.mark.parametrize("hosts", HOSTS)
def test_every_record_comes_once_an_epoch_on_any_number_of_hosts(info: reader.DatasetInfo, hosts: int) -> None:
    steps = -(-2 * RECORDS // (HOST_BATCH * hosts))
    shares = [[name for name, _ in host] for host in read(info.url, hosts, steps)]
    each = RECORDS // hosts  # or one more
    assert all(len(set(share[:each])) == each for share in shares)
    assert len({name for share in shares for name in share[: each + 1]}) == RECORDS
    counts = Counter(name for share in shares for name in share[: 2 * each])
    assert len(counts) == RECORDS and max(counts.values()) <= 3


@pytest.mark.soak
def test_training_that_is_stopped_again_and_again_in_new_processes_misses_and_repeats_nothing(
    info: reader.DatasetInfo,
) -> None:
    """A history of 48 stops, half of them followed by another number of hosts; positions cross as JSON."""
    generator = random.Random(5)
    position = reader.train_batches(info, "train", global_batch_size=HOST_BATCH, seed=3).start
    hosts, plan = 1, []
    for stop in range(48):
        steps = generator.randrange(0, max(2, 2 * RECORDS // (HOST_BATCH * hosts) // 3))
        plan.append({"url": info.url, "hosts": hosts, "steps": steps, "position": position.to_json()})
        position = position.after(steps)
        hosts = hosts if stop % 2 else generator.choice([count for count in HOSTS if count != hosts])
        position = position.on(global_batch_size=HOST_BATCH * hosts, hosts=hosts)
    parts = [part for at in range(0, 48, 6) for part in read_in_new_process(plan[at : at + 6])]
    history = [one for seen in parts for one in in_order(seen)]
    assert len(history) > 2 * RECORDS
    # Epochs may overlap by less than a step of the hosts that read on; count how often each record has come.
    counts: Counter[str] = Counter()
    for at, (name, _) in enumerate(history):
        counts[name] += 1
        assert counts[name] <= at // RECORDS + 2
    # The last position knows the rest of its epoch: with it, each record has come equally often.
    rest = position.on(global_batch_size=1, hosts=1)
    left = RECORDS - sum(phase.read for phase in rest.phases)
    batches = reader.train_batches(info, "train", global_batch_size=1, position=rest, features=["filename"])
    counts.update(inputs["filename"][0].decode() for inputs, _ in itertools.islice(batches.repeat(), left))
    assert set(counts.values()) == {rest.epoch + 1} and len(counts) == RECORDS


@pytest.mark.parametrize(("hosts", "step"), [(1, 11), (2, 7), (3, 40), (7, 5)])
def test_the_same_hosts_go_on_with_the_same_names_and_pixels(info: reader.DatasetInfo, hosts: int, step: int) -> None:
    never_stopped = read(info.url, hosts, step + 10)
    batches = reader.train_batches(info, "train", global_batch_size=HOST_BATCH * hosts, host=(0, hosts), seed=3)
    position = batches.position_at(step)
    assert read(info.url, hosts, 10, position.to_json()) == [host[step * HOST_BATCH :] for host in never_stopped]


def test_batches_carry_the_position_where_they_begin(info: reader.DatasetInfo) -> None:
    options: dict[str, Any] = {"global_batch_size": 8, "host": (1, 2), "features": ["filename"]}
    batches = reader.train_batches(info, "train", seed=9, window_runs=3, **options)
    assert batches.start == reader.train_batches(info, "train", seed=9, window_runs=3, **options).start
    assert (batches.start.step, batches.start.hosts, batches.start.global_batch_size) == (0, 2, 8)
    stream = [inputs["filename"].tolist() for inputs, _ in itertools.islice(batches.repeat(), 30)]
    resumed = reader.train_batches(info, "train", position=batches.position_at(13), **options)
    assert resumed.start == batches.position_at(13) and resumed.start.step == 13
    assert (resumed.start.seed, resumed.start.window_runs) == (9, 3)
    assert [inputs["filename"].tolist() for inputs, _ in itertools.islice(resumed.repeat(), 17)] == stream[13:]
    again = reader.train_batches(info, "train", position=resumed.position_at(np.int64(17)), seed=9, **options)
    assert next(iter(again))[0]["filename"].tolist() == stream[17]


def test_a_position_of_something_else_is_one_line(info: reader.DatasetInfo) -> None:
    position = reader.train_batches(info, "train", global_batch_size=8, seed=4, window_runs=2).start
    for seed in (5, 0):
        with pytest.raises(ValueError, match=rf"^the position was made with another seed: 4, here it is {seed}$"):
            reader.train_batches(info, "train", global_batch_size=8, position=position, seed=seed)
    for window_runs in (16, 3):
        with pytest.raises(
            ValueError, match=rf"^the position was made with another window_runs: 2, here .* {window_runs}$"
        ):
            reader.train_batches(info, "train", global_batch_size=8, position=position, window_runs=window_runs)
    reader.train_batches(info, "train", global_batch_size=8, position=position, seed=4, window_runs=2)
    for split in ("validation", "train[:50%]"):
        with pytest.raises(ValueError, match=r"^the position was made with another dataset or split: .*$"):
            reader.train_batches(info, split, global_batch_size=8, position=position)
    with pytest.raises(UsageError, match=r"^position must be an imageshards.Position, such as batches\.position_at"):
        reader.train_batches(info, "train", global_batch_size=8, position="x")  # type: ignore[arg-type]


if __name__ == "__main__":
    print(json.dumps([read(**part) for part in json.loads(sys.argv[1])]))
