"""A small dataset to train on."""

from __future__ import annotations

import pytest

from tests.reading.shards import make_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("train") / "1.0.0"
    return make_dataset(folder, {"train": [24, 16], "validation": [11]}, size=(16, 16))
