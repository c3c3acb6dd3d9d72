"""What `train` runs on: found, said in a line, and refused in a line."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from urllib.error import URLError

import pytest
import tensorflow as tf

from beam_pipeline.errors import ImageShardsError, UsageError
from reader.training import devices
from reader.training.devices import Devices, use_devices
from reader.training.options import TrainOptions

FAILURES = [
    ValueError("Please provide a TPU Name to connect to."),
    URLError("[Errno -2] Name or service not known"),
    tf.errors.NotFoundError(None, None, "TPUs not found in the cluster. Failed in initialization: No OpKernel"),
    tf.errors.UnavailableError(None, None, "failed to connect to all addresses"),
    tf.errors.InvalidArgumentError(None, None, "Unable to find a TPU"),
]


@pytest.fixture(params=FAILURES, ids=lambda error: type(error).__name__)
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes TensorFlow's look for a TPU fail; the text that is told."""

    def fail(resolver: Any) -> None:
        raise request.param

    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", fail)
    return str(request.param.message if hasattr(request.param, "message") else request.param).partition(". Failed")[0]


def test_auto_falls_back_and_says_why_and_a_tpu_that_was_asked_for_is_an_error(failing: str) -> None:
    with use_devices(TrainOptions()) as there:
        assert (there.kind, there.count, there.strategy) == ("cpu", 1, None)
        why = "" if failing == "TPUs not found in the cluster" else f": {failing}"  # what TensorFlow says without a TPU
        assert there.description == f"the CPU (TensorFlow; no TPU{why}; no GPU)"
    with pytest.raises(ImageShardsError) as caught, use_devices(TrainOptions(device="tpu")):
        pass
    assert str(caught.value) == f"--device tpu: none found: {failing}"


def test_tpu_name_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def resolver(tpu: str) -> None:
        asked.append(tpu)
        raise ValueError("no TPU")

    monkeypatch.setenv("TPU_NAME", "node-1")
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", resolver)
    with pytest.raises(ImageShardsError, match="none found: no TPU"), use_devices(TrainOptions(device="tpu")):
        pass
    assert asked == ["local"]


def test_the_cpu_is_used_without_a_look_for_others_and_a_gpu_that_is_not_there_is_an_error() -> None:
    with use_devices(TrainOptions(device="cpu")) as there:
        assert there.description == "the CPU (TensorFlow)"
    with pytest.raises(ImageShardsError, match=r"^--device gpu: none found"), use_devices(TrainOptions(device="gpu")):
        pass


def test_several_workers_of_tensorflow_are_refused_and_one_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    two = "TF_CONFIG names 2 workers: Keras trains on several hosts with JAX"
    for config, message in (
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', two),
        ('{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}}', two),
        ("{", "TF_CONFIG is not a JSON object"),
    ):
        monkeypatch.setenv("TF_CONFIG", config)
        with pytest.raises(UsageError, match=message), use_devices(TrainOptions()):
            pass
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')
    with use_devices(TrainOptions(device="cpu")) as there:
        assert there.count == 1


def test_a_backend_that_can_not_train_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.keras.backend, "backend", lambda: "torch")
    with (
        pytest.raises(UsageError, match="KERAS_BACKEND=torch: train runs on tensorflow or jax"),
        use_devices(TrainOptions()),
    ):
        pass


@pytest.mark.parametrize("backend", ["torch", "theano"])
def test_the_command_refuses_such_a_backend_before_it_imports_any(dataset: str, backend: str) -> None:
    command = [sys.executable, "-m", "reader", "train", dataset]
    done = subprocess.run(command, env={**os.environ, "KERAS_BACKEND": backend}, capture_output=True, text=True)
    message = f"error: KERAS_BACKEND={backend}: train runs on tensorflow or jax; others: see docs/howto/keras.md\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize(
    ("kind", "capability", "wanted", "policy"),
    [
        ("cpu", (), "auto", "float32"),
        ("tpu", (), "auto", "mixed_bfloat16"),
        ("gpu", (9, 0), "auto", "mixed_bfloat16"),
        ("gpu", (7, 5), "auto", "mixed_float16"),
        ("gpu", (6, 1), "auto", "float32"),
        ("gpu", (9, 0), "none", "float32"),
        ("cpu", (), "bfloat16", "mixed_bfloat16"),
    ],
)
def test_mixed_precision_follows_the_device(kind: str, capability: tuple[int, ...], wanted: str, policy: str) -> None:
    assert Devices(kind, 1, "", capability=capability).precision(wanted) == policy
