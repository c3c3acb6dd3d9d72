"""One rule to resume: after a position or a state, the first loop is the rest of the iteration, on every adapter."""

from __future__ import annotations

import itertools
import json
import pickle
import types
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline.errors import UsageError
from beam_pipeline.schema.example import int64_feature
from reader.stream import State
from tests.reading.shards import make_dataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores
RECORDS, BATCH = 301, 24
STEPS = RECORDS // BATCH  # 12, and records that open the next iteration
POINTS = (0, 1, 7, STEPS - 1, STEPS, 2 * STEPS + 4)
NUMBER: Any = [("number", "int64", False, int64_feature, lambda number: (number,))]  # JAX has no array for a name
Loops = Iterable[Any]  # each time it is iterated, the next loop


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    """Uneven shards."""
    folder = tmp_path_factory.mktemp("resume") / "1.0.0"
    return reader.load_info(make_dataset(folder, {"train": [130, 3, 100, 68], "validation": [9]}, columns=NUMBER))


def train(info: Any, **options: Any) -> Any:
    return reader.train_batches(info, "train", **{"global_batch_size": BATCH, "features": ["number"], **options})


def evals(info: Any, **options: Any) -> Any:
    return reader.eval_batches(info, "train", **{"global_batch_size": BATCH, "features": ["number"], **options})


def seen(batches: Iterable[Any]) -> list[int]:
    """Record numbers, but those of padding."""
    found: list[int] = []
    for batch in batches:
        numbers = np.asarray(batch[0]["number"])
        assert np.array_equal(np.asarray(batch[1]), numbers % 3)
        found += numbers[np.asarray(batch[2]) > 0].tolist() if len(batch) > 2 else numbers.tolist()
    return found


class _OneLoop:
    """Loops over batches whose first iterator is set to a state."""

    def __init__(self, loops: Any, saved: Any) -> None:
        self._loops, self._first = loops, iter(loops)
        self._first.load_state_dict(saved)

    def __iter__(self) -> Any:
        first, self._first = self._first, iter(self._loops)
        return first


def numpy(batches: Any, saved: Any) -> Loops:
    return batches if saved is None else _OneLoop(batches, saved)


def jax(batches: Any, saved: Any) -> Loops:
    jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'imageshards[jax]'")
    arrays = reader.as_jax(batches, jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0]))
    return arrays if saved is None else _OneLoop(arrays, saved)


def torch(batches: Any, saved: Any, workers: int = 0) -> Loops:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'imageshards[torch]'")
    dataset = reader.as_torch(batches)
    if saved is not None:
        dataset.load_state_dict(saved)
    more = {"num_workers": workers, "persistent_workers": workers > 0}
    return torch.utils.data.DataLoader(dataset, batch_size=None, **more)  # type: ignore[no-any-return]


ADAPTERS: dict[str, Callable[..., Loops]] = {
    "numpy": numpy,
    "replicas": numpy,
    "torch": torch,
    "1 worker": lambda *given: torch(*given, workers=1),
    "3 workers": lambda *given: torch(*given, workers=3),
    "jax": jax,
}
CASES = [(adapter, hosts) for adapter in ADAPTERS for hosts in ((1,) if adapter == "jax" else (1, 3))]
adapters = pytest.mark.parametrize(("adapter", "hosts"), CASES)


def share(adapter: str, host: int, hosts: int) -> Any:
    """What `host=` is: an InputContext of two replicas where a step has two batches."""
    if adapter != "replicas":
        return host, hosts
    counts = {"num_input_pipelines": hosts, "num_replicas_in_sync": 2 * hosts}
    return types.SimpleNamespace(input_pipeline_id=host, **counts)


@adapters
@pytest.mark.parametrize("is_state", [False, True], ids=["position", "state"])
def test_the_first_loop_after_a_resume_is_the_rest_of_the_iteration_and_the_next_one_is_full(
    info: reader.DatasetInfo, adapter: str, hosts: int, is_state: bool
) -> None:
    host, per_step = hosts - 1, BATCH // hosts
    stream = seen(itertools.islice(train(info, host=(host, hosts), seed=5).repeat(), 4 * STEPS))
    points = POINTS[::2] if "worker" in adapter else POINTS
    for step in points:
        batches = train(info, host=share(adapter, host, hosts), seed=5)
        position = reader.Position.from_json(batches.position_at(np.int64(step)).to_json())
        state = json.loads(json.dumps(batches.state_at(step).to_dict()))
        assert state == {"position": json.loads(position.to_json()), "step": step % STEPS}
        if is_state:
            loops = ADAPTERS[adapter](batches, state)
        else:
            batches = train(info, host=share(adapter, host, hosts), position=position)
            loops = ADAPTERS[adapter](batches, None)
        end = step - step % STEPS + STEPS
        assert [seen(loops), seen(loops)] == [
            stream[step * per_step : end * per_step],
            stream[end * per_step : (end + STEPS) * per_step],
        ]


@adapters
@pytest.mark.parametrize("pad", [True, False], ids=["padded", "not padded"])
def test_an_evaluation_goes_on_at_its_step_and_the_next_one_has_each_record_once(
    info: reader.DatasetInfo, adapter: str, hosts: int, pad: bool
) -> None:
    if adapter == "jax" and not pad:
        pytest.skip("JAX takes equal batches only: test_jax")
    host = hosts - 1
    full = seen(evals(info, host=(host, hosts), pad=pad))
    begin, end = host * 100 + min(host, 1), RECORDS if host else 301
    assert full == list(range(begin, end))
    for step in (0, 5, 12, 13) if "worker" not in adapter else (5,):
        batches = evals(info, host=share(adapter, host, hosts), pad=pad)
        assert len(batches) == 13 * (2 if adapter == "replicas" else 1)
        read = seen(itertools.islice(batches, step * len(batches) // 13))
        state = json.loads(json.dumps(batches.state_at(step).to_dict()))
        assert state["step"] == step % 13 and state["position"]["step"] == 0
        loops = ADAPTERS[adapter](evals(info, host=share(adapter, host, hosts), pad=pad), state)
        assert [seen(loops), seen(loops)] == [full[len(read) if step < 13 else 0 :], full]


@pytest.mark.parametrize("door", ["numpy", "jax", "torch"])
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
def test_the_state_of_an_iterator_after_its_last_batch_has_an_empty_rest_until_the_loop_is_left(
    info: reader.DatasetInfo, door: str, is_training: bool
) -> None:
    build = train if is_training else evals

    def loops() -> Any:
        made: Any = ADAPTERS[door](build(info), None)
        return made.dataset if door == "torch" else made

    one, length = loops(), STEPS if is_training else 13
    first, second = seen(one), seen(one)
    iterator = iter(one := loops())
    for read in range(length + 1):
        state = iterator.state_dict()
        assert state["step"] == read and json.loads(iterator.get_state()) == state
        assert state["position"]["step"] == read * is_training
        again = iter(other := loops())
        again.set_state(json.dumps(state))
        assert again.state_dict() == state
        if read in (0, 5, length):
            rest = seen(again)
            assert rest == first[len(first) - len(rest) :] and (len(rest) == 0) == (read == length)
            assert seen(other) == second
        if read % 2:  # what counts on is an iterator that was resumed itself
            (iterator := iter(one := loops())).load_state_dict(state)
        next(iterator, None)
    left = iterator.state_dict()
    assert (left["step"], left["position"]["step"]) == (0, length * is_training)
    iterator.load_state_dict(left)
    assert seen(iterator) == second


def test_an_iterator_of_two_replicas_is_saved_between_their_steps(info: reader.DatasetInfo) -> None:
    batches = train(info, host=share("replicas", 0, 1))
    iterator, stream = iter(batches), seen(itertools.islice(train(info), STEPS))
    next(iterator)
    with pytest.raises(UsageError, match=r"^1 of 2 replicas have their batch of this step: save between steps$"):
        iterator.state_dict()
    next(iterator)
    saved = iterator.state_dict()
    assert saved == batches.state_at(1).to_dict()
    (again := iter(train(info, host=share("replicas", 0, 1)))).load_state_dict(saved)
    assert seen(again) == stream[BATCH:]


def test_an_endless_iterator_goes_on_in_the_iteration_that_it_was_stopped_in(info: reader.DatasetInfo) -> None:
    endless = train(info).repeat()
    stream = seen(itertools.islice(endless, 2 * STEPS + 3))
    state = endless.state_dict()
    assert (state["step"], state["position"]["step"]) == (3, 2 * STEPS + 3)
    more = seen(itertools.islice(endless, STEPS))
    endless.load_state_dict(state)  # back
    assert seen(itertools.islice(endless, STEPS)) == more
    batches = train(info)
    resumed = iter(batches)
    resumed.load_state_dict(state)
    assert seen(resumed) + seen(batches) == more[: (STEPS - 3) * BATCH] + seen(
        itertools.islice(train(info, position=batches.position_at(3 * STEPS)), STEPS)
    )
    assert len(stream) == (2 * STEPS + 3) * BATCH


@pytest.mark.parametrize(("batch", "steps"), [(7, 43), (48, 6), (200, 1)])
@pytest.mark.parametrize("step", [0, 5, STEPS - 1, STEPS, 3 * STEPS + 5])
def test_with_another_batch_size_position_and_state_give_one_first_loop(
    info: reader.DatasetInfo, batch: int, steps: int, step: int
) -> None:
    before = train(info, seed=5)
    by_position = train(info, position=before.position_at(step), global_batch_size=batch)
    by_state = train(info, global_batch_size=batch)
    by_state.restore(before.state_at(step))
    assert by_position.next_loop == by_state.next_loop
    first, read = seen(by_position), -(-(step % STEPS) * steps // STEPS)
    assert first == seen(by_state) and len(first) // batch == max(1, steps - read)
    assert len(seen(by_position)) == steps * batch


def test_a_loop_may_be_full_from_any_position(info: reader.DatasetInfo) -> None:
    batches, stream = train(info), seen(itertools.islice(train(info).repeat(), 3 * STEPS))
    full = batches.at(batches.position_at(5), rest=False)
    assert seen(full) + seen(full) == stream[5 * BATCH : (2 * STEPS + 5) * BATCH]
    assert full.state_at(STEPS + 7).step == 2 and full.state_at(STEPS + 7).position == batches.position_at(STEPS + 7)
    assert seen(batches) == stream[: STEPS * BATCH]  # which have not moved


@pytest.mark.parametrize("is_context", [False, True])
def test_tensorflow_has_full_loops_only_and_says_how(info: reader.DatasetInfo, is_context: bool) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'imageshards[tensorflow]'")
    host: Any = share("replicas", 0, 1) if is_context else (0, 1)
    stream = seen(itertools.islice(train(info).repeat(), 3 * STEPS))
    batches = train(info, host=host, position=train(info).position_at(5))
    with pytest.raises(
        UsageError,
        match=r"^the batches begin at step 5 of an iteration of 12, .*give batches\.at\(position, rest=False\)",
    ):
        reader.as_tf(batches)
    if find_spec("keras"):
        with pytest.raises(UsageError, match=r"give batches\.at\(position, rest=False\)"):
            reader.keras.fit_arguments(batches)
    full = reader.as_tf(batches.at(batches.start, rest=False))
    assert len(full) == len(batches)
    assert [seen(full), seen(full)] == [
        stream[5 * BATCH : (STEPS + 5) * BATCH],
        stream[(STEPS + 5) * BATCH : (2 * STEPS + 5) * BATCH],
    ]
    assert len(reader.as_tf(train(info, host=host, position=train(info).position_at(2 * STEPS)))) == len(batches)


def test_other_hosts_and_batch_sizes_read_the_rest_of_the_pass_once(info: reader.DatasetInfo) -> None:
    state, read = train(info, seed=6).state_at(0), []
    for hosts, batch, steps in ((1, 20, 3), (3, 24, 4), (2, 10, 6), (4, 12, 0), (2, 18, 1)):
        states = []
        for host in range(hosts):
            batches = train(info, host=(host, hosts), global_batch_size=batch)
            batches.restore(state)
            read += seen(itertools.islice(batches, steps))
            states.append(State.parse(batches.state_at(batches.start.step + steps).to_json()))
        assert all(other == states[0] for other in states)
        state = states[0]
    assert len(read) == 60 + 96 + 60 + 18 and state.position.step == 14
    one = train(info, global_batch_size=1)
    one.restore(state)
    counts = Counter([*read, *seen(itertools.islice(one.repeat(), RECORDS - len(read)))])
    assert sorted(counts) == list(range(RECORDS)) and set(counts.values()) == {1}


def test_iterators_of_one_loop_end_it_once_and_those_from_before_a_resume_end_nothing(
    info: reader.DatasetInfo,
) -> None:
    batches, stream = train(info), seen(itertools.islice(train(info).repeat(), 2 * STEPS))
    one, other, stale = iter(batches), iter(batches), iter(batches)
    next(stale)
    assert list(zip(seen([next(one)]), seen([next(other)]), strict=True))
    seen(one), seen(other)
    assert seen(batches) == stream[STEPS * BATCH :]
    batches.restore(train(info).state_at(0))
    seen(stale)
    assert seen(batches) == stream[: STEPS * BATCH]


def test_a_pickled_copy_goes_on_by_itself(info: reader.DatasetInfo) -> None:
    stream = seen(itertools.islice(train(info, seed=5, window_runs=1).repeat(), 3 * STEPS))
    for one in (train(info, seed=5), train(info, window_runs=1), train(info)):
        one.restore(train(info, seed=5, window_runs=1).state_at(5))
        assert seen(one) == stream[5 * BATCH : STEPS * BATCH]
        other = pickle.loads(pickle.dumps(one))
        assert other.next_loop == one.next_loop
        assert seen(other) == stream[STEPS * BATCH : 2 * STEPS * BATCH]
        assert seen(one) + seen(one) == stream[STEPS * BATCH :]  # which the copy hasn't moved


IMPOSSIBLE: list[Any] = [
    {"step": -1},
    {"step": STEPS + 1},
    {"step": "1"},
    {"position": None},
    {"position": {"records": 301}},
    {"more": 1},
    {"position.phases": []},
    3,
    "x\ny",
    {},
]


@pytest.mark.parametrize("change", IMPOSSIBLE, ids=str)
def test_an_impossible_state_is_one_line_and_changes_nothing(info: reader.DatasetInfo, change: Any) -> None:
    stream = seen(itertools.islice(train(info).repeat(), 2 * STEPS))
    batches = train(info)
    read = iter(batches)
    assert seen(itertools.islice(read, 2)) == stream[: 2 * BATCH]
    before = read.state_dict()
    state = change
    if isinstance(change, dict) and change:
        state = json.loads(json.dumps(before))
        for name, value in change.items():
            *outer, inner = name.split(".")
            (state[outer[0]] if outer else state)[inner] = value
    with pytest.raises(UsageError, match=r"^not a state of batches: [^\n]*$"):
        read.load_state_dict(state)
    assert read.state_dict() == before
    assert seen(read) + seen(batches) == stream[2 * BATCH :]


def test_a_state_or_position_of_something_else_is_one_line_and_changes_nothing(info: reader.DatasetInfo) -> None:
    one = train(info, seed=0, window_runs=16)
    begin = one.next_loop
    part = reader.train_batches(info, "train[:200]", global_batch_size=BATCH)
    for other, message in (
        (train(info, seed=1), r"the position was made with another seed: 1, here it is 0"),
        (train(info, window_runs=3), r"the position was made with another window_runs: 3, here it is 16"),
        (part, r"the position was made with another dataset or split: '\w+', here it is '\w+'"),
    ):
        for resume in (lambda: one.restore(other.state_at(0)), lambda: one.at(other.start)):  # noqa: B023
            with pytest.raises(ValueError, match=f"^{message}$"):
                resume()
    for pad in (True, False):
        with pytest.raises(UsageError, match=r"^the position was made with another pad: "):
            evals(info, pad=pad).restore(evals(info, pad=not pad).state_at(3))
        with pytest.raises(
            UsageError, match=r"^(the position was made|not a state of batches: step 3 .* 0 records are)"
        ):
            one.restore(evals(info, pad=pad).state_at(3))
    with pytest.raises(UsageError, match="the state of an evaluation is for"):
        evals(info).restore(one.state_at(3))
    for saved in ("x", one.start.to_json(), json.loads(one.start.to_json())):
        with pytest.raises(UsageError, match=r"^position must be .*Position\.from_json of saved text, got .{1,99}$"):
            one.at(saved)
    for options in ({"global_batch_size": 12}, {"host": (0, 2)}):
        with pytest.raises(UsageError, match="the state of an evaluation is for the same hosts and batch size only"):
            evals(info).restore(evals(info, **options).state_at(3))
    for step in (-1, 2.5, "x"):
        with pytest.raises(UsageError, match=r"^(step|step -1) (must be|is before step 0)"):
            one.state_at(step)
        with pytest.raises(UsageError, match=r"^step must be"):
            evals(info).state_at(step)
    assert one.next_loop is begin
