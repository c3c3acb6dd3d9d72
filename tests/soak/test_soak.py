"""Trainings that are killed again and again in three epochs; half of them go on with other hosts and batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import harness

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
