"""The order of records is a promise: what releases before this one gave, saved positions and states go on to give.

Recorded by `tests/reading/golden/record.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import reader
from tests.reading.golden import observe
from tests.reading.golden.dataset import DATASETS, make_dataset

Infos = dict[str, reader.DatasetInfo]


def recorded(kind: str) -> list[Any]:
    cases: list[Any] = json.loads((Path(__file__).parent / "golden" / f"{kind}.json").read_text())
    assert cases
    return cases


def golden(*kinds: str) -> pytest.MarkDecorator:
    """Parametrizes a test by the recorded cases of some kinds; `one` is a case and what was seen.

    Of each kind `make test` has every fourth, `make soak` the others.
    """
    return pytest.mark.parametrize(
        ("kind", "one"),
        [
            pytest.param(
                *(kind, one),
                id=re.sub(r'[{}",: ]+', "-", f"{kind} {json.dumps(one['case'])}"),  # what it asks for, in its order
                marks=[pytest.mark.soak] if number % 4 else [],
            )
            for kind in kinds
            for number, one in enumerate(recorded(kind))
        ],
    )


@pytest.fixture(scope="module")
def infos(tmp_path_factory: pytest.TempPathFactory) -> Infos:
    folder = tmp_path_factory.mktemp("golden")
    return {name: reader.load_info(make_dataset(folder / name / "1.0.0", name)) for name in DATASETS}


@golden(*observe.SEEN)
def test_hosts_read_these_records_in_this_order_with_these_seeds(infos: Infos, kind: str, one: Any) -> None:
    assert observe.SEEN[kind](infos[one["case"]["dataset"]], one["case"]) == one["seen"]


@golden("positions")
def test_a_saved_position_goes_on_with_these_records(infos: Infos, kind: str, one: Any) -> None:
    info, made = infos[one["case"]["dataset"]], observe.position_of(infos[one["case"]["dataset"]], one["case"])
    saved = reader.Position.from_json(json.dumps(json.loads(one["text"]) | {"step": made.step}))  # the moves say it
    assert saved == made and reader.Position.from_json(saved.to_json()) == saved
    assert observe.observe_position(info, one["case"], saved) == one["seen"]


@golden("iterators")
def test_a_state_that_an_iterator_saved_goes_on_with_these_records(infos: Infos, kind: str, one: Any) -> None:
    info, case = infos[one["case"]["dataset"]], one["case"]
    made = observe.state_of(info, case)
    # These were recorded when a state numbered its iteration.
    saved = {name: value for name, value in json.loads(one["state"]).items() if name != "iteration"}
    assert json.loads(made) == saved
    for state in {json.dumps(saved), made}:
        assert observe.observe_state(info, case, state) == one["seen"]
