"""States of PyTorch's datasets and loaders: training goes on exactly, with other ranks, workers and batch sizes too."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import reader
from beam_pipeline.errors import UsageError
from tests.reading.shards import flipped, make_dataset, numbers_in

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'imageshards[torch]'")

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
    pytest.mark.filterwarnings("ignore::UserWarning:torchdata"),  # its own deprecated call
]
RECORDS, BATCH = 301, 20
STEPS = RECORDS // BATCH  # 15, and a record that opens the next iteration
# In fast tests of their own worker processes keep, load and save states, too.
with_workers = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.soak)])


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    counts = {"train": [130, 100, 71], "validation": [40, 11]}
    return reader.load_info(make_dataset(tmp_path_factory.mktemp("torch") / "1.0.0", counts))


@pytest.fixture(scope="module")
def stream(info: reader.DatasetInfo) -> list[list[int]]:
    """The record numbers of the first batches of the training."""
    batches = reader.train_batches(info, "train", global_batch_size=BATCH, features=["filename"])
    return seen(itertools.islice(batches.repeat(), 6 * STEPS))


def dataset(info: Any, **options: Any) -> Any:
    return reader.torch.ShardDataset(info, "train", **{"batch_size": BATCH, "features": ["filename"], **options})


def loader(one: Any, workers: int, **options: Any) -> Any:
    return torch.utils.data.DataLoader(one, batch_size=None, num_workers=workers, **options)


def stateful(one: Any, workers: int, **options: Any) -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(
        one, batch_size=None, num_workers=workers, **options
    )


def seen(batches: Iterable[Any]) -> list[list[int]]:
    return [numbers_in([batch]) for batch in batches]


def steps_of(one: Any, steps: int) -> list[list[int]]:
    """So many steps of the next iterations, each read to its end and no further."""
    read: list[list[int]] = []
    while len(read) < steps:
        read += seen(itertools.islice(one, steps - len(read)))
    return read


def as_saved(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a checkpoint has it."""
    text = json.dumps(state)
    assert len(text) < 10_000 and json.loads(text) == state
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@with_workers
@pytest.mark.parametrize("steps", [0, 1, 11, STEPS - 1, STEPS, STEPS + 1, 2 * STEPS + 4])
def test_training_goes_on_where_its_state_was_saved(
    info: reader.DatasetInfo, stream: list[list[int]], steps: int, workers: int
) -> None:
    one = dataset(info)
    assert steps_of(one, steps) == stream[:steps]
    state = as_saved(one.state_dict())
    # After its last batch an iteration isn't left yet: its rest is empty.
    ended = steps > 0 and steps % STEPS == 0
    iteration, step = divmod(steps, STEPS) if not ended else (steps // STEPS - 1, STEPS)
    assert (state["iteration"], state["step"], state["position"]["step"]) == (iteration, step, steps)
    other = dataset(info)
    other.load_state_dict(state)
    assert other.state_dict() == state and other.iteration == iteration
    end = (iteration + 1) * STEPS
    batches = loader(other, workers)
    assert [seen(batches), seen(batches)] == [stream[steps:end], stream[end : end + STEPS]]


@with_workers
@pytest.mark.parametrize("stops", [[13], [STEPS], [5, STEPS, STEPS + 8], [2 * STEPS - 1, 2 * STEPS]])
def test_a_loop_that_counts_steps_trains_as_many_however_often_it_was_stopped(
    info: reader.DatasetInfo, stream: list[list[int]], stops: list[int], workers: int
) -> None:
    read: list[list[int]] = []
    state: dict[str, Any] | None = None
    for stop in [*stops, 3 * STEPS]:
        batches = stateful(dataset(info), workers)
        if state is not None:
            batches.load_state_dict(state)
        while len(read) < stop:  # three epochs
            for batch in batches:
                read += seen([batch])
                if len(read) == stop:
                    state = batches.state_dict()
                    break
    assert read == stream[: 3 * STEPS]


def test_after_the_end_of_an_iteration_the_state_is_the_next_ones_beginning(
    info: reader.DatasetInfo, stream: list[list[int]]
) -> None:
    one, other = dataset(info), dataset(info)
    assert seen(one) == stream[:STEPS]
    state = as_saved(one.state_dict())
    assert (state["iteration"], state["step"], state["position"]["step"]) == (1, 0, STEPS)
    other.load_state_dict(state)
    assert seen(other) == stream[STEPS : 2 * STEPS]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_global_step_makes_the_state_that_training_is_at_whatever_workers_read_ahead(
    info: reader.DatasetInfo, stream: list[list[int]], workers: int
) -> None:
    one = dataset(info)
    batches = loader(one, workers)
    assert seen(batches) == stream[:STEPS]
    reading = iter(batches)
    assert seen(itertools.islice(reading, 5)) == stream[STEPS : STEPS + 5]
    step = STEPS + 5
    if workers:
        with pytest.raises(UsageError, match=r"^a DataLoader's workers read ahead of the trainer: give state_dict\("):
            one.state_dict()
    else:
        assert one.state_dict() == one.state_dict(step)
    for _ in range(2):  # resumed, and resumed again: steps are global
        state = as_saved(one.state_dict(torch.tensor(step)))
        assert (state["iteration"], state["step"], state["position"]["step"]) == (1, step - STEPS, step)
        one = dataset(info)
        one.load_state_dict(state)
        assert one.state_dict() == state
        reading = iter(loader(one, workers))
        assert seen(itertools.islice(reading, 3)) == stream[step : step + 3]
        step += 3
    with pytest.raises(
        UsageError, match=rf"^step 0 is before step {step - 3}, where this position is: give the global"
    ):
        one.state_dict(0)


def test_a_state_reaches_workers_that_persist(info: reader.DatasetInfo, stream: list[list[int]]) -> None:
    one = dataset(info)
    batches = loader(one, 2, persistent_workers=True)
    processes = set()
    for steps in (0, 7, 7, 2 * STEPS + 3, STEPS):
        one.load_state_dict(dataset(info).state_dict(steps))
        end = steps - steps % STEPS + STEPS
        assert seen(batches) == stream[steps:end]
        left = iter(batches)
        next(left)  # left early, while workers go on
        processes.add(tuple(worker.pid for worker in batches._iterator._workers))
    assert len(processes) == 1


def test_other_ranks_and_batch_sizes_read_the_rest_of_the_pass_once(info: reader.DatasetInfo) -> None:
    state, read = dataset(info, seed=6).state_dict(), []
    trained = 0.0  # of the iteration
    for world_size, batch_size, steps, workers in (
        (1, 20, 3, 0),
        (3, 8, 4, 2),
        (2, 5, 6, 0),
        (4, 3, 0, 0),
        (2, 9, 1, 2),
    ):
        states = []
        for rank in range(world_size):
            one = dataset(info, rank=rank, world_size=world_size, batch_size=batch_size)
            one.load_state_dict(state)
            batches = seen(loader(one, workers))
            assert len(batches) == len(one) - -(-trained * len(one) // 1)
            read += batches[:steps]
            one.load_state_dict(state)
            states.append(as_saved(one.state_dict(one.batches.start.step + steps)))
        assert all(other == states[0] for other in states)
        state = states[0]
        trained = state["step"] / len(one)
    records = sum(map(len, read))
    assert records == 60 + 96 + 60 + 18 and state["position"]["step"] == 14
    one = dataset(info, batch_size=1)
    one.load_state_dict(state)
    rest = numbers_in(itertools.islice(itertools.chain(one, one), RECORDS - records))
    assert sorted([*itertools.chain(*read), *rest]) == list(range(RECORDS))


IMPOSSIBLE: list[Any] = [
    {"step": -1},
    {"step": STEPS + 1},
    {"step": "1"},
    {"iteration": -1},
    {"iteration": 1 << 60},
    {"iteration": 0.5},
    {"position": None},
    {"position": {"records": 301}},
    {"more": 1},
    {"position.phases": []},
    {"position.phases": [[1, 16, 0, RECORDS]]},
    {"position.phases": [[0, 16, 0, 0]]},
    {"position.global_batch_size": 0},
    {"position.step": -1},
    {"position.format": 1},
    {"position.more": 1},
    3,
    "x\ny",
    {},
    {"source": "724974f0650be749", "seed": 0, "epoch": 1, "parts": [[1, 2, 8, False, 5]]},
    {"source": "724974f0650be749", "seed": 0, "epoch": 1, "parts": [[1, 2, 8, False, 5]], "worker": [0, 1]},
]


@pytest.mark.parametrize("change", IMPOSSIBLE)
def test_an_impossible_state_is_one_line_and_changes_nothing(
    info: reader.DatasetInfo, stream: list[list[int]], change: Any
) -> None:
    one = dataset(info)
    read = iter(one)
    assert seen(itertools.islice(read, 2)) == stream[:2]
    before = one.state_dict()
    state = change
    if isinstance(change, dict) and change and "source" not in change:
        state = as_saved(before)
        for name, value in change.items():
            *outer, inner = name.split(".")
            (state[outer[0]] if outer else state)[inner] = value
    for load in (one.load_state_dict, read.load_state_dict):
        with pytest.raises(UsageError, match=r"^not a state of batches: [^\n]*$"):
            load(state)
        assert one.state_dict() == before == read.state_dict()
    assert seen(read) == stream[2:STEPS] and seen(one) == stream[STEPS : 2 * STEPS]


def test_a_state_of_something_else_is_one_line_and_changes_nothing(
    info: reader.DatasetInfo, stream: list[list[int]]
) -> None:
    one = dataset(info, seed=0, window_runs=16)
    begin = one.state_dict()
    part = reader.torch.ShardDataset(info, "train[:200]", batch_size=BATCH)
    evaluation = dataset(info, shuffle=False)
    for other, message in (
        (dataset(info, seed=1), r"the position was made with another seed: 1, here it is 0"),
        (dataset(info, window_runs=3), r"the position was made with another window_runs: 3, here it is 16"),
        (part, r"the position was made with another dataset or split: '\w+', here it is '\w+'"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            one.load_state_dict(other.state_dict())
    for options in ({"batch_size": 10}, {"world_size": 2, "rank": 0}):
        with pytest.raises(UsageError, match="the state of an evaluation is for the same hosts and batch size only"):
            evaluation.load_state_dict(dataset(info, shuffle=False, **options).state_dict())
    assert one.state_dict() == begin and seen(one) == stream[:STEPS]
    assert len(seen(evaluation)) == STEPS + 1
    without_seed = dataset(info)  # takes the state's
    without_seed.load_state_dict(dataset(info, seed=1).state_dict())
    assert seen(without_seed) == seen(dataset(info, seed=1)) != stream[:STEPS]


@with_workers
@pytest.mark.parametrize("is_padded", [False, True])
def test_an_evaluation_goes_on_where_its_state_was_saved(
    info: reader.DatasetInfo, is_padded: bool, workers: int
) -> None:
    def evaluation() -> Any:
        if not is_padded:
            return dataset(info, shuffle=False, rank=1, world_size=2)
        options: dict[str, Any] = {"global_batch_size": 2 * BATCH, "host": (1, 2), "features": ["filename"]}
        return reader.as_torch(reader.eval_batches(info, "train", **options))

    whole = seen(evaluation())
    assert len(whole) == 8
    for steps in (0, 3, 8, 9):
        one, other = evaluation(), evaluation()
        steps_of(one, steps)
        other.load_state_dict(as_saved(one.state_dict()))
        read = loader(other, workers)
        assert [seen(read), seen(read)] == [whole[steps % 9 :] if steps != 9 else whole[1:], whole]


def test_batches_without_a_valid_record_count_as_steps(tmp_path: Path) -> None:
    corrupt, _ = flipped(tmp_path / "1.0.0", [30], 12)
    options: dict[str, Any] = {"shuffle": False, "batch_size": 1, "on_error": "skip"}
    whole = [number for number in range(30) if number != 12]
    for read in (11, 12, 13, 29):
        one, other = dataset(corrupt, **options), dataset(corrupt, **options)
        assert seen(itertools.islice(one, read)) == [[number] for number in whole[:read]]
        other.load_state_dict(one.state_dict())
        assert numbers_in(other) == whole[read:] and numbers_in(other) == whole
        assert other.iteration == 2


@pytest.mark.parametrize(
    ("iterations", "steps", "workers"),
    [
        (0, 7, 2),
        (2, 4, 0),
        *(
            pytest.param(iterations, steps, workers, marks=pytest.mark.soak)
            for iterations, steps in ((0, 0), (0, 1), (0, STEPS), (1, 0), (2, 4))
            for workers in (2, 3)
        ),
    ],
)
def test_torchdata_goes_on_where_it_saved_the_states_of_its_workers(
    info: reader.DatasetInfo, stream: list[list[int]], iterations: int, steps: int, workers: int
) -> None:
    saving = stateful(dataset(info), workers)
    read = [batch for _ in range(iterations) for batch in seen(saving)]
    if steps:
        begun = iter(saving)
        read += seen(itertools.islice(begun, steps))
    state = saving.state_dict()
    one = dataset(info)
    batches = stateful(one, workers)
    batches.load_state_dict(state)
    for end in range((iterations + 1) * STEPS, (iterations + 3) * STEPS, STEPS):
        rest = seen(batches)
        assert rest == stream[len(read) : end]
        read += rest
        assert one.iteration == end // STEPS
    assert one.state_dict(end + 2)["iteration"] == end // STEPS  # the dataset knows where its workers are


@pytest.mark.parametrize("persistent", [False, True])
def test_torchdata_may_save_every_few_steps_and_resume_again_and_again(
    info: reader.DatasetInfo, stream: list[list[int]], persistent: bool
) -> None:
    options = {"persistent_workers": persistent, "snapshot_every_n_steps": 3}
    batches = stateful(dataset(info), 2, **options)
    at = 0
    for steps in (4, 5, 5, 4, 7):  # the fourth time to the end of an iteration
        end = at - at % STEPS + STEPS
        read = seen(itertools.islice(batches, steps))
        assert read == stream[at : min(at + steps, end)]
        at += len(read)
        state = batches.state_dict()
        batches = stateful(dataset(info), 2, **options)
        batches.load_state_dict(state)


class _UnevenWorkers(reader.torch.ShardDataset):
    """Worker 0 loads its state while the others have begun to iterate and haven't read."""

    def load_state_dict(self, state: Any) -> None:
        worker = torch.utils.data.get_worker_info()
        time.sleep(0.5 * (worker.id == 0))
        super().load_state_dict(state)

    def __iter__(self) -> Any:
        iterator, worker = super().__iter__(), torch.utils.data.get_worker_info()
        time.sleep(1.0 * (worker.id > 0))
        return iterator


def test_a_worker_never_takes_the_state_of_another_one_for_its_own(
    info: reader.DatasetInfo, stream: list[list[int]]
) -> None:
    saving = stateful(dataset(info), 2)
    begun = iter(saving)
    assert seen(itertools.islice(begun, 3)) == stream[:3]
    batches = stateful(_UnevenWorkers(info, "train", batch_size=BATCH, features=["filename"]), 2)
    batches.load_state_dict(saving.state_dict())
    assert seen(batches) == stream[3:STEPS]


def test_an_iterator_and_its_dataset_go_on_where_the_iterator_is_set(
    info: reader.DatasetInfo, stream: list[list[int]]
) -> None:
    one = dataset(info)
    read = iter(one)
    assert seen(itertools.islice(read, 4)) == stream[:4]
    state = read.get_state()
    assert json.loads(state) == read.state_dict() == one.state_dict()
    assert seen(one) + seen(one) == stream[: 2 * STEPS]
    read = iter(one)
    next(read)
    read.set_state(state)
    assert one.iteration == 0 and one.state_dict() == json.loads(state)
    assert seen(read) + seen(one) == stream[4 : 2 * STEPS]


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_of_the_iteration_that_is_next_changes_nothing(
    info: reader.DatasetInfo, stream: list[list[int]], workers: int
) -> None:
    one = dataset(info)
    for epoch in range(3):
        one.set_epoch(epoch)
        assert seen(loader(one, workers)) == stream[epoch * STEPS : (epoch + 1) * STEPS]
    resumed = dataset(info)
    resumed.load_state_dict(one.state_dict(STEPS + 4))
    for epoch in (1, 2):
        resumed.set_epoch(epoch)
        assert seen(loader(resumed, workers)) == stream[max(STEPS + 4, epoch * STEPS) : (epoch + 1) * STEPS]


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_of_a_later_iteration_begins_there(
    info: reader.DatasetInfo, stream: list[list[int]], workers: int
) -> None:
    one = dataset(info)
    batches = loader(one, workers, persistent_workers=workers > 0)
    for epoch in (2, 3, 5):
        one.set_epoch(epoch)
        assert one.state_dict(epoch * STEPS)["iteration"] == one.iteration == epoch
        assert seen(batches) == stream[epoch * STEPS : (epoch + 1) * STEPS]
    resumed = dataset(info)
    resumed.load_state_dict(dataset(info).state_dict(STEPS + 4))
    resumed.set_epoch(2)
    assert (resumed.state_dict()["iteration"], resumed.state_dict()["step"]) == (2, 0)
    assert seen(resumed) == stream[2 * STEPS : 3 * STEPS]


def test_set_epoch_of_an_earlier_iteration_is_an_error_that_names_at(
    info: reader.DatasetInfo, stream: list[list[int]]
) -> None:
    one = dataset(info)
    for epoch in range(2):
        one.set_epoch(epoch)
        seen(one)
    for epoch in (0, 1):  # as a second loop does
        message = rf"^set_epoch\({epoch}\): iteration 2 is next; to read an earlier one again, give .*as_torch\("
        with pytest.raises(UsageError, match=rf"{message}batches.at\(position\)\)$"):
            one.set_epoch(epoch)
    assert seen(one) == stream[2 * STEPS : 3 * STEPS]
    again = reader.as_torch(one.batches.at(reader.train_batches(info, "train", global_batch_size=BATCH).start))
    assert seen(again) == stream[:STEPS]
    for epoch in (-1, 2.5, "a", 1 << 60):
        with pytest.raises(UsageError, match="epoch must be"):
            one.set_epoch(epoch)


@with_workers
@pytest.mark.parametrize("steps", [2 * STEPS, 2 * STEPS + 4])
def test_a_loop_that_counts_from_0_after_a_resume_goes_on_from_there(
    info: reader.DatasetInfo, stream: list[list[int]], steps: int, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    by_state = dataset(info)
    by_state.load_state_dict(dataset(info).state_dict(steps))
    start = reader.train_batches(info, "train", global_batch_size=BATCH).position_at(steps)
    for one in (by_state, dataset(info, position=start)):
        caplog.clear()
        for epoch in range(3):
            one.set_epoch(epoch)
            begin, end = (steps, 3 * STEPS) if not epoch else ((epoch + 2) * STEPS, (epoch + 3) * STEPS)
            assert seen(loader(one, workers)) == stream[begin:end]
        said = "set_epoch(0): resumed in iteration 2, so epochs are counted from there"
        assert [record.message for record in caplog.records] == [said]
        for epoch in range(3):  # a second loop
            with pytest.raises(UsageError, match=rf"^set_epoch\({epoch}\): iteration 5 is next"):
                one.set_epoch(epoch)


@with_workers
@pytest.mark.parametrize("first", [0, 1])
def test_set_epoch_and_torchdata_go_together(
    info: reader.DatasetInfo, stream: list[list[int]], first: int, workers: int
) -> None:
    """A loop that counts from 0 after a resume, and one that counts from the resumed epoch."""
    saving = stateful(dataset(info), workers)
    seen(saving)
    begun = iter(saving)
    seen(itertools.islice(begun, 4))
    one = dataset(info)
    batches = stateful(one, workers)
    batches.load_state_dict(saving.state_dict())
    for epoch in range(first, first + 3):
        one.set_epoch(epoch)
        at = epoch - first + 1
        assert seen(batches) == stream[at * STEPS + 4 * (at == 1) : (at + 1) * STEPS]


def test_the_state_of_a_step_is_known_right_after_torchdata_resumed(
    info: reader.DatasetInfo, stream: list[list[int]]
) -> None:
    """Workers save their own next batches, of which some are ahead of the trained step."""
    saving = stateful(dataset(info), workers := 2)
    for trained in (3, 4):
        begun = iter(saving)
        state = [seen(itertools.islice(begun, trained)), saving.state_dict()][1]
        one = dataset(info)
        batches = stateful(one, workers)
        batches.load_state_dict(state)
        resumed = iter(batches)  # starts the workers, which load their states
        first = seen(itertools.islice(resumed, 1))
        assert first == stream[trained : trained + 1]
        again = dataset(info)
        again.load_state_dict(one.state_dict(trained))
        assert seen(again)[:1] == first
        saving = stateful(dataset(info), workers)
