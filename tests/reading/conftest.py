"""Two logical CPUs, so that a strategy has two replicas."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest


@pytest.fixture(autouse=True, scope="session")
def _two_logical_cpus() -> None:
    if "tensorflow" not in sys.modules:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # somebody has used TensorFlow already
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
