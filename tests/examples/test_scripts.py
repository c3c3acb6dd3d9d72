"""The scripts in examples/: each, killed and resumed, ends with the weights of a run that nothing interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.runs import EXAMPLES, HALVES, OPTIONS, TWO_DEVICES, check_resume, run, skip_without
from tests.reading.shards import make_dataset

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("train_*.py"))
# The file that holds the trained arrays, and what each needs besides the reader.
RESULTS = {
    "train_grain.py": ("params.npz", "grain", "jax"),
    "train_jax.py": ("params.npz", "jax", "orbax"),
    "train_keras.py": ("step-000000015.npz", "keras", "tensorflow"),
    "train_torch.py": ("model.pt", "torch"),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("examples") / "1.0.0"
    return make_dataset(folder, {"train": [24, 16], "validation": [11]}, size=(16, 16))


@pytest.mark.soak
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_that_is_killed_and_resumed_ends_with_the_same_weights(
    script: str, url: str, tmp_path: Path
) -> None:
    result, *modules = RESULTS[script]
    skip_without(*modules)
    check_resume(script, url, tmp_path, result, KERAS_BACKEND="tensorflow")
    more_data = make_dataset(tmp_path / "2.0.0", {"train": [24, 17], "validation": [11]}, size=(16, 16))
    wrong = [(url, ("--seed", "1"), "seed"), (more_data, (), "dataset")]
    if script in ("train_grain.py", "train_jax.py"):
        wrong.append((url, ("--batch_size", "4"), "batch"))
    for dataset, options, expected in wrong:
        command = (EXAMPLES / script, dataset, *OPTIONS, "--out", tmp_path / "killed", *options)
        code, said = run(command, {"KERAS_BACKEND": "tensorflow"})
        assert code and "Traceback" not in said and expected in said.splitlines()[-1], said
    command = (EXAMPLES / script, url, *OPTIONS, "--out", tmp_path / "killed", "--epochs", "4")
    code, said = run(command, {"KERAS_BACKEND": "tensorflow"})
    assert (code, "continuing after step 15\n" in said) == (0, True), said


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_is_short_and_the_readme_says_whom_it_is_for(script: str) -> None:
    lines = len((EXAMPLES / script).read_text().splitlines())
    assert lines <= (128 if script == "train_torch.py" else 90)
    assert f"]({script})" in (EXAMPLES / "README.md").read_text()


# Script, launcher, flags of the script, environment.
WAYS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], dict[str, str]]] = {
    "two processes of torchrun, one of which is killed": ("train_torch.py", TORCHRUN, (), {}),
    "a checkpoint that is due at the end of an epoch": ("train_torch.py", (), ("--checkpoint_steps", "5"), {}),
    "JAX on two devices": ("train_jax.py", (), (), {"XLA_FLAGS": TWO_DEVICES}),
    "Keras on JAX": ("train_keras.py", (), (), {"KERAS_BACKEND": "jax", "XLA_FLAGS": TWO_DEVICES}),
    "Keras on PyTorch": ("train_keras.py", (), (), {"KERAS_BACKEND": "torch"}),
    "Keras under a mirrored strategy": ("train_keras.py", ("-c", HALVES), (), {"KERAS_BACKEND": "tensorflow"}),
}


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_it_continues_on_several_processes_and_devices_and_on_other_backends(
    url: str, tmp_path: Path, way: str
) -> None:
    script, launcher, more, environment = WAYS[way]
    result, *modules = RESULTS[script]
    skip_without(*modules, *(module for module in ("jax", "torch") if module == environment.get("KERAS_BACKEND")))
    check_resume(script, url, tmp_path, result, launcher, more, **environment)


@pytest.mark.soak
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
