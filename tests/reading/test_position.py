"""Positions: what training has read, saved as JSON; and how hosts share a step."""

from __future__ import annotations

import json
import math
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_pipeline.errors import UsageError
from reader.position import MAX_HOSTS, MAX_WINDOW_RUNS, Phase, Position, batch_size_of, share_of_host

GOLDEN = Path(__file__).parent / "golden" / "positions.json"

hosts = st.integers(1, 12)
moves = st.lists(st.tuples(hosts, st.integers(1, 40), st.integers(0, 300), st.integers(1, 20)), max_size=6)


def start(records: int, *, hosts: int = 1, batch: int = 1, seed: int = 0, window_runs: int = 16) -> Position:
    return Position("s", records, seed, batch * hosts, 0, (Phase(hosts, window_runs),))


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 3000), st.integers(), moves)
def test_every_position_that_training_reaches_survives_the_round_trip(records: int, seed: int, moves: Any) -> None:
    position = start(records, seed=seed)
    for count, batch, steps, window_runs in moves:
        position = position.on(global_batch_size=batch * count, hosts=count, window_runs=window_runs)
        assert Position.from_json(position.to_json()) == position
        position = position.after(steps)
        assert Position.from_json(position.to_json()) == position == pickle.loads(pickle.dumps(position))


@pytest.mark.parametrize("text", sorted({case["text"] for case in json.loads(GOLDEN.read_text())}))
def test_positions_saved_by_the_release_before_load(text: str) -> None:
    assert Position.from_json(text).to_json() == text


@given(st.integers(1, 10**6), hosts, st.integers(1, 100), st.integers(0, 10**6), st.integers(0, 10**6))
def test_steps_add_up(records: int, count: int, batch: int, steps: int, more: int) -> None:
    begin = start(records, hosts=count, batch=batch)
    assert begin.after(steps).after(more) == begin.after(steps + more)
    position = begin.after(steps)
    read = position.epoch * records + position.phases[0].read  # `read` doesn't count what early hosts read of the next
    assert read == steps * batch * count


def test_a_position_is_small_json() -> None:
    position = start(640_000)
    for step in range(100):
        position = position.on(global_batch_size=1 + step % 2, hosts=1 + step % 2).after(1)
    text = position.to_json()
    assert len(text) < 10_000
    assert "\n" not in text
    assert Position.from_json(text) == position


def test_a_position_of_huge_runs_is_arithmetic() -> None:
    position = start(10**9, hosts=64, batch=64).after(10**9)
    assert position.epoch == 4096 * 10**9 // 10**9
    assert position.phases[0].read == 0


def test_windows_stay_as_they_were_unless_others_are_asked_for() -> None:
    position = start(1000, window_runs=3).after(10)
    assert position.on(global_batch_size=2, hosts=2).window_runs == 3
    assert position.on(global_batch_size=2, hosts=2, window_runs=5).window_runs == 5
    assert position.on(global_batch_size=1, hosts=1) == position


# --- what is no position

VALID = start(1000, hosts=4, batch=8).after(7)


NOT_POSITIONS: list[Any] = ["", "{}", "[]", "1", "null", '"x"', '{"format":2}', '{"format":1,"source":"x"}']
NOT_POSITIONS += ["\udc80", '{"\\udc80":1}', "\0", "[" * 100_000, '{"format":1,"source":' + "[" * 100_000]
NOT_POSITIONS += ['{"format":1e400}', '{"format":' + "9" * 5000 + "}", None, 5, {"format": 1}, ["x"] * 1000]
NOT_POSITIONS += [VALID.to_json()[:-1], VALID.to_json() + "x", VALID.to_json().replace('"format"', '"new":1,"format"')]


@pytest.mark.parametrize("text", NOT_POSITIONS, ids=lambda text: repr(text)[:40])
def test_other_text_is_no_position(text: Any) -> None:
    with pytest.raises(UsageError, match=r"^not a reader\.Position: ") as caught:
        Position.from_json(text)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300


def test_what_a_file_holds_may_be_read_as_bytes() -> None:
    assert Position.from_json(VALID.to_json().encode()) == VALID


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"phases": []}, r"length >= 1 - at `\$.phases`"),
        ({"phases": [[4, 16, 0, 10**9]]}, "4000000000 records read of an epoch of 1000"),
        ({"phases": [[4, 16, 0, 250]]}, "1000 records read of an epoch of 1000"),
        ({"phases": [[4, 16, 0, 200], [2, 16, 0, 100], [4, 16, 0, 0]]}, "1000 records read of an epoch of 1000"),
        ({"phases": [[4, 16, 4, 8]]}, "lead 4 of 4 hosts in phase 0"),
        ({"phases": [[4, 16, 0, 8], [4, 8, 10**9, 8]]}, "lead 1000000000 of 4 hosts in phase 1"),
        ({"phases": [[4, 16, 1, 0]]}, "lead 1, but nothing taken in phase 0"),
        ({"phases": [[3, 16, 0, 0]]}, "global_batch_size 32 can't be divided by 3 hosts"),
        ({"phases": [[64, 16, 0, 0]]}, "global_batch_size 32 can't be divided by 64 hosts"),
        ({"phases": [[0, 16, 0, 0]]}, r"`int` >= 1 - at `\$.phases\[0\]\[0\]`"),
        ({"phases": [[10**9, 16, 0, 0]]}, f"hosts=1000000000: at most {MAX_HOSTS}"),
        ({"phases": [[4, 0, 0, 0]]}, ">= 1"),
        ({"phases": [[4, 10**12, 0, 0]]}, f"window_runs=1000000000000: at most {MAX_WINDOW_RUNS}"),
        ({"phases": [[4, 16, -1, 0]]}, ">= 0"),
        ({"phases": [[4, 16, 0, -1]]}, ">= 0"),
        ({"phases": [[4, 16, 0, True]]}, "got `bool`"),
        ({"phases": [[4, 16, 0, 1.0]]}, "got `float`"),
        ({"phases": [[4, 16, 0, "1"]]}, "got `str`"),
        ({"phases": [[4, 16, 0]]}, "length 4"),
        ({"phases": [[4, 16, 0, 0, 0]]}, "length 4"),
        ({"phases": {"4": 16}}, "Expected `array`"),
        ({"epoch": "x"}, "got `str`"),
        ({"epoch": -1}, ">= 0"),
        ({"epoch": True}, "got `bool`"),
        ({"seed": 1.5}, "got `float`"),
        ({"seed": None}, "got `null`"),
        ({"records": 0}, ">= 1"),
        ({"records": 20}, "28 records read of an epoch of 20"),
        ({"global_batch_size": 0}, ">= 1"),
        ({"source": 5}, "Expected `str`"),
        ({"format": 2}, "format"),
        ({"format": True}, "format"),
    ],
    ids=str,
)
def test_an_impossible_position_is_refused(wrong: dict[str, Any], why: str) -> None:
    value = json.loads(start(1000, hosts=4, batch=8, window_runs=16).to_json())
    value["phases"] = [[4, 16, 0, 7]]
    assert Position.from_json(json.dumps(value)).phases[0].read == 28
    with pytest.raises(UsageError, match=rf"^not a reader\.Position: .*{why}") as caught:
        Position.from_json(json.dumps({**value, **wrong}))
    assert len(str(caught.value).splitlines()) == 1


numbers = st.integers(-2, 70) | st.sampled_from([2**31, 2**63, 10**30])


@given(st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=1, max_size=3), numbers, numbers, numbers)
def test_whatever_is_not_refused_can_be_read_on(phases: list[list[int]], records: int, batch: int, epoch: int) -> None:
    value = {**json.loads(VALID.to_json()), "phases": phases, "records": records, "epoch": epoch}
    try:
        position = Position.from_json(json.dumps({**value, "global_batch_size": batch}))
    except UsageError:
        return
    assert sum(phase.read for phase in position.phases) < position.records
    later = position.after(1000)
    assert Position.from_json(later.to_json()) == later
    assert later.epoch >= position.epoch


@pytest.mark.parametrize("key", ["source", "records", "seed", "global_batch_size", "epoch", "phases", "format"])
def test_a_position_lacks_nothing(key: str) -> None:
    value = json.loads(VALID.to_json())
    del value[key]
    with pytest.raises(UsageError, match=f"missing required field `{key}`"):
        Position.from_json(json.dumps(value))


# --- steps, batches, hosts


class Variable:
    """A step counter as frameworks have it, such as Keras' `optimizer.iterations`: no `__index__`."""

    def __int__(self) -> int:
        return 5

    def __eq__(self, other: object) -> Any:
        return np.array(other == 5)


@pytest.mark.parametrize("steps", [np.int64(5), np.array(5), 5.0, Variable()])
def test_step_counters_of_any_kind_make_the_same_position(steps: Any) -> None:
    begin = start(64)
    assert begin.after(steps).to_json() == begin.after(5).to_json()
    numbers: Any = {"global_batch_size": np.int64(4), "hosts": np.int64(2), "window_runs": np.int64(3)}
    assert begin.on(**numbers).to_json() == begin.on(global_batch_size=4, hosts=2, window_runs=3).to_json()


@pytest.mark.parametrize("steps", [2.5, "5", None, math.nan, math.inf])
def test_other_step_counters_are_refused(steps: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(f"steps={steps!r}: a whole number")):
        start(64).after(steps)


def test_batches_that_hosts_cannot_divide_name_the_nearest() -> None:
    position = start(10)
    with pytest.raises(ValueError, match=r"global_batch_size=100 .* 7 hosts; the nearest that fit: 98 or 105"):
        position.on(global_batch_size=100, hosts=7)
    with pytest.raises(UsageError, match=r"global_batch_size=2\.5: a whole number"):
        position.on(global_batch_size=2.5, hosts=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the nearest that fit: 7"):
        position.on(global_batch_size=3, hosts=7)
    with pytest.raises(ValueError, match="only moves forward"):
        position.after(-1)


class InputContext(NamedTuple):
    """What `tf.distribute.InputContext` has."""

    input_pipeline_id: int
    num_input_pipelines: int
    num_replicas_in_sync: int


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (None, (0, 1, 1)),
        ((1, 3), (1, 3, 1)),
        ([np.int64(0), np.int64(2)], (0, 2, 1)),
        (InputContext(1, 2, 8), (1, 2, 4)),
        (InputContext(0, 2, 1), (0, 2, 1)),
    ],
)
def test_hosts_are_given_by_number_or_by_input_context(host: Any, expected: tuple[int, int, int]) -> None:
    assert share_of_host(host) == expected


def test_tensorflows_own_input_context_is_understood() -> None:
    import tensorflow as tf

    assert share_of_host(tf.distribute.InputContext(4, 3, 8)) == (3, 4, 2)


@pytest.mark.parametrize("host", [(2, 2), (-1, 2), (0,), (0, 1, 2), 1, "01", (0.0, 1), ("x",) * 1000, {}])
def test_an_impossible_host_is_refused(host: Any) -> None:
    with pytest.raises(UsageError, match=r"^host=.*: \(index, count\) with 0 <= index < count$"):
        share_of_host(host)


def test_replicas_share_a_hosts_batch() -> None:
    assert batch_size_of(96, 2, 4) == 12
    with pytest.raises(ValueError, match="global_batch_size=20 can't be divided by 8 replicas"):
        batch_size_of(20, 2, 4)
