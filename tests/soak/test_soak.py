"""Trainings that are killed five times in three epochs; half of them go on with other hosts and batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import harness

# Those that start processes for every kill take longer.
SEEDS = dict.fromkeys(harness.TRAINERS, 4) | {"jax": 2} | dict.fromkeys(harness.KERAS, 1)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return harness.dataset(tmp_path_factory.mktemp("soak"))


@pytest.mark.parametrize("is_elastic", [False, True], ids=["same-hosts", "other-hosts"])
@pytest.mark.parametrize(("adapter", "seed"), [(name, seed) for name, count in SEEDS.items() for seed in range(count)])
def test_a_training_that_is_killed_again_and_again_reads_the_uninterrupted_sequence(
    url: str, tmp_path: Path, adapter: str, seed: int, is_elastic: bool
) -> None:
    harness.skip_without(adapter)
    sigkills = harness.KILLS if adapter in harness.OWN_PROCESS else 2
    jobs = harness.plan(adapter, url, tmp_path, seed, is_elastic, sigkills=sigkills)
    rows, state = harness.train(jobs)
    harness.check(rows, jobs)
    if adapter in harness.KERAS and not is_elastic:
        weights, uninterrupted = state
        assert weights == uninterrupted
