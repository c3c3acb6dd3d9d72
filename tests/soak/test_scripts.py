"""Examples on several processes and devices and on Keras' other backends, killed and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.runs import EXAMPLES, check_resume, run, skip_without
from tests.reading.shards import make_dataset

pytestmark = pytest.mark.soak

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
TWO_DEVICES = "--xla_force_host_platform_device_count=2"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("examples") / "1.0.0"
    return make_dataset(folder, {"train": [24, 16], "validation": [11]}, size=(16, 16))


def test_two_processes_of_torchrun_of_which_one_is_killed_continue_together(url: str, tmp_path: Path) -> None:
    skip_without("torch")
    check_resume("train_torch.py", url, tmp_path, "model.pt", TORCHRUN)


def test_a_checkpoint_that_is_due_at_the_end_of_an_epoch_is_written_once_its_line_is_printed(
    url: str, tmp_path: Path
) -> None:
    skip_without("torch")
    check_resume("train_torch.py", url, tmp_path, "model.pt", more=("--checkpoint_steps", "5"))


def test_no_thread_of_the_process_group_is_left_when_python_ends(url: str, tmp_path: Path) -> None:
    """Gloo's threads need the interpreter to free their tensors: one that is ending aborts the process instead."""
    skip_without("torch")
    script = tmp_path / "threads.py"
    script.write_text(
        "import atexit, runpy, sys\n"
        "from pathlib import Path\n"
        "def tell():\n"
        "    threads = [path.read_text().strip() for path in Path('/proc/self/task').glob('*/comm')]\n"
        "    print(f'\\n{len(threads)} threads are left:', *threads, flush=True)\n"
        "atexit.register(tell)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    command = (*TORCHRUN, script, EXAMPLES / "train_torch.py", url, "--epochs", "1", "--out", tmp_path / "run")
    code, said = run(command, {})
    left = [line for line in said.splitlines() if "threads are left:" in line]
    assert code == 0 and len(left) == 2 and not any("gloo" in line for line in left), said


def test_jax_continues_on_two_devices(url: str, tmp_path: Path) -> None:
    skip_without("jax", "orbax")
    check_resume("train_jax.py", url, tmp_path, "params.npz", XLA_FLAGS=TWO_DEVICES)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_keras_continues_on_its_other_backends(url: str, tmp_path: Path, backend: str) -> None:
    skip_without("keras", backend)
    more = {"XLA_FLAGS": TWO_DEVICES} if backend == "jax" else {}
    check_resume("train_keras.py", url, tmp_path, "step-000000015.npz", KERAS_BACKEND=backend, **more)


def test_keras_continues_under_a_mirrored_strategy(url: str, tmp_path: Path) -> None:
    skip_without("keras", "tensorflow")
    halves = tmp_path / "halves.py"
    halves.write_text(
        "import runpy, sys, tensorflow as tf\n"
        "halves = [tf.config.LogicalDeviceConfiguration()] * 2\n"
        "tf.config.set_logical_device_configuration(tf.config.list_physical_devices('CPU')[0], halves)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    check_resume("train_keras.py", url, tmp_path, "step-000000015.npz", (str(halves),), KERAS_BACKEND="tensorflow")
