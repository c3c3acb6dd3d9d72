"""Ways to resume, a few: a training that is killed reads on exactly. `make soak` has all of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.soak import harness


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return harness.dataset(tmp_path_factory.mktemp("forms"))


@pytest.mark.parametrize("adapter", ["numpy position", "tensorflow", "torch workers"])
def test_every_record_comes_once_an_epoch_and_in_order_through_kills_and_other_hosts(
    url: str, tmp_path: Path, adapter: str
) -> None:
    harness.skip_without(adapter)
    sigkills = int(adapter.startswith("numpy"))  # the others are imported first, for seconds
    jobs = harness.plan(adapter, url, tmp_path, seed=100, is_elastic=True, sigkills=sigkills)
    rows, _ = harness.train(jobs)
    harness.check(rows, jobs)


def test_the_soak_kills_trainings_of_every_kind(url: str, tmp_path: Path) -> None:
    plans = [harness.soak_plan(training, url, tmp_path) for training in harness.TRAININGS]
    kills = [(jobs, segment) for jobs in plans for segment, job in enumerate(jobs) if job.is_killed]
    states = {"numpy state", "numpy replicas", "torch", "torch workers", "jax"}  # whose evaluations can go on
    within = [
        jobs[segment]
        for jobs, segment in kills
        if jobs[0].adapter in states and jobs[segment].evaluated and jobs[segment][4:6] == jobs[segment + 1][4:6]
    ]
    assert len(kills) == len(plans) == 70 and {jobs[0].adapter for jobs in plans} == {*harness.TRAINERS, *harness.KERAS}
    assert sum(len({job[4:6] for job in jobs}) > 1 for jobs in plans) >= 35
    assert len(within) >= 10 and sum(jobs[0].start > 0 for jobs in plans) >= 10
    assert sum(jobs[0].adapter in ("numpy replicas", "tensorflow", "tensorflow replicas") for jobs in plans) >= 6


def test_a_wrong_order_and_a_record_that_is_missing_or_double_are_told(url: str, tmp_path: Path) -> None:
    jobs = harness.plan("numpy position", url, tmp_path, seed=100, is_elastic=False)
    steps = harness.expected(url, jobs, itertools.repeat(0, -(-harness.EPOCHS * harness.RECORDS // jobs[0].batch) + 1))
    rows = [[0, *(number for _, number in step)] for step in steps]
    assert harness.fault(rows, jobs) is None
    rows[7][1], rows[7][2] = rows[7][2], rows[7][1]
    assert ", step 7: read [" in str(harness.fault(rows, jobs))
    assert "0 records missing [], 0 too often []" in str(harness.fault(rows, jobs))
    rows[7][1] = rows[8][1]
    assert f"1 records missing [{steps[7][1][1]}], 1 too often [{rows[8][1]}]" in str(harness.fault(rows, jobs))
