"""Single flipped bits: `imageshards verify` finds each, `--repair` repairs them. More: flips.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from beam_pipeline import schema
from tests import servers
from tests.conftest import reached
from tests.faults import flips


@pytest.fixture(scope="module", params=["local", pytest.param("gs", marks=pytest.mark.soak)])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[flips.Dataset]:
    folder = tmp_path_factory.mktemp("flips")
    if request.param == "local":
        yield flips.Dataset(folder, images=110)
        return
    if servers.fake_gcs_binary() is None:
        pytest.skip(servers.HOW_TO_ENABLE)
    with servers.fake_gcs(folder / "gcs.log", folder) as url, reached({"STORAGE_EMULATOR_HOST": url}):
        yield flips.Dataset(folder, images=110, gcs=servers.Gcs(url))


def test_every_kind_of_file_takes_part(dataset: flips.Dataset) -> None:
    assert {flips.kind(path) for path in dataset.files()} == {
        "class.labels.txt",
        "dataset_info.json",
        "features.json",
        "manifest.json",
        "photos-tfrecord",
        "photos-tfrecord.idx",
        "photos-tfrecord.records.npy",
        "rejects.jsonl",
        "runs.npy",
    }


def test_verify_finds_each_flipped_bit_and_places_those_in_shards(dataset: flips.Dataset) -> None:
    assert flips.flip_one_by_one(dataset, 48, seed=5).total() == 48


def test_repair_repairs_three_bits_in_each_kind_of_file(dataset: flips.Dataset) -> None:
    kinds: dict[str, list[Path]] = {}
    for path in dataset.files():
        kinds.setdefault(flips.kind(path), []).append(path)
    of_manifest = list(flips.places(kinds.pop(schema.MANIFEST_FILE), 3, seed=6))
    flips.repair(dataset, [place for some in kinds.values() for place in flips.places(some, 3, seed=6)])
    flips.repair(dataset, of_manifest)


@pytest.mark.parametrize("kept", [schema.MANIFEST_FILE, ""])
def test_repair_repairs_a_hundred_bits_at_once(dataset: flips.Dataset, kept: str) -> None:
    some: list[Path] = [path for path in dataset.files() if path.name != kept]
    flips.repair(dataset, list(flips.places(some, 100, seed=7)))


def test_a_bit_that_flips_below_a_store_whose_listed_checksum_stays_is_repaired(dataset: flips.Dataset) -> None:
    shard = next(path for path in dataset.files() if flips.kind(path) == "photos-tfrecord")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    flips.repair(dataset, [])
