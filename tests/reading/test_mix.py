"""`mix`: exact shares, and the records of a slow reference, on any hosts, after any resume."""

from __future__ import annotations

import itertools
import logging
import pickle
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.schema.example import int64_feature
from reader.position import MixPosition
from reader.shares import Rule, begins
from tests.reading import shards, slow_mix, slow_order
from tests.reading.test_resume import ADAPTERS

NAMES = [("bird", "cat", "dog"), ("cat", "dog", "emu"), ("ant", "bee", "cat")]
SHARDS = [[37], [64, 64, 1], [300, 57], [8], [150, 90]]
Datasets = list[reader.DatasetInfo]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Datasets:
    """Datasets whose records have numbers: no two have the same."""
    found = []
    for at, counts in enumerate(SHARDS):
        number: Any = ("number", "int64", False, int64_feature, lambda record, at=at: (1000 * at + record,))
        folder = tmp_path_factory.mktemp("sets") / "1.0.0"
        url = shards.make_dataset(folder, {"train": counts}, size=(8, 8), columns=[number], classes=NAMES[at % 3])
        found.append(reader.load_info(url))
    return found


def numbers_of(batches: Any) -> list[int]:
    return [number for inputs, *_ in batches for number in np.asarray(inputs["number"]).tolist()]


def mixed(sources: Any, batch: int = 8, **more: Any) -> Any:
    return reader.mix(sources, global_batch_size=batch, features=["number"], **more)


# --- whose each row is


def random_weights(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randint(1, rng.choice([3, 9, 99, 9999])) for _ in range(rng.randint(2, 12)))


@pytest.mark.parametrize("trial", range(60))
def test_each_host_s_first_rows_have_the_shares_within_2_and_any_1000_within_3(trial: int) -> None:
    weights = [(99, 1), (1,) * 12, tuple(2**at for at in range(12)), random_weights(random.Random(trial))][
        min(trial, 3)
    ]
    rule, rows = Rule(weights), np.arange(4001)
    for hosts, host in ((1, 0), (2, 1), (3, 2), (7, 3), (7, 6)):
        begin = int(begins(rule, hosts)[host])
        counts = np.stack([rule.count(source, begin + rows) for source in range(len(weights))])
        assert (np.diff(counts) >= 0).all() and (np.diff(counts).sum(0) == 1).all()
        assert (np.diff(counts).argmax(0) == rule.sources(begin + rows[:-1])).all()
        exact = np.multiply.outer(np.array(weights) / sum(weights), rows)
        error = counts - counts[:, :1] - exact
        assert np.abs(error).max() <= 2 and np.abs(error[:, 1000:] - error[:, :-1000]).max() <= 3
    for row in (0, 1, 1234, 10**12):
        assert [int(rule.count(source, np.array(row))) for source in range(len(weights))] == slow_mix.counts(
            weights, row
        )


def test_a_rare_source_doesn_t_come_to_all_hosts_at_once() -> None:
    rule = Rule((99, 1))
    rows = np.add.outer(begins(rule, 10), np.arange(1000))
    rare = (rule.sources(rows.ravel()).reshape(rows.shape) == 1).sum(0)
    assert rare.max() == 1 and rare.sum() == 100


# --- what is read


class Mix:
    """Some sources of random kinds, and what the slow reference says of them."""

    def __init__(self, datasets: Datasets, rng: random.Random, seed: int) -> None:
        self.weights = tuple(rng.randint(1, rng.choice([3, 9, 50])) for _ in range(rng.randint(2, 12)))
        self.pairs, self.numbers, jobs, names = list[Any](), list[list[int]](), [], list[list[str]]()
        for weight in self.weights:
            at = rng.randrange(len(datasets))
            info, own = datasets[at], NAMES[at % 3]
            wanted = rng.choice([None, list(own[:2]), {own[2]: "bird"}])
            total = sum(SHARDS[at])
            chosen = [number for number in range(total) if wanted is None or own[number % 3] in wanted]
            runs, count = slow_order.runs_of(SHARDS[at], chosen)
            new = wanted if isinstance(wanted, dict) else {name: name for name in wanted or own}
            names.append([new[own[number % 3]] for number in chosen])
            jobs.append(slow_order.Job(runs, [0] * len(chosen), (), 0, (total, count), 16, seed))
            self.numbers.append([1000 * at + number for number in chosen])
            self.pairs.append((info if wanted is None else {"dataset": info, "classes": wanted}, weight))
        scale = int(np.gcd.reduce(self.weights))
        self.weights = tuple(weight // scale for weight in self.weights)
        self.jobs, self.names = jobs, names
        self.left = [(0, slow_order.passes_of(job, 0)) for job in jobs]

    def read(self, hosts: int, row: int, count: int) -> tuple[list[list[slow_mix.Row]], list[slow_mix.Left]]:
        begin = begins(Rule(self.weights), hosts).tolist()
        return slow_mix.read(self.jobs, self.weights, self.left, begin, row, count)

    def shown(self, rows: list[slow_mix.Row]) -> list[tuple[int, str]]:
        """The number of each record and its class."""
        return [(self.numbers[source][draw], self.names[source][draw]) for source, _, draw in rows]


@pytest.mark.parametrize("trial", [*range(6), *(pytest.param(n, marks=pytest.mark.soak) for n in range(6, 60))])
def test_any_mix_hosts_and_resume_read_what_the_slow_reference_reads(datasets: Datasets, trial: int) -> None:
    rng = random.Random(trial)
    mix = Mix(datasets, rng, seed=trial % 5)
    hosts, begun, row, step, position = 0, 0, 0, 0, None
    seen = Counter[tuple[int, int, int]]()
    for leg in range(4):
        if leg % 2 == 0:  # else the same hosts go on, in batches of another size
            if hosts:
                mix.left = mix.read(hosts, begun, row - begun)[1]
            hosts, begun = rng.choice([1, 2, 3, 7]), row
        batch, steps = rng.randint(1, 12), rng.randint(0, 20)
        wanted, _ = mix.read(hosts, begun, row + batch * steps - begun)
        for host in range(hosts):
            batches = mixed(mix.pairs, batch * hosts, seed=trial % 5, host=(host, hosts), position=position)
            found = [*itertools.islice(batches.repeat(), steps)]
            labels = [batches.classes[label] for _, one in found for label in one.tolist()]
            mine = wanted[host][row - begun :]
            assert [*zip(numbers_of(found), labels, strict=True)] == mix.shown(mine)
            seen.update(mine)
        step, row = step + steps, row + batch * steps
        position = reader.Position.from_json(batches.position_at(step).to_json())
        assert (position.step, position.records_read) == (step, sum(seen.values()))
    for source, one in enumerate(position.sources):
        ended = Counter({(source, epoch, draw): 1 for epoch in range(one.epoch) for draw in range(one.records)})
        assert ended == Counter({key: n for key, n in seen.items() if key[0] == source and key[1] < one.epoch})
        assert max((epoch for at, epoch, _ in seen if at == source), default=0) <= one.epoch


@pytest.mark.parametrize("adapter", ["numpy", "torch", "3 workers", "jax"])
def test_an_adapter_reads_a_mix_and_resumes_it_by_its_state(datasets: Datasets, adapter: str) -> None:
    batches = mixed({datasets[0]: "0.2", datasets[1]: 0.5, datasets[4]: 0.3}, 12)
    assert len(batches) == -(-800 // 12)  # 240 records, a weight of 0.3
    stream = numbers_of(itertools.islice(batches.repeat(), 2 * len(batches)))
    state = batches.at(batches.start).state_at(31)
    assert len(state.to_json()) < 2000
    loops = ADAPTERS[adapter](pickle.loads(pickle.dumps(batches.at(batches.start))), state.to_dict())
    assert numbers_of(loops) + numbers_of(loops) == stream[31 * 12 :]


def test_keras_resumes_a_mix(datasets: Datasets, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras", reason="Keras is not installed: pip install 'imageshards[train]'")
    sources = {datasets[2]: 3, datasets[3]: 1}
    batches = reader.mix(sources, global_batch_size=100)
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    reader.keras.Resume(tmp_path, batches).fit(model, epochs=1, verbose=0)
    again = reader.keras.Resume(tmp_path, reader.mix(sources, global_batch_size=100))
    assert (again.step, again.epoch) == (len(batches), 1)
    assert again._batches.next_loop.position == batches.position_at(len(batches))


def test_what_is_read_and_what_is_told(datasets: Datasets, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        batches = mixed([((datasets[0], "train[:50%]"), 3), ((datasets[1].url, "train"), 1)], 8, labels="one_hot")
    assert batches.classes == ("bird", "cat", "dog", "emu") and next(iter(batches))[1].shape == (8, 4)
    first, second = "photos 1.0.0 train[:50%]", "photos 1.0.0 train"
    assert repr(batches) == f"MixBatches(mix of 3 × {first}, 1 × {second}: 65 batches of 8 images 8x8x3, number)"
    (told,) = [record.getMessage() for record in caplog.records]
    joined = "the sources' classes are joined by name, 4 in all"
    assert told == f"{joined}: {first} has no emu; {second} has no bird"
    caplog.clear()
    mixed([({"dataset": datasets[0], "classes": ["cat"]}, 1), ({"dataset": datasets[0], "classes": ["dog"]}, 1)])
    (told,) = [record.getMessage() for record in caplog.records]  # of both, though they are called the same
    assert told.endswith(f"2 in all: {second} has no dog; {second} has no cat")
    assert len(mixed({datasets[0]: 1}, epoch_records=20)) == 3 and len(mixed({datasets[0]: 5}, 37)) == 1


def test_corrupt_records_are_skipped_and_counted_by_source(tmp_path: Path, datasets: Datasets) -> None:
    corrupt, where = shards.flipped(tmp_path / "1.0.0", [40], 33, size=(8, 8))
    sources = {corrupt: 1, datasets[2]: 1}
    options: dict[str, Any] = {"global_batch_size": 10, "seed": 1}
    with pytest.raises(ImageShardsError, match=re.escape(where)):
        for _ in reader.mix(sources, **options):
            pass
    skipping = reader.mix(sources, on_error="skip", **options)
    assert sum(len(labels) for _, labels in skipping) == len(skipping) * 10 and skipping.skipped == 1


ERRORS: dict[str, tuple[Any, str]] = {
    "no sources": (lambda sets: mixed({}), r"sources must be a dict of dataset → weight, or a list"),
    "weight 0": (
        lambda sets: mixed({sets[0]: 1, sets[1]: 0}),
        r"the weight of source 2, .*1\.0\.0 must be above 0, got 0",
    ),
    "no number": (lambda sets: mixed({sets[0]: "half"}), r"the weight of source 1, .* must be above 0, got 'half'"),
    "endless": (lambda sets: mixed({sets[0]: "1e99999999"}), r"the weight of source 1, .* has over 100 digits"),
    "unprintable": (lambda sets: mixed({sets[0]: 10**5000}), r"the weight of source 1, .* has over 100 digits"),
    "infinite": (lambda sets: mixed({sets[0]: float("inf")}), r"must be above 0, got inf"),
    "too exact": (lambda sets: mixed({sets[0]: 1, sets[1]: 0.1234567890123}), r"have too many digits"),
    "unknown key": (lambda sets: mixed([({"dataset": sets[0], "clases": ["cat"]}, 1)]), r"did you mean .?classes"),
    "no dataset": (lambda sets: mixed([({"classes": ["cat"]}, 1)]), r"no dataset: None"),
    "batch_size": (lambda sets: mixed({sets[0]: 1}, batch_size=3), r"there is no argument batch_size=: give global_"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_can_t_be_mixed_is_one_line(datasets: Datasets, case: str) -> None:
    build, message = ERRORS[case]
    with pytest.raises(UsageError, match=message) as error:
        build(datasets)
    assert "\n" not in str(error.value)


def test_sources_that_differ_are_refused(datasets: Datasets, tmp_path: Path) -> None:
    large = shards.make_dataset(tmp_path / "1.0.0", {"train": [9]}, size=(16, 8))
    with pytest.raises(UsageError, match=r"the sources have images of 8x8x3 and 16x8x3 .*: give image_size"):
        reader.mix({datasets[0]: 1, large: 1}, global_batch_size=2)
    grey = shards.make_dataset(tmp_path / "grey" / "1.0.0", {"train": [9]}, size=(8, 8), channels=1)
    for more in ({}, {"image_size": 8}):  # which changes no channels
        with pytest.raises(UsageError, match=r"images of 8x8x3 and 8x8x1 .*: write them with the same --channels$"):
            reader.mix({datasets[0]: 1, grey: 1}, global_batch_size=2, **more)
    resized, _ = next(iter(reader.mix({datasets[0]: 1, large: 1}, global_batch_size=2, image_size=8)))
    assert resized.shape == (2, 8, 8, 3)
    with pytest.raises(UsageError, match=r"there is no 'number'"):
        mixed({datasets[0]: 1, large: 1}, image_size=8)


def test_another_mix_s_position_is_refused(datasets: Datasets) -> None:
    batches = mixed({datasets[0]: 3, datasets[1]: 1}, seed=1)
    position = batches.position_at(5)
    assert isinstance(position, MixPosition)
    plain = reader.train_batches(datasets[0], "train", global_batch_size=8)
    for other, message in (
        (lambda: mixed({datasets[0]: 1, datasets[1]: 3}, position=position), "made with another weights"),
        (lambda: mixed({datasets[0]: 3, datasets[2]: 1}, position=position), "made with another sources"),
        (lambda: mixed({datasets[0]: 3, datasets[1]: 1}, position=position, seed=2), "made with another seed: 1, here"),
        (
            lambda: mixed({datasets[0]: 3, datasets[1]: 1}, position=position, epoch_records=5),
            "made with another number of records",
        ),
        (lambda: batches.at(plain.start), "the position is that of a dataset, these batches are a mix"),
        (lambda: plain.at(position), "the position is that of a mix, these batches are a dataset"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            other()
    for wrong in ('"row":8', '"row":-1', '"step":-1'):
        with pytest.raises(UsageError, match=r"not an imageshards\.Position"):
            reader.Position.from_json(re.sub(rf'"{wrong[1:5]}"?:\d+', wrong, position.to_json()))
