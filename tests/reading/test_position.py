"""Positions: what training has read, saved as JSON; and how hosts share a step."""

from __future__ import annotations

import json
import math
import pickle
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_pipeline.errors import UsageError
from reader.hosts import batch_size_of, share_of_host
from reader.position import MAX_HOSTS, MAX_WINDOW_RUNS, Phase, Position


def start(records: int, *, hosts: int = 1, batch: int = 1, seed: int = 0, window_runs: int = 16) -> Position:
    return Position("s", records, seed, batch * hosts, 0, (Phase(hosts, window_runs),), step=0)


def test_a_position_is_small_json_however_far_and_often_training_went() -> None:
    position = start(640_000)
    for step in range(100):
        position = position.on(global_batch_size=1 + step % 2, hosts=1 + step % 2).after(1)
    text = position.to_json()
    assert len(text) < 10_000 and "\n" not in text
    assert Position.from_json(text) == Position.from_json(text.encode()) == position  # a file may be read as bytes
    far = start(10**9, hosts=64, batch=64).after(10**9)
    assert (far.epoch, far.phases[0].read) == (4096, 0)


def test_a_position_counts_the_steps_of_the_training_through_every_resume() -> None:
    position = start(100, hosts=2, batch=5).after(7).on(global_batch_size=9, hosts=3).after(30)
    assert (position.step, position.records_read) == (37, 70 + 270)
    assert Position.from_json(position.to_json()).step == 37
    assert position.at(41) == position.at(np.int64(41)) == position.at(np.float32(41)) == position.after(4)
    assert position.at(37) == position
    with pytest.raises(
        UsageError, match=r"^step 36 is before step 37, where this position is: give the global step, c"
    ):
        position.at(36)
    for wrong in (37.5, "40", None):
        with pytest.raises(UsageError, match=r"^step must be an integer, got "):
            position.at(wrong)


# --- what is no position

VALID = start(1000, hosts=4, batch=8).after(7)


def changed(**changes: Any) -> str:
    """A valid position as JSON, but for some of its values; None leaves one out."""
    value = {**json.loads(VALID.to_json()), **changes}
    return json.dumps({key: one for key, one in value.items() if one is not None})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "") for text in ("", "[]", "null", "\udc80", '{"\\udc80":1}', "[" * 100_000, None, 5, ["x"] * 1000)),
        *((text, "") for text in ('{"format":1e400}', '{"format":' + "9" * 5000 + "}", VALID.to_json() + "x")),
        *((changed(**{key: None}), f"missing required field `{key}`") for key in Position.__struct_fields__),
        (changed(new=1), "new"),
        (changed(phases=[]), r"length >= 1 - at `\$.phases`"),
        (changed(phases=[[4, 16, 0, 10**9]]), "4000000000 records read of an epoch of 1000"),
        (changed(phases=[[4, 16, 0, 250]]), "1000 records read of an epoch of 1000"),
        (changed(phases=[[4, 16, 0, 200], [2, 16, 0, 100], [4, 16, 0, 0]]), "1000 records read of an epoch of 1000"),
        (changed(phases=[[4, 16, 4, 8]]), "offset must be at most 3, got 4"),
        (changed(phases=[[4, 16, 0, 8], [4, 8, 10**9, 8]]), "offset must be at most 3, got 1000000000"),
        (changed(phases=[[4, 16, 1, 0]]), "taken must be at least 1, got 0"),
        (changed(phases=[[3, 16, 0, 0]]), "global_batch_size=32 can't be divided by 3 hosts"),
        (changed(phases=[[0, 16, 0, 0]]), r"hosts must be at least 1, got 0 - at `\$.phases\[0\]`"),
        (changed(phases=[[10**9, 16, 0, 0]]), f"hosts must be at most {MAX_HOSTS}, got 1000000000"),
        (changed(phases=[[4, 0, 0, 0]]), "window_runs must be at least 1"),
        (changed(phases=[[4, 10**12, 0, 0]]), f"window_runs must be at most {MAX_WINDOW_RUNS}, got 10+"),
        (changed(phases=[[4, 16, -1, 0]]), "offset must be at least 0"),
        (changed(phases=[[4, 16, 0, -1]]), "taken must be at least 0"),
        (changed(phases=[[4, 16, 0, True]]), "got `bool`"),
        (changed(phases=[[4, 16, 0, 1.0]]), "got `float`"),
        (changed(phases=[[4]]), "length 2"),
        (changed(epoch="x"), "got `str`"),
        (changed(epoch=-1), ">= 0"),
        (changed(seed=1.5), "got `float`"),
        (changed(records=0), ">= 1"),
        (changed(records=20), "224 records read of an epoch of 20"),
        (changed(global_batch_size=0), ">= 1"),
        (changed(source=5), "Expected `str`"),
        (changed(format=2), "format"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_what_is_no_position_or_an_impossible_one_is_refused_in_one_line(text: Any, why: str) -> None:
    with pytest.raises(UsageError, match=rf"^not an imageshards\.Position: .*{why}") as caught:
        Position.from_json(text)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 300


numbers = st.integers(-2, 70) | st.sampled_from([2**31, 2**63, 10**30])


@given(st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=1, max_size=3), numbers, numbers, numbers)
def test_whatever_is_not_refused_can_be_read_on(phases: list[list[int]], records: int, batch: int, epoch: int) -> None:
    try:
        position = Position.from_json(changed(phases=phases, records=records, epoch=epoch, global_batch_size=batch))
    except UsageError:
        return
    assert sum(phase.read for phase in position.phases) < position.records
    later = position.after(1000)
    assert Position.from_json(later.to_json()) == pickle.loads(pickle.dumps(later)) == later
    assert later == position.after(7).after(993)
    assert later.epoch >= position.epoch


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
    assert begin.on(global_batch_size=4, hosts=2).window_runs == begin.window_runs == 16
    assert begin.on(**numbers).to_json() == begin.on(global_batch_size=4, hosts=2, window_runs=3).to_json()
    for wrong in (2.5, "5", None, math.nan, math.inf):
        with pytest.raises(UsageError, match=re.escape(f"steps must be an integer, got {wrong!r}")):
            begin.after(wrong)  # type: ignore[arg-type]


def test_batches_that_hosts_cannot_divide_name_the_nearest() -> None:
    position = start(10)
    with pytest.raises(ValueError, match=r"global_batch_size=100 .* 7 hosts; the nearest that fit: 98 or 105"):
        position.on(global_batch_size=100, hosts=7)
    with pytest.raises(UsageError, match=r"global_batch_size must be an integer, got 2\.5"):
        position.on(global_batch_size=2.5, hosts=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the nearest that fit: 7"):
        position.on(global_batch_size=3, hosts=7)
    with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
        position.after(-1)
    assert batch_size_of(96, 2, 4) == 12
    with pytest.raises(ValueError, match="global_batch_size=20 can't be divided by 8 replicas"):
        batch_size_of(20, 2, 4)


def context(index: int, count: int, replicas: int) -> Any:
    """What `tf.distribute.InputContext` has."""
    return SimpleNamespace(input_pipeline_id=index, num_input_pipelines=count, num_replicas_in_sync=replicas)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (None, (0, 1, 1)),
        ((1, 3), (1, 3, 1)),
        ([np.int64(0), np.int64(2)], (0, 2, 1)),
        (context(1, 2, 8), (1, 2, 4)),
        (context(0, 2, 1), (0, 2, 1)),
        ("auto", (0, 1, 1)),  # no process of several
    ],
)
def test_hosts_are_given_by_number_or_by_input_context(host: Any, expected: tuple[int, int, int]) -> None:
    assert share_of_host(host) == expected


@pytest.mark.parametrize("host", [(2, 2), (-1, 2), (0,), (0, 1, 2), 1, "01", (0.0, 1), ("x",) * 1000, {}])
def test_an_impossible_host_is_refused(host: Any) -> None:
    with pytest.raises(UsageError, match=r"^host must be \(index, count\) with 0 <= index < count, or 'auto', got .*$"):
        share_of_host(host)


CHIEF = '{"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}, "task": {"type": "%s", "index": %s}}'


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "3"}, (1, 3)),  # torchrun, before init_process_group
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
        ({"WORLD_SIZE": "3"}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "3"}, (0, 1)),
        ({"RANK": "x", "WORLD_SIZE": "3"}, (0, 1)),
        ({"TF_CONFIG": CHIEF % ("chief", 0)}, (0, 3)),
        ({"TF_CONFIG": CHIEF % ("worker", 0)}, (1, 3)),
        ({"TF_CONFIG": CHIEF % ("worker", '"1"')}, (2, 3)),
        ({"TF_CONFIG": CHIEF % ("ps", 0)}, (0, 1)),
        ({"TF_CONFIG": CHIEF % ("evaluator", 0)}, (0, 1)),  # reads all of them
        ({"TF_CONFIG": "{}"}, (0, 1)),
        ({"TF_CONFIG": ""}, (0, 1)),
        ({"TF_CONFIG": CHIEF % ("worker", 1), "RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),  # torchrun on each of them
    ],
)
def test_what_started_several_processes_tells_which_this_is(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int, int]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert share_of_host("auto") == (*expected, 1)
    assert share_of_host(None) == (0, 1, 1)


@pytest.mark.parametrize(
    "config", ["{", "[]", '{"cluster": 1}', '{"task": {"index": "x"}}', '{"cluster": {"chief": 1}}']
)
def test_a_tf_config_that_says_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(UsageError, match="TF_CONFIG is not a JSON object with a cluster: correct or unset it"):
        share_of_host("auto")
