"""Runs that are stopped and resumed: `python tests/train/runs.py DATASET FOLDER`."""

from __future__ import annotations

import io
import itertools
import json
import signal
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.make import ROOT as ROOT

if TYPE_CHECKING:
    from reader.info import DatasetInfo
    from reader.training.options import TrainOptions

MODEL = '''
import keras

def random_layers(shape, classes):
    """Layers that draw random numbers, whose state has to be restored."""
    layers = keras.layers
    return keras.Sequential([
        layers.RandomFlip("horizontal"), layers.RandomTranslation(0.1, 0.1),
        layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Flatten(), layers.Dropout(0.3), layers.Dense(classes),
    ])
'''
# 5 steps an epoch of the `dataset` fixture, of milliseconds each. The second epoch is the best, the fourth the last.
OPTIONS: dict[str, Any] = {"image_size": 16, "batch_size": 8, "epochs": 6, "seed": 5, "checkpoint_steps": 2}
OPTIONS |= {"early_stopping": 2}
_RATES = {"tensorflow": 0.5, "jax": 0.005}
_BEST_STEP = 10  # the end of the second epoch
MOMENTS = ("best", "evaluation", "signal", "end")


class Killed(BaseException):
    """Ends a run as a kill does: nothing is written any more."""


@contextmanager
def killed_at(moment: str) -> Iterator[None]:
    """Kill a run at its best epoch, before its line; in an evaluation; or between last.keras and model.keras."""
    from reader.training import fit, out_folder

    places: dict[str, tuple[Any, str]] = {
        "best": (out_folder.Checkpoints, "keep_best"),
        "evaluation": (fit.StepWatch, "on_test_batch_begin"),
        "signal": (fit.StepWatch, "on_test_batch_begin"),
        "end": (fit.OutFolder, "write"),
    }
    owner, name = places[moment]
    function, calls = getattr(owner, name), itertools.count()

    def call_and_kill(*given: Any, **named: Any) -> None:
        if name == "on_test_batch_begin" and next(calls) == 3:  # two batches an evaluation
            if moment == "evaluation":
                raise Killed
            signal.raise_signal(signal.SIGTERM)
        function(*given, **named)
        if (moment == "best" and given[0].at.step == _BEST_STEP) or "last.keras" in given:
            raise Killed

    setattr(owner, name, call_and_kill)
    try:
        yield
    finally:
        setattr(owner, name, function)


def linear(shape: tuple[int, ...], classes: int) -> Any:
    """A model for --model that is compiled in half the time of small_cnn."""
    from keras import Sequential, layers

    return Sequential([layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(classes)])


@contextmanager
def random_layers_in(folder: Path) -> Iterator[None]:
    """--model models:random_layers is found there meanwhile."""
    folder.mkdir(parents=True)
    (folder / "models.py").write_text(MODEL)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def kill_and_continue(info: DatasetInfo, folder: Path, moments: Sequence[str]) -> None:
    """Train into folder/plain; and into folder/MOMENT, with a kill at each of `moments`, and to the end."""
    from beam_pipeline.errors import ImageShardsError
    from reader.training.fit import train

    train(info, _options(folder / "plain"))
    for moment in moments:
        with suppress(Killed, ImageShardsError), killed_at(moment):
            train(info, _options(folder / moment))
            raise AssertionError(moment)
        train(info, _options(folder / moment))


def metrics_of(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, but for times."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in ("images_per_s", "wait_share")} for line in lines]


def weights_of(out: Path, name: str = "model.keras") -> list[Any]:
    """All weights of a model of a run, layer by layer."""
    import h5py

    found: list[Any] = []
    with zipfile.ZipFile(out / name) as file, h5py.File(io.BytesIO(file.read("model.weights.h5"))) as weights:
        weights.visititems(lambda _, one: found.append(one[()]) if isinstance(one, h5py.Dataset) else None)
    return found


def checkpoint_of(out: Path) -> tuple[dict[str, Any], list[Any]]:
    """How far the last checkpoint is, and its arrays."""
    import numpy as np

    with np.load(max(out.glob("checkpoints/step-*"))) as file:
        document = json.loads(bytes(file["document"]))
        return document["progress"], [file[name] for name in sorted(file.files) if name != "document"]


def _options(out: Path) -> TrainOptions:
    import keras

    from reader.training.options import TrainOptions

    rate = _RATES[keras.backend.backend()]
    return TrainOptions(out=str(out), model="models:random_layers", learning_rate=rate, **OPTIONS)


if __name__ == "__main__":
    from reader.info import load_info

    with random_layers_in(Path(sys.argv[2])):
        kill_and_continue(load_info(sys.argv[1]), Path(sys.argv[2]), MOMENTS)
