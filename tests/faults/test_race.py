"""A job takes over a version from a live one on gs://; `python -m tests.faults.race` does it many times."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests import make
from tests.faults import race
from tests.faults.jobs import Job, Output
from tests.servers import Gcs, serving

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.class_folders(tmp_path_factory.mktemp("race"), {"ant": 40, "bee": 40})


@pytest.fixture(scope="module")
def hashes(gcs: Gcs, images: Path) -> tuple[str, str]:
    one, other = (
        race.expected_hash(images, Output(f"gs://{gcs.new_bucket()}", gcs.url), flags)
        for flags in (race.FIRST, race.SECOND)
    )
    return one, other


@pytest.mark.parametrize("held", race.HELD)
def test_what_arrives_after_another_job_took_over_is_not_in_its_version(
    gcs: Gcs, images: Path, hashes: tuple[str, str], held: str
) -> None:
    race.hold(images, Output(f"gs://{gcs.new_bucket()}", gcs.url), race.HELD[held], hashes[1])


def test_a_version_that_is_published_before_the_claim_is_taken_is_overwritten(
    gcs: Gcs, images: Path, hashes: tuple[str, str]
) -> None:
    output = Output(f"gs://{gcs.new_bucket()}", gcs.url)
    with (
        serving(race.Holding(gcs.url, race.FIRST_SHARD)) as of_first,
        serving(race.Holding(gcs.url, race.CLAIM, number=2)) as of_second,  # first it asks for one that nobody has
    ):
        first = Job(images, race.through(output, of_first), more=race.FIRST)
        assert of_first.is_held.wait(60)
        second = Job(images, race.through(output, of_second), more=race.SECOND)
        assert of_second.is_held.wait(60)
        of_first.release.set()
        assert first.result().code == 0
        assert race.check(output) == hashes[0]
        of_second.release.set()
        won = second.result()
    assert won.code == 0, won
    assert race.check(output) == hashes[1]


def test_with_requests_that_take_their_time_one_version_is_left(
    gcs: Gcs, images: Path, hashes: tuple[str, str]
) -> None:
    race.race(images, Output(f"gs://{gcs.new_bucket()}", gcs.url), hashes, random.Random(0), both=False)
