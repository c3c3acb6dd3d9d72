"""Selected and balanced epochs: exact counts, and the records of a slow reference, on any hosts, after any resume."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline.schema import RUN_DTYPE
from reader.balance import Balance, Weights, counts
from reader.runs import RunTable, SelectedTable
from tests.reading import shards, slow_order
from tests.reading.golden.dataset import IMAGES
from tests.reading.golden.observe import write_seed

SHARDS, NAMES = [300, 37, 0, 200, 150], ("ant", "bee", "cat", "dog")


def label_of(number: int) -> int:
    """Classes of very different sizes, in no order."""
    return (0, 0, 0, 1, 0, 2, 0, 1, 0, 0, 1, 3, 0, 0, 1, 2, 0)[number * 40503 % 1009 % 17] if number % 170 else 3


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    def record(split: str, number: int) -> tuple[int, bytes]:
        label = label_of(number)
        path = {"class_id": label, "label": NAMES[label], "path": f"{number:06d}.jpg"}
        return label, shards.image_example(image=IMAGES["jpeg"], size=(8, 8), **path)

    folder = tmp_path_factory.mktemp("balance") / "1.0.0"
    return reader.load_info(shards.make_dataset(folder, {"train": SHARDS}, size=(8, 8), classes=NAMES, record=record))


def seeds_of(batch: Any) -> list[tuple[int, int]]:
    """(number of the record, seed of its augmentation) of each row."""
    names, images = batch[0]["filename"], batch[0]["image"]
    return [
        (int(bytes(name)[:6]), int.from_bytes(image.tobytes()[:8], "little"))
        for name, image in zip(names, images, strict=True)
    ]


def job_of(info: reader.DatasetInfo, options: dict[str, Any], shares: list[int]) -> tuple[slow_order.Job, list[int]]:
    """What the reference reads for these options, and the number in the split of each selected record."""
    names = options.get("classes") or {name: name for name in NAMES}
    chosen = [n for n in range(sum(SHARDS)) if NAMES[label_of(n)] in names and ("where" not in options or n % 3)]
    new = sorted(set(names.values()))
    runs, count = slow_order.runs_of(SHARDS, chosen)
    labels = [new.index(names[NAMES[label_of(number)]]) for number in chosen]
    size, seed = options.get("epoch_records", len(chosen)), options["seed"]
    return slow_order.Job(runs, labels, shares, size, (sum(SHARDS), count), options["window_runs"], seed), chosen


@pytest.mark.parametrize("trial", [*range(8), *(pytest.param(n, marks=pytest.mark.soak) for n in range(8, 32))])
def test_any_selection_balance_hosts_and_resume_read_what_the_slow_reference_reads(
    info: reader.DatasetInfo, trial: int
) -> None:
    rng = random.Random(trial)
    options: dict[str, Any] = {"seed": trial % 5, "window_runs": rng.choice([1, 2, 16])}
    shares: list[int] = []
    if trial % 4:
        options["classes"] = rng.choice(
            [{"ant": "ant", "bee": "bee"}, {"dog": "big", "ant": "big", "cat": "small"}, {"bee": "x"}]
        )
    if trial % 3 == 2:
        options["where"] = lambda columns: third_wanted(columns)
    if trial % 2:
        names = sorted(set(options.get("classes", dict(zip(NAMES, NAMES, strict=True))).values()))
        shares = [rng.choice([1, 2, 7]) for _ in names]
        options["balance"] = dict(zip(names, shares, strict=True)) if trial % 6 != 1 else "classes"
        shares = shares if trial % 6 != 1 else [1] * len(names)
        options["epoch_records"] = rng.choice([50, 333, 1500, 2500]) if trial != 7 else 5003
    job, chosen = job_of(info, options, shares)
    size = options.get("epoch_records", len(chosen))
    position, hosts, before = None, rng.choice([1, 2, 3, 7]), 0
    epoch, todo = 0, slow_order.passes_of(job, 0)
    for leg in range(3):
        moved = hosts if leg and rng.random() < 0.5 else rng.choice([1, 2, 3, 7])
        batch, steps = rng.randint(1, 16), rng.randint(1, 1 + size // 20)
        if trial == 7:  # the first hosts end within the third of four passes
            moved, batch, steps = ((7, 16, 24), (3, 5, 9), (2, 7, 30))[leg]
        if moved != hosts and leg:
            _, epoch, todo = slow_order.read(job, epoch, todo, itertools.cycle(range(hosts)), [before] * hosts)
            before = 0
        hosts = moved
        wanted, *_ = slow_order.read(job, epoch, todo, itertools.cycle(range(hosts)), [before + batch * steps] * hosts)
        for host in range(hosts):
            more = {"position": position, "host": (host, hosts), "features": ["filename"], "augment": write_seed}
            batches = reader.train_batches(info, "train", global_batch_size=batch * hosts, **options, **more)
            assert batches.start.records == size
            rows = [row for one in itertools.islice(batches.repeat(), steps) for row in seeds_of(one)]
            assert rows == [
                (chosen[draw % len(chosen)], slow_order.mixed(job, "augment", at, draw))
                for at, draw in wanted[host][before:]
            ]
        position, before = batches.position_at(batches.start.step + steps), before + batch * steps


def third_wanted(columns: Any) -> Any:
    """Records whose number in the split isn't a multiple of 3: by how many came before, shard by shard."""
    begin = {300: 0, 37: 300, 200: 337, 150: 537}[len(columns["class"])]
    return (begin + np.arange(len(columns["class"]))) % 3 > 0


def table_of(labels: Sequence[int], run: int = 64) -> SelectedTable:
    """Records of these classes in runs of so many."""
    count = len(labels)
    rows = [(0, 16 * at, 16 * min(run, count - at), min(run, count - at)) for at in range(0, count, run)]
    table = RunTable.select(["shard"], np.array(rows, RUN_DTYPE), 0, count)
    size = np.full(count, 16, np.uint32)
    index = (np.arange(count) % run).astype(np.uint16)
    known = {"index": index, "start": index.astype(np.uint32) * 16, "size": size, "label": np.array(labels, np.int32)}
    return SelectedTable.of(table, np.arange(len(table.records)), table.records, **known)


@pytest.mark.parametrize(
    ("sizes", "weights", "size"),
    [
        ((1000, 10, 1), None, 1011),
        ((732, 1300, 1300, 900), None, 4232),
        ((500, 100, 3), (7, 2, 1), 77),
        ((40, 40), (1, 3), 333),
    ],
)
def test_ten_epochs_have_exact_counts_and_records_of_a_class_come_equally_often_but_for_one(
    sizes: tuple[int, ...], weights: tuple[int, ...] | None, size: int
) -> None:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(sizes)), sizes))
    balance, seen = Balance(Weights(weights, size), table_of(labels), "abcd"[: len(sizes)]), np.zeros(len(labels), int)
    shares = np.array(weights or (1,) * len(sizes))
    for epoch in range(10):
        draws = balance.draws(7, epoch)
        assert len(draws.draw) == size == len(np.unique(draws.draw))  # no copy of a record twice in a pass
        records = draws.draw % len(labels)
        found = np.bincount(labels[records], minlength=len(sizes))
        assert (abs(found - size * shares / shares.sum()) < 2).all()
        if sizes == (1000, 10, 1):
            assert found.tolist() == [337, 337, 337]
        seen += np.bincount(records, minlength=len(labels))
        total = np.bincount(labels, seen, minlength=len(sizes))
        assert total.astype(int).tolist() == counts(shares.tolist(), size * (epoch + 1))
        for label in range(len(sizes)):
            assert np.ptp(seen[labels == label]) <= 1
        of_pass = [np.diff(draws.first)[a:b].sum() for a, b in itertools.pairwise(draws.passes.tolist())]
        assert sum(of_pass) == size and (min(of_pass) >= 1024 or len(of_pass) == 1)


def test_a_class_that_repeats_very_often_is_told(info: reader.DatasetInfo, caplog: pytest.LogCaptureFixture) -> None:
    reader.train_batches(info, "train", global_batch_size=8, balance="classes", epoch_records=4000)
    (line,) = [record.message for record in caplog.records if "balance" in record.message]
    assert re.fullmatch(r"balance reads each record of class 'dog' \d+ times an epoch: it has \d+ records; .*", line)
