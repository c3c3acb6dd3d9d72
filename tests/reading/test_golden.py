"""The order of records is a promise: what releases before this one gave, saved positions and states go on to give.

Recorded by `tests/reading/golden/record.py`.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import reader
from tests.reading.golden import observe
from tests.reading.golden.dataset import DATASETS, make_dataset

FOLDER = Path(__file__).parent / "golden"


def golden(kind: str) -> pytest.MarkDecorator:
    """Parametrizes a test by the recorded cases of a kind; `one` is a case and what was seen."""
    cases = json.loads((FOLDER / f"{kind}.json").read_text())
    assert cases
    return pytest.mark.parametrize("one", cases, ids=[_name(one["case"]) for one in cases])


def _name(case: Any) -> str:
    """A case as a test's name: what it asks for, in its order."""
    if isinstance(case, dict):
        skipped = ("dataset", "ways", "epochs")
        return "-".join(
            _name(value) if isinstance(value, str) or key in ("options", "begin") else f"{key}={_name(value)}"
            for key, value in case.items()
            if key not in skipped and value != {}
        )
    if isinstance(case, list):
        return ",".join(map(_name, case))
    return str(case)


@pytest.fixture(scope="module")
def infos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, reader.DatasetInfo]:
    folder = tmp_path_factory.mktemp("golden")
    return {name: reader.load_info(make_dataset(folder / name / "1.0.0", name)) for name in DATASETS}


@golden("train")
def test_hosts_read_these_records_in_this_order(infos: dict[str, reader.DatasetInfo], one: Any) -> None:
    assert observe.observe_train(infos[one["case"]["dataset"]], one["case"]) == one["seen"]


@golden("iterations")
def test_an_iteration_begins_behind_the_last_that_was_read_to_its_end(
    infos: dict[str, reader.DatasetInfo], one: Any
) -> None:
    assert observe.observe_iterations(infos[one["case"]["dataset"]], one["case"]) == one["seen"]


def test_iterations_join_without_a_seam_whatever_is_abandoned_between(infos: dict[str, reader.DatasetInfo]) -> None:
    options: dict[str, Any] = {"global_batch_size": 17, "features": ["filename"], "seed": 2}
    batches = observe.open_train(infos["medium"], "train", **options)
    assert len(batches) == infos["medium"].steps_per_epoch("train", 17) == 7
    read = []
    for count in (1, 7, 3, 6, 7, 0, 7):
        names = list(itertools.chain.from_iterable(map(observe.names_of, itertools.islice(batches, count))))
        read += names if count == len(batches) else []
    position = infos["medium"].position("train", global_batch_size=17, hosts=1, seed=2)
    endless = itertools.chain.from_iterable(
        itertools.repeat(observe.open_train(infos["medium"], "train", position=position, **options))
    )
    assert read == list(itertools.chain.from_iterable(map(observe.names_of, itertools.islice(endless, 21))))
    counts = Counter(read)  # 357 names: two epochs of 130, and 97 records of the third
    assert len(counts) == 130 and set(counts.values()) == {2, 3} and counts.total() == 357


@golden("eval")
def test_hosts_evaluate_these_records_in_file_order(infos: dict[str, reader.DatasetInfo], one: Any) -> None:
    assert observe.observe_eval(infos[one["case"]["dataset"]], one["case"]) == one["seen"]


@golden("positions")
def test_a_saved_position_goes_on_with_these_records(infos: dict[str, reader.DatasetInfo], one: Any) -> None:
    info, case = infos[one["case"]["dataset"]], one["case"]
    saved = reader.Position.from_json(one["text"])
    assert observe.position_of(info, case) == saved
    assert observe.observe_position(info, case, saved) == one["seen"]


@golden("torch")
def test_ranks_and_workers_read_these_batches(infos: dict[str, reader.DatasetInfo], one: Any) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install '.[torch]'")
    assert observe.observe_torch(infos[one["case"]["dataset"]], one["case"]) == one["seen"]


@golden("states")
def test_a_saved_state_goes_on_with_these_batches(infos: dict[str, reader.DatasetInfo], one: Any) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install '.[torch]'")
    info, case = infos[one["case"]["dataset"]], one["case"]
    made = observe.state_of(info, case)
    for state in (one["state"],) if made == one["state"] else (one["state"], made):
        assert [observe.observe_torch(info, {**case, **way}, state) for way in case["ways"]] == one["seen"]


@pytest.mark.filterwarnings("ignore::UserWarning:torchdata")  # its own deprecated call, its advice on workers
@golden("torchdata")
def test_a_state_that_torchdata_saved_goes_on_with_these_batches(
    infos: dict[str, reader.DatasetInfo], one: Any
) -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed: pip install '.[torch]'")
    info, case = infos[one["case"]["dataset"]], one["case"]
    assert observe.observe_torchdata(info, case, one["state"]) == one["seen"]
    assert observe.observe_torchdata(info, case, observe.torchdata_state(info, case)) == one["seen"]


@golden("seeds")
def test_each_record_of_an_epoch_has_this_seed(infos: dict[str, reader.DatasetInfo], one: Any) -> None:
    assert observe.observe_seeds(infos[one["case"]["dataset"]], one["case"]) == one["seen"]


@golden("augments")
def test_flip_and_flip_crop_decide_the_same_for_each_record(infos: dict[str, reader.DatasetInfo], one: Any) -> None:
    assert observe.observe_augment(infos[one["case"]["dataset"]], one["case"]) == one["seen"]


@pytest.mark.parametrize("seed", [0, 7])
def test_a_records_seed_is_the_same_on_any_hosts_and_in_any_batch(seed: int) -> None:
    same = [
        one["seen"]
        for one in json.loads((FOLDER / "seeds.json").read_text())
        if one["case"]["split"] == "train" and one["case"]["options"]["seed"] == seed
    ]
    assert same and all(seen == same[0] for seen in same)
    assert all(epoch["records"] == 130 and len(set(epoch["some"].values())) > 7 for epoch in same[0])
    assert same[0][0]["some"] != same[0][1]["some"]


def test_tensorflow_reads_the_same(infos: dict[str, reader.DatasetInfo]) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install '.[tensorflow]'")
    for kind, look in (("train", observe.observe_train), ("eval", observe.observe_eval)):
        for one in json.loads((FOLDER / f"{kind}.json").read_text())[1::13]:
            assert look(infos[one["case"]["dataset"]], one["case"], door="tensorflow") == one["seen"]
