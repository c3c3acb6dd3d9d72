"""The scripts in examples/: each, killed and resumed, ends with the weights of a run that nothing interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.runs import EXAMPLES, OPTIONS, check_resume, run, skip_without
from tests.reading.shards import make_dataset

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
