"""A small dataset to train on, on one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf

from reader.training import metrics
from tests.reading.shards import make_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("train") / "1.0.0"
    return make_dataset(folder, {"train": [24, 16], "validation": [11]}, size=(16, 16))


@pytest.fixture(scope="module")
def eager() -> Iterator[None]:
    """TensorFlow traces no functions: of runs of a few steps that takes the longest."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw no curves and no confusion: that takes as long as their steps."""
    for name in ("curves", "confusion"):
        monkeypatch.setattr(metrics, name, lambda *_: b"")


@pytest.fixture(scope="module", autouse=True)
def _one_device() -> Iterator[None]:
    """Other tests of the same process may have divided the CPU."""
    listed = tf.config.list_logical_devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.config, "list_logical_devices", lambda kind: listed(kind)[:1])
        yield
