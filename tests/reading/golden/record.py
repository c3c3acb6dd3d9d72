"""Records what the reader does, for `test_golden.py`: `python -m tests.reading.golden.record`.

What is recorded is a promise to everybody who saved a position. Record again only to add a case, or after a decision to
break it; `git diff` must then show nothing else.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reader
from tests.reading.golden import observe
from tests.reading.golden.dataset import DATASETS, make_dataset

FOLDER = Path(__file__).parent


def train_cases() -> Iterator[dict[str, Any]]:
    """Seeds, hosts, batches, windows, splits, positions and labels."""

    def case(dataset: str, split: str, batch: int, steps: int, **options: Any) -> dict[str, Any]:
        return {
            "dataset": dataset,
            "split": split,
            "steps": steps,
            "options": {"global_batch_size": batch, **options},
        }

    for seed in (0, 1, 7, -3, 2**40 + 5):
        yield case("large", "train", 100, 65, seed=seed)
    for hosts, host in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (7, 0), (7, 3), (7, 6), (16, 0), (16, 9), (16, 15)):
        yield case("large", "train", 10 * hosts, 3100 // (10 * hosts), seed=3, host=[host, hosts])
    for window_runs in (1, 2, 3, 5, 40, 100):
        yield case("large", "train", 64, 60, window_runs=window_runs)
        yield case("large", "train", 60, 60, window_runs=window_runs, host=[1, 3], seed=2)
    for split in ("train[:40%]", "train[40%:]", "train[1090:1240]", "train[-33%:-7]", "validation", "all"):
        yield case("large", split, 32, 40, seed=4)
    for split in ("train+validation", "train[:10%]+validation[50%:]", "validation+train[100:200]+train[50:150]"):
        yield case("large", split, 24, 60, host=[2, 4], seed=5)
    for batch in (1, 7, 64, 130, 131, 300):
        yield case("medium", "train", batch, 400 // batch + 4, seed=1)
    for hosts, host in itertools.chain(((4, host) for host in range(4)), ((9, 0), (9, 8))):
        yield case("medium", "train", 2 * hosts, 80, host=[host, hosts], window_runs=1)
    yield case("medium", "train", 12, 40, labels="one_hot")
    yield case("small", "train", 5, 60, labels="one_hot", seed=9)
    for hosts, host in ((1, 0), (5, 0), (5, 4), (40, 0), (40, 36), (40, 39)):  # also more hosts than records
        yield case("small", "train", 2 * hosts, 40, host=[host, hosts], seed=6)
    yield case("small", "validation", 12, 9)
    yield case("small", "train[:1]", 3, 5)


def iteration_cases() -> Iterator[dict[str, Any]]:
    """Where an iteration begins after others that were read to their end, or not."""
    for split, batch, options in (
        ("train", 17, {}),
        ("train[:100]", 20, {"seed": 3}),
        ("train", 14, {"host": [1, 2], "seed": 8}),
        ("train[:5]", 12, {}),  # one batch an iteration, of several epochs
    ):
        of_one = max(1, {"train": 130, "train[:100]": 100, "train[:5]": 5}[split] // batch)
        some = [1, max(of_one - 1, 1), of_one] if of_one > 1 else [0, of_one]
        case = {"dataset": "medium", "split": split, "options": {"global_batch_size": batch, **options}}
        yield {**case, "iterations": [None, *some, 1 if of_one > 1 else 0, None, None]}


def eval_cases() -> Iterator[dict[str, Any]]:
    """Hosts, also such without a record, and batches."""
    for dataset, split, hosts, batches in (
        ("large", "train", (1, 3, 7), (64,)),
        ("large", "validation", (1, 3, 7), (1, 5)),
        ("large", "train[95%:]+validation[:20]", (2, 3), (9,)),
        ("medium", "train", (1, 3, 7), (4, 13)),
        ("small", "train", (1, 3, 7, 40), (1, 3)),
        ("small", "validation", (3, 7), (2,)),
    ):
        for count, batch in itertools.product(hosts, batches):
            options = {"global_batch_size": batch * count}
            yield {"dataset": dataset, "split": split, "hosts": count, "options": options}
    one_hot = {"global_batch_size": 14, "labels": "one_hot"}
    yield {"dataset": "small", "split": "train", "hosts": 7, "options": one_hot}


def position_cases() -> Iterator[dict[str, Any]]:
    """Changes of hosts, batches and windows, at the beginning, in the middle and at the end of epochs."""

    def setting(batch: int, hosts: int, window_runs: int = 16) -> dict[str, int]:
        return {"global_batch_size": batch, "hosts": hosts, "window_runs": window_runs}

    def after(steps: int) -> list[Any]:
        return ["after", steps]

    def on(batch: int, hosts: int, window_runs: int = 16) -> list[Any]:
        return ["on", setting(batch, hosts, window_runs)]

    for dataset, seed, begin, moves, ways in (
        ("large", 0, setting(64, 1), [], [setting(64, 1), setting(60, 3)]),
        ("large", 0, setting(64, 1), [after(10)], [setting(64, 1), setting(64, 2)]),
        ("large", 7, setting(64, 1), [after(45)], [setting(64, 1), setting(70, 7)]),
        ("large", 7, setting(64, 1), [after(46)], [setting(64, 1)]),
        ("large", 1, setting(100, 1), [after(29)], [setting(100, 1), setting(99, 3)]),  # an epoch's last record
        ("large", 1, setting(60, 3), [after(20)], [setting(60, 3), setting(60, 1), setting(60, 2)]),
        ("large", 2, setting(60, 3), [after(48)], [setting(60, 3), setting(60, 4)]),  # hosts in different epochs
        ("large", 2, setting(96, 3, 4), [after(11)], [setting(96, 3, 4), setting(96, 3, 2)]),
        ("large", 3, setting(64, 2), [after(9), on(63, 3), after(8)], [setting(63, 3), setting(64, 4)]),
        ("large", 3, setting(64, 2), [after(9), on(32, 2), after(30)], [setting(32, 2), setting(32, 1)]),
        ("large", 4, setting(64, 2, 5), [after(9), on(63, 3, 2), after(8), on(50, 5, 1)], [setting(50, 5, 1)]),
        (
            "large",
            5,
            setting(40, 4),
            [after(7), on(33, 3), after(5), on(70, 7), after(3), on(8, 1), after(11)],
            [setting(8, 1), setting(44, 2), setting(63, 7, 3)],
        ),
        ("large", 6, setting(40, 4), [after(7), on(33, 3), after(200), on(20, 2), after(9)], [setting(20, 2)]),
        ("large", 6, setting(64, 1), [after(1000)], [setting(64, 1)]),
        ("large", 6, setting(64, 4, 3), [after(13), on(64, 4, 9), after(13)], [setting(64, 4, 9), setting(9, 9)]),
        ("medium", 0, setting(6, 3), [after(21)], [setting(6, 3), setting(5, 5)]),
        ("medium", 0, setting(6, 3), [after(22)], [setting(6, 3), setting(5, 5)]),
        ("medium", 11, setting(7, 7, 1), [after(18), on(2, 2, 1), after(1)], [setting(2, 2, 1), setting(4, 4, 1)]),
        ("medium", 11, setting(260, 2), [after(3)], [setting(260, 2), setting(4, 1)]),
        ("small", 0, setting(10, 5), [after(3), on(12, 12), after(1)], [setting(12, 12), setting(3, 3)]),
        ("small", 5, setting(40, 40), [after(1)], [setting(2, 2), setting(40, 40)]),
        ("small", 5, setting(4, 1), [after(9), on(6, 6), after(0), on(2, 1)], [setting(4, 1), setting(8, 8)]),
    ):
        records = sum(DATASETS[dataset][1]["train"])
        ways = [{**way, "steps": records * 5 // 4 // way["global_batch_size"] + 3} for way in ways]
        yield {"dataset": dataset, "split": "train", "begin": {**begin, "seed": seed}, "moves": moves, "ways": ways}
    begin = {**setting(32, 2), "seed": 5}
    for split in ("train[:20%]", "train[10%:30%]+validation"):
        ways = [{**setting(30, 3), "steps": 30}]
        yield {"dataset": "large", "split": split, "begin": begin, "moves": [after(12)], "ways": ways}


def torch_cases() -> Iterator[dict[str, Any]]:
    """Ranks, workers, order, what is dropped, epochs."""

    def case(dataset: str, ranks: int, workers: int, batch: int, epoch: int, **options: Any) -> dict[str, Any]:
        split = options.pop("split", "train")
        case = {"dataset": dataset, "split": split, "ranks": ranks, "workers": workers, "batch_size": batch}
        return {**case, "epoch": epoch, "options": options}

    for ranks, epoch, drop_last in itertools.product((1, 2, 3), (0, 1, 2), (False, True)):
        yield case("medium", ranks, 0, 8, epoch, drop_last=drop_last, seed=3)
    for ranks, drop_last, shuffle in itertools.product((1, 3), (False, True), (False, True)):
        yield case("medium", ranks, 2, 8, ranks - 1, drop_last=drop_last, shuffle=shuffle)
    for ranks, drop_last in itertools.product((1, 3), (False, True)):
        yield case("medium", ranks, 0, 8, 0, drop_last=drop_last, shuffle=False)
    for workers in (0, 2):
        yield case("large", 2, workers, 64, 1, seed=1)
        yield case("large", 2, workers, 50, 0, window_runs=3, split="train[:30%]+validation")
        yield case("small", 3, workers, 1, 2)


def state_cases() -> Iterator[dict[str, Any]]:
    """States of one run or several in an epoch, and who goes on."""

    def run(ranks: int, workers: int, batch: int, steps: int = 0) -> dict[str, int]:
        return {"ranks": ranks, "workers": workers, "batch_size": batch, "steps": steps}

    for epoch, options, runs, ways in (
        (0, {}, [run(1, 0, 8, 5)], [run(1, 0, 8), run(2, 0, 8), run(1, 2, 8)]),
        (0, {"drop_last": True}, [run(1, 0, 8, 16)], [run(1, 0, 8)]),
        (2, {"seed": 4}, [run(1, 2, 8, 3)], [run(1, 2, 8), run(1, 0, 5), run(3, 2, 8)]),
        (1, {"seed": 4}, [run(2, 0, 8, 4)], [run(2, 0, 8), run(3, 0, 16)]),
        (1, {"drop_last": True}, [run(2, 2, 4, 5)], [run(2, 2, 4), run(1, 0, 8)]),
        (1, {}, [run(2, 2, 8, 3), run(3, 0, 4, 2)], [run(3, 0, 4), run(1, 2, 8)]),
        (3, {"seed": 9, "window_runs": 1}, [run(3, 0, 4, 2), run(1, 2, 8, 3), run(2, 0, 8, 1)], [run(2, 0, 8)]),
        (0, {"shuffle": False}, [run(2, 0, 8, 3)], [run(2, 0, 8)]),
        (0, {"shuffle": False}, [run(1, 2, 8, 5)], [run(1, 2, 8)]),
    ):
        way_cases = [{**way, "epoch": epoch} for way in ways]
        case = {"dataset": "medium", "split": "train", "epoch": epoch, "options": options}
        yield {**case, "runs": runs, "ways": way_cases}


def torchdata_cases() -> Iterator[dict[str, Any]]:
    """Workers, and where in an epoch torchdata's loader is asked for its state."""
    for ranks, workers, steps, epoch in ((1, 0, 5, 1), (1, 2, 1, 0), (1, 2, 9, 2), (2, 2, 4, 1), (2, 3, 5, 0)):
        case = {"dataset": "medium", "split": "train", "ranks": ranks, "workers": workers, "batch_size": 8}
        yield {**case, "steps": steps, "epoch": epoch, "options": {"seed": 2}}


def augment_cases() -> Iterator[dict[str, Any]]:
    """Seeds of the order, splits and hosts; each iteration is an epoch."""
    for seed, split, batch, hosts in (
        (0, "train", 10, 1),
        (0, "train", 26, 2),
        (7, "train", 13, 1),
        (7, "train+validation", 15, 3),
        (7, "train[50:]", 8, 1),
    ):
        options = {"global_batch_size": batch, "seed": seed}
        yield {"dataset": "medium", "split": split, "hosts": hosts, "epochs": 2, "options": options}


def record(infos: dict[str, reader.DatasetInfo]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """File name → cases, each with what was seen."""

    def with_seen(cases: Iterator[dict[str, Any]], look: Any) -> list[dict[str, Any]]:
        return [{"case": case, "seen": look(infos[case["dataset"]], case)} for case in cases]

    yield "train", with_seen(train_cases(), observe.observe_train)
    yield "iterations", with_seen(iteration_cases(), observe.observe_iterations)
    yield "eval", with_seen(eval_cases(), observe.observe_eval)
    yield "seeds", with_seen(augment_cases(), observe.observe_seeds)
    names = ("flip", "flip_crop")
    pictures = ({**case, "augment": name, "dataset": "medium"} for name in names for case in augment_cases())
    yield "augments", with_seen(pictures, observe.observe_augment)
    yield "torch", with_seen(torch_cases(), observe.observe_torch)
    positions = []
    for case in position_cases():
        position = observe.position_of(infos[case["dataset"]], case)
        seen = observe.observe_position(infos[case["dataset"]], case, position)
        positions.append({"case": case, "text": position.to_json(), "seen": seen})
    yield "positions", positions
    torchdata = []
    for case in torchdata_cases():
        state = observe.torchdata_state(infos[case["dataset"]], case)
        rest = observe.observe_torchdata(infos[case["dataset"]], case, state)
        torchdata.append({"case": case, "state": state, "seen": rest})
    yield "torchdata", torchdata
    states = []
    for case in state_cases():
        state = observe.state_of(infos[case["dataset"]], case)
        ways = [observe.observe_torch(infos[case["dataset"]], {**case, **way}, state) for way in case["ways"]]
        states.append({"case": case, "state": state, "seen": ways})
    yield "states", states


def main() -> None:
    """Write a JSON file a kind, one case a line."""
    with tempfile.TemporaryDirectory() as folder:
        infos = {name: reader.load_info(make_dataset(Path(folder, name, "1.0.0"), name)) for name in DATASETS}
        for kind, cases in record(infos):
            lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
            (FOLDER / f"{kind}.json").write_text(f"[\n{lines}\n]\n")
            print(kind, len(cases))


if __name__ == "__main__":
    main()
