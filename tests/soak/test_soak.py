"""Trainings that are killed again and again in three epochs; half of them go on with other hosts and batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import harness

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return harness.dataset(tmp_path_factory.mktemp("soak"))


@pytest.mark.parametrize("training", harness.TRAININGS, ids=str)
def test_a_training_that_is_killed_again_and_again_reads_the_uninterrupted_sequence(
    url: str, tmp_path: Path, training: harness.Training
) -> None:
    adapter, _, is_elastic = training
    harness.skip_without(adapter)
    jobs = harness.soak_plan(training, url, tmp_path)
    rows, state = harness.train(jobs)
    harness.check(rows, jobs)
    if adapter in harness.KERAS and not is_elastic:
        weights, uninterrupted = state
        assert weights == uninterrupted
