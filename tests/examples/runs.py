"""Runs of an example: to the end; killed by SIGKILL in its second epoch, and resumed by the same command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.make import ROOT

EXAMPLES = ROOT / "examples"
# Two devices of the CPU: for JAX, and a program that runs another one so with TensorFlow.
TWO_DEVICES = "--xla_force_host_platform_device_count=2"
HALVES = """
import runpy, sys, tensorflow as tf
halves = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices('CPU')[0], halves)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""
# 5 steps an epoch of tests/examples' dataset: a checkpoint within each, and some steps after it that a kill loses.
OPTIONS = ("--epochs", "3", "--batch_size", "8", "--checkpoint_steps", "3")
# What is printed after 10 steps, before they are saved; Keras then begins its third epoch.
KILLED_AT = {"train_keras.py": "Epoch 3/3"}
_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",  # the last line is the last one also where stdout and stderr are one pipe
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",  # only CPUs promise the same bits
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "NPROC": "8",  # XLA's threads: with one a device, two devices may wait for each other for ever
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def skip_without(*modules: str) -> None:
    """Skip a test if one of them isn't installed."""
    if missing := [module for module in modules if find_spec(module) is None]:
        extras = "examples,jax,tensorflow,torch,train"
        pytest.skip(f"{', '.join(missing)} not installed: pip install 'imageshards[{extras}]'")


def run(command: Sequence[object], environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and output of a process, which finds the packages by tests/conftest.py."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **_ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout


def check_resume(
    script: str, url: str, folder: Path, result: str, launcher: Sequence[str] = (), more: Sequence[str] = (), **env: str
) -> None:
    """Fail the test unless a run that was killed prints and leaves what an uninterrupted one does.

    Args:
        script: an example's file name.
        url: the dataset.
        folder: for the runs.
        result: the file with the trained arrays that the example leaves, .npz or .pt; both are zip archives.
        launcher: before the script, as torchrun.
        more: flags of the script.
        env: more variables of the environment.
    """
    options = (EXAMPLES / script, url, *OPTIONS, *more)
    kill = (Path(__file__).with_name("kill.py"), KILLED_AT.get(script, "epoch 2:"))
    env["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    code, uninterrupted = run([*launcher, *options, "--out", folder / "complete"], env)
    assert (code, "continuing" in uninterrupted) == (0, False), uninterrupted
    code, said = run([*launcher, *kill, *options, "--out", folder / "killed"], env)
    assert code == (1 if "torch.distributed.run" in launcher else -signal.SIGKILL), said
    code, said = run([*launcher, *options, "--out", folder / "killed"], env)
    assert (code, "continuing after step " in said) == (0, True), said
    # The second epoch's loss is in part from before the kill. Keras' lines are its own.
    assert _epochs(said) == _epochs(uninterrupted)[1:]
    complete, killed = (zipfile.ZipFile(folder / name / result) for name in ("complete", "killed"))
    names = complete.namelist()
    assert len(names) > 4 and names == killed.namelist()
    assert [name for name in names if complete.read(name) != killed.read(name)] == []


def _epochs(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("epoch ")]
