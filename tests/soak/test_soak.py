"""Trainings that are killed again and again in three epochs; half of them go on with other hosts and batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import reader
from beam_pipeline.errors import UsageError
from tests.soak import harness
from tests.soak.trainers import Job, numbers_of

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return harness.dataset(tmp_path_factory.mktemp("soak"))


@pytest.mark.parametrize("is_elastic", [False, True], ids=["same-hosts", "other-hosts"])
@pytest.mark.parametrize("adapter", [*harness.TRAINERS, *harness.KERAS])
def test_a_training_that_is_killed_again_and_again_reads_the_uninterrupted_sequence(
    url: str, tmp_path: Path, adapter: str, is_elastic: bool
) -> None:
    harness.skip_without(adapter)
    kills = 2 if adapter in harness.OWN_PROCESS else harness.KILLS  # they import their framework for each
    jobs = harness.plan(adapter, url, tmp_path, 0, is_elastic, kills=kills, sigkills=1)
    rows, state = harness.train(jobs)
    harness.check(rows, jobs)
    if adapter in harness.KERAS and not is_elastic:
        weights, uninterrupted = state
        assert weights == uninterrupted


@pytest.mark.parametrize("persistent", [False, True], ids=["new-workers", "persistent-workers"])
@pytest.mark.parametrize("workers", [0, 3])
def test_a_state_that_torchdata_saves_between_epochs_is_followed_by_a_whole_epoch(
    url: str, tmp_path: Path, workers: int, persistent: bool
) -> None:
    harness.skip_without("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    job = Job("torchdata", url, str(tmp_path), segment=0, batch=60, hosts=1, steps=None)
    state: dict[str, Any] = {}
    for epoch in range(8):
        dataset = reader.as_torch(job.batches())
        options = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
        loader = StatefulDataLoader(dataset, batch_size=None, **options)
        loader.load_state_dict(state)
        read = [numbers_of(batch) for batch in loader]
        steps = harness.expected(url, [job], [0] * 9 * (epoch + 1))[-9:]
        assert read == [[number for _, number in step] for step in steps], f"epoch {epoch}: {len(read)} batches of 9"
        state = copy.deepcopy(loader.state_dict())


def test_what_the_workers_of_torchdata_saved_is_refused_with_another_batch_size(url: str, tmp_path: Path) -> None:
    harness.skip_without("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    job = Job("torchdata workers", url, str(tmp_path), segment=0, batch=60, hosts=1, steps=None)
    first, other = (
        StatefulDataLoader(reader.as_torch(one.batches()), batch_size=None, num_workers=2)
        for one in (job, job._replace(batch=30))
    )
    batches = iter(first)
    assert [len(numbers_of(next(batches))) for _ in range(3)] == [60] * 3
    other.load_state_dict(first.state_dict())
    with pytest.raises(
        UsageError, match=r"is for the same ranks and batch size: for other ones save dataset\.state_dict"
    ):
        next(iter(other))
