"""Fits of Keras on one backend, for test_keras.py: prints what was trained on and the weights' hashes as JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

import reader
from tests.reading.shards import flipped

RECORDS, EPOCHS, BATCH = 37, 3, 6
STEPS = RECORDS // BATCH * EPOCHS
# Global batch size, that of evaluation, and steps_per_execution: 1 to 3 batches an evaluation.
CASES = [(37, 9, 1), (18, 5, 1), (4, 4, 1), (4, 4, 4)]
BACKEND = keras.backend.backend()
Rows = list[list[int]]


class Seen(keras.metrics.Metric):
    """Which records each step of an epoch, or of a validation, was made on: their labels are their numbers."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.counts = self.add_variable((40, RECORDS), "zeros", name="counts")
        self.step = self.add_variable((), "zeros", name="step")

    def update_state(self, labels: Any, logits: Any, sample_weight: Any = None) -> None:
        one_hot = ops.one_hot(ops.reshape(ops.cast(labels, "int32"), (-1,)), RECORDS)
        if sample_weight is not None:
            one_hot *= ops.reshape(ops.cast(sample_weight, "float32"), (-1, 1))
        here = ops.cast(ops.equal(ops.arange(40, dtype="float32"), self.step), "float32")
        self.counts.assign(self.counts + here[:, None] * ops.sum(one_hot, axis=0)[None])
        self.step.assign(self.step + 1)

    def result(self) -> Any:
        return self.step * 1

    def rows(self) -> Rows:
        """The records of each step, sorted."""
        counts = ops.convert_to_numpy(self.counts).astype(int)[: int(self.step)]
        return [[record for record, count in enumerate(row) for _ in range(count)] for row in counts]


class Log(keras.callbacks.Callback):
    """Keeps what each epoch and each validation of a fit saw; stops it after a step of an epoch."""

    def __init__(self, seen: Seen, stop: int | None = None) -> None:
        super().__init__()
        self.seen, self.stop = seen, stop
        self.epochs: list[Rows] = []
        self.validations: list[Rows] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.stop is not None and batch >= self.stop:
            self.model.stop_training = True

    def on_test_begin(self, logs: Any = None) -> None:
        _ = self.model  # on JAX this brings the variables up to date
        self.epochs.append(self.seen.rows())

    def on_test_end(self, logs: Any = None) -> None:
        self.validations.append(self.seen.rows())


class Do(keras.callbacks.Callback):
    """Does something after a global step."""

    def __init__(self, resume: Any, step: int, act: Callable[[], Any]) -> None:
        super().__init__()
        self.resume, self.step, self.act = resume, step, act

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.resume.step == self.step:
            self.act()


def small(seen: Seen, steps_per_execution: int = 1) -> Any:
    """A model without state of its own."""
    layers = keras.layers
    model = keras.Sequential([layers.Rescaling(1 / 255), layers.GlobalAveragePooling2D(), layers.Dense(RECORDS)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, weighted_metrics=[seen], steps_per_execution=steps_per_execution)
    return model


def stateful(width: int = 4, metrics: Any = ()) -> Any:
    """A model with all kinds of state; TensorFlow builds it in its first step."""
    keras.utils.set_random_seed(5)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.RandomFlip(),
            layers.Rescaling(1 / 255),
            layers.Conv2D(width, 3, strides=2),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(RECORDS),
        ]
    )
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, STEPS))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, weighted_metrics=list(metrics))
    return model


def digest(model: Any) -> str:
    """Of all variables."""
    arrays = [ops.convert_to_numpy(one) for one in [*model.variables, *model.optimizer.variables]]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def error_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fits(url: str) -> dict[str, Any]:
    """Per case: epochs and validations of fits in a row, of which two were stopped, and what was predicted."""
    found: dict[str, Any] = {}
    metrics = {execution: Seen() for execution in (1, 4)}
    models = {execution: small(seen, execution) for execution, seen in metrics.items()}
    for batch, evaluated, execution in CASES:
        if execution > 1 and BACKEND == "torch":
            continue  # Keras can't there
        model, seen = models[execution], metrics[execution]
        train = reader.train_batches(url, "train", global_batch_size=batch, augment=reader.augment.flip)
        evals = reader.eval_batches(url, "validation", global_batch_size=evaluated)
        stops = [None, 0, len(train) - 2, None] if len(train) > 2 else [None, None]
        logs = [Log(seen, stop) for stop in stops]
        for log in logs:
            model.fit(**reader.keras.fit_arguments(train, evals), epochs=2, verbose=0, callbacks=[log])
        found[f"{batch} {evaluated} {execution}"] = {
            "epochs": [log.epochs for log in logs],
            "validations": [one for log in logs for one in log.validations],
            "predicted": len(model.predict(**reader.keras.evaluate_arguments(evals), verbose=0)),
        }
        model.evaluate(**reader.keras.evaluate_arguments(evals), verbose=0)
        found[f"{batch} {evaluated} {execution}"]["validations"].append(seen.rows())
    return found


class Trainings:
    """Trainings with `Resume`."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    def resume(self, name: str, every_steps: int = 2, **options: Any) -> Any:
        arguments = {"global_batch_size": BATCH, "seed": 3, "augment": reader.augment.flip_crop, **options}
        batches = reader.train_batches(self.url, "train", **arguments)
        return reader.keras.Resume(self.folder / name, batches, every_steps)

    def fit(self, resume: Any, model: Any = None, callbacks: Any = (), epochs: int = EPOCHS, **options: Any) -> Any:
        """Train to the end; returns (hash of the variables, (epoch, val_loss) of the epochs that were trained)."""
        model = model or stateful()
        evals = reader.eval_batches(self.url, "validation", global_batch_size=4)
        history = resume.fit(model, evals, epochs=epochs, verbose=0, callbacks=callbacks, **options)
        losses = map(float, history.history.get("val_loss", []))
        return digest(model), list(map(list, zip(history.epoch, losses, strict=True)))


def resumes(trainings: Trainings) -> dict[str, Any]:
    """The hashes and errors of many trainings."""
    fit, resume, found = trainings.fit, trainings.resume, dict[str, Any]()
    found["plain"] = fit(resume("plain", 1000))
    for stop in (5, 11):  # each in another epoch, after an odd step: saves are of even ones
        again = resume("stopped")
        with contextlib.suppress(KeyboardInterrupt):
            fit(again, callbacks=[Do(again, stop, interrupt)])
    found["interrupted again"] = error_of(lambda: fit(again))
    found["stopped"] = fit(resume("stopped"))
    found["files"] = sorted(path.name for path in (trainings.folder / "stopped").iterdir())
    model = stateful()
    found["finished"] = fit(resume("stopped"), model)

    stopping = {"monitor": "val_loss", "patience": 1, "min_delta": 10.0, "restore_best_weights": True}
    found["early"] = [
        fit(resume("early"), stateful(), [keras.callbacks.EarlyStopping(**stopping)], epochs) for epochs in (9, 9, 10)
    ]

    found["other model"] = error_of(lambda: fit(resume("stopped"), stateful(5)))
    found["other seed"] = error_of(lambda: resume("stopped", seed=4))
    found["steps"] = error_of(lambda: fit(resume("new"), model, steps_per_epoch=2))
    found["callback"] = error_of(lambda: model.fit(np.zeros((1, 16, 24, 3)), np.zeros(1), callbacks=[resume("new")]))
    found["average"] = error_of(lambda: fit(resume("new"), averaged()))
    found["execution"] = error_of(lambda: fit(resume("new"), small(Seen(), 4))) if BACKEND != "torch" else ""

    half = resume("batch")
    fit(half, callbacks=[Do(half, 9, lambda: setattr(half.model, "stop_training", True))])
    seen, other = Seen(), resume("batch", global_batch_size=BATCH // 2)
    log = Log(seen)
    found["other batch"] = [other.step, other.epoch]
    fit(other, stateful(metrics=[seen]), [log])
    found["other batch"] += [other.step, log.epochs]
    return found


def interrupt() -> None:
    raise KeyboardInterrupt


def corrupt(folder: Path) -> list[str]:
    """Where a record is corrupt, and what `fit` and `evaluate` say of it."""
    url, where = flipped(folder / "corrupt" / "1.0.0", [40], 33)
    train, evals = (make(url, "train", global_batch_size=10) for make in (reader.train_batches, reader.eval_batches))
    arguments, model = reader.keras.fit_arguments(train), small(Seen())
    return [
        where,
        error_of(lambda: model.fit(**arguments, epochs=2, verbose=0)),
        error_of(lambda: model.evaluate(**reader.keras.evaluate_arguments(evals), verbose=0)),
    ]


def averaged() -> Any:
    model = small(Seen())
    model.compile(keras.optimizers.SGD(use_ema=True), "mse")
    return model


def main(url: str, folder: str) -> None:
    trainings = Trainings(url, Path(folder))
    found = {"fits": fits(url), "corrupt": corrupt(Path(folder))}
    print(json.dumps({**found, "resumes": resumes(trainings)}))
