"""`train`: phase by phase, epoch by epoch, from the last checkpoint on if there is one."""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from beam_pipeline.errors import ImageShardsError, UsageError, from_worker
from beam_pipeline.text import one_line, plural
from reader.info import DatasetInfo, load_info
from reader.position import Position
from reader.training import metrics, out_folder, report
from reader.training.devices import Devices, use_devices
from reader.training.inputs import Inputs
from reader.training.models import LOSS, Model, build, compile_for
from reader.training.options import Phase, Recipe, TrainOptions, make_recipe, warnings
from reader.training.out_folder import Checkpoints, OutFolder, open_out
from reader.training.report import Clocks, summary_lines, warn

Report = Callable[[str], None]
Line = dict[str, Any]
_AHEAD = 2  # steps that are begun before earlier ones have ended: a device then never waits for Python
_PATIENCE_S = 60.0  # after which the next is begun in any case: an error of a step comes with it


@dataclass(frozen=True)
class TrainResult:
    """Result of a run.

    Attributes:
        out: its folder.
        devices: that it ran on, in words.
        epochs: the lines of metrics.jsonl.
        best_epoch: whose weights model.keras has; without validation the last one.
        verdict: what limited it.
    """

    out: str
    devices: str
    epochs: tuple[Line, ...]
    best_epoch: int
    verdict: str

    def __repr__(self) -> str:
        accuracy = ""
        for best in self.epochs[self.best_epoch - 1 : self.best_epoch]:  # none if somebody deleted metrics.jsonl
            what, name = ("validation", "val_accuracy") if "val_accuracy" in best else ("training", "accuracy")
            accuracy = f"{what} accuracy {best[name]:.3f} (epoch {self.best_epoch} of {len(self.epochs)}): "
        return f"{self.verdict}\n{accuracy}{self.out}/{out_folder.MODEL_FILE}"


def _say_nothing(line: str) -> None:
    """`report` of every process but the first, and if none is given."""


def train(
    dataset: DatasetInfo | str | os.PathLike[str],
    options: TrainOptions | None = None,
    report: Report = _say_nothing,
    command: str = "",
) -> TrainResult:
    """Train an image classifier, or resume an unfinished run, and write all that comes out of it.

    Args:
        dataset: what `load_info` returned, or the URL.
        options: what to train and how; None lets the dataset decide.
        report: is given a line at the beginning and after each epoch, such as `print`; on a terminal Keras then shows
            its progress bar, too.
        command: the command line, for run.json.

    Raises:
        UsageError: an option can't be used with this dataset, these devices or this folder.
        ImageShardsError: the dataset can't be read or the folder written, or a signal stopped the run.
    """
    info, options = load_info(dataset), TrainOptions() if options is None else options
    if not isinstance(options, TrainOptions):
        raise UsageError(f"options={options!r}: give imageshards.TrainOptions(…)")
    with use_devices(options) as devices, _our_errors():
        recipe = make_recipe(info, options, devices.count)
        out, run = open_out(options.out, info.name, recipe.configuration(info), devices.is_first)
        report = report if devices.is_first else _say_nothing
        try:
            if run is not None and run["finished"]:
                report(f"{out.as_given}: this run is finished; choose another --out to train again")
                return TrainResult(
                    out.as_given, run["devices"], tuple(out.metrics()), run["best_epoch"], run["verdict"]
                )
            for line in warnings(info, recipe) if devices.is_first else ():
                warn(line)
            for line in summary_lines(info, recipe, devices):
                report(line)
            report(f"writing to {out.as_given}")
            return _Training(info, recipe, devices, out, report, command).run()
        finally:
            out.close()


class _Training:
    """A run in this process.

    Args:
        info, recipe, devices, out: what, how, on what, to where.
        tell: takes a line.
        command: for run.json.
    """

    def __init__(
        self, info: DatasetInfo, recipe: Recipe, devices: Devices, out: OutFolder, tell: Report, command: str
    ) -> None:
        self._info, self._recipe, self._devices, self._out, self._tell = info, recipe, devices, out, tell
        self._stop = threading.Event()  # set by a signal
        self._inputs = Inputs(info, recipe, devices)
        self._run = report.run_document(info, recipe, devices, command)
        self._clocks, self._compiles, self._sync_calls = np.zeros(4), True, 0
        self._sums: list[Any] = []  # of the metrics in training
        self._checkpoints = Checkpoints(out, recipe, self._inputs.begin)
        self._at = self._checkpoints.at
        self._saved_step = self._at.step
        position, size = Position.from_json(self._at.position), recipe.batch_size
        self._begin = position.on(global_batch_size=size, hosts=devices.processes)

    def run(self) -> TrainResult:
        """Train what is left, and write what comes out."""
        if np.ptp(self._devices.gather(self._at.step)):
            fix = "processes see different checkpoints; give a folder or URL that all share"
            raise ImageShardsError(f"--out {self._out.as_given!r}: {fix}")
        if not self._checkpoints.is_new:
            self._tell(f"continuing after step {self._at.step:,}")
        elif self._out.run() is not None:
            self._tell("stopped before its first checkpoint: beginning again (--checkpoint_steps saves more often)")
        with self._devices.scope():
            self._model = build(self._info, self._recipe)
        self._out.write_run(self._run)  # not before the model is known to be possible
        self._out.write_metrics(self._at.lines)
        with _stop_signals(self._devices, self._stop):  # from here on there is something to save
            for number, phase in enumerate(self._recipe.phases):
                if number < self._at.phase:
                    continue
                self._at.phase, self._compiles = number, True
                with self._devices.scope():
                    compiled = compile_for(self._model, phase, self._recipe, self._devices)
                    self._sums = [variable for metric in compiled for variable in metric.variables]
                    self._checkpoints.restore(self._model.full)
                while not self._has_ended(phase):
                    clocks = self._train_epoch() if self._at.logs is None else np.zeros(4)
                    self._end_epoch(phase, dict(self._at.logs or {}) | self._validate(), clocks)
            self._save()  # so that a disk that is full now costs nothing
            return self._finish()

    # --- checkpoints

    def _save(self) -> None:
        self._saved_step = self._at.step
        if keras.backend.backend() == "jax":
            self._model.full.jax_state_sync()  # let the variables have their values within `fit` and `evaluate`, too
        if self._devices.is_first:
            self._checkpoints.save(self._begin.at(self._at.step), self._model.full, self._sums)

    def _is_due(self) -> bool:
        return self._at.step != self._saved_step and self._at.step % self._recipe.options.checkpoint_steps == 0

    def _is_stopped(self) -> bool:
        """Whether a signal came; in several processes, whether all of them have made the same steps since."""
        if self._devices.processes == 1:
            return self._stop.is_set()
        from jax.experimental import multihost_utils

        self._sync_calls += 1  # it stops all processes at the same call, so none may be left out
        return bool(multihost_utils.reached_preemption_sync_point(self._sync_calls))

    def _save_and_stop(self) -> None:
        self._save()
        how = f"the same command with --out {self._out.as_given} continues"
        raise ImageShardsError(f"stopped after step {self._at.step:,}, which is saved; {how}")

    # --- epochs

    def _has_ended(self, phase: Phase) -> bool:
        """Whether a phase has all its epochs, or hasn't become better for as many as `--early_stopping` allows."""
        if sum(line["phase"] == phase.name for line in self._at.lines) >= phase.epochs:
            return True
        patience, best = self._recipe.options.early_stopping, self._recipe.best(self._at.lines, phase)
        if patience is None or best is None or len(self._at.lines) - best["epoch"] < patience:
            return False
        self._tell(f"early stopping: no lower validation loss for {plural(patience, 'epoch')}")
        return True

    def _train_epoch(self) -> Clocks:
        """Make the steps of an epoch that are left; how long they took."""
        epoch, steps, first = len(self._at.lines), self._recipe.steps, self._at.step
        start = self._read_clocks(0)

        def before(begun: int, logs: dict[str, float] | None) -> None:
            nonlocal start
            if begun:
                self._at.step = first + begun
            if begun == 1 and self._compiles:  # the first step isn't timed
                self._compiles, start = False, self._read_clocks(begun)
            if self._is_stopped():
                self._save_and_stop()
            if self._is_due():
                if logs:
                    self._check_loss(logs[LOSS])  # before a checkpoint that holds NaN replaces one that doesn't
                self._save()

        watch = StepWatch(before, lambda: self._checkpoints.restore_sums(self._sums))
        bar = keras.callbacks.ProgbarLogger()
        bar.async_safe = True  # else the device would wait for it after each step
        is_shown = self._tell is not _say_nothing and sys.stdout.isatty()
        data = self._inputs.training(self._begin.at(first))
        history = self._model.full.fit(data, verbose=int(is_shown), shuffle=False, callbacks=[watch, bar]).history
        self._at.step = (epoch + 1) * steps
        self._at.logs = {name: values[-1] for name, values in history.items()}
        self._check_loss(self._at.logs[LOSS])
        if self._is_due():  # the epoch needn't be trained again if it isn't validated
            self._save()
        return self._read_clocks(self._at.step - first) - start

    def _check_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise ImageShardsError(f"the loss is {loss} after step {self._at.step:,}: lower --learning_rate")

    def _validate(self) -> dict[str, float]:
        data = self._inputs.validation()
        if data is None:
            return {}
        watch = StepWatch(lambda *_: self._save_and_stop() if self._stop.is_set() else None)
        logs = self._model.full.evaluate(data, verbose=0, return_dict=True, callbacks=[watch])
        return {f"val_{name}": value for name, value in logs.items()}

    def _read_clocks(self, steps: int) -> Clocks:
        images = steps * self._recipe.batch_size
        return np.array([time.perf_counter(), self._inputs.waited_s, time.process_time(), images])

    def _end_epoch(self, phase: Phase, logs: dict[str, float], clocks: Clocks) -> None:
        line: Line = {"epoch": len(self._at.lines) + 1, "phase": phase.name, "step": self._at.step}
        for name, key in (("loss", LOSS), ("accuracy", "accuracy")):
            line |= {f"{of}{name}": round(float(logs[of + key]), 6) for of in ("", "val_") if of + key in logs}
        self._clocks += clocks
        self._at.lines.append(line | report.speed(clocks))
        self._at.logs = None
        if (best := self._best_with_weights()) and best["step"] == self._at.step:
            self._checkpoints.keep_best(self._model.full)
        self._out.write_metrics(self._at.lines)
        self._tell(report.epoch_line(self._at.lines[-1], self._recipe.epochs))

    def _best_with_weights(self) -> Mapping[str, Any] | None:
        """The line of the epoch whose weights model.keras will have; None without validation: it has the last ones."""
        if self._recipe.data.evaluation is None:
            return None
        return self._recipe.best(self._at.lines, self._recipe.phases[-1])

    # --- the end

    def _finish(self) -> TrainResult:
        out, lines, model, recipe = self._out, self._at.lines, self._model, self._recipe
        model.synchronize(False)  # other backends can't
        if self._devices.is_first:
            out.write(out_folder.LAST_MODEL_FILE, _saved(model, recipe))
        if best := self._best_with_weights():
            for variable, array in zip(model.full.variables, self._checkpoints.best, strict=True):
                variable.assign(array)
        counts = self._confusion()
        verdict, number = report.verdict(self._clocks, self._info, recipe), int((best or lines[-1])["epoch"])
        split = recipe.data.evaluation or ""
        if self._devices.is_first:
            files = {
                out_folder.MODEL_FILE: _saved(model, recipe),
                out_folder.LABELS_FILE: "".join(f"{label}\n" for label in recipe.classes).encode(),
                out_folder.CURVES_FILE: metrics.curves(lines, number, split),
            }
            if counts is not None:
                files |= metrics.confusion_files(counts, recipe.classes, split)
                if line := report.no_better(counts, recipe, lines[-1]["accuracy"]):
                    warn(line)
            for name, data in files.items():
                out.write(name, data)
        self._run |= {"finished": True, "best_epoch": number, "verdict": verdict, **report.mean_speed(lines)}
        out.write_run(self._run)
        return TrainResult(out.as_given, self._devices.description, tuple(lines), number, verdict)

    def _confusion(self) -> Any:
        """Counts [classes, classes] of what is validated on, by all processes; or None."""
        classes, evals, full = len(self._recipe.classes), self._inputs.evals, self._model.full
        if evals is None or classes > metrics.MAX_CLASSES:
            return None
        if self._devices.processes > 1:  # each counts what it reads, with a copy of the model on its own device
            weights = full.get_weights()
            keras.distribution.set_distribution(None)
            full = build(self._info, self._recipe).full
            full.set_weights(weights)
        counts = np.zeros((classes, classes), np.int64)
        for images, labels, weights in evals:
            valid = int(np.count_nonzero(weights))  # padding is behind all records
            logits = keras.ops.convert_to_numpy(full.predict_on_batch(images))
            counts += metrics.confusion_counts(labels[:valid], logits[:valid].argmax(axis=1), classes)
        return self._devices.gather(counts).sum(axis=0)


class StepWatch(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls `before` in the main thread before each step, when the state of the model may be read.

    Args:
        before: gets the number of steps of this `fit`, or `evaluate`, that are begun, and the last known logs of `fit`.
        at_first: is called after `fit` has reset the metrics, which may be restored then.
    """

    # Keras then gives `on_train_batch_end`, whose logs it has to wait for, to another thread.
    async_safe = True

    def __init__(
        self, before: Callable[[int, dict[str, float] | None], None], at_first: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._before, self._at_first, self._logs = before, at_first, None
        self._free = threading.Semaphore(_AHEAD)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._at_first()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._free.acquire(timeout=_PATIENCE_S)
        self._before(batch, self._logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._logs = logs
        self._free.release()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._before(batch, None)


def _saved(model: Model, recipe: Recipe) -> bytes:
    """A .keras file, without the optimizer, which would triple it; a run resumes from its checkpoints."""
    saved = keras.Model(model.full.input, model.full.output, name=model.full.name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, out_folder.MODEL_FILE)
        try:
            saved.save(path)
        except (NotImplementedError, TypeError, ValueError) as error:
            why = f"{one_line(error)[:200]}; give its layers a get_config and run the same command again, to save it"
            raise ImageShardsError(f"--model {recipe.model!r} can't be saved: {why}") from error
        return path.read_bytes()


@contextmanager
def _our_errors() -> Iterator[None]:
    """Turns what TensorFlow and JAX make of an error of the reader (a corrupt record) back into it."""
    try:
        yield
    except ImageShardsError:
        raise
    except Exception as error:
        if keras.backend.backend() == "jax":
            from jax.errors import JaxRuntimeError as DeviceError  # such as too little memory
        else:
            from tensorflow.errors import OpError as DeviceError
        if (ours := from_worker(error)) is None and not isinstance(error, (OSError, DeviceError)):
            raise
        # What went wrong in a step TensorFlow says behind a list of the files that led there.
        cause = str(error).rpartition('File "')[2].partition("\n")[2] or str(error)
        raise ours or ImageShardsError(f"training failed: {' '.join(cause.split())[:500]}") from error


@contextmanager
def _stop_signals(devices: Devices, stop: threading.Event) -> Iterator[None]:
    """Lets SIGTERM and Ctrl-C set an event; a second one ends the process as always."""
    # Several processes of JAX must stop after the same step: its own handler of SIGTERM notifies the others.
    is_ours = devices.processes == 1 and threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if is_ours else ()
    before = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in numbers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
