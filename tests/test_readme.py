"""The README's commands and programs run as written, one after the other, in one folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.blocks import blocks, environment, run
from tests.make import done

README = Path(__file__).parent.parent / "README.md"
INSTALLS = "pip install"


def recipes() -> list[tuple[str, str]]:
    """(language, text) of each block that is marked as bash or python; unmarked ones need more than a machine has."""
    return [(language, text) for language, text in blocks(README) if INSTALLS not in text]


def reading() -> str:
    """The recipe that opens a dataset for a trainer."""
    (text,) = (text for language, text in recipes() if language == "python" and "train_dataset(" in text)
    return text


def must_print(text: str) -> bool:
    return "<<" not in text and text != reading()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


SLOW = ("imageshards train ", "runs/")
QUICK = [(language, text) for language, text in recipes() if not any(one in text for one in SLOW)]


@pytest.mark.parametrize("number", range(len(QUICK)))
def test_quick_recipe_runs_as_written(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    language, text = QUICK[number]
    text = text.replace("sample_data photos", "sample_data photos --images 100")  # all 600 are drawn in the slow test
    assert run(language, text, f"{README} ({number})").strip() or not must_print(text)


# What trainers do with `train` and `info`.
_TRAINERS = """
images, labels = next(train.as_numpy_iterator())
assert images.shape == (64, 96, 96, 3) and labels.shape == (64,)
import keras
layers = keras.layers
model = keras.Sequential([layers.Rescaling(1 / 255), layers.GlobalAveragePooling2D(), layers.Dense(info.num_classes)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
history = model.fit(train, epochs=2, verbose=0)
assert len(history.history["loss"]) == 2
print(keras.backend.backend())
"""


@pytest.mark.soak
def test_all_recipes_run_as_a_user_runs_them_and_what_one_opens_feeds_keras(tmp_path: Path) -> None:
    for language, text in recipes():
        command = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else [sys.executable, "-c", text]
        printed = done(*command, cwd=tmp_path, env=environment()).stdout
        assert printed.strip() or not must_print(text), f"prints nothing:\n{text}"
    for framework in ("tensorflow", "jax"):
        pytest.importorskip(framework)
        variables = environment(KERAS_BACKEND=framework)
        program = done(sys.executable, "-c", reading() + _TRAINERS, cwd=tmp_path, env=variables)
        assert program.stdout.split()[-1] == framework


def test_there_are_recipes_for_both_sides() -> None:
    texts = "\n".join(text for _, text in recipes())
    wanted = ("imageshards write ", "imageshards train ", "imageshards predict ", "imageshards.train_dataset(")
    assert [one for one in wanted if one not in texts] == []
