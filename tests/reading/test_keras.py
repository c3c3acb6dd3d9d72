"""`reader.keras` on each backend of Keras: what `fit` is trained on, and that a training which was stopped goes on.

`make test` has one training that is interrupted; all else takes half a minute for each backend.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline.errors import UsageError
from beam_pipeline.schema.example import image_example
from tests.reading.shards import draw, make_dataset
from tests.reading.without import run_without

BACKENDS = {"tensorflow": "jax,torch", "jax": "tensorflow,torch", "torch": "tensorflow,jax"}  # and what it runs without
RECORDS, EPOCHS, BATCH, STEPS = 37, 3, 6, 18


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset each of whose records has a class of its own."""

    def record(split: str, number: int) -> tuple[int, bytes]:
        image, size = draw(number, (16, 24)), (16, 24)
        return number, image_example(image=image, size=size, class_id=number, label=str(number), path=f"{number}.jpg")

    folder, classes = tmp_path_factory.mktemp("keras") / "1.0.0", [str(number) for number in range(RECORDS)]
    return make_dataset(folder, {"train": [20, 17], "validation": [9]}, classes=classes, record=record)


@pytest.fixture(scope="module", params=[pytest.param(backend, marks=pytest.mark.soak) for backend in BACKENDS])
def fits(request: pytest.FixtureRequest, url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What keras_fits.py found on a backend."""
    backend: str = request.param
    for package in ("keras", backend):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'imageshards[train,{backend}]'")
    folder = tmp_path_factory.mktemp(backend)
    options = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "TF_DETERMINISTIC_OPS": "1"}
    # The same model is compiled seven times, at 4 s each.
    options |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "jax"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    program = "import sys\nfrom tests.reading.keras_fits import main\nmain(*sys.argv[1:])"
    done = run_without(BACKENDS[backend], program, folder, url, folder, **options)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"backend": backend, "said": done.stderr, **found}


def test_a_training_that_is_interrupted_in_this_process_ends_with_the_same_bits(url: str, tmp_path: Path) -> None:
    pytest.importorskip("keras", reason="Keras is not installed: pip install 'imageshards[train]'")
    from tests.reading.keras_fits import Do, Trainings, interrupt

    trainings = Trainings(url, tmp_path)
    plain = trainings.fit(trainings.resume("plain"))
    resume = trainings.resume("stopped")
    with pytest.raises(KeyboardInterrupt):
        trainings.fit(resume, callbacks=[Do(resume, 9, interrupt)])
    resume = trainings.resume("stopped")
    assert 6 <= resume.step <= 9
    assert trainings.fit(resume)[0] == plain[0]


def test_a_loss_that_is_nan_is_not_saved(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("keras", reason="Keras is not installed: pip install 'imageshards[train]'")
    from tests.reading.keras_fits import Do, Trainings

    def diverge() -> None:
        resume.model.set_weights([weights * np.nan for weights in resume.model.get_weights()])

    trainings = Trainings(url, tmp_path)
    resume = trainings.resume("diverged")
    trainings.fit(resume, callbacks=[Do(resume, 9, diverge)])
    assert "the loss is NaN after step 10: not saved" in caplog.text
    assert trainings.resume("diverged").step == 8


def test_a_folder_that_another_process_trains_into_is_refused(url: str, tmp_path: Path) -> None:
    pytest.importorskip("keras", reason="Keras is not installed: pip install 'imageshards[train]'")
    from reader.saves import lock_folder

    batches, other = reader.train_batches(url, "train", global_batch_size=BATCH), lock_folder(str(tmp_path / "run"))
    with pytest.raises(UsageError, match="run: another process trains there; end it, or choose another"):
        reader.keras.Resume(tmp_path / "run", batches)
    second = reader.train_batches(url, "train", global_batch_size=BATCH, host=(1, 2))
    assert reader.keras.Resume(tmp_path / "run", second).step == 0  # which only reads
    os.close(other)
    assert [reader.keras.Resume(tmp_path / "run", batches).step for _ in range(2)] == [0, 0]


def records(batches: Any) -> list[list[int]]:
    """The records of each batch of an iteration, sorted; without padding."""
    return [sorted(label for label, *weight in zip(*more, strict=True) if weight != [0]) for _, *more in batches]


def test_each_epoch_is_an_iteration_of_the_batches_and_each_validation_sees_every_record_once(
    url: str, fits: dict[str, Any]
) -> None:
    assert len(fits["fits"]) == (3 if fits["backend"] == "torch" else 4)
    for case, saw in fits["fits"].items():
        batch, evaluated, execution = map(int, case.split())
        validation = [[*range(at, min(at + evaluated, 9))] for at in range(0, 9, evaluated)]
        train = reader.train_batches(url, "train", global_batch_size=batch)
        first, second, third, fourth = (records(train) for _ in range(4))
        steps = len(train)
        stops = [stop // execution * execution + execution for stop in (0, steps - 2)] if steps > 2 else []
        # Two epochs, then two that were stopped and begun again, and two more.
        expected = [[first, second], *([third[:stop]] for stop in stops), [third, fourth]]
        assert (case, saw["epochs"]) == (case, expected)
        assert saw["validations"] == [validation] * (4 + len(stops) + 1)
        assert saw["predicted"] == len(validation) * evaluated


def test_a_training_that_was_stopped_twice_ends_with_the_same_bits(fits: dict[str, Any]) -> None:
    found = fits["resumes"]
    weights, epochs = found["plain"]
    assert [epoch for epoch, _ in epochs] == list(range(EPOCHS))
    assert found["stopped"] == [weights, epochs[1:]]  # the same validations
    assert len(found["files"]) == 2 and found["files"][-1] == f"step-{STEPS:09}.npz"
    assert found["interrupted again"].startswith("UsageError: the last fit was interrupted: make a new Resume")
    assert "what callbacks count (Do) begins here" in fits["said"]


def test_a_finished_training_gets_its_weights_and_no_step_and_says_so(fits: dict[str, Any]) -> None:
    assert fits["resumes"]["finished"] == [fits["resumes"]["plain"][0], []]
    assert (
        f"/stopped is finished after epoch {EPOCHS}, as asked: nothing is trained; raise epochs to train on"
        in fits["said"]
    )


def test_a_training_that_was_stopped_early_is_finished_with_the_weights_that_it_restored(fits: dict[str, Any]) -> None:
    (weights, epochs), *again = fits["resumes"]["early"]
    assert [epoch for epoch, _ in epochs] == [0, 1]
    assert again == [[weights, []]] * 2
    said = "/early is finished after epoch 2, by EarlyStopping: nothing is trained; choose another folder to train on"
    assert fits["said"].count(said) == 2


def test_a_corrupt_record_ends_a_fit_and_an_evaluation_with_its_place(fits: dict[str, Any]) -> None:
    where, *errors = fits["corrupt"]
    assert len(errors) == 2 and all(where in error for error in errors), errors


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("other model", "/stopped holds a run of another model; choose another folder"),
        ("other seed", "/stopped holds another run: the position was made with another seed: 3, here it is 4; "),
        ("steps", "UsageError: resume.fit takes no steps_per_epoch, only class_weight, validation_freq of Keras' fit"),
        ("callback", "UsageError: model.fit(callbacks=[resume]) doesn't resume: call resume.fit(model, …)"),
        ("average", "UsageError: use_ema would replace the weights at the end of each epoch: leave it out"),
        ("execution", "UsageError: steps_per_execution=4 must divide len(batches), 6"),
    ],
)
def test_what_cannot_continue_is_one_line(what: str, said: str, fits: dict[str, Any]) -> None:
    if what == "execution" and fits["backend"] == "torch":
        pytest.skip("Keras on PyTorch makes one step at a time")
    error = fits["resumes"][what]
    assert said in error and "\n" not in error


def test_another_batch_size_trains_on_what_is_unread_and_ends_after_as_many_records(
    url: str, fits: dict[str, Any]
) -> None:
    step, epochs, end, saw = fits["resumes"]["other batch"]
    steps = RECORDS // (BATCH // 2)
    assert (step, epochs, end) == (9, 9 * 2 // steps, 9 + EPOCHS * steps - 9 * 2)
    before = reader.train_batches(url, "train", global_batch_size=BATCH, seed=3)
    trained = list(itertools.chain(*records(itertools.islice(before.repeat(), 9)), *itertools.chain(*saw)))
    counts = Counter(trained)
    assert len(trained) == EPOCHS * steps * (BATCH // 2)
    assert len(counts) == RECORDS and max(counts.values()) <= EPOCHS and sum(counts.values()) >= RECORDS * EPOCHS - 3
